"""What tars and Parquet files share: many files of images per part, with classes as numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from unflip.data.class_names import classes_in_order, names_of_keys, short_names, wnid
from unflip.data.errors import DataError
from unflip.data.listing import Labels

TEST_NAMES = ("test", "val")  # "val" also matches "validation"

# Keys and readable names of the classes.
Classes = tuple[tuple[str, ...], tuple[str, ...]]


def files_with_suffix(folder: Path, suffix: str) -> list[Path]:
    """In the folder itself, or in folders inside it: train, val, data."""
    found = [*folder.glob(f"*{suffix}"), *folder.glob(f"*/*{suffix}")]
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def parts_of(
    folder: Path, files: list[Path], labeled: Callable[[Path], bool]
) -> tuple[list[Path], list[Path]]:
    """The files of training images, and those of test images.

    ImageNet is also published with test files that have no labels. Then the validation images are the test images.
    """
    named = [(path, _parts_named(path.relative_to(folder))) for path in files]
    train = [path for path, parts in named if "train" in parts]
    if not train:
        raise DataError(
            f"{folder} has {len(files)} files such as {files[0].name}, but none with 'train' in its name. "
            "Name the files of training images train-*, and those of test images val-* or test-*."
        )
    for part in TEST_NAMES:
        test = [path for path, parts in named if part in parts]
        if test and labeled(test[0]):
            return train, test
    raise DataError(
        f"{folder} has training images, but no file with 'val' or 'test' in its name that has labels. "
        "Add the files of validation images."
    )


def _parts_named(path: Path) -> set[str]:
    """The parts at the beginning of a word of the file's own name (x-train-00.tar), else of its folder's.

    A file in both parts would test a network on images that it was trained on.
    """
    for text in (path.name, path.parent.name):
        parts = {
            part
            for part in ("train", *TEST_NAMES)
            if re.search(rf"(?<![a-z]){part}", text, re.IGNORECASE)
        }
        if "train" in parts and len(parts) > 1:
            raise DataError(
                f"{path} has both {' and '.join(repr(part) for part in sorted(parts))} in {text!r}, so it is unclear "
                "whether it holds training or test images. Rename it: train-*, val-* or test-*."
            )
        if parts:
            return parts
    return set()


def numbered_classes(
    folder: Path, labels: Labels, names: list[str], texts: list[str] | None = None
) -> Classes:
    """The classes of the training images. ``texts`` are readable names that come with the labels.

    The keys are the WNIDs in the names of ImageNet's training images. Otherwise they are those of a file of classes,
    the texts, or the numbers.
    """
    count = int(labels.max()) + 1
    _check_gaps(folder, labels, count)
    texts = texts[:count] if texts and len(texts) >= count else None
    keys = _wnids(labels, names)
    if keys is not None:
        return keys, short_names(keys, texts) if texts else names_of_keys(keys, (folder,))
    listed = classes_in_order(count, (folder,))
    if listed is not None:
        keys = tuple(key for key, _ in listed[:count])
        return keys, short_names(keys, [text for _, text in listed[:count]])
    numbers = tuple(map(str, range(count)))
    keys = tuple(texts) if texts and len(set(texts)) == count else numbers
    return keys, short_names(keys, texts or keys)


def check_test_labels(labels: Labels, classes: int, name: Callable[[int], str]) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"{name(int(wrong[0]))} has label {labels[wrong[0]]}, but the labels of the training images are "
            f"0..{classes - 1}. Remove it, or add training images of its class."
        )


def _check_gaps(folder: Path, labels: Labels, count: int) -> None:
    if labels.min() < 0:
        raise DataError(
            f"{folder} has a training image with label {labels.min()}. Labels must be 0 or more."
        )
    # Not bincount over all labels: one wrong label of 2**60 must not take all memory.
    there = np.unique(labels)
    if len(there) < count:
        gap = int(np.flatnonzero(there != np.arange(len(there)))[0])
        raise DataError(
            f"{folder} has training labels up to {count - 1}, but no training image with label {gap}. Add the files "
            "that are missing, or number the classes without gaps."
        )


def _wnids(labels: Labels, names: list[str]) -> tuple[str, ...] | None:
    """The WNID of each label, if every training image has one in its name and they agree."""
    found: dict[int, str] = {}
    for label, name in zip(labels.tolist(), names, strict=True):
        key = wnid(name.rpartition("/")[2])
        if key is None or found.setdefault(label, key) != key:
            return None
    keys = tuple(found[label] for label in sorted(found))
    return keys if len(set(keys)) == len(keys) else None
