"""CIFAR-10 as its authors publish it: packed or unpacked, the binary or the Python version.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. Nothing is downloaded,
and nothing is written to disk. The length and MD5 of every batch file are checked, so every result
is of exactly these images. The MD5 of the archive is not checked: an archive that was packed again
from the same files is just as good.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unflip.data.errors import DataError
from unflip.data.image_set import ImageSet, Labels, Pixels

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

Batch = tuple[Pixels, Labels]


@dataclass(frozen=True)
class BatchFile:
    """One published file of 10,000 images, with the length and MD5 that identify it."""

    name: str
    length: int
    md5: str


@dataclass(frozen=True)
class Layout:
    """One of the published versions: its names, and how the bytes of a batch become arrays.

    `decode` takes the bytes and, for messages, where they come from.
    """

    archive: str
    archive_md5: str
    folder: str
    train: tuple[BatchFile, ...]
    test: BatchFile
    decode: Callable[[bytes, str], Batch]

    @property
    def batches(self) -> tuple[BatchFile, ...]:
        return (*self.train, self.test)


def load_cifar10(folder: Path | None = None) -> ImageSet:
    """50,000 training and 10,000 test images of 3×32×32, in the published order.

    `folder` holds an archive or an unpacked folder of batches, or is one of these itself. Without
    it, the environment variable UNFLIP_DATA names the folder, or else it is ~/.cache/unflip/data.
    The binary version is preferred where both are found, since it needs no unpickling.
    """
    layout, place = _find(_default_folder() if folder is None else Path(folder).expanduser())
    batches = _read(layout, place)
    train = [batches[batch.name] for batch in layout.train]
    test_images, test_labels = batches[layout.test.name]
    return ImageSet(
        train_images=np.concatenate([images for images, _ in train]),
        train_labels=np.concatenate([labels for _, labels in train]),
        test_images=test_images,
        test_labels=test_labels,
        classes=CLASSES,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        crop_padding=4,
        flip=True,
    )


def _default_folder() -> Path:
    return Path(os.environ.get("UNFLIP_DATA") or "~/.cache/unflip/data").expanduser()


def _find(root: Path) -> tuple[Layout, Path]:
    """The first version found at `root`, and the archive or folder it is in."""
    looked = [root]
    for layout in LAYOUTS:
        inside = (root / layout.folder, root / layout.archive)
        for place in (root, *inside):
            if _holds(layout, place):
                return layout, place
        looked.extend(inside)
    raise _not_found(root, looked)


def _holds(layout: Layout, place: Path) -> bool:
    """One batch file is enough to tell: if another is missing, the error names that file."""
    if place.is_file():
        return place.name == layout.archive
    return any((place / batch.name).is_file() for batch in layout.batches)


def _not_found(root: Path, looked: list[Path]) -> DataError:
    wanted = LAYOUTS[0]
    if root.is_file():
        names = " or ".join(layout.archive for layout in LAYOUTS)
        return DataError(
            f"folder={root} is a file of another name than CIFAR-10's. Give {names}, or the folder that holds it."
        )
    home = root.parent if root.name in {layout.archive for layout in LAYOUTS} else root
    return DataError(
        f"CIFAR-10 was not found. Download {wanted.archive} (MD5 {wanted.archive_md5}) from {PAGE} "
        f"and put it into {home} without unpacking it. Or name the folder that holds it with --data (folder= in "
        f"Python) or the environment variable UNFLIP_DATA. Looked at: {', '.join(map(str, looked))}."
    )


def _read(layout: Layout, place: Path) -> dict[str, Batch]:
    """Every batch by its file name, each checked before it is decoded."""
    read = _read_archive if place.is_file() else _read_folder
    batches = {}
    for batch, where, data in read(layout, place):
        found = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if found != batch.md5:
            raise DataError(
                f"{where} is damaged: its MD5 should be {batch.md5} and is {found}. "
                f"Download {layout.archive} again from {PAGE}."
            )
        batches[batch.name] = layout.decode(data, where)
    return batches


def _read_folder(layout: Layout, folder: Path) -> Iterator[tuple[BatchFile, str, bytes]]:
    for batch in layout.batches:
        path = folder / batch.name
        try:
            _check_length(batch, str(path), path.stat().st_size)
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing: unpack {layout.archive} again.") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}.") from error
        yield batch, str(path), data


def _read_archive(layout: Layout, archive: Path) -> Iterator[tuple[BatchFile, str, bytes]]:
    """The expected members of the archive, in its order; members of any other name are skipped."""
    wanted = {f"{layout.folder}/{batch.name}": batch for batch in layout.batches}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                regular = member.name in wanted and member.isreg()
                stream = tar.extractfile(member) if regular else None
                if stream is None:
                    continue
                batch, where = wanted.pop(member.name), f"{member.name} in {archive}"
                _check_length(batch, where, member.size)
                yield batch, where, stream.read()
                if not wanted:
                    return
    except (EOFError, OSError, tarfile.TarError, zlib.error) as error:
        raise _bad_archive(layout, archive, f"it cannot be read to its end ({error})") from error
    raise _bad_archive(layout, archive, f"it lacks {', '.join(wanted)}")


def _bad_archive(layout: Layout, archive: Path, problem: str) -> DataError:
    return DataError(
        f"{archive} ({archive.stat().st_size:,} bytes) is truncated or not {layout.archive}: "
        f"{problem}. Download it again from {PAGE}; the published archive has the "
        f"MD5 {layout.archive_md5}."
    )


def _check_length(batch: BatchFile, where: str, length: int) -> None:
    """Checked before the bytes are read: a wrong length is the clearer message, and this limits the memory."""
    if length != batch.length:
        raise DataError(
            f"{where} should have {batch.length:,} bytes and has {length:,}. Download it again from {PAGE}."
        )


def _decode_binary(data: bytes, where: str) -> Batch:
    """Records of one label byte and 3,072 pixel bytes: the red plane, the green, the blue."""
    if len(data) % (1 + PIXELS):
        raise DataError(
            f"{where} should hold records of {1 + PIXELS:,} bytes and has {len(data):,} bytes."
        )
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, 1 + PIXELS)
    return _arrays(records[:, 1:], records[:, 0])


def _decode_python(data: bytes, where: str) -> Batch:
    """A pickled dict of Python 2: b"data" is N×3,072 uint8, b"labels" a list of N ints."""
    batch = _unpickle(data, where)
    pixels = batch.get(b"data") if isinstance(batch, dict) else None
    labels = batch.get(b"labels") if isinstance(batch, dict) else None
    if not (
        isinstance(pixels, np.ndarray)
        and pixels.dtype == np.uint8
        and pixels.shape[1:] == (PIXELS,)
        and isinstance(labels, list)
        and len(labels) == len(pixels)
        and all(isinstance(label, int) for label in labels)
    ):
        raise DataError(
            f"{where} should be a pickled dict with b'data', a uint8 array of N×{PIXELS:,}, and "
            "b'labels', a list of N ints; it is not."
        )
    return _arrays(pixels, np.array(labels))


def _arrays(pixels: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Batch:
    """Copies: what is read from bytes is read-only."""
    return pixels.copy().reshape(-1, *SHAPE), labels.astype(np.int64)


def _unpickle(data: bytes, where: str) -> Any:
    """Unpickle, allowing no call but that of an array's constructor.

    The MD5 was checked before, so this protects against a wrong MD5 in our table.
    """
    try:
        return _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    except _RefusedError as error:
        raise DataError(f"{where} is not a batch of CIFAR-10: {error}.") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(f"{where} is not a readable pickle: {error}.") from error


class _RefusedError(Exception):
    pass


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise _RefusedError(f"its pickle asks for {module}.{name}, which is refused")
        return _ADMITTED[module, name]


def _encode(text: str, encoding: str) -> bytes:
    """Protocol 2 of Python 3 pickles bytes as a call of this; the real `encode` would run any codec."""
    if encoding != "latin1":
        raise _RefusedError(f"its pickle asks for the codec {encoding!r}, which is refused")
    return text.encode("latin1")


# numpy renamed its module, and importing the old name warns. An array knows its own constructor.
_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
}

BINARY = Layout(
    archive="cifar-10-binary.tar.gz",
    archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
    folder="cifar-10-batches-bin",
    train=(
        BatchFile("data_batch_1.bin", 30_730_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
        BatchFile("data_batch_2.bin", 30_730_000, "5ea93a67294ea407fff1d09f752e9692"),
        BatchFile("data_batch_3.bin", 30_730_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
        BatchFile("data_batch_4.bin", 30_730_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
        BatchFile("data_batch_5.bin", 30_730_000, "53f37980c15c3d472c316c40844f3f0d"),
    ),
    test=BatchFile("test_batch.bin", 30_730_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
    decode=_decode_binary,
)

PYTHON = Layout(
    archive="cifar-10-python.tar.gz",
    archive_md5="c58f30108f718f92721af3b95e74349a",
    folder="cifar-10-batches-py",
    train=(
        BatchFile("data_batch_1", 31_035_704, "c99cafc152244af753f735de768cd75f"),
        BatchFile("data_batch_2", 31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
        BatchFile("data_batch_3", 31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
        BatchFile("data_batch_4", 31_035_696, "634d18415352ddfa80567beed471001a"),
        BatchFile("data_batch_5", 31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
    ),
    test=BatchFile("test_batch", 31_035_526, "40351d587109b95175f43aff81a1287e"),
    decode=_decode_python,
)

LAYOUTS: tuple[Layout, ...] = (BINARY, PYTHON)
