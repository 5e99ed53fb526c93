"""Compiles networks as plain C for this machine, and compares their scores with the runtime's."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import unflip
from unflip.export.plain_c.check import differences, scores_of
from unflip.export.plain_c.export import export_c
from unflip.packing import Packed
from unflip.packing.file import write
from unflip.runtime.images import normalized

STRICT = ("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Wshadow", "-Werror")
GUARD = 64  # bytes before and after an arena that must not change


class Library:
    """All networks in one library: one call of the compiler."""

    def __init__(self, networks: dict[str, Packed], folder: Path) -> None:
        self.packed, self.files = networks, {}
        for name, packed in self.packed.items():
            write(folder / f"{name}.unflip", packed)
            self.files[name] = export_c(folder / f"{name}.unflip", folder, name)
        self.models = {name: unflip.load(folder / f"{name}.unflip") for name in self.packed}
        sources = [folder / f"{name}.c" for name in self.packed]
        built = folder / "all.so"
        command = ["cc", *STRICT, "-O0", "-shared", "-fPIC", *map(str, sources), "-o", str(built)]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(built))

    def run(self, name: str, x: Any) -> Any:
        """The scores, computed in an arena of exactly the stated size, whose first content is all ones."""
        arena = np.full(self.files[name].arena + 2 * GUARD, 255, np.uint8)
        scores = np.full(self._scores(name) + 2, np.float32(7), np.float32)
        function = getattr(self.library, f"{name}_run{'' if x.dtype == np.uint8 else '_floats'}")
        given = np.ascontiguousarray(x)
        places = given.ctypes.data, scores[1:].ctypes.data, arena[GUARD:].ctypes.data
        assert function(*map(ctypes.c_void_p, places)) == 0
        assert (arena[:GUARD] == 255).all()
        assert (arena[-GUARD:] == 255).all()
        assert scores[0] == scores[-1] == 7
        return scores[1:-1].copy()

    def _scores(self, name: str) -> int:
        return sum(int(np.prod(shape)) for shape in self.models[name].output_shapes.values())

    def differences(self, name: str, x: Any) -> int:
        """Scores that differ in a bit from the runtime's, for floats (C, H, W) or pixels (H, W, C)."""
        model, given = self.models[name], x
        if x.dtype == np.uint8:
            given = normalized(x.transpose(2, 0, 1).astype(np.float32), model)
        return differences(self.run(name, x), scores_of(model, given))
