"""Exports with values of 16 bits: ranges and errors, measured on images with this machine's C compiler."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np

from unflip.export.plain_c.check import Compiled, image_paths, scores_of
from unflip.export.plain_c.export import CFiles, check_name, check_targets, to_c, write_files
from unflip.export.plain_c.memory import Memory
from unflip.export.plain_c.plan import Plan, make_plan
from unflip.export.plain_c.shorts import possible_shorts, scales_of
from unflip.packing.file import PackedFileError, read, sha256
from unflip.runtime import Model, load
from unflip.runtime.images import normalized, read_pixels

Array = np.ndarray[Any, np.dtype[Any]]

HOOK = """#ifndef UNFLIP_HOOK
#define UNFLIP_HOOK
extern void (*unflip_hook)(int);
#define UNFLIP_AFTER(layer) do { if (unflip_hook) unflip_hook(layer); } while (0)
#endif
"""


@dataclass(frozen=True)
class Error:
    """Of scores, over all images."""

    images: int
    largest: float  # absolute difference of a score
    scores: float  # the largest absolute score
    other_classes: int  # images with another best score

    def __str__(self) -> str:
        return (
            f"on {self.images} images scores differ by at most {self.largest:.3g} (the largest score is "
            f"{self.scores:.3g}), and {self.other_classes} images get another class"
        )


def export_int16(
    model: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    name: str,
    images: Path,
    *,
    replace: bool = False,
    max_memory: int | None = None,
    max_work: int | None = None,
) -> tuple[CFiles, Error]:
    """Like ``export_c``, with shortcuts of 16 bits. Their ranges and the error are measured on ``images``."""
    check_name(name)
    check_targets(folder, name, replace)
    network = load(model, max_memory=max_memory, max_work=max_work)
    packed = read(model)
    plan = make_plan(packed)
    found = possible_shorts(plan)
    if not found:
        raise PackedFileError(
            f"{model}: no value can be stored in 16 bits; export it without --int16"
        )
    pixels = [read_pixels(path, network) for path in image_paths(images, "--int16")]
    with tempfile.TemporaryDirectory() as made:
        floats = to_c(packed, name)
        write_files(floats, made, replace=True)
        largest = _largest(Path(made), floats, plan, found, pixels)
        _refuse_infinite(model, plan, largest)
        files = to_c(packed, name, sha256(model), scales_of(plan, largest))
        write_files(files, made, replace=True)
        error = _error(Path(made), files, network, pixels)
    files = files.with_note(f"Shortcuts are 16-bit integers: {error}.")
    write_files(files, folder, replace=replace)
    return files, error


def _largest(
    folder: Path, files: CFiles, plan: Plan, values: Iterable[int], images: list[Array]
) -> dict[int, float]:
    """The largest absolute number of each value."""
    memory, wanted = Memory(plan, {}), set(values)
    largest = dict.fromkeys(wanted, 0.0)
    (folder / "hook.h").write_text(HOOK)
    (folder / "hook.c").write_text("void (*unflip_hook)(int);\n")
    flags = ("-include", str(folder / "hook.h"), str(folder / "hook.c"))
    with Compiled(folder / f"{files.name}.c", files.name, files.arena, flags) as compiled:
        bytes_of = compiled.arena.view(np.uint8)

        def after(layer: int) -> None:
            value = plan.tasks[layer].value
            if value in wanted and value is not None:
                start = memory.offset(value)
                numbers = bytes_of[start : start + 4 * prod(plan.shapes[value])].view(np.float32)
                largest[value] = float(np.maximum(largest[value], np.abs(numbers).max()))

        hook = ctypes.CFUNCTYPE(None, ctypes.c_int)(after)  # must live as long as it is called
        place = ctypes.c_void_p.in_dll(compiled.library, "unflip_hook")
        place.value = ctypes.cast(hook, ctypes.c_void_p).value
        for pixels in images:
            compiled.run(pixels, _scores(plan))
    return largest


def _refuse_infinite(model: str | os.PathLike[str], plan: Plan, largest: dict[int, float]) -> None:
    for task in plan.tasks:
        most = largest.get(task.value, 0.0) if task.value is not None else 0.0
        if not isfinite(most):
            raise PackedFileError(
                f"{model}: {task.kind} {task.name!r} gives {most} for an image, which 16 bits cannot hold; export it "
                "without --int16"
            )


def _scores(plan: Plan) -> int:
    return sum(prod(plan.shapes[v]) for v in plan.outputs)


def _error(folder: Path, files: CFiles, network: Model, images: list[Array]) -> Error:
    largest = scores = 0.0
    others = 0
    with Compiled(folder / f"{files.name}.c", files.name, files.arena) as compiled:
        for pixels in images:
            x = normalized(pixels.transpose(2, 0, 1).astype(np.float32), network)
            expected = scores_of(network, x)
            found = compiled.run(pixels, len(expected))
            # np.maximum keeps a NaN.
            largest = float(np.maximum(largest, np.abs(found - expected).max()))
            scores = float(np.maximum(scores, np.abs(expected).max()))
            others += int(found.argmax() != expected.argmax())
    return Error(len(images), largest, scores, others)
