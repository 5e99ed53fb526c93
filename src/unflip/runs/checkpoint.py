"""Checkpoints that survive a kill, a full disk and a flipped bit.

A checkpoint is two files: ``checkpoint-EPOCH-STEP.safetensors`` and, written after it, a ``.json`` file of the
same name with the SHA-256 of the first. Each is written to a temporary file, flushed to disk and renamed. So a
file that exists is complete, and a pair is complete once its JSON exists. The last two checkpoints are kept: if
the newest is damaged, the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unflip.printable import printable
from unflip.runs.files import RunError, read_json, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

KEEP = 2
_NAME = re.compile(r"checkpoint-(\d+)-(\d+)\.json")
_ANY_PART = re.compile(r"\.?(checkpoint-\d+-\d+)\.(json|safetensors)(\.part)?")


class DamagedCheckpoint(RunError):
    """A checkpoint that does not hold what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a run after ``step`` steps of ``epoch``, with its recipe and seed in ``info``."""

    epoch: int
    step: int
    tensors: dict[str, Tensor]
    info: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the pair, then remove all but the last two, and parts that a kill left behind."""
    import safetensors.torch  # imports torch, which reading the rest of a run does not need

    name = _stem(checkpoint.epoch, checkpoint.step)
    tensors = {k: v.detach().cpu().contiguous() for k, v in checkpoint.tensors.items()}
    data = safetensors.torch.save(tensors)
    info = {**checkpoint.info, "sha256": hashlib.sha256(data).hexdigest()}
    write_atomically(folder / f"{name}.safetensors", data)
    write_atomically(folder / f"{name}.json", json.dumps(info, indent=1).encode())
    _keep_only(folder, _complete(folder)[-KEEP:])


def available(folder: Path) -> list[tuple[int, int]]:
    """(epoch, step) of the checkpoints in a folder, oldest first. Their content is not checked."""
    return [_position(path) for path in _complete(folder)]


def drop_after(folder: Path, at: tuple[int, int] | None) -> None:
    """Remove checkpoints newer than ``at`` (None: all): a run that resumes there writes them again.

    If they stayed, they would count among the last two, and the new ones would be removed.
    """
    _keep_only(folder, [p for p in _complete(folder) if at is not None and _position(p) <= at])


def survey(folder: Path) -> tuple[list[tuple[int, int]], list[str]]:
    """(epoch, step) of the undamaged checkpoints, oldest first, and a message for each damaged one."""
    whole: list[tuple[int, int]] = []
    problems: list[str] = []
    for at in available(folder):
        try:
            load_at(folder, *at)
            whole.append(at)
        except DamagedCheckpoint as error:
            problems.append(str(error))
    return whole, problems


def load_at(folder: Path, epoch: int, step: int) -> Checkpoint:
    """The checkpoint at that position; raises :class:`DamagedCheckpoint`."""
    import safetensors.torch

    path = folder / f"{_stem(epoch, step)}.json"
    try:
        info = json.loads(path.read_text())
        data = path.with_suffix(".safetensors").read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found != info["sha256"]:
            raise ValueError(f"its SHA-256 is {found[:12]}…, not {info['sha256'][:12]}…")
        if not isinstance(info.get("recipe", {}), dict):
            raise ValueError("its recipe is not an object")
        return Checkpoint(epoch, step, safetensors.torch.load(data), info)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
        safetensors.SafetensorError,
    ) as error:
        problem = printable(str(error))  # it may quote the file
        raise DamagedCheckpoint(f"{path.with_suffix('')} is damaged: {problem}") from error


def load_latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest undamaged checkpoint, and a message for each newer, damaged one."""
    problems: list[str] = []
    for epoch, step in reversed(available(folder)):
        try:
            return load_at(folder, epoch, step), problems
        except DamagedCheckpoint as error:
            problems.append(str(error))
    return None, problems


def load_usable(folder: Path) -> Checkpoint:
    """The newest undamaged checkpoint; warns about newer ones that are damaged.

    An error if there is none, or if a finished run has lost its last one: weights of an earlier epoch do not belong to
    its result.
    """
    saved, problems = load_latest(folder)
    if saved is None:
        raise ValueError(f"{folder} has no usable checkpoint{_reasons(problems)}")
    result = folder / "result.json"
    if result.exists() and saved.epoch < (epochs := read_json(result, "epochs")["epochs"]):
        raise ValueError(
            f"the run in {folder} is finished with {epochs} epochs, but its last undamaged checkpoint is of epoch "
            f"{saved.epoch} ({'; '.join(problems) or 'later ones were deleted'}). Delete its result.json and train it "
            "again: it resumes there"
        )
    for problem in problems:
        print(f"warning: {problem}; using the checkpoint before it", flush=True)
    return saved


def _reasons(problems: list[str]) -> str:
    return f": {'; '.join(problems)}" if problems else ""


def identity(folder: Path) -> str | None:
    """SHA-256 of a finished run's last checkpoint as it was written, None if it was not kept; for a file of weights,
    the file's own."""
    if folder.is_file():
        return hashlib.sha256(folder.read_bytes()).hexdigest()
    epochs = read_json(folder / "result.json", "epochs")["epochs"]
    path = folder / f"{_stem(epochs, 0)}.json"
    try:
        return str(json.loads(path.read_text())["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _stem(epoch: int, step: int) -> str:
    return f"checkpoint-{epoch:05d}-{step:06d}"


def _position(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def _complete(folder: Path) -> list[Path]:
    """The JSON files of complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name))


def _keep_only(folder: Path, complete: list[Path]) -> None:
    """Remove every checkpoint file but those pairs; the JSON, which makes a pair complete, first."""
    kept = {path.stem for path in complete}
    for path in sorted(folder.iterdir()):
        match = _ANY_PART.fullmatch(path.name)
        if match and (match[1] not in kept or match[3]):
            path.unlink(missing_ok=True)
