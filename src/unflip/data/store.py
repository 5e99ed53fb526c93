"""Encoded images with labels, readable by number: what training asks of a large image set on disk.

`open_store` recognizes a pack (made by ``unflip data pack``) and the layouts that image sets are published in. Parquet
files are only packed or shown: a Parquet file is read in blocks of many images, so images in random order would take
hundreds of times longer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from unflip.data import class_folders, parquet, tars
from unflip.data.errors import DataError
from unflip.data.listing import ListedStore, entries
from unflip.data.pack import Pack, is_pack

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
    store = open_any(path)
    if store.kind == parquet.KIND:
        raise DataError(
            f"{path} holds Parquet files, from which single images cannot be read quickly. "
            f"Pack them first: unflip data pack {path} NAME.pack"
        )
    return store


def open_any(path: Path) -> Pack | ListedStore:
    """The images at ``path``, also where they can only be packed or shown."""
    path = Path(path).expanduser()
    return Pack(path) if is_pack(path) else _open_layout(path)


def _open_layout(path: Path) -> ListedStore:
    if not path.is_dir():
        problem = "is a file, but not a pack" if path.exists() else "does not exist"
        raise DataError(f"{path} {problem}. Give a pack (NAME.pack), or a folder with {LAYOUTS}.")
    if train := class_folders.find_train(path):
        return class_folders.open_class_folders(path, train)
    if tars_found := tars.find_tars(path):
        return tars.open_tars(path, tars_found)
    if parquet_found := parquet.find_parquet(path):
        return parquet.open_parquet(path, parquet_found)
    raise DataError(f"{path} holds {entries(path)}. It should hold {LAYOUTS}.")
