"""The ``.unflip`` file: a safetensors file with the graph in its metadata and a SHA-256 over all of it.

The format is described in ``docs/format.md``. numpy alone is needed here, not torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

VERSION = "1"
NO_HASH = b"0" * 64
DTYPES = {"<f4": "F32", "|u1": "U8"}

Array = np.ndarray[Any, np.dtype[Any]]


class PackedFileError(ValueError):
    """A file that is no packed network, or a broken one; the message says what is wrong with it."""


class Packed(NamedTuple):
    """A packed network: the graph (see docs/format.md) and the tensors it names."""

    graph: dict[str, Any]
    tensors: dict[str, Array]


def write(path: str | os.PathLike[str], packed: Packed) -> int:
    """Write the file, whole or not at all; returns its size in bytes."""
    data = to_bytes(packed)
    beside = Path(path).with_name(Path(path).name + ".part")
    beside.write_bytes(data)
    beside.replace(path)
    return len(data)


def to_bytes(packed: Packed) -> bytes:
    """The file's content.

    The header is written here and not by safetensors, whose order of keys changes from run to run: one
    network should be one file, byte for byte.
    """
    graph = json.dumps(packed.graph, separators=(",", ":"), allow_nan=False)
    metadata = {"format": "unflip", "version": VERSION, "sha256": NO_HASH.decode(), "graph": graph}
    header: dict[str, Any] = {"__metadata__": metadata}
    parts, at = [], 0
    # Floats first, so that bytes of bits leave none of them unaligned.
    for name, tensor in sorted(
        packed.tensors.items(), key=lambda item: (-item[1].itemsize, item[0])
    ):
        part = np.ascontiguousarray(tensor).tobytes()
        kind = DTYPES[tensor.dtype.str]
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [at, at + len(part)]}
        parts.append(part)
        at += len(part)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join([len(text).to_bytes(8, "little"), text, *parts])
    return _with_hash(data, hashlib.sha256(data).hexdigest().encode(), NO_HASH)


def read(path: str | os.PathLike[str]) -> Packed:
    """Read and verify a file."""
    data = Path(path).read_bytes()
    try:
        return from_bytes(data)
    except PackedFileError as error:
        raise PackedFileError(f"{path}: {error}") from None


def sha256(path: str | os.PathLike[str]) -> str:
    """The checksum a file carries; :func:`read` verifies it."""
    return _metadata(Path(path).read_bytes())["sha256"]


def from_bytes(data: bytes) -> Packed:
    """The inverse of :func:`to_bytes`. The native loader checks far more: shapes, fields, values."""
    metadata = _metadata(data)
    found = metadata.get("sha256", "")
    blank = _with_hash(data, NO_HASH, found.encode())
    if hashlib.sha256(blank).hexdigest() != found:
        raise PackedFileError("its SHA-256 is wrong: the file was changed or cut off")
    return Packed(json.loads(metadata["graph"]), load_tensors(data))


def _metadata(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise PackedFileError("not a packed network (no safetensors header), or cut off")
    try:
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        load_tensors(data)
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise PackedFileError(f"not a packed network: {error}") from None
    if not isinstance(metadata, dict) or metadata.get("format") != "unflip":
        raise PackedFileError(
            "a safetensors file, but not a packed network; make one with unflip pack"
        )
    if metadata.get("version") != VERSION:
        raise PackedFileError(
            f"its format version is {metadata.get('version')!r}; this unflip reads {VERSION!r}"
        )
    return metadata


def _with_hash(data: bytes, new: bytes, old: bytes) -> bytes:
    """Put ``new`` in place of the digits ``old``, which stand once in the header."""
    quoted = b'"sha256":"' + old + b'"'
    end = 8 + int.from_bytes(data[:8], "little")
    if len(old) != 64 or data[:end].count(quoted) != 1:
        raise PackedFileError("its SHA-256 is missing")
    return data[:end].replace(quoted, b'"sha256":"' + new + b'"') + data[end:]
