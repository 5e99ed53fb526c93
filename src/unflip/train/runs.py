"""Run folders: what is in them, who is writing to them, and how two recipes differ."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unflip.train.checkpoint import CheckpointError


@dataclass(frozen=True)
class Run:
    """One seed's folder as `unflip runs` lists it."""

    folder: Path
    recipe: str
    seed: int
    state: str  # finished, running or interrupted
    epoch: int
    epochs: int
    accuracy: float | None


def find_runs(root: Path) -> list[Run]:
    """Every run below ``root``."""
    return [_describe(path.parent) for path in sorted(root.rglob("recipe.json"))]


def _describe(folder: Path) -> Run:
    saved = json.loads((folder / "recipe.json").read_text())
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    accuracy = None
    for line in reversed(lines):
        try:
            accuracy = json.loads(line)["accuracy"]
            break
        except ValueError:  # a line cut short by a kill
            continue
    if (folder / "result.json").exists():
        state = "finished"
    else:
        state = "running" if _locked(folder) else "interrupted"
    recipe = saved["recipe"]
    return Run(folder, recipe["name"], saved["seed"], state, len(lines), recipe["epochs"], accuracy)


def recipe_difference(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """``field: old -> new`` for each field that differs."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key == "about":
            continue
        a, b, here = old.get(key), new.get(key), f"{path}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            lines += recipe_difference(a, b, f"{here}.")
        elif a != b:
            lines.append(f"{here} is {a!r} there and {b!r} here")
    return lines


@contextmanager
def lock(folders: Sequence[Path]) -> Iterator[None]:
    """Hold the folders for this process; another one that trains in them is refused."""
    with ExitStack() as stack:
        for folder in folders:
            file = stack.enter_context(open(folder / ".lock", "w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CheckpointError(f"another process is training in {folder}") from None
        yield


def _locked(folder: Path) -> bool:
    path = folder / ".lock"
    if not path.exists():
        return False
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
