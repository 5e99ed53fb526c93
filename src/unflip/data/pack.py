"""Packs: images that ``unflip data pack`` has written into one file, read by number."""

from __future__ import annotations

import os
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unflip.data.errors import DamagedImage, DataError
from unflip.data.hashes import fingerprint_of, short_hash
from unflip.data.listing import Labels, Names, Numbers, in_chunks
from unflip.data.pack_format import INDEX_SUFFIX, SUFFIX, Header, Records, read_index
from unflip.printable import printable

KIND = "pack"


class Pack:
    """A pack, opened. Its index is memory-mapped; pickled, it is its path, and is opened again."""

    kind = KIND

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        index = read_index(self.path)
        self.header: Header = index.header
        self.checksum = index.checksum
        self.records: Records = index.records
        self.names = Names(index.names.data, index.records["name_end"])
        # Not memory-mapped: an error of the disk would end the process without a message.
        self._file = self.path.open("rb", buffering=0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.path, self.checksum)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.header.classes

    @property
    def keys(self) -> tuple[str, ...]:
        return self.header.keys

    @cached_property
    def train(self) -> PackPart:
        return PackPart(self, 0, self.header.train)

    @cached_property
    def test(self) -> PackPart:
        return PackPart(self, self.header.train, self.header.images)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        return fingerprint_of(self.train.digest(), self.test.digest(), self.keys)

    def read(self, number: int) -> bytes:
        """Image ``number`` of all, training images first."""
        record = self.records[number]
        length = int(record["length"])
        try:
            data = os.pread(self._file.fileno(), length, int(record["offset"]))
        except OSError as error:
            raise DataError(f"{self._named(number)} cannot be read: {error}.") from error
        found = zlib.crc32(data)
        if len(data) != length or found != int(record["crc"]):
            raise DamagedImage(
                f"{self._named(number)} is damaged: {len(data):,} bytes with CRC {found:08x} instead of {length:,} "
                f"with {int(record['crc']):08x}. Copy the pack again, or pack again."
            )
        return data

    def _named(self, number: int) -> str:
        return f"{printable(self.names[number])} in {self.path} (image {number})"


class PackPart:
    """The training or the test images of a pack."""

    def __init__(self, pack: Pack, begin: int, end: int) -> None:
        self.pack, self.begin, self.end = pack, begin, end

    @cached_property
    def labels(self) -> Labels:
        return self.records["label"].astype(np.int64)

    @property
    def records(self) -> Records:
        return self.pack.records[self.begin : self.end]

    def lengths(self) -> Numbers:
        return self.records["length"].astype(np.int64)

    def __len__(self) -> int:
        return self.end - self.begin

    def read(self, index: int) -> bytes:
        return self.pack.read(self._number(index))

    def name(self, index: int) -> str:
        return printable(self.pack.names[self._number(index)])

    def sizes(self) -> npt.NDArray[np.int64]:
        """Width and height of each image."""
        columns = (self.records["width"], self.records["height"])
        return np.stack(columns, axis=1).astype(np.int64)

    def marks(self) -> npt.NDArray[np.uint64]:
        """The CRC of each image: another one has another CRC."""
        return self.records["crc"].astype(np.uint64)

    def reading_chunks(self) -> list[Numbers]:
        return in_chunks(np.argsort(self.records["offset"], kind="stable").astype(np.int64))

    def digest(self) -> str:
        """Number and hash of the encoded images, by their CRCs."""
        hashed = short_hash(self.labels, self.records["length"], self.records["crc"])
        return f"{len(self):,} ({hashed})"

    def _number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        return self.begin + index


def is_pack(path: Path) -> bool:
    """By its name. An index is mistaken for its pack easily."""
    if path.name.endswith(SUFFIX + INDEX_SUFFIX):
        raise DataError(
            f"{path} is the index of a pack. Give the pack itself: {str(path).removesuffix(INDEX_SUFFIX)}"
        )
    if not path.name.endswith(SUFFIX) or path.is_dir():
        return False
    if not path.exists():
        raise DataError(f"{path} does not exist. Make it with: unflip data pack SRC {path}")
    return True


def _reopened(path: Path, checksum: str) -> Pack:
    pack = Pack(path)
    if pack.checksum != checksum:
        raise DataError(f"{path} has changed since it was opened. Run the command again.")
    return pack
