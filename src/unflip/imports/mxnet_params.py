"""MXNet's ``.params`` files, read with numpy alone.

All numbers are little endian:

    uint64 0x112, uint64 reserved
    uint64 count, then the arrays
    uint64 count, then the names: uint64 length, bytes

An array is a shape, two int32 for the device (ignored), an int32 for the type, and the values in C order. There are
three ways to write the shape: uint32 dims, uint32 each (before MXNet 1.0); the mark 0xF993FAC8, uint32 dims, int64
each; the mark 0xF993FAC9, int32 0 (dense), uint32 dims, int64 each.

Every length is compared with the rest of the file before anything is allocated.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from unflip.imports.errors import CannotImport

MAGIC = 0x112
INT64_SHAPE, DENSE_INT64_SHAPE = 0xF993FAC8, 0xF993FAC9
DTYPES = {0: "<f4", 1: "<f8", 2: "<f2", 3: "|u1", 4: "<i4", 5: "|i1", 6: "<i8"}
MOST_DIMS = 8
MOST_ARRAYS = 100_000
LONGEST_NAME = 4096
LARGEST_FILE = 2**31

Array = np.ndarray[Any, np.dtype[Any]]


def read_params(path: Path) -> dict[str, Array]:
    """The arrays by name, such as ``arg:conv0_weight``."""
    return parse_params(read_limited(path, LARGEST_FILE), str(path))


def read_limited(path: Path, most: int) -> bytes:
    """The content of a file that is not absurdly large."""
    if not path.is_file():
        raise CannotImport(f"{path}: the file does not exist; give the path of a file")
    size = path.stat().st_size
    if size > most:
        raise CannotImport(f"{path}: {size:,} bytes; a file of this kind has at most {most:,}")
    return path.read_bytes()


def parse_params(data: bytes, where: str) -> dict[str, Array]:
    """The arrays of a file with this content; ``where`` is its name in messages."""
    reader = _Reader(data, where)
    magic, _ = reader.numbers("QQ", "its first 16 bytes")
    if magic != MAGIC:
        raise CannotImport(
            f"{where}: not an MXNet .params file: it begins with {magic:#x} instead of {MAGIC:#x}"
        )
    arrays = [reader.array(f"array {i}") for i in range(reader.count("arrays"))]
    names = [reader.name(f"name {i}") for i in range(reader.count("names"))]
    reader.finish()
    if len(names) != len(arrays):
        raise CannotImport(f"{where}: {len(arrays)} arrays but {len(names)} names; copy it again")
    if len(set(names)) != len(names):
        [(twice, _)] = Counter(names).most_common(1)
        raise CannotImport(f"{where}: two arrays have the name {twice!r}; names must differ")
    return dict(zip(names, arrays, strict=True))


class _Reader:
    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def take(self, length: int, what: str) -> memoryview:
        left = len(self.data) - self.at
        if length > left:
            raise CannotImport(
                f"{self.where}: cut off or damaged: {what} needs {length:,} bytes, and {left:,} are left; copy it again"
            )
        self.at += length
        return memoryview(self.data)[self.at - length : self.at]

    def numbers(self, kinds: str, what: str) -> tuple[int, ...]:
        return struct.unpack(f"<{kinds}", self.take(struct.calcsize(f"<{kinds}"), what))

    def count(self, what: str) -> int:
        [count] = self.numbers("Q", f"the number of {what}")
        if count > MOST_ARRAYS:
            raise CannotImport(
                f"{self.where}: it announces {count:,} {what}; at most {MOST_ARRAYS:,} are read"
            )
        return count

    def array(self, what: str) -> Array:
        shape = self._shape(what)
        *_, kind = self.numbers("iii", f"the device and type of {what}")
        if kind not in DTYPES:
            raise CannotImport(
                f"{self.where}: {what} has the unknown type {kind}; known are 0 to {max(DTYPES)}"
            )
        dtype = np.dtype(DTYPES[kind])
        values = self.take(math.prod(shape) * dtype.itemsize, f"{what} of shape {shape}")
        return np.frombuffer(values, dtype).reshape(shape)

    def _shape(self, what: str) -> tuple[int, ...]:
        [dims] = self.numbers("I", f"the shape of {what}")
        kind = "I"
        if dims in (INT64_SHAPE, DENSE_INT64_SHAPE):
            kind = "q"
            if dims == DENSE_INT64_SHAPE and self.numbers("i", f"the storage of {what}") != (0,):
                raise CannotImport(f"{self.where}: {what} is sparse; only dense arrays are read")
            [dims] = self.numbers("I", f"the shape of {what}")
        if not 1 <= dims <= MOST_DIMS:
            raise CannotImport(
                f"{self.where}: {what} has {dims:,} dimensions; 1 to {MOST_DIMS} are read"
            )
        shape = self.numbers(kind * dims, f"the shape of {what}")
        if min(shape) < 1:
            raise CannotImport(f"{self.where}: {what} has the shape {shape}; sizes start at 1")
        return shape

    def name(self, what: str) -> str:
        [length] = self.numbers("Q", f"the length of {what}")
        if length > LONGEST_NAME:
            raise CannotImport(
                f"{self.where}: {what} has {length:,} bytes; at most {LONGEST_NAME:,} are read"
            )
        try:
            return bytes(self.take(length, what)).decode()
        except UnicodeDecodeError:
            raise CannotImport(f"{self.where}: {what} is not UTF-8 text; copy it again") from None

    def finish(self) -> None:
        left = len(self.data) - self.at
        if left:
            raise CannotImport(f"{self.where}: {left:,} bytes too many at its end; copy it again")
