"""Compiles a written network with the machine's C compiler, and compares it with the runtime, bit for bit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from unflip.export.plain_c.export import CFiles
from unflip.runtime import Model
from unflip.runtime.images import normalized, read_pixels

Array = np.ndarray[Any, np.dtype[Any]]

FLAGS = ("-std=c99", "-O2")


class NoCompiler(RuntimeError):
    """This machine has no C compiler."""


class Compiled:
    """A written network as a library of this machine. Use it in a ``with`` block."""

    def __init__(self, source: Path, name: str, arena: int, flags: Iterable[str] = ()) -> None:
        self.source, self.name, self.flags = source, name, tuple(flags)
        self.arena = np.zeros(arena // 8 + 1, np.float64)  # aligned to 8 bytes

    def __enter__(self) -> Compiled:
        compiler = shutil.which("cc")
        if compiler is None:
            raise NoCompiler("--check needs a C compiler: 'cc' was not found")
        self.folder = tempfile.TemporaryDirectory()
        library = Path(self.folder.name) / "network.so"
        command = [
            compiler,
            *FLAGS,
            *self.flags,
            "-shared",
            "-fPIC",
            str(self.source),
            "-o",
            str(library),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"'{' '.join(command)}' failed:\n{done.stderr[:4000]}")
        self.library = ctypes.CDLL(str(library))
        self.pixels = getattr(self.library, f"{self.name}_run")
        self.floats = getattr(self.library, f"{self.name}_run_floats")
        return self

    def __exit__(self, *_: object) -> None:
        self.folder.cleanup()

    def run(self, x: Array, scores: int) -> Array:
        """Scores for pixels (H, W, C) of uint8, or an input (C, H, W) of float32."""
        function = self.pixels if x.dtype == np.uint8 else self.floats
        given, found = np.ascontiguousarray(x), np.empty(scores, np.float32)
        pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (given, found, self.arena)]
        code = function(*pointers)
        if code:
            raise RuntimeError(f"{self.name}_run returned {code}")
        return found


def scores_of(model: Model, x: Array) -> Array:
    """The runtime's outputs for one sample, one after another."""
    found = model(x)
    parts = list(found.values()) if isinstance(found, dict) else found
    parts = parts if isinstance(parts, list | tuple) else [parts]
    return np.concatenate([np.ravel(part) for part in parts])


def differences(found: Array, expected: Array) -> int:
    """How many scores differ in a bit."""
    return int((found.view(np.uint32) != expected.view(np.uint32)).sum())


def image_paths(images: Path, option: str) -> list[Path]:
    """An image file, or all files of a folder."""
    if not images.exists():
        raise FileNotFoundError(
            f"{option} {images} does not exist; give an image or a folder of images"
        )
    paths = sorted(p for p in images.iterdir() if p.is_file()) if images.is_dir() else [images]
    if not paths:
        raise ValueError(
            f"{option} {images}: the folder has no files; give an image or a folder of images"
        )
    return paths


def check_images(model: Model, files: CFiles, source: Path, images: Path) -> tuple[int, int]:
    """Compare scores with the runtime: (number of images, images with different scores)."""
    paths = image_paths(images, "--check")
    different = 0
    with Compiled(source, files.name, files.arena) as compiled:
        for path in paths:
            pixels = read_pixels(path, model)
            x = normalized(pixels.transpose(2, 0, 1).astype(np.float32), model)
            expected = scores_of(model, x)
            different += differences(compiled.run(pixels, len(expected)), expected) > 0
    return len(paths), different
