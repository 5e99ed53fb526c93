"""The JSON files that training leaves: one that is damaged is named, with what brings it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_AGAIN = "and run the same command again: the run goes on from its last checkpoint"
WHAT_TO_DO = {
    "recipe.json": f"Delete it, and result.json beside it if there is one, {_AGAIN}",
    "result.json": f"Delete it {_AGAIN}",
    "metrics.jsonl": "Put the line back as it was, or take it out to do without that epoch",
    "provenance.json": "Put it back as it was, or delete it: then nobody asks whether the run was given the same",
    "stopped.json": "Delete it, and the run is tried again",
    "study.json": "Run the study's command again (--tables-only trains nothing): it is written anew from the runs",
    "fitness.json": "Delete it, and the candidate is evaluated again",
}
NUMBERS = {"accuracy", "epochs", "seconds"}  # of a result
IN_METRICS = ("epoch", "loss", "accuracy", "seconds")  # of every line


def read_saved(path: Path, *keys: str) -> dict[str, Any]:
    """The object in a file that is there; without one of ``keys`` it is damaged too."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"it holds {type(values).__name__}, not an object")
        missing = [key for key in keys if key not in values]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
        for key in NUMBERS.intersection(keys):
            if not isinstance(values[key], int | float):
                raise ValueError(f"its {key} is {values[key]!r}, not a number")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. {WHAT_TO_DO[path.name]}") from None
    return values


def refuse_other_seed(folder: Path, seed: int) -> None:
    """A run that was copied to another seed's folder would count twice, as if it were two."""
    for path in (folder / "recipe.json", folder / "result.json"):
        there = read_saved(path).get("seed", seed) if path.exists() else seed
        if there != seed:
            raise ValueError(
                f"{path} is of seed {there}, and the folder is seed {seed}'s: was it copied or renamed? "
                f"Delete {folder} and run the same command again"
            )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``, nothing where there is none. A last line that a kill cut short is left out; a
    damaged one before it is refused: what is said of a run is not to miss an epoch without a word."""
    lines, damaged = whole_metrics(path)
    if damaged:
        which = f"line{'s' if len(damaged) > 1 else ''} {', '.join(map(str, damaged))}"
        raise ValueError(
            f"{path} is damaged: {which} should be an object with {', '.join(IN_METRICS)}. {WHAT_TO_DO[path.name]}"
        )
    return lines


def whole_metrics(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The lines that are whole, and the numbers of those that are not, less the last line."""
    lines, damaged = [], []
    texts = path.read_bytes().rstrip().splitlines() if path.exists() else []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            _ = [line[key] for key in IN_METRICS]
            lines.append({**line, "epoch": int(line["epoch"])})
        except (ValueError, KeyError, TypeError):
            if number < len(texts):
                damaged.append(number)
    return lines, damaged
