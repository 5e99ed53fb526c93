"""Encoded images with labels, readable by number: what training asks of a large image set on disk.

`open_store` recognises a pack (made by ``unflip data pack``) and the layouts that image sets are published in. Parquet
files are only packed or shown: a Parquet file is read in blocks of many images, so images in random order would take
hundreds of times longer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from unflip.data.class_folders import find_train, open_class_folders
from unflip.data.errors import DataError
from unflip.data.listing import ListedStore, entries

LAYOUTS = (
    "class folders (train/CLASS/*.jpg and val/CLASS/*.jpg), WebDataset tars (*train*.tar and *val*.tar) "
    "or Parquet files (train-*.parquet and validation-*.parquet)"
)


class Part(Protocol):
    """The training or the test images, numbered from 0. Cheap to pickle: files are opened after that."""

    @property
    def labels(self) -> npt.NDArray[np.int64]: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """The encoded image. DataError names it if it cannot be read, or if its CRC is wrong."""

    def name(self, index: int) -> str:
        """The path that the image came from, for messages."""


class ImageStore(Protocol):
    """Encoded images with labels. ``classes`` are readable names; ``keys`` are WNIDs or names of folders."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def keys(self) -> tuple[str, ...]: ...

    @property
    def train(self) -> Part: ...

    @property
    def test(self) -> Part: ...

    @property
    def fingerprint(self) -> dict[str, str]:
        """As `Dataset.fingerprint`."""


def open_store(path: Path) -> ImageStore:
    """The images at ``path``, for training: a pack, or a folder of class folders or tars."""
    return open_layout(Path(path).expanduser())


def open_layout(path: Path) -> ListedStore:
    """A folder in one of the layouts that can be packed."""
    if not path.exists():
        raise DataError(
            f"{path} does not exist. Give a pack (NAME.pack), or a folder with {LAYOUTS}."
        )
    if not path.is_dir():
        raise DataError(
            f"{path} is a file, but not a pack. Give a pack (NAME.pack), or a folder with {LAYOUTS}."
        )
    train = find_train(path)
    if train is not None:
        return open_class_folders(path, train)
    raise DataError(f"{path} holds {entries(path)}. It should hold {LAYOUTS}.")
