"""What came of one run: its result, or why it stopped."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unflip.runs import checkpoint as checkpoints
from unflip.runs.checkpoint import CheckpointError
from unflip.runs.files import read_metrics, read_saved, refuse_other_seed
from unflip.runs.run import recipe_difference
from unflip.train.recipe import Recipe

STOPPED = "stopped.json"  # beside the run's other files: it is not run again


@dataclass(frozen=True)
class Record:
    """A run that is over. ``accuracy`` is of the last epoch, None for a run that stopped."""

    seed: int
    accuracy: float | None
    best_accuracy: float | None
    epochs: int
    seconds: float
    stopped: str | None = None


def finished(folder: Path) -> bool:
    return (folder / "result.json").exists()


def stop_reason(folder: Path) -> str | None:
    """Why the run stopped; None if it did not, or if it was finished after all."""
    note = folder / STOPPED
    if not note.exists() or finished(folder):
        return None
    return str(read_saved(note, "reason")["reason"])


def note_stop(folder: Path, reason: str) -> None:
    """Keep the reason, so that a study that goes on does not run into it again."""
    data = json.dumps({"reason": reason}, indent=1).encode() + b"\n"
    checkpoints.write_atomically(folder / STOPPED, data)


def read(folder: Path, seed: int) -> Record | None:
    """The run's record; None while it is not over."""
    reason = stop_reason(folder)
    if reason is None and not finished(folder):
        return None
    refuse_other_seed(folder, seed)
    metrics = metrics_of(folder)
    best = max((m["accuracy"] for m in metrics if m["accuracy"] is not None), default=None)
    if finished(folder):
        result = read_saved(folder / "result.json", "accuracy", "epochs", "seconds")
        last = float(result["accuracy"])
        best = last if best is None else max(best, last)
        return Record(seed, last, best, result["epochs"], result["seconds"])
    seconds = round(sum(m["seconds"] for m in metrics), 2)
    return Record(seed, None, best, len(metrics), seconds, reason)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The run's line an epoch; nothing where its result alone was kept."""
    return read_metrics(folder / "metrics.jsonl")


def difference(folder: Path, recipe: Recipe) -> list[str]:
    """How the recipe of the run in a folder differs from this one; nothing where there is no run."""
    saved = folder / "recipe.json"
    if not saved.exists():
        if finished(folder):
            raise ValueError(
                f"{folder} has a result.json and no recipe.json, so nothing tells what it is the result of. "
                "Put recipe.json back, or delete that folder and run the same command again"
            )
        return []
    return recipe_difference(read_saved(saved, "recipe")["recipe"], recipe)


def refuse_another_recipe(folder: Path, recipe: Recipe) -> None:
    """A table must not mix recipes."""
    differs = difference(folder, recipe)
    if differs:
        raise CheckpointError(
            f"{folder} holds a run of another recipe: {'; '.join(differs)}. "
            "Choose another --out, or delete that folder."
        )
