"""What the layouts on disk share: compact lists of names, the order of images, and a store of two parts.

Images are numbered by label, then by file name without suffix. So class folders, tars and Parquet files of the same
images give the same numbers, and training from any of them sees the same batches.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from unflip.data.errors import DataError
from unflip.data.hashes import fingerprint_of, short_hash
from unflip.data.texts import UNPRINTABLE
from unflip.printable import printable

Labels = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int64]

CHUNK = 16  # images; as many are lost for each worker process when packing is killed
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
TEST_FOLDERS = ("test", "val", "validation", "valid")  # the first one that exists is used


class Names(Sequence[str]):
    """Many short texts in one block of bytes: a tenth of the memory of a list, and quick to send to a process."""

    def __init__(self, block: bytes | memoryview, ends: npt.NDArray[Any]) -> None:
        self.block, self.ends = block, ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> Names:
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        return cls(b"".join(encoded), ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"name {index} of {len(self)}")
        begin = int(self.ends[index - 1]) if index else 0
        return bytes(self.block[begin : int(self.ends[index])]).decode("utf-8", "surrogateescape")


class ListedPart(ABC):
    """The training or the test images of a layout. ``read`` opens files when it is called: a part can be pickled."""

    ignored: Sequence[str] = ()  # files beside the images that are not read

    def __init__(self, labels: Labels, names: Names) -> None:
        self.labels, self.names = labels, names

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> bytes:
        """The encoded image."""

    @abstractmethod
    def name(self, index: int) -> str:
        """The path of the image, for messages. In a tar or Parquet file: path of the file/name inside it."""

    @abstractmethod
    def lengths(self) -> Numbers | None:
        """Of each image in bytes; None if all images would have to be read for it."""

    def marks(self) -> npt.NDArray[np.uint64]:
        """A number per image that differs if its bytes do, as far as one can tell without reading them: its length."""
        lengths = self.lengths()
        if lengths is None:
            raise NotImplementedError
        return lengths.astype(np.uint64)

    def reading_chunks(self) -> list[Numbers]:
        """The numbers of the images in the order in which they are on the disk, in pieces to be read at once."""
        return in_chunks(np.arange(len(self), dtype=np.int64))

    def digest(self) -> str:
        """Number and hash. The contents are not read, which would take hours: names and lengths must do."""
        stems = "\0".join(stem(name) for name in self.names).encode("utf-8", "surrogateescape")
        lengths = self.lengths()
        if lengths is None:
            return f"{len(self):,} by name ({short_hash(self.labels, stems)})"
        return f"{len(self):,} by name and length ({short_hash(self.labels, lengths, stems)})"


@dataclass(frozen=True)
class ListedStore:
    """Images of one of the layouts, read in place."""

    kind: str
    path: Path
    classes: tuple[str, ...]
    keys: tuple[str, ...]
    train: ListedPart
    test: ListedPart

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise DataError(
                f"{self.path} has only one class, {self.classes[0]!r}. A classifier needs two or more."
            )
        for text in (*self.keys, *self.classes):
            if UNPRINTABLE.search(text):
                raise DataError(
                    f"{self.path} has a class called {printable(text)}, with control characters or bytes that are "
                    "not UTF-8. Rename it."
                )
        if len(set(self.keys)) < len(self.keys):
            twice = next(key for key in self.keys if self.keys.count(key) > 1)
            raise DataError(f"{self.path} has two classes with the key {twice}. Rename one.")

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        return fingerprint_of(self.train.digest(), self.test.digest(), self.keys)


def images_and_others(folder: Path) -> tuple[list[str], list[str]]:
    """The names of the images, and the paths of what is ignored: other files, and folders. Hidden ones are neither:
    macOS leaves a ._name.jpg, which is not an image, beside name.jpg."""
    with os.scandir(folder) as found:
        entries = [entry for entry in found if not entry.name.startswith(".")]
    images = [entry.name for entry in entries if is_image(entry.name) and not entry.is_dir()]
    there = set(images)
    return images, [
        entry.path + "/" * entry.is_dir() for entry in entries if entry.name not in there
    ]


def stem(name: str) -> str:
    """What orders images within a class: the file name without folder and suffix."""
    return name.rpartition("/")[2].partition(".")[0]


def in_order(labels: Labels, names: Sequence[str], keys: Sequence[str]) -> Numbers:
    """The order of the images: by label, then by stem, then by name.

    Hugging Face appends the class's key to ImageNet's names (n01440764_18_n01440764.JPEG), which is left out.
    """
    ranks = [
        (label, stem(name).removesuffix(f"_{keys[label]}"), name)
        for name, label in zip(names, labels.tolist(), strict=True)
    ]
    return np.array(sorted(range(len(ranks)), key=ranks.__getitem__), dtype=np.int64)


def in_chunks(numbers: Numbers, size: int = CHUNK) -> list[Numbers]:
    return [numbers[begin : begin + size] for begin in range(0, len(numbers), size)]


def is_image(name: str) -> bool:
    """By its suffix. Hidden files belong to tools: macOS leaves ._name.jpg, which is not an image, beside name.jpg."""
    file = name.rpartition("/")[2]
    return file.lower().endswith(SUFFIXES) and not file.startswith(".")


def entries(folder: Path, most: int = 8) -> str:
    """What a folder holds, for a message."""
    names = sorted(path.name + "/" * path.is_dir() for path in _first(folder.iterdir(), 1000))
    shown = ", ".join(names[:most])
    return f"{shown}, …" if len(names) > most else shown or "nothing"


def _first(paths: Iterator[Path], most: int) -> Iterator[Path]:
    return (path for path, _ in zip(paths, range(most), strict=False))
