"""The two files of a pack, as docs/data.md describes them: writing and checking their bytes.

NAME.pack holds the encoded images one after another, NAME.pack.index the rest. All numbers are little-endian. Nothing
in an index is used before it is checked: a damaged or hostile file gives a DataError, whatever it claims.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unflip.data.errors import DataError
from unflip.data.texts import UNPRINTABLE

SUFFIX = ".pack"
INDEX_SUFFIX = ".index"
PACK_MAGIC = b"UNFLIPPK"
INDEX_MAGIC = b"UNFLIPIX"
VERSION = 1
PREAMBLE = 16  # magic, version, length of the header
HASH = 16  # bytes at the end of both files
MOST_HEADER = 64 << 20  # bytes; ImageNet's is 40 KB

RECORD = np.dtype(
    [
        ("offset", "<u8"),  # of the image in NAME.pack
        (
            "name_end",
            "<u8",
        ),  # of its name in the block of names; it begins where the previous one ends
        ("length", "<u4"),
        ("label", "<u4"),
        ("width", "<u4"),  # upright, as decoded
        ("height", "<u4"),
        ("crc", "<u4"),  # CRC-32 of the encoded image
    ]
)

Records = npt.NDArray[Any]


@dataclass(frozen=True)
class Header:
    """The JSON object at the beginning of an index."""

    images: int
    train: int  # the first ones; the others are test images
    names: int  # bytes of the block of names
    classes: tuple[str, ...]
    keys: tuple[str, ...]
    pack_length: int
    pack_hash: str
    layout: str
    size: int | None  # short side in pixels, if the images were resized
    quality: int | None  # of the JPEG encoder, if the images were resized
    encoder: str | None
    job: str  # hash of options, names, labels and lengths of the source's images
    skipped: int  # damaged images that were left out
    skipped_names: tuple[str, ...]  # the first of them


@dataclass(frozen=True)
class Index:
    header: Header
    records: Records
    names: npt.NDArray[np.uint8]
    checksum: str


def index_path(pack: Path) -> Path:
    return pack.with_name(pack.name + INDEX_SUFFIX)


def content_hash(records: Records) -> bytes:
    """Of the places, lengths and CRCs of all images: ties NAME.pack to its index without reading all of it."""
    hashed = hashlib.blake2b(digest_size=HASH)
    for column in ("offset", "length", "crc"):
        hashed.update(np.ascontiguousarray(records[column]).data)
    return hashed.digest()


def index_bytes(header: Header, records: Records, names: bytes) -> list[bytes | memoryview]:
    """The index file, in pieces."""
    text = json.dumps(asdict(header), ensure_ascii=True, separators=(",", ":")).encode()
    text += b" " * (-(PREAMBLE + len(text)) % 8)
    preamble = INDEX_MAGIC + np.array([VERSION, len(text)], "<u4").tobytes()
    pieces: list[bytes | memoryview] = [preamble, text, memoryview(records.tobytes()), names]
    hashed = hashlib.blake2b(digest_size=HASH)
    for piece in pieces:
        hashed.update(piece)
    return [*pieces, hashed.digest()]


def read_index(pack: Path) -> Index:
    """The index of ``pack``, memory-mapped and checked against itself and against the pack's length and hash."""
    path = index_path(pack)
    try:
        whole = np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist, and {pack} cannot be read without it. Copy both files, or pack again: "
            f"unflip data pack SRC {pack}"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise _bad(path, f"it cannot be read ({error})") from error
    header, begin = _header(path, whole)
    _check_total(path, header, begin, len(whole))
    checksum = bytes(whole[-HASH:])
    if hashlib.blake2b(whole[:-HASH].data, digest_size=HASH).digest() != checksum:
        raise _bad(path, "its checksum is wrong")
    middle = begin + header.images * RECORD.itemsize
    records = whole[begin:middle].view(RECORD)
    names = whole[middle : middle + header.names]
    _check_records(path, header, records)
    _check_pack(path, pack, header)
    return Index(header, records, names, checksum.hex())


def _bad(path: Path, problem: str) -> DataError:
    return DataError(
        f"{path} is not an index that 'unflip data pack' wrote: {problem}. Copy it again, or pack again."
    )


def _header(path: Path, whole: npt.NDArray[np.uint8]) -> tuple[Header, int]:
    """The header, and where the records begin."""
    start = bytes(whole[:PREAMBLE])
    if len(start) < PREAMBLE or start[:8] != INDEX_MAGIC:
        raise _bad(path, f"it begins with {start[:8]!r}, not {INDEX_MAGIC!r}")
    version, length = np.frombuffer(start[8:], "<u4").tolist()
    if version != VERSION:
        raise DataError(
            f"{path} has format version {version}; this unflip reads version {VERSION}. Pack again with this unflip."
        )
    if length > min(MOST_HEADER, len(whole) - PREAMBLE) or (PREAMBLE + length) % 8:
        raise _bad(path, f"its header of {length:,} bytes does not fit into it")
    try:
        values = json.loads(bytes(whole[PREAMBLE : PREAMBLE + length]))
        return _typed(values), PREAMBLE + length
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"its header is wrong ({error})") from error


def _typed(values: Any) -> Header:
    """The header with every field checked; ValueError says which one is wrong."""
    names = [field.name for field in fields(Header)]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise ValueError(f"it should have the fields {', '.join(names)}")
    for name in ("images", "train", "names", "pack_length", "skipped"):
        if type(values[name]) is not int or not 0 <= values[name] < 1 << 62:
            raise ValueError(f"{name} should be a number of 0 or more")
    for name in ("size", "quality"):
        if values[name] is not None and (type(values[name]) is not int or values[name] < 1):
            raise ValueError(f"{name} should be null or a positive number")
    for name in ("pack_hash", "layout", "job"):
        if not isinstance(values[name], str):
            raise ValueError(f"{name} should be a text")
    if not isinstance(values["encoder"], str | None):
        raise ValueError("encoder should be null or a text")
    for name in ("classes", "keys", "skipped_names"):
        if not isinstance(values[name], list) or not all(isinstance(v, str) for v in values[name]):
            raise ValueError(f"{name} should be a list of texts")
        values[name] = tuple(values[name])
    for name in ("pack_hash", "layout", "job", "encoder", "classes", "keys", "skipped_names"):
        texts = [values[name]] if isinstance(values[name], str) else values[name] or ()
        if any(UNPRINTABLE.search(text) for text in texts):
            raise ValueError(f"{name} should have no control characters and no surrogates")
    if len(set(values["keys"])) < len(values["keys"]):
        raise ValueError("keys should differ from each other")
    if len(values["classes"]) != len(values["keys"]) or len(values["keys"]) < 2:
        raise ValueError("classes and keys should be two lists of the same length, of 2 or more")
    if not 0 < values["train"] < values["images"]:
        raise ValueError("train should be from 1 to images - 1")
    return Header(**values)


def _check_total(path: Path, header: Header, begin: int, length: int) -> None:
    expected = begin + header.images * RECORD.itemsize + header.names + HASH
    if length != expected:
        raise _bad(path, f"it has {length:,} bytes where its header says {expected:,}")


def _check_records(path: Path, header: Header, records: Records) -> None:
    ends = records["name_end"]
    if int(ends[-1]) != header.names or (ends[1:] < ends[:-1]).any():
        raise _bad(path, "the positions of its names are wrong")
    if int(records["label"].max()) >= len(header.keys):
        wrong = int(np.argmax(records["label"]))
        raise _bad(path, f"image {wrong} has label {records['label'][wrong]} of {len(header.keys)}")
    room = header.pack_length - HASH  # where the images end
    offsets, lengths = records["offset"], records["length"].astype(np.uint64)
    inside = (offsets >= len(PACK_MAGIC)) & (lengths > 0)
    # Without a sum, which could overflow.
    inside &= (offsets <= max(room, 0)) & (
        lengths <= max(room, 0) - np.minimum(offsets, max(room, 0))
    )
    if not inside.all():
        raise _bad(path, f"image {int(np.argmin(inside))} lies outside the pack")
    if not (records["width"].all() and records["height"].all()):
        raise _bad(path, "an image has no pixels")


def _check_pack(path: Path, pack: Path, header: Header) -> None:
    try:
        with pack.open("rb", buffering=0) as file:
            length = os.fstat(file.fileno()).st_size
            magic = file.read(len(PACK_MAGIC))
            file.seek(max(0, length - HASH))
            tail = file.read(HASH).hex()
    except OSError as error:
        raise DataError(f"{pack} cannot be read: {error}. Copy it again, or pack again.") from error
    if magic != PACK_MAGIC:
        raise DataError(
            f"{pack} is not a pack: it begins with {magic!r}, not {PACK_MAGIC!r}. Give a file that 'unflip data pack' "
            "wrote."
        )
    if length != header.pack_length or tail != header.pack_hash:
        raise DataError(
            f"{pack} does not belong to {path}: it has {length:,} bytes and ends with {tail}, where the index says "
            f"{header.pack_length:,} bytes and {header.pack_hash}. Copy both files again, or pack again."
        )
