"""WebDataset tars: KEY.jpg with its label in KEY.cls, read in place.

The headers of all tars are read once, which gives the position of every image. Nothing is unpacked.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unflip.data.errors import DamagedImage, DataError
from unflip.data.listing import (
    SUFFIXES,
    Labels,
    ListedPart,
    ListedStore,
    Names,
    Numbers,
    in_chunks,
    in_order,
    is_image,
)
from unflip.data.shards import check_test_labels, files_with_suffix, numbered_classes, parts_of

KIND = "WebDataset tars"
MOST_DIGITS = 18  # of a label, so that it is an int64


@dataclass(frozen=True)
class Found:
    """An image in a tar: the tar's number, the member's name, where its bytes are, and its label."""

    tar: int
    name: str
    offset: int
    length: int
    label: int


class TarPart(ListedPart):
    def __init__(self, tars: tuple[Path, ...], found: list[Found]) -> None:
        super().__init__(_labels(found), Names.of(image.name for image in found))
        self.tars = tars
        self.tar_of = np.array([image.tar for image in found], dtype=np.int32)
        self.offsets = np.array([image.offset for image in found], dtype=np.int64)
        self._lengths = np.array([image.length for image in found], dtype=np.int64)

    def lengths(self) -> Numbers:
        return self._lengths

    def read(self, index: int) -> bytes:
        """The tar is opened for each image: a thousand tars would be more open files than a process may have."""
        length = int(self._lengths[index])
        try:
            with self.tars[self.tar_of[index]].open("rb", buffering=0) as file:
                file.seek(int(self.offsets[index]))
                data = file.read(length)
        except OSError as error:
            raise DataError(f"{self.name(index)} cannot be read: {error}.") from error
        if len(data) < length:
            raise DamagedImage(
                f"{self.name(index)} is cut off: the tar has {len(data):,} of its {length:,} bytes. "
                "Download the tar again."
            )
        return data

    def name(self, index: int) -> str:
        return f"{self.tars[self.tar_of[index]]}/{self.names[index]}"

    def reading_chunks(self) -> list[Numbers]:
        return in_chunks(np.lexsort((self.offsets, self.tar_of)).astype(np.int64))


def find_tars(folder: Path) -> list[Path]:
    return files_with_suffix(folder, ".tar")


def open_tars(folder: Path, tars: list[Path]) -> ListedStore:
    train_tars, test_tars = parts_of(folder, tars, _has_labels)
    train, test = _read_headers(train_tars), _read_headers(test_tars)
    keys, classes = numbered_classes(folder, _labels(train), [image.name for image in train])
    check_test_labels(
        _labels(test), len(keys), lambda index: f"{test_tars[test[index].tar]}/{test[index].name}"
    )
    return ListedStore(
        kind=KIND,
        path=folder,
        classes=classes,
        keys=keys,
        train=_part(train_tars, train, keys),
        test=_part(test_tars, test, keys),
    )


def _part(tars: list[Path], found: list[Found], keys: tuple[str, ...]) -> TarPart:
    order = in_order(_labels(found), [image.name for image in found], keys)
    return TarPart(tuple(tars), [found[index] for index in order])


def _labels(found: list[Found]) -> Labels:
    return np.array([image.label for image in found], dtype=np.int64)


def _has_labels(tar: Path) -> bool:
    return any(_suffix(member.name) == "cls" for _, member in _members(tar))


def _read_headers(tars: list[Path]) -> list[Found]:
    found = [image for number, tar in enumerate(tars) for image in _images(number, tar)]
    if not found:
        raise DataError(f"{tars[0]} holds no images. Download it again, or remove it.")
    return found


def _images(number: int, tar: Path) -> Iterator[Found]:
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, int] = {}
    for file, member in _members(tar):
        key = _key(member.name)
        if not (is_image(member.name) or _suffix(member.name) == "cls"):
            continue
        if member.islnk():
            raise DataError(
                f"{tar}/{member.name} is a hard link to {member.linkname}, which cannot be read in place. "
                "Write the tar again with GNU tar's option --hard-dereference."
            )
        if is_image(member.name):
            if key in images:
                raise DataError(
                    f"{tar} has two images with the key {key}: {images[key].name} and {member.name}. Remove one."
                )
            images[key] = member
        elif key in labels:
            raise DataError(f"{tar} has two labels with the key {key}. Remove one {key}.cls.")
        else:
            labels[key] = _label(file, member, tar)
    alone = sorted(labels.keys() - images.keys())
    if alone:
        raise DataError(
            f"{tar}/{alone[0]}.cls is the label of no image: the tar has no {alone[0]} with one of the suffixes "
            f"{', '.join(SUFFIXES)}. Add the image, or remove the label."
        )
    for key, member in images.items():
        if key not in labels:
            raise DataError(
                f"{tar}/{member.name} has no label: the tar has no {key}.cls. Add it. If this is a tar of class "
                "folders, unpack it and give the folder."
            )
        yield Found(number, member.name, member.offset_data, member.size, labels[key])


def _members(tar: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The regular files and hard links of a tar, without hidden ones."""
    length = tar.stat().st_size
    try:
        with tarfile.open(tar, "r:") as file:
            for member in file:
                if member.size < 0:  # tarfile would read the same headers forever
                    raise DataError(f"{tar} has a member of negative size. Download it again.")
                if member.issparse():
                    raise DataError(
                        f"{tar}/{member.name} is sparse, which cannot be read in place. Write the tar without the "
                        "option --sparse."
                    )
                if member.offset_data + member.size > length:
                    raise DataError(f"{tar} is cut off inside {member.name}. Download it again.")
                if (member.isreg() or member.islnk()) and not member.name.rpartition("/")[
                    2
                ].startswith("."):
                    yield file, member
            _check_end(file, tar)
    except DataError:
        raise
    except (
        tarfile.TarError,
        OSError,
        EOFError,
        ValueError,
    ) as error:  # ValueError: damaged numbers
        raise DataError(f"{tar} cannot be read as a tar: {error}. Download it again.") from error


def _check_end(file: tarfile.TarFile, tar: Path) -> None:
    """A tar ends with blocks of zeros. tarfile also stops, without an error, where a header is damaged or cut off."""
    assert file.fileobj is not None
    file.fileobj.seek(file.offset)
    if file.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise DataError(f"{tar} is damaged or cut off at byte {file.offset:,}. Download it again.")


def _key(name: str) -> str:
    """As WebDataset has it: the path up to the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _suffix(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[2].lower()


def _label(file: tarfile.TarFile, member: tarfile.TarInfo, tar: Path) -> int:
    stream = file.extractfile(member)
    text = stream.read(MOST_DIGITS + 8).strip() if stream else b""
    if not text.isdigit() or len(text) > MOST_DIGITS:
        raise DataError(
            f"{tar}/{member.name} holds {text!r}; a .cls file should hold the number of the class, such as 12."
        )
    return int(text)
