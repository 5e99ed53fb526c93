"""Files of runs and studies: written whole or not at all, and read with an error that says how to repair them."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from unflip.disk import open_new, sync_folder
from unflip.hints import Foreseen

_RESUME = "and run the same command again: the run resumes from its last checkpoint"
REMEDIES = {
    "recipe.json": f"Delete it, and result.json beside it if that exists, {_RESUME}",
    "result.json": f"Delete it {_RESUME}",
    "metrics.jsonl": "Restore the line, or remove it to do without that epoch",
    "provenance.json": "Restore the file, or delete it to skip the check that the run's data, start and teacher are "
    "unchanged",
    "stopped.json": "Delete it to train the run again",
    "study.json": "Run the study's command again (--tables-only trains nothing): it rewrites the file from the runs",
    "fitness.json": "Delete it to evaluate the candidate again",
    "signs.json.gz": "Delete it, and write it again with 'unflip report --keep-signs' where the checkpoints are",
}
NUMBERS = {"accuracy", "epochs", "seconds", "fitness"}  # of a result or a candidate
MOST_BITS = 1000  # of a whole number
IN_METRICS = ("epoch", "loss", "accuracy", "seconds")  # in every line


class RunError(Foreseen, RuntimeError):
    """A run cannot be written, or its folder holds another run."""


class DamagedFile(ValueError):
    """A file that does not hold what was written; the message says what to do."""

    def __init__(self, path: Path, problem: object) -> None:
        self.path, self.problem = path, str(problem)
        remedy = REMEDIES.get(path.name)
        super().__init__(f"{path} is damaged: {problem}" + (f". {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type[DamagedFile], tuple[Path, str]]:
        """So that a worker process can send it."""
        return DamagedFile, (self.path, self.problem)


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """The object in a file. Without one of ``keys`` the file is damaged too."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        if not isinstance(values, dict):
            raise ValueError(f"it holds {type(values).__name__}, not an object")
        missing = [key for key in keys if key not in values]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
        for key in NUMBERS.intersection(keys):
            if not _is_number(values[key]):
                raise ValueError(f"its {key} is {values[key]!r}, not a number")
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, error) from None
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, which is not JSON")


def _is_number(value: object) -> bool:
    """Not NaN or infinity, which are written as null. A whole number may have more digits than a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else value.bit_length() <= MOST_BITS


def write_json(path: Path, values: object) -> None:
    """Write readable JSON; numbers that JSON cannot write become null."""
    text = json.dumps(_finite(values), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, text.encode() + b"\n")


def write_atomically(path: Path, data: bytes) -> None:
    """Either all of ``data`` is at ``path``, or the old content is still there and an error is raised."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with open_new(temporary) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # a read-only disk refuses even this
            temporary.unlink()
        raise RunError(
            f"cannot write {path} ({len(data):,} bytes): {error.strerror}. "
            "Files saved earlier are untouched; free space or choose another --out, then run again."
        ) from error


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Add one line of JSON; numbers that JSON cannot write become null."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; empty if the file does not exist.

    A last line that a kill cut short is left out. A damaged line before it is refused, so that no epoch is missing
    silently.
    """
    lines, damaged = whole_metrics(path)
    if damaged:
        which = f"line{'s' if len(damaged) > 1 else ''} {', '.join(map(str, damaged))}"
        raise DamagedFile(path, f"{which} should be an object with {', '.join(IN_METRICS)}")
    return lines


def whole_metrics(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The lines that can be read, and the numbers of those that cannot, except the last line."""
    lines, damaged = [], []
    texts = path.read_bytes().rstrip().splitlines() if path.exists() else []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            _check_types(line)
            lines.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            if number < len(texts):
                damaged.append(number)
    return lines, damaged


def _check_types(line: dict[str, Any]) -> None:
    """An epoch and its seconds are numbers; a loss or accuracy may be null."""
    for key in IN_METRICS:
        value, kinds = line[key], (int,) if key == "epoch" else (int, float)
        empty = value is None and key in ("loss", "accuracy")
        if not empty and not (_is_number(value) and isinstance(value, kinds)):
            raise TypeError(f"{key} is {value!r}")
