"""The ``.unflip`` file: a safetensors file with the graph and a SHA-256 of the file in its metadata.

``docs/format.md`` describes the format. This module needs numpy, not torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from unflip.disk import open_new

VERSION = "1"
NO_HASH = b"0" * 64
DTYPES = {"<f4": "F32", "|u1": "U8"}
ONE_OUTPUT = "output"  # the name of the output if a model returns a single tensor
MOST_HEADER = 100_000_000  # safetensors' own limit
# What the user can do. native/src/safetensors.cpp has the same messages for the same files.
MAKE = "; make a packed network with 'unflip pack'"
AGAIN = "; copy it again, or pack the network again with 'unflip pack'"

Array = np.ndarray[Any, np.dtype[Any]]


class PackedFileError(ValueError):
    """A file that is not a packed network, or is damaged. The message says what is wrong."""


class Packed(NamedTuple):
    """A packed network: the graph (see docs/format.md) and its tensors by name."""

    graph: dict[str, Any]
    tensors: dict[str, Array]


class Output(NamedTuple):
    """A value of the graph that is returned."""

    name: str
    value: int
    pixels: bool = False  # an image of one pixel, not a vector


def outputs_of(graph: dict[str, Any]) -> list[Output]:
    """The outputs of a network, in order. Invalid outputs are refused, as in the native loader."""
    if ("output" in graph) == ("outputs" in graph):
        raise PackedFileError("its graph must have either 'output' or 'outputs'")
    try:
        one = {
            "name": ONE_OUTPUT,
            "value": graph.get("output"),
            "pixels": graph.get("pixels", False),
        }
        parts = graph.get("outputs", [one])
        found = [Output(part["name"], part["value"], part.get("pixels", False)) for part in parts]
    except (TypeError, KeyError, AttributeError):
        raise PackedFileError("its outputs must be a list of names and values") from None
    if not found or len({output.name for output in found}) != len(found):
        raise PackedFileError("its outputs must be one or more, with different names")
    most = len(graph["ops"])
    for name, value, _ in found:
        if not isinstance(value, int) or not 0 <= value <= most:
            raise PackedFileError(f"its output {name!r} must be a value 0 .. {most}, not {value!r}")
    return found


def write(path: str | os.PathLike[str], packed: Packed) -> int:
    """Write the file atomically and return its size in bytes."""
    data = to_bytes(packed)
    write_whole(Path(path), data)
    return len(data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically. If that fails or is interrupted, nothing is left behind."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written: there is no folder {path.parent}; create it"
        )
    beside = path.with_name(path.name + ".part")
    try:
        with open_new(beside) as file:
            file.write(data)
        beside.replace(path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a full disk has none
        raise


def to_bytes(packed: Packed) -> bytes:
    """The file's content.

    The header is not written by safetensors, because its order of keys changes from run to run. The same
    network always gives the same bytes.
    """
    graph = json.dumps(packed.graph, separators=(",", ":"), allow_nan=False)
    metadata = {"format": "unflip", "version": VERSION, "sha256": NO_HASH.decode(), "graph": graph}
    header: dict[str, Any] = {"__metadata__": metadata}
    parts, at = [], 0
    # Floats come first, so that they are aligned.
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
    """Read a file and verify its checksum."""
    data = Path(path).read_bytes()
    try:
        return from_bytes(data)
    except PackedFileError as error:
        raise PackedFileError(f"{path}: {error}") from None


def sha256(path: str | os.PathLike[str]) -> str:
    """The checksum stored in a file; :func:`read` verifies it."""
    return _metadata(Path(path).read_bytes())["sha256"]


def from_bytes(data: bytes) -> Packed:
    """The inverse of :func:`to_bytes`. The native loader checks more: shapes, fields, values."""
    metadata = _metadata(data)
    found = metadata.get("sha256", "")
    blank = _with_hash(data, NO_HASH, found.encode())
    if hashlib.sha256(blank).hexdigest() != found:
        raise PackedFileError(f"its SHA-256 is wrong: the file was changed{AGAIN}")
    return Packed(json.loads(metadata["graph"]), load_tensors(data))


def _metadata(data: bytes) -> dict[str, str]:
    header, rest = _header(data)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") != "unflip":
        raise PackedFileError(f"a safetensors file, but not a packed network{MAKE}")
    if metadata.get("version") != VERSION:
        raise PackedFileError(
            f"its format version is {metadata.get('version')!r}, but this unflip reads version {VERSION!r}; "
            "install an unflip that reads it, or pack the network again"
        )
    try:
        end = max((v["data_offsets"][1] for v in header.values() if v is not metadata), default=0)
        missing = end - rest
        if missing == 0:
            load_tensors(data)
    except (ValueError, KeyError, IndexError, TypeError, SafetensorError) as error:
        raise PackedFileError(f"its table of tensors is damaged: {error}{AGAIN}") from None
    if missing > 0:
        raise PackedFileError(f"the file is cut off by {_bytes(missing)}{AGAIN}")
    if missing < 0:
        raise PackedFileError(f"the file has {_bytes(-missing)} too many at its end{AGAIN}")
    return metadata


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """A safetensors file's header, and the number of bytes after it."""
    if not data:
        raise PackedFileError(f"the file is empty{AGAIN}")
    length, there = int.from_bytes(data[:8], "little"), len(data) - 8
    if there < length <= MOST_HEADER and data[8:9] == b"{":
        raise PackedFileError(f"the file is cut off within its header{AGAIN}")
    if length > there or length < 2 or data[8:9] != b"{":
        raise PackedFileError(f"not a packed network{_instead(data)}{MAKE}")
    try:
        header: dict[str, Any] = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise PackedFileError(
            f"not a packed network, or a damaged one: its header is bad JSON: {error}{AGAIN}"
        ) from None
    return header, there - length


def _instead(data: bytes) -> str:
    """The kind of file, if it is one that is likely to be given by mistake."""
    if data[:2] == b"PK":
        return " but a zip file (torch.save writes one)"
    if data[:1] == b"\x80" and data[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return " but a pickle"
    return " (no safetensors header)"


def _bytes(count: int) -> str:
    return f"{count} byte{'' if count == 1 else 's'}"


def _with_hash(data: bytes, new: bytes, old: bytes) -> bytes:
    """Replace the digits ``old``, which occur once in the header, by ``new``."""
    quoted = b'"sha256":"' + old + b'"'
    end = 8 + int.from_bytes(data[:8], "little")
    if len(old) != 64 or data[:end].count(quoted) != 1:
        raise PackedFileError("its SHA-256 is missing")
    return data[:end].replace(quoted, b'"sha256":"' + new + b'"') + data[end:]
