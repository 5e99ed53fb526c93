"""The JSON files that training leaves: one that is damaged is named, with what brings it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_AGAIN = "and run the same command again: the run goes on from its last checkpoint"
WHAT_TO_DO = {
    "recipe.json": f"Delete it, and result.json beside it if there is one, {_AGAIN}",
    "result.json": f"Delete it {_AGAIN}",
    "provenance.json": "Put it back as it was, or delete it: then nobody asks whether the run was given the same",
    "stopped.json": "Delete it, and the run is tried again",
    "study.json": "Run the study's command again (--tables-only trains nothing): it is written anew from the runs",
    "fitness.json": "Delete it, and the candidate is evaluated again",
}


def read_saved(path: Path, *keys: str) -> dict[str, Any]:
    """The object in a file that is there; without one of ``keys`` it is damaged too."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"it holds {type(values).__name__}, not an object")
        missing = [key for key in keys if key not in values]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. {WHAT_TO_DO[path.name]}") from None
    return values
