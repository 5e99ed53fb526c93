"""Class folders: train/CLASS/*.jpg and val/CLASS/*.jpg (or test/CLASS/*.jpg), read in place.

ImageNet as Kaggle publishes it is found too. Its val folder has no classes; LOC_val_solution.csv has the labels.
"""

from __future__ import annotations

import csv
import errno
import os
from pathlib import Path

import numpy as np

from unflip.data.class_names import names_of_keys
from unflip.data.errors import DataError
from unflip.data.listing import (
    SUFFIXES,
    TEST_FOLDERS,
    Labels,
    ListedPart,
    ListedStore,
    Names,
    Numbers,
    images_and_others,
    in_order,
)

KIND = "class folders"
INSIDE = (
    ".",
    "CLS-LOC",
    "Data/CLS-LOC",
    "ILSVRC/Data/CLS-LOC",
)  # where ImageNet's archives have train
SOLUTION = "LOC_val_solution.csv"

# Label and file name of each image.
Listing = list[tuple[int, str]]


class FolderPart(ListedPart):
    """Images in one folder per class; ``folders`` has the folder of each label."""

    def __init__(
        self, folders: tuple[Path, ...], labels: Labels, names: Names, ignored: Names
    ) -> None:
        super().__init__(labels, names)
        self.folders, self.ignored = folders, ignored

    def read(self, index: int) -> bytes:
        try:
            path = self.name(index)
            if os.path.exists(path) and not os.path.isfile(path):  # a pipe would never end
                raise OSError(errno.EINVAL, "it is not an ordinary file")
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise _unreadable(self.name(index), error) from error

    def name(self, index: int) -> str:
        return f"{self.folders[self.labels[index]]}/{self.names[index]}"

    def lengths(self) -> Numbers:
        names = (self.name(index) for index in range(len(self)))
        return np.array([_length(name) for name in names], dtype=np.int64)


def find_train(folder: Path) -> Path | None:
    """The folder train with one folder per class."""
    for inside in INSIDE:
        train = folder / inside / "train"
        if train.is_dir() and class_folders(train):
            return train
    return None


def open_class_folders(folder: Path, train: Path) -> ListedStore:
    keys = tuple(class_folders(train))
    return ListedStore(
        kind=KIND,
        path=folder,
        classes=names_of_keys(keys, (folder, train.parent)),
        keys=keys,
        train=_part(train, keys),
        test=_test_part(folder, train, keys),
    )


def class_folders(part: Path) -> list[str]:
    """Hidden folders, such as .ipynb_checkpoints, belong to tools and are not classes."""
    with os.scandir(part) as found:
        return sorted(e.name for e in found if not e.name.startswith(".") and e.is_dir())


def _test_part(folder: Path, train: Path, keys: tuple[str, ...]) -> FolderPart:
    """A test folder without classes, such as that of ImageNet's challenge, has no labels and is not used."""
    there = [path for name in TEST_FOLDERS if (path := train.parent / name).is_dir()]
    for path in there:
        if class_folders(path):
            return _part(path, keys)
    for path in there:
        for solution in (folder / SOLUTION, train.parent / SOLUTION):
            if path.name == "val" and solution.is_file():
                return _solved_part(path, solution, keys)
    if there:
        raise DataError(
            f"{there[0]} has no class folders, so the labels of its images are unknown. Move each image into a folder "
            f"named like its class under {train}, or put {SOLUTION} into {folder}."
        )
    raise DataError(
        f"{train.parent} has a folder train, but no folder with test images: {', '.join(TEST_FOLDERS)}. "
        "Add one, with one folder per class."
    )


def _part(part: Path, keys: tuple[str, ...]) -> FolderPart:
    listing: Listing = []
    ignored: list[str] = []
    label_of = {key: label for label, key in enumerate(keys)}
    for key in class_folders(part):
        if key not in label_of:
            raise DataError(
                f"{part / key} is a class without training images. Remove it, or add a folder {key} under train."
            )
        files, others = images_and_others(part / key)
        ignored += others
        if not files:
            raise DataError(
                f"{part / key} holds no image ({', '.join(SUFFIXES)}). Add some, or remove the folder."
            )
        listing.extend((label_of[key], name) for name in files)
    return _listed(tuple(part / key for key in keys), listing, keys, ignored)


def _solved_part(part: Path, solution: Path, keys: tuple[str, ...]) -> FolderPart:
    """Images without class folders, with their classes in Kaggle's file: ImageId,"WNID x y x y ..."."""
    label_of = {key: label for label, key in enumerate(keys)}
    try:
        with solution.open(newline="", encoding="utf-8") as file:
            answers = {row[0]: row[1].split() for row in csv.reader(file) if len(row) == 2}
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{solution} is not a table: {error}") from None
    listing: Listing = []
    images, ignored = images_and_others(part)
    for name in images:
        answer = answers.get(name.partition(".")[0])
        if not answer or answer[0] not in label_of:
            raise DataError(
                f"{solution} has no class of the training images for {part / name}. "
                "Add its line, or remove the image."
            )
        listing.append((label_of[answer[0]], name))
    if not listing:
        raise DataError(f"{part} holds no image ({', '.join(SUFFIXES)}). Unpack the images there.")
    return _listed((part,) * len(keys), listing, keys, ignored)


def _listed(
    folders: tuple[Path, ...], listing: Listing, keys: tuple[str, ...], ignored: list[str]
) -> FolderPart:
    labels = np.array([label for label, _ in listing], dtype=np.int64)
    names = [name for _, name in listing]
    order = in_order(labels, names, keys)
    return FolderPart(
        folders, labels[order], Names.of(names[i] for i in order), Names.of(sorted(ignored))
    )


def _length(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> DataError:
    problem = f"{path} cannot be read: {error.strerror}."
    if os.path.islink(path):
        return DataError(
            f"{problem} It is a link to {os.readlink(path)}. Restore that, or remove the link."
        )
    return DataError(f"{problem} Check disk, network and permissions, or remove the file.")
