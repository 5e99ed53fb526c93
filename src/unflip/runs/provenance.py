"""What a run was given besides its recipe: the images, the weights it started from, and its teacher.

``provenance.json`` is written when a run begins. What is compared are contents: a run that is copied goes on on another
machine, and the folders in the file are for people. So is the number of threads, which the last digits depend on where
a CPU trains; a run may go on with another. Runs of before there was such a file are taken as they are.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unflip.data import Dataset
from unflip.runs import checkpoint as checkpoints
from unflip.runs.checkpoint import CheckpointError
from unflip.runs.files import read_saved
from unflip.runs.run import seed_folder
from unflip.train.recipe import Recipe, recipe_in
from unflip.uses import code_hash

if TYPE_CHECKING:
    from unflip.train.loop import Job

NAME = "provenance.json"
PARTS = ("start", "teacher")  # of a run, that are runs themselves
SEEN = ("training images", "classes")  # what made the weights; test images only measure them
EVERYTHING = (*SEEN, "test images")


def write(job: Job, images: Dataset, threads: int | None = None) -> None:
    """Keep what a run that begins now is given; ``threads`` of a CPU."""
    given: dict[str, Any] = {"images": images.fingerprint}
    for part, folder, run in _from_elsewhere(job):
        given[part] = {"folder": str(folder), "sha256": checkpoints.identity(run)}
    if job.recipe.uses:
        given["code"] = {module: code_hash(module) for module in job.recipe.uses}
    if threads is not None:
        given["threads"] = [threads]
    _save(job.folder, given)


def keep_threads(folder: Path, threads: int | None) -> int | None:
    """Keep that a run goes on with another number of threads, where it is known what it had: which is returned."""
    given = read(folder) or {}
    before = given.get("threads")
    if threads is None or not before or before[-1] == threads:
        return None
    _save(folder, {**given, "threads": [*before, threads]})
    return int(before[-1])


def _save(folder: Path, given: dict[str, Any]) -> None:
    data = json.dumps(given, indent=1, ensure_ascii=False).encode() + b"\n"
    checkpoints.write_atomically(folder / NAME, data)


def read(folder: Path) -> dict[str, Any] | None:
    """What the run in a folder was given, if that is known."""
    path = folder / NAME
    return read_saved(path, "images") if path.exists() else None


def refuse_another(job: Job, images: Dataset | None) -> None:
    """Refuse a job whose folder holds a run that was given something else. ``images`` are as the run sees them; None,
    and a start or teacher that is not given, are not asked about."""
    given = read(job.folder)
    if given is None:
        return
    _warn_of_other_code(job, given)
    wrong = [
        f"--data: its {part} are {there}, these are {here}"
        for part, there, here in (changed(given, images, EVERYTHING) if images else ())
    ]
    weights = [other_weights(given, *named) for named in _from_elsewhere(job)]
    wrong += [text for text in weights if text]
    if wrong:
        raise CheckpointError(
            f"{job.folder} holds a run that was given something else: {'; '.join(wrong)}. "
            "Choose another --out, or give what it was given."
        )


def _warn_of_other_code(job: Job, given: dict[str, Any]) -> None:
    """A change may be a comment, or another method's: only a person can tell."""
    for module, there in given.get("code", {}).items():
        here = code_hash(module) if module in job.recipe.uses else there
        if here != there:
            warnings.warn(
                f"the run in {job.folder} began with other code of {module!r} (SHA-256 {there:.12}…, now {here:.12}…). "
                "If the change is one of its method or network, choose another --out, or delete that folder",
                stacklevel=2,
            )


def changed(
    given: dict[str, Any], images: Dataset, parts: tuple[str, ...] = SEEN
) -> list[tuple[str, str, str]]:
    """Which parts of these images are not what a run was given, with what they were and are."""
    pairs = [(part, given["images"].get(part), images.fingerprint[part]) for part in parts]
    return [(part, there, here) for part, there, here in pairs if there != here]


def other_images(
    folder: Path, recipe: Recipe, images: Dataset | None = None
) -> tuple[str, str] | None:
    """The images of the run in a folder and a recipe's own, where they differ; ``images`` are the latter, if at hand.

    Weights from other images may have seen some that are held out here, which would make any figure look good.
    """
    there = recipe_in(folder).data
    if there != recipe.data:
        return str(there), str(recipe.data)
    given = read(folder)
    found = changed(given, images) if given and images else []
    if not found:
        return None
    return (
        "; ".join(f"{part} {theirs}" for part, theirs, _ in found),
        "; ".join(f"{part} {ours}" for part, _, ours in found),
    )


def _from_elsewhere(job: Job) -> list[tuple[str, Path, Path]]:
    """Start and teacher of a job, as far as it has them: which, the folder as given, and the run in it."""
    both = (("start", job.start, job.seed), ("teacher", job.teacher, 0))
    return [(part, folder, seed_folder(folder, seed)) for part, folder, seed in both if folder]


def other_weights(given: dict[str, Any], part: str, folder: Path, run: Path) -> str | None:
    """How a start or teacher is not the one that was given. Where its weights are no longer kept, nothing tells."""
    if part not in given:
        return None
    there = given[part]
    was = f"--{part}: it had the weights of {there['folder']} (SHA-256 {there['sha256']:.12}…)"
    if not (run / "result.json").exists() and not run.is_file():
        return f"{was}, and {folder} holds no finished run"
    here = checkpoints.identity(run)
    if here in (None, there["sha256"]):
        return None
    return f"{was}, {folder} has others ({here:.12}…)"
