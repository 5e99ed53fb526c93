"""What a run was made from besides its recipe: the images, the weights it started from, its teacher, and code.

``provenance.json`` is written when a run begins. Contents are compared, not paths: a run can be copied to another
machine and resumed there. Paths in the file are for people. So is the number of CPU threads, on which the last digits
depend; a run may resume with another number.
"""

from __future__ import annotations

import functools
import os
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unflip import __version__
from unflip.data.registry import in_words
from unflip.printable import printable
from unflip.runs import checkpoint as checkpoints
from unflip.runs.files import DamagedFile, RunError, read_json, write_json
from unflip.runs.run import Run
from unflip.uses import code_hash

NAME = "provenance.json"
PARTS = ("start", "teacher")  # of a run, that are runs themselves
SEEN = ("training images", "classes")  # these shaped the weights; test images only measure them
EVERYTHING = (*SEEN, "test images")
Fingerprint = Mapping[str, str]


@dataclass(frozen=True)
class Origins:
    """Where the first weights and the teacher of a run come from, and the modules its recipe uses."""

    seed: int
    start: Path | None = None
    teacher: Path | None = None
    uses: tuple[str, ...] = ()

    @property
    def folders(self) -> list[tuple[str, Path, Run]]:
        """Start and teacher, if any: which, the folder as it was named, and the run in it."""
        both = (("start", self.start, self.seed), ("teacher", self.teacher, 0))
        return [(part, folder, Run.find(folder, seed)) for part, folder, seed in both if folder]


def write(run: Run, images: Fingerprint, origins: Origins, threads: int | None = None) -> None:
    """Record what a run that begins now is made from; ``threads`` of a CPU."""
    saved: dict[str, Any] = {"images": dict(images), "versions": [unflip_version()]}
    for part, folder, its_run in origins.folders:
        saved[part] = {"folder": str(folder), "sha256": checkpoints.identity(its_run.folder)}
    if origins.uses:
        saved["code"] = {module: code_hash(module) for module in origins.uses}
    if threads is not None:
        saved["threads"] = [threads]
    write_json(run.folder / NAME, saved)


def read(run: Run) -> dict[str, Any] | None:
    """None where the file does not exist."""
    path = run.folder / NAME
    if not path.exists():
        return None
    saved = read_json(path, "images")
    try:
        _ = saved["images"]["training images"]
        _ = [(saved[p]["folder"] + "", saved[p]["sha256"] + "") for p in PARTS if p in saved]
        _ = [version["commit"] for version in saved.get("versions", [])]
        _ = [int(count) for count in saved.get("threads", [])]
        _ = [digest + "" for digest in saved.get("code", {}).values() if digest is not None]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(path, f"it lacks or misstates {error}") from None
    return saved


def folder_of(run: Run, part: str) -> Path | None:
    """The folder of a run's start or teacher, as it was named; None if it has none."""
    saved = (read(run) or {}).get(part)
    return Path(saved["folder"]) if saved else None


def note_version(run: Run) -> str | None:
    """Record that a run resumes with another commit; returns the one it had."""
    saved = read(run) or {}
    before, now = saved.get("versions"), unflip_version()
    if not before or before[-1] == now:
        return None
    write_json(run.folder / NAME, {**saved, "versions": [*before, now]})
    return None if before[-1]["commit"] == now["commit"] else printable(str(before[-1]["commit"]))


def note_threads(run: Run, threads: int | None) -> int | None:
    """Record that a run resumes with another number of threads; returns the number it had."""
    saved = read(run) or {}
    before = saved.get("threads")
    if threads is None or not before or before[-1] == threads:
        return None
    write_json(run.folder / NAME, {**saved, "threads": [*before, threads]})
    return int(before[-1])


def refuse_another(run: Run, images: Fingerprint | None, origins: Origins) -> None:
    """Refuse a run that was made from something else. ``images`` None, and a start or teacher that is not named, are
    not compared."""
    saved = read(run)
    if saved is None:
        return
    _warn_of_other_code(run, saved, origins.uses)
    wrong = [
        f"--data: its {part} are {there}, these are {here}"
        for part, there, here in (changed(saved, images, EVERYTHING) if images else ())
    ]
    wrong += [text for named in origins.folders if (text := other_weights(saved, *named))]
    if wrong:
        raise RunError(
            f"{run} holds a run that was made from something else: {'; '.join(wrong)}. "
            "Choose another --out, or give the same as before."
        )


def _warn_of_other_code(run: Run, saved: dict[str, Any], uses: tuple[str, ...]) -> None:
    """Only a person can tell whether a change matters: it may be a comment, or another method's."""
    for module, there in saved.get("code", {}).items():
        here = code_hash(module) if module in uses else there
        if here != there:
            warnings.warn(
                f"the run in {run} began with other code in {module!r} (SHA-256 {there:.12}…, now {here:.12}…). "
                "If its method, network or data changed, choose another --out, or delete that folder",
                stacklevel=2,
            )


def changed(
    saved: Mapping[str, Any], images: Fingerprint, parts: tuple[str, ...] = SEEN
) -> list[tuple[str, str, str]]:
    """The parts of these images that differ from the run's: (part, the run's, these)."""
    pairs = [(part, saved["images"].get(part), images[part]) for part in parts]
    return [(part, there, here) for part, there, here in pairs if there != here]


def other_images(
    run: Run, data: Mapping[str, Any], images: Fingerprint | None = None
) -> tuple[str, str] | None:
    """How a run's images differ from those of a recipe's ``data`` (as JSON values): a description of each, or None.

    Weights from other images may have seen some that are held out here, which would make any accuracy look good.
    ``images`` are the recipe's, if they are loaded.
    """
    there = run.recipe["data"]
    if there != data:
        return in_words(there), in_words(data)
    saved = read(run)
    found = changed(saved, images) if saved and images else []
    if not found:
        return None
    return (
        "; ".join(f"{part} {theirs}" for part, theirs, _ in found),
        "; ".join(f"{part} {ours}" for part, _, ours in found),
    )


def other_weights(saved: Mapping[str, Any], part: str, folder: Path, run: Run) -> str | None:
    """How a start or teacher differs from the recorded one; None if it does not, or if its weights were deleted."""
    if part not in saved:
        return None
    there = saved[part]
    was = f"--{part}: it had the weights of {there['folder']} (SHA-256 {there['sha256']:.12}…)"
    if not run.finished and not run.folder.is_file():
        return f"{was}, and {folder} does not hold a finished run"
    here = checkpoints.identity(run.folder)
    if here in (None, there["sha256"]):
        return None
    return f"{was}, {folder} has others ({here:.12}…)"


@functools.cache
def unflip_version() -> dict[str, Any]:
    """Version, commit and whether the sources differ from it: every result carries them.

    The commit is that of the checkout the sources are in, or ``UNFLIP_COMMIT`` where they were copied without it; None
    for an installed package.
    """
    here = Path(__file__).resolve().parents[1]
    commit, dirty = os.environ.get("UNFLIP_COMMIT") or None, None
    found = _git(here, "rev-parse", "HEAD") if commit is None else None
    if found is not None and _git(here, "ls-files", "--error-unmatch", __file__) is not None:
        commit, dirty = found, bool(_git(here, "status", "--porcelain", "--", "."))
    return {"unflip": __version__, "commit": commit, "dirty": dirty}


def _git(folder: Path, *words: str) -> str | None:
    """None without git, outside a checkout, or when git takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
