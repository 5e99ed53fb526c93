"""Checkpoints that survive a kill, a full disk and a flipped bit.

A checkpoint is two files: ``checkpoint-EPOCH-STEP.safetensors`` and, written after it, a ``.json`` of the
same name with the SHA-256 of the first. Each is written to a temporary file, flushed to disk and renamed, so
a name that exists is complete; the JSON is the mark that the pair is. The last two are kept: if the
newest is damaged, the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from unflip.hints import Foreseen
from unflip.runs.files import read_saved

KEEP = 2
_NAME = re.compile(r"checkpoint-(\d+)-(\d+)\.json")
_ANY_PART = re.compile(r"\.?(checkpoint-\d+-\d+)\.(json|safetensors)(\.part)?")


class CheckpointError(Foreseen, RuntimeError):
    """A checkpoint that cannot be written, or one that belongs to something else."""


class Damaged(CheckpointError):
    """A checkpoint whose content is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors and what is known of them; ``step`` steps of ``epoch`` are done."""

    epoch: int
    step: int
    tensors: dict[str, Tensor]
    info: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the pair, then drop all but the last two, and what a kill left unfinished."""
    name = _stem(checkpoint.epoch, checkpoint.step)
    tensors = {k: v.detach().cpu().contiguous() for k, v in checkpoint.tensors.items()}
    data = safetensors.torch.save(tensors)
    info = {**checkpoint.info, "sha256": hashlib.sha256(data).hexdigest()}
    write_atomically(folder / f"{name}.safetensors", data)
    write_atomically(folder / f"{name}.json", json.dumps(info, indent=1).encode())
    _keep_only(folder, _complete(folder)[-KEEP:])


def available(folder: Path) -> list[tuple[int, int]]:
    """(epoch, step) of the checkpoints in a folder, oldest first; whether they are whole is not known."""
    return [_position(path) for path in _complete(folder)]


def drop_after(folder: Path, at: tuple[int, int] | None) -> None:
    """Drop checkpoints newer than ``at`` (None: all): a run that goes on from there makes them again.

    Left in place they would count among the last two, in front of the ones made now.
    """
    _keep_only(folder, [p for p in _complete(folder) if at is not None and _position(p) <= at])


def survey(folder: Path) -> tuple[list[tuple[int, int]], list[str]]:
    """(epoch, step) of the checkpoints that are whole, oldest first, and what is wrong with the others."""
    whole: list[tuple[int, int]] = []
    problems: list[str] = []
    for at in available(folder):
        try:
            load_at(folder, *at)
            whole.append(at)
        except Damaged as error:
            problems.append(str(error))
    return whole, problems


def load_at(folder: Path, epoch: int, step: int) -> Checkpoint:
    """The checkpoint of that position, or :class:`Damaged`."""
    path = folder / f"{_stem(epoch, step)}.json"
    try:
        info = json.loads(path.read_text())
        data = path.with_suffix(".safetensors").read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found != info["sha256"]:
            raise ValueError(f"its SHA-256 is {found[:12]}…, not {info['sha256'][:12]}…")
        return Checkpoint(epoch, step, safetensors.torch.load(data), info)
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise Damaged(f"{path.with_suffix('')} is damaged: {error}") from error


def load_latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with the newer ones."""
    problems: list[str] = []
    for epoch, step in reversed(available(folder)):
        try:
            return load_at(folder, epoch, step), problems
        except Damaged as error:
            problems.append(str(error))
    return None, problems


def load_usable(folder: Path) -> Checkpoint:
    """As :func:`load_latest`, saying what was passed over; an error where nothing is whole, or where a finished run's
    last one is not: an earlier epoch's weights are not what its result is about."""
    saved, problems = load_latest(folder)
    if saved is None:
        raise ValueError(f"no usable checkpoint in {folder}: {'; '.join(problems) or 'none there'}")
    result = folder / "result.json"
    if result.exists() and saved.epoch < (epochs := read_saved(result, "epochs")["epochs"]):
        raise ValueError(
            f"the run in {folder} is finished with {epochs} epochs, but its last whole checkpoint is of epoch "
            f"{saved.epoch} ({'; '.join(problems) or 'later ones are gone'}). Delete its result.json and train it "
            "again: it goes on from there"
        )
    for problem in problems:
        print(f"warning: {problem}; using the checkpoint before it", flush=True)
    return saved


def identity(folder: Path) -> str | None:
    """SHA-256 of a finished run's last checkpoint, as it was written; None where that was not kept. Of a file of
    weights, its own."""
    if folder.is_file():
        return hashlib.sha256(folder.read_bytes()).hexdigest()
    epochs = read_saved(folder / "result.json", "epochs")["epochs"]
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


def write_atomically(path: Path, data: bytes) -> None:
    """All of ``data`` at ``path``, or what was there before and an error."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # a read-only disk refuses even this
            temporary.unlink()
        raise CheckpointError(
            f"cannot write {path} ({len(data):,} bytes): {error.strerror}. "
            "What was saved before is untouched; free space or choose another --out, then run again."
        ) from error


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
