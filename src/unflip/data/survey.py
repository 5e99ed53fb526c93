"""What a folder of images holds, as far as the choice of a network depends on it: only some headers are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unflip.data.errors import DataError
from unflip.data.folders import image_files, parts, training_classes
from unflip.data.listing import images_and_others

LOOKED_AT = 400  # images whose size is read


@dataclass(frozen=True)
class Survey:
    """``side`` is the median of the shorter sides, in pixels. ``ignored``: files beside the class folders, and whatever
    is beside the images."""

    classes: int
    images: int  # to train with, and to test on if there is no folder for that
    fewest: int  # images of a class
    side: int
    has_test: bool
    ignored: tuple[str, ...] = ()


def survey(folder: Path) -> Survey:
    """Look at folder/CLASS/*.png, or folder/train/CLASS/*.png with or without folder/val/CLASS/*.png."""
    folder = folder.expanduser()
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"--data {folder} {problem}. Give a folder with one folder per class.")
    try:
        return _survey(folder)
    except DataError as error:
        raise DataError(f"--data {folder}: {error}") from error


def _survey(folder: Path) -> Survey:
    train, test = parts(folder)
    classes = training_classes(train)
    files = [image_files(train / name) for name in classes]
    paths = [path for of_class in files for path in of_class]
    step = max(1, len(paths) // LOOKED_AT)
    sides = [side for path in paths[::step] if (side := _shorter_side(path)) is not None]
    if not sides:
        raise DataError(
            f"none of the images in {train} can be read, such as {paths[0]}. Repair or replace the files."
        )
    counts = [len(of_class) for of_class in files]
    beside = [str(p) for p in train.iterdir() if p.is_file() and not p.name.startswith(".")]
    ignored = sorted(path for name in classes for path in images_and_others(train / name)[1])
    return Survey(
        len(classes),
        len(paths),
        min(counts),
        int(np.median(sides)),
        test is not None,
        (*sorted(beside), *ignored),
    )


def _shorter_side(path: Path) -> int | None:
    """None for a file that cannot be read: loading all images names it."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return min(image.size)
    except Exception:  # a damaged file can raise nearly anything
        return None
