"""Your own images: a tree with one folder per class."""

from __future__ import annotations

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
from unflip.data.listing import SUFFIXES
from unflip.pictures import PixelError, read_picture

if TYPE_CHECKING:
    from PIL.Image import Image

# Label and file of each image, in the order in which the images are kept.
Listing = list[tuple[int, Path]]


def load_folder(folder: Path | None, size: int | None = None) -> ImageSet:
    """Images from folder/train/CLASS/ and folder/test/CLASS/ (or folder/val/CLASS/), as RGB.

    The classes are the sorted names of the folders under train. All images must have the same size,
    unless `size` is given: then the shorter side is resized to it (bilinear) and the center is cut
    out. The whole set is held in memory, N×3×H×W bytes.

    The file names determine the order of the images. The classes are interleaved, so that
    `ImageSet.split` takes its share from every class.
    """
    if size is not None and (type(size) is not int or size < 1):
        raise DataError(f"size={size!r} must be a whole number of pixels, at least 1.")
    if folder is None:
        raise DataError(
            "The data set 'folder' needs the folder of the images: give --data DIR (folder= in Python)."
        )
    folder = Path(folder).expanduser()
    train, test = _parts(folder)
    classes = _classes(train)
    if len(classes) == 1:
        raise DataError(
            f"{train} has only one class, {classes[0]!r}. A classifier needs two or more: make one folder per "
            "class there."
        )
    listings = _listing(train, classes), _listing(test, classes)
    shape = _shape(listings[0][0][1], size)
    train_images, train_labels = _read(listings[0], shape, size)
    test_images, test_labels = _read(listings[1], shape, size)
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


def _parts(folder: Path) -> tuple[Path, Path]:
    """The folders of the two parts; a tree that has both "test" and "val" is tested on "test"."""
    train = folder / "train"
    tests = [folder / name for name in ("test", "val") if (folder / name).is_dir()]
    if train.is_dir() and tests:
        return train, tests[0]
    missing = f"{folder / 'test'} (or val)" if train.is_dir() else str(train)
    raise DataError(
        f"folder={folder} should hold train/CLASS/*.png and test/CLASS/*.png (or val/CLASS/*.png; "
        f"the images may be {_suffixes()}), but there is no folder {missing}."
    )


def _classes(part: Path) -> tuple[str, ...]:
    """Hidden folders, such as .ipynb_checkpoints, belong to tools and are not classes."""
    names = sorted(
        path.name for path in part.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not names:
        raise DataError(f"{part} holds no folders; it should hold one folder of images per class.")
    return tuple(names)


def _listing(part: Path, classes: tuple[str, ...]) -> Listing:
    """The images of one part, interleaved by class, each with its label."""
    listing: Listing = []
    for name in _classes(part):
        if name not in classes:
            raise DataError(
                f"{part / name} is a class without training images: remove it, or add some. "
                f"The classes under train are: {', '.join(classes)}."
            )
        listing.extend((classes.index(name), path) for path in _images(part / name))
    labels = np.array([label for label, _ in listing], dtype=np.int64)
    return [listing[index] for index in stratified_order(labels)]


def _images(folder: Path) -> list[Path]:
    """Hidden files are skipped: macOS leaves a ._name.jpg, which is not an image, beside name.jpg."""
    paths = sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    )
    if not paths:
        raise DataError(
            f"{folder} is a class without images: it holds no {_suffixes()} file. Add some, or remove it."
        )
    return paths


def _suffixes() -> str:
    return ", ".join(SUFFIXES)


def _shape(first: Path, size: int | None) -> tuple[int, int]:
    """Height and width of all images: those asked for, or those of the first training image."""
    if size is not None:
        return size, size
    height, width, _ = _read_image(first, None).shape
    return height, width


def _read(listing: Listing, shape: tuple[int, int], size: int | None) -> tuple[Pixels, Labels]:
    images = np.empty((len(listing), 3, *shape), dtype=np.uint8)
    for index, (_, path) in enumerate(listing):
        pixels = _read_image(path, size)
        if pixels.shape[:2] != shape:
            raise DataError(
                f"{path} is {pixels.shape[1]}×{pixels.shape[0]} pixels, but the first training "
                f"image is {shape[1]}×{shape[0]}. Give size= (in a recipe, data.size) to resize all images "
                "to the same size."
            )
        images[index] = pixels.transpose(2, 0, 1)
    return images, np.array([label for label, _ in listing], dtype=np.int64)


def _read_image(path: Path, size: int | None) -> Pixels:
    """One image as H,W,3."""
    try:
        image = read_picture(path, "RGB")
    except ImportError as error:
        raise DataError("The data set 'folder' needs Pillow: pip install Pillow") from error
    except PixelError as error:
        raise DataError(f"{error}.") from error
    except Exception as error:  # a damaged file can raise nearly anything from a decoder
        raise DataError(
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
