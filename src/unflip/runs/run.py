"""Run folders: what is in them, who is writing to them, and how two recipes differ."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from unflip.runs.checkpoint import CheckpointError
from unflip.runs.files import read_saved, whole_metrics
from unflip.train.recipe import Recipe


@dataclass(frozen=True)
class Run:
    """One seed's folder as `unflip runs` lists it."""

    folder: Path
    recipe: str
    seed: int
    state: str  # finished, running, interrupted or damaged
    epoch: int
    epochs: int
    accuracy: float | None


def find_runs(root: Path) -> list[Run]:
    """Every run below ``root``; a ``recipe.json`` of something else is passed over."""
    found = [_describe(path.parent) for path in sorted(root.rglob("recipe.json"))]
    return [run for run in found if run is not None]


def seed_folder(folder: Path, seed: int) -> Path:
    """One seed of a recipe's folder; or the folder itself, where someone has named a seed's."""
    inside = folder / f"seed-{seed}"
    return inside if inside.is_dir() else folder


def _describe(folder: Path) -> Run | None:
    try:
        saved = json.loads((folder / "recipe.json").read_text())
        recipe, seed = saved["recipe"], saved["seed"]
        name, epochs = recipe["name"], recipe["epochs"]
    except (ValueError, KeyError, TypeError):
        return _damaged(folder)
    lines, _ = whole_metrics(folder / "metrics.jsonl")  # one damaged run hides no other
    epoch, accuracy = 0, None
    for line in reversed(lines):
        epoch, accuracy = epoch or line["epoch"], line["accuracy"]
        if accuracy is not None:  # not measured in every epoch
            break
    if (folder / "result.json").exists():
        return _finished(Run(folder, name, seed, "finished", epoch, epochs, accuracy))
    state = "running" if _locked(folder) else "interrupted"
    return Run(folder, name, seed, state, epoch, epochs, accuracy)


def _finished(run: Run) -> Run:
    """With what its result says: metrics may be gone."""
    try:
        result = read_saved(run.folder / "result.json", "accuracy", "epochs")
    except ValueError:
        return replace(run, state="damaged")
    return replace(run, epoch=result["epochs"], accuracy=result["accuracy"])


def _damaged(folder: Path) -> Run | None:
    """A run whose recipe cannot be read; None where the file is something else's."""
    seed = folder.name.removeprefix("seed-")
    if not seed.isdecimal() or not (folder / "metrics.jsonl").exists():
        return None
    return Run(folder, "", int(seed), "damaged", 0, 0, None)


def recipe_difference(saved: dict[str, Any], recipe: Recipe) -> list[str]:
    """How the recipe of a run differs from another. An option that came after the run has its default there, which is
    what the run did."""
    try:
        there = Recipe.model_validate(saved).plain()
    except (ValueError, ImportError):  # it names what is no more: then it differs as it stands
        there = saved
    return _difference(there, recipe.plain())


def _difference(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key == "about":
            continue
        a, b, here = old.get(key), new.get(key), f"{path}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            lines += _difference(a, b, f"{here}.")
        elif a != b:
            lines.append(f"{here} is {a!r} there and {b!r} here")
    return lines


@contextmanager
def leave_nothing_behind(folders: Sequence[Path]) -> Iterator[Callable[[], None]]:
    """Make the folders; a block that fails before it calls what it was given loses those made for it."""
    new = [folder for folder in folders if not folder.exists()]
    above = [parent for folder in folders[:1] for parent in folder.parents if not parent.exists()]
    begun: list[bool] = []
    try:
        for folder in folders:
            _make(folder)
        yield lambda: begun.append(True)
    except BaseException:
        if not begun:
            for folder in new:
                shutil.rmtree(folder, ignore_errors=True)
            for folder in above:
                with suppress(OSError):  # someone has put something else there
                    folder.rmdir()
        raise


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error.strerror}") from error


@contextmanager
def lock(folders: Sequence[Path]) -> Iterator[None]:
    """Hold the folders for this process; another one that trains in them is refused."""
    with ExitStack() as stack:
        for folder in folders:
            try:
                file = stack.enter_context(open(folder / ".lock", "w"))
            except OSError as error:
                raise CheckpointError(f"cannot write to {folder}: {error.strerror}") from error
            if not _taken(file):
                raise CheckpointError(f"another process is training in {folder}")
        yield


def _taken(file: IO[str]) -> bool:
    """Take the lock; a second's patience, because `unflip runs` holds it for a moment to look."""
    for _ in range(10):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(0.1)
    return False


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
