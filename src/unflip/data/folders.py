"""Your own images: a tree with one folder per class."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unflip.data.errors import DataError
from unflip.data.image_set import (
    ImageSet,
    Labels,
    Pixels,
    channel_statistics,
    stratified_order,
)
from unflip.data.listing import SUFFIXES, TEST_FOLDERS, images_and_others
from unflip.pictures import PixelError, read_picture

if TYPE_CHECKING:
    from PIL.Image import Image

SHOWN = 5  # damaged files
PROGRESS_SECONDS = 5.0
MEMORY_SHARE = 0.8  # of the machine's memory that images may take

# Label and file of each image, in the order in which the images are kept.
Listing = list[tuple[int, Path]]


class DamagedFile(DataError):
    """An image that cannot be read. All of them are collected before an error ends the loading."""


def load_folder(
    folder: Path | None, size: int | None = None, test_share: float | None = None
) -> ImageSet:
    """Images from folder/train/CLASS/ and folder/test/CLASS/ (or folder/val/CLASS/), as RGB.

    The classes are the sorted names of the folders under train. All images must have the same size,
    unless `size` is given: then the shorter side is resized to it (bilinear) and the center is cut
    out. The whole set is held in memory, N×3×H×W bytes.

    `test_share` is for trees without test images, where folder/train is optional too: this share of
    the images of each class is tested on, at least one of each class with two or more images.

    The file names determine the order of the images. The classes are interleaved, so that
    `ImageSet.split` takes its share from every class.
    """
    if size is not None and (type(size) is not int or size < 1):
        raise DataError(f"size={size!r} must be a whole number of pixels, at least 1.")
    if folder is None:
        raise DataError(
            "The data set 'folder' needs the folder of the images: give --data DIR (folder= in Python)."
        )
    if test_share is not None and not 0 < test_share < 1:
        raise DataError(f"test_share={test_share!r} must be between 0 and 1, such as 0.1.")
    classes, listings = _listings(Path(folder).expanduser(), test_share)
    shape = _shape(listings[0][0][1], size)
    _check_memory(sum(map(len, listings)), shape)
    damaged: list[str] = []
    train_images, train_labels = _read(listings[0], shape, size, damaged)
    test_images, test_labels = _read(listings[1], shape, size, damaged)
    if damaged:
        raise DataError(_in_words(damaged))
    mean, std = channel_statistics(train_images)
    return ImageSet(
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        classes=classes,
        mean=mean,
        std=std,
        crop_padding=max(1, min(shape) // 8),
        flip=True,
    )


def parts(folder: Path) -> tuple[Path, Path | None]:
    """The folders of training and test images; a tree that has both "test" and "val" is tested on "test".

    A folder without train/ holds the class folders itself. Such a folder has no test images.
    """
    train = folder / "train"
    if not train.is_dir():
        return folder, None
    tests = [folder / name for name in TEST_FOLDERS if (folder / name).is_dir()]
    return train, tests[0] if tests else None


def _listings(
    folder: Path, test_share: float | None
) -> tuple[tuple[str, ...], tuple[Listing, Listing]]:
    """The classes, and the images of the two parts."""
    train, test = parts(folder)
    if test is None and test_share is None:
        raise _without_test_images(folder)
    if not train.is_dir():
        raise DataError(f"folder={folder} is not a folder. Give the one that holds the images.")
    if test is not None and test_share is not None:
        raise DataError(
            f"test_share={test_share} is for image sets without test images, but {test} holds some. Leave it out."
        )
    classes = training_classes(train)
    listing = _listing(train, classes)
    if test is not None:
        return classes, (listing, _listing(test, classes))
    assert test_share is not None
    return classes, _split(listing, test_share)


def _split(listing: Listing, test_share: float) -> tuple[Listing, Listing]:
    """The last images of each class, by name, are tested on. Both parts stay interleaved by class."""
    of_class: dict[int, list[Path]] = {}
    for label, path in listing:
        of_class.setdefault(label, []).append(path)
    tested: set[Path] = set()
    for paths in of_class.values():
        count = min(len(paths) - 1, max(1, round(test_share * len(paths))))
        tested.update(paths[len(paths) - count :])
    train = [entry for entry in listing if entry[1] not in tested]
    test = [entry for entry in listing if entry[1] in tested]
    if not test:
        raise DataError(
            "No class has two images, so none can be held out for testing. Add images to each class."
        )
    return train, test


def _without_test_images(folder: Path) -> DataError:
    train = folder / "train"
    missing = f"{folder / 'test'} (or val)" if train.is_dir() else str(train)
    return DataError(
        f"folder={folder} should hold train/CLASS/*.png and test/CLASS/*.png (or val/CLASS/*.png; "
        f"the images may be {_suffixes()}), but there is no folder {missing}. With test_share=0.1 (in a recipe, "
        "data.test_share) a tenth of each class is held out instead."
    )


def training_classes(train: Path) -> tuple[str, ...]:
    classes = class_names(train)
    if len(classes) == 1:
        image_files(train / classes[0])  # it may be a folder around the real ones
        raise DataError(
            f"{train} has only one class, {classes[0]!r}. A classifier needs two or more: make one folder per "
            "class there."
        )
    return classes


def class_names(part: Path) -> tuple[str, ...]:
    """Hidden folders, such as .ipynb_checkpoints, belong to tools and are not classes."""
    names = sorted(
        path.name for path in part.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not names:
        images = len(images_and_others(part)[0])
        found = f"{images:,} images but no folders" if images else "no folders"
        raise DataError(f"{part} holds {found}. Put the images of each class into a folder there.")
    return tuple(names)


def _listing(part: Path, classes: tuple[str, ...]) -> Listing:
    """The images of one part, interleaved by class, each with its label."""
    listing: Listing = []
    for name in class_names(part):
        if name not in classes:
            raise DataError(
                f"{part / name} is a class without training images: remove it, or add some. "
                f"The classes under train are: {', '.join(classes)}."
            )
        listing.extend((classes.index(name), path) for path in image_files(part / name))
    labels = np.array([label for label, _ in listing], dtype=np.int64)
    return [listing[index] for index in stratified_order(labels)]


def image_files(folder: Path) -> list[Path]:
    """The images of a class."""
    names, others = images_and_others(folder)
    if not names:
        raise _without_images(folder, others)
    return [folder / name for name in sorted(names)]


def _without_images(folder: Path, others: list[str]) -> DataError:
    """Nested folders and formats that are not read are the usual reasons."""
    problem = f"{folder} is a class without images: it holds no {_suffixes()} file"
    folders = sorted(Path(path).name for path in others if path.endswith("/"))
    if folders:
        return DataError(
            f"{problem}, only folders such as {folders[0]!r}. If these are the classes, give {folder} as the folder "
            f"of the images. If it holds training or test images, call it train or test. Otherwise move the images "
            f"from its folders into {folder} itself."
        )
    suffixes = sorted({suffix for path in others if (suffix := Path(path).suffix.lower())})
    if suffixes:
        return DataError(
            f"{problem}, only {', '.join(suffixes)}. Convert the images, such as to .png, or remove the folder."
        )
    return DataError(f"{problem}. Add some, or remove the folder.")


def _suffixes() -> str:
    return ", ".join(SUFFIXES)


def _shape(first: Path, size: int | None) -> tuple[int, int]:
    """Height and width of all images: those asked for, or those of the first training image."""
    if size is not None:
        return size, size
    height, width, _ = _read_image(first, None).shape
    return height, width


def _check_memory(count: int, shape: tuple[int, int]) -> None:
    """Before hours of reading end with a process that the system kills."""
    if not hasattr(os, "sysconf"):  # Windows
        return
    needed, memory = (
        3 * count * math.prod(shape),
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
    if needed > MEMORY_SHARE * memory:
        raise DataError(
            f"{count:,} images of {shape[1]}×{shape[0]} pixels take {needed / 1e9:.1f} GB of memory; this machine has "
            f"{memory / 1e9:.1f} GB. Give a smaller size= (in a recipe, data.size), or use the data set 'images', "
            "which reads them from the disk while it trains."
        )


def _read(
    listing: Listing, shape: tuple[int, int], size: int | None, damaged: list[str]
) -> tuple[Pixels, Labels]:
    """Images and labels; what is wrong with files that cannot be read is added to ``damaged``."""
    images = np.empty((len(listing), 3, *shape), dtype=np.uint8)
    printed = time.monotonic()
    for index, (_, path) in enumerate(listing):
        if time.monotonic() - printed > PROGRESS_SECONDS:
            printed = time.monotonic()
            print(f"read {index:,} of {len(listing):,} images", file=sys.stderr, flush=True)
        try:
            pixels = _read_image(path, size)
        except DamagedFile as error:
            damaged.append(str(error))
            continue
        if pixels.shape[:2] != shape:
            raise DataError(
                f"{path} is {pixels.shape[1]}×{pixels.shape[0]} pixels, but the first training "
                f"image is {shape[1]}×{shape[0]}. Give size= (in a recipe, data.size) to resize all images "
                "to the same size."
            )
        images[index] = pixels.transpose(2, 0, 1)
    return images, np.array([label for label, _ in listing], dtype=np.int64)


def _in_words(damaged: list[str]) -> str:
    if len(damaged) == 1:
        return damaged[0]
    more = f"\nand {len(damaged) - SHOWN:,} more" if len(damaged) > SHOWN else ""
    return f"{len(damaged):,} images cannot be used:\n" + "\n".join(damaged[:SHOWN]) + more


def _read_image(path: Path, size: int | None) -> Pixels:
    """One image as H,W,3."""
    try:
        image = read_picture(path, "RGB")
    except ImportError as error:
        raise DataError("The data set 'folder' needs Pillow: pip install Pillow") from error
    except PixelError as error:
        raise DamagedFile(f"{error}.") from error
    except Exception as error:  # a damaged file can raise nearly anything from a decoder
        raise DamagedFile(
            f"{path} cannot be read as an image: {error}. Repair or remove the file."
        ) from error
    return np.array(image if size is None else _resize_and_crop(image, size))


def _resize_and_crop(image: Image, size: int) -> Image:
    from PIL.Image import Resampling

    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    resized = image.resize((width, height), Resampling.BILINEAR)
    return resized.crop((left, top, left + size, top + size))
