"""A pack while it is written, in files that survive a kill at any moment.

NAME.pack.part has the images so far. NAME.pack.journal.part says what they are: a line of JSON with the job, then one
entry per image, written after the image. What is longer than the journal says is cut off when packing resumes. Both
files get their final names when all is written: the index first, so that NAME.pack exists only if it is complete.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from unflip.data.errors import DataError
from unflip.data.pack_format import (
    HASH,
    PACK_MAGIC,
    Header,
    Records,
    index_bytes,
    index_path,
)
from unflip.disk import open_new, sync_folder, try_lock

ENTRY = np.dtype(
    [
        ("length", "<u4"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("crc", "<u4"),
        ("mark", "<u8"),  # of the image in the source, by which a change is noticed
    ]
)
SKIPPED = 0x534B4950
SYNC_EVERY = 4096  # entries between two calls of fsync

Job = dict[str, Any]
Marks = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Encoded:
    """An image as it is packed; without ``data`` it was damaged and is skipped, for the reason ``problem``."""

    data: bytes
    width: int
    height: int
    problem: str = ""

    def entry(self, mark: int) -> tuple[int, int, int, int, int]:
        return len(self.data), self.width, self.height, _check_value(self.data), mark


class PartialPack:
    """For a with block. ``entries`` has what is packed so far, in the order of reading; ``marks`` has all images."""

    def __init__(self, out: Path, job: Job, marks: Marks) -> None:
        self.out, self.job, self.marks = out, job, marks
        self.data_path = out.with_name(out.name + ".part")
        self.journal_path = out.with_name(out.name + ".journal.part")
        self.entries: list[Records] = []
        self.done = self.unsynced = 0

    def __enter__(self) -> PartialPack:
        with ExitStack() as stack:
            self.journal = stack.enter_context(_open(self.journal_path))
            self._lock()
            self.data = stack.enter_context(_open(self.data_path))
            self._add(self._resume())
            self.files = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self.files.close()

    def append(self, images: Iterable[Encoded]) -> None:
        images = list(images)
        marks = self.marks[self.done : self.done + len(images)].tolist()
        entries = np.array([i.entry(m) for i, m in zip(images, marks, strict=True)], dtype=ENTRY)
        self._write(self.data, self.data_path, b"".join(image.data for image in images))
        self._write(self.journal, self.journal_path, entries.tobytes())
        self._add(entries)
        self.unsynced += len(images)
        if self.unsynced >= SYNC_EVERY:
            self._sync()

    def finish(self, header: Header, records: Records, names: bytes) -> None:
        """Write the index, and give both files their final names."""
        self._write(self.data, self.data_path, bytes.fromhex(header.pack_hash))
        self._sync()
        index = index_path(self.out)
        part = index.with_name(index.name + ".part")
        try:
            with open_new(part) as file:
                for piece in index_bytes(header, records, names):
                    _write_all(file, piece)
                os.fsync(file.fileno())
        except OSError as error:
            raise self._failed(part, error) from error
        os.replace(part, index)
        os.replace(self.data_path, self.out)
        self.journal_path.unlink()
        sync_folder(self.out.parent)

    def length(self) -> int:
        """Of NAME.pack when it is finished."""
        return len(PACK_MAGIC) + sum(_bytes_of(entries) for entries in self.entries) + HASH

    def all_entries(self) -> Records:
        return np.concatenate(self.entries)

    def changed(self) -> npt.NDArray[np.bool_]:
        """For each image so far, whether it is another one in the source now."""
        return self.all_entries()["mark"] != self.marks[: self.done]

    def keep(self, count: int) -> None:
        """Forget all images after the first ``count``."""
        entries = self.all_entries()[:count]
        self.entries, self.done = [], 0
        self._add(entries)
        self._cut(entries)

    def _add(self, entries: Records) -> None:
        self.entries.append(entries)
        self.done += len(entries)

    def _lock(self) -> None:
        """Until the journal is closed. Some network file systems have no locks; there the user must take care."""
        try:
            locked = try_lock(self.journal)
        except OSError:
            return
        if not locked:
            raise self._busy()
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self.journal.fileno()), os.stat(self.journal_path)):
                return
        raise self._busy()  # it has finished, and deleted the journal, in this moment

    def _busy(self) -> DataError:
        return DataError(f"{self.out} is being packed by another process. Wait for it, or stop it.")

    def _resume(self) -> Records:
        """The entries whose images are there. Both files are cut off after them."""
        begun, newline, rest = self.journal.read().partition(b"\n")
        if newline:
            self._check_job(begun)
        whole = len(rest) // ENTRY.itemsize * ENTRY.itemsize
        entries = np.frombuffer(rest[:whole], dtype=ENTRY)
        entries = entries[: self._there(entries)]
        if not newline:  # new, or killed while the first line was written
            self.journal.truncate(0)
            self.journal.seek(0)
            self._write(self.journal, self.journal_path, self._line())
        if not len(entries):
            self.data.truncate(0)
            self.data.seek(0)
            self._write(self.data, self.data_path, PACK_MAGIC)
        self._cut(entries)
        return entries

    def _cut(self, entries: Records) -> None:
        """End both files after these entries."""
        for file, length in (
            (self.journal, len(self._line()) + entries.nbytes),
            (self.data, len(PACK_MAGIC) + _bytes_of(entries)),
        ):
            file.truncate(length)
            file.seek(length)

    def _line(self) -> bytes:
        return json.dumps(self.job, sort_keys=True).encode() + b"\n"

    def _check_job(self, begun: bytes) -> None:
        try:
            before = json.loads(begun)
        except (ValueError, RecursionError):
            before = None
        if before == self.job:
            return
        names = self.job if isinstance(before, dict) else ()
        changed = [
            f"{name} was {before.get(name)!r} and is {self.job[name]!r}"
            for name in names
            if before.get(name) != self.job[name]
        ]
        raise DataError(
            f"{self.data_path} was begun with another source or other options ({'; '.join(changed) or 'unreadable'}). "
            f"Give the same ones to resume, or begin again: delete {self.data_path.name} and {self.journal_path.name}."
        )

    def _there(self, entries: Records) -> int:
        """How many of the entries are in the data file whole.

        After a power failure the newest images can be zeros. All before the last fsync are safe; a few more are read.
        """
        ends = len(PACK_MAGIC) + np.cumsum(entries["length"], dtype=np.int64)
        if os.pread(self.data.fileno(), len(PACK_MAGIC), 0) != PACK_MAGIC:
            return 0
        count = int(np.searchsorted(ends, os.fstat(self.data.fileno()).st_size, side="right"))
        for number in range(max(0, count - 2 * SYNC_EVERY), count):
            length = int(entries["length"][number])
            data = os.pread(self.data.fileno(), length, int(ends[number]) - length)
            if _check_value(data) != int(entries["crc"][number]):
                return number
        return count

    def _write(self, file: IO[bytes], path: Path, data: bytes) -> None:
        try:
            _write_all(file, data)
        except OSError as error:
            raise self._failed(path, error) from error

    def _failed(self, path: Path, error: OSError) -> DataError:
        return DataError(
            f"{path} cannot be written: {error.strerror}. {self.done:,} images are packed and kept. Make room on the "
            "disk; the same command resumes."
        )

    def _sync(self) -> None:
        for file, path in ((self.data, self.data_path), (self.journal, self.journal_path)):
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise self._failed(path, error) from error
        self.unsynced = 0


def _check_value(data: bytes) -> int:
    """The CRC; for a skipped image a mark, since zeros are what a power failure leaves."""
    return zlib.crc32(data) if data else SKIPPED


def _open(path: Path) -> IO[bytes]:
    """For reading and writing; made if it does not exist."""
    try:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag
        return os.fdopen(os.open(path, flags, 0o644), "r+b", buffering=0)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}. Choose another OUT."
        ) from error


def _bytes_of(entries: Records) -> int:
    return int(entries["length"].sum(dtype=np.int64))


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """A write to a disk that is nearly full may write less than asked, without an error."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
