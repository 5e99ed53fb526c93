"""A set of one's own: a tree with one folder of images for each class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unflip.data import (
    DataError,
    ImageSet,
    channel_statistics,
    missing_package,
    stratified_order,
)
from unflip.pictures import PixelError, read_picture

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")

# One class and file an entry, in the order in which the images are kept.
Listing = list[tuple[int, Path]]


def load_folder(folder: Path, size: int | None = None) -> ImageSet:
    """Images from folder/train/CLASS/ and folder/test/CLASS/ (or folder/val/CLASS/), as RGB.

    The classes are the sorted names of the folders under train. All images must be of one size,
    unless `size` is given: then the shorter side is resized to it (bilinear) and the centre is cut
    out. The whole set is held in memory, N×3×H×W bytes.

    The order is fixed by the file names, with the classes interleaved, so that `ImageSet.split`
    takes its share from every class.
    """
    if size is not None and size < 1:
        raise DataError(f"size={size} must be at least 1 pixel.")
    folder = Path(folder).expanduser()
    train, test = _parts(folder)
    classes = _classes(train)
    if len(classes) == 1:
        raise DataError(
            f"{train} holds one class alone, {classes[0]!r}: nothing to tell apart. Each class has a folder of "
            "its own there, and two are the least."
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
    """The folders of the two parts; "test" goes before "val" where a tree has both."""
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
    """Hidden folders are those of tools (.ipynb_checkpoints), not classes."""
    names = sorted(
        path.name for path in part.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not names:
        raise DataError(f"{part} should hold one folder of images for each class; it holds none.")
    return tuple(names)


def _listing(part: Path, classes: tuple[str, ...]) -> Listing:
    """The images of one part, interleaved by class, each with its label."""
    listing: Listing = []
    for name in _classes(part):
        if name not in classes:
            raise DataError(
                f"{part / name} is a class without training images; "
                f"the classes under train are: {', '.join(classes)}."
            )
        listing.extend((classes.index(name), path) for path in _images(part / name))
    labels = np.array([label for label, _ in listing], dtype=np.int64)
    return [listing[index] for index in stratified_order(labels)]


def _images(folder: Path) -> list[Path]:
    """Hidden files are skipped: macOS leaves a ._name.jpg, which is no image, beside name.jpg."""
    paths = sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    )
    if not paths:
        raise DataError(f"{folder} is a class without images: it holds no file in {_suffixes()}.")
    return paths


def _suffixes() -> str:
    return ", ".join(SUFFIXES)


def _shape(first: Path, size: int | None) -> tuple[int, int]:
    """Height and width of all images: those asked for, or those of the first training image."""
    if size is not None:
        return size, size
    height, width, _ = _read_image(first, None).shape
    return height, width


def _read(listing: Listing, shape: tuple[int, int], size: int | None) -> tuple[Tensor, Tensor]:
    images = torch.empty((len(listing), 3, *shape), dtype=torch.uint8)
    for index, (_, path) in enumerate(listing):
        pixels = _read_image(path, size)
        if pixels.shape[:2] != shape:
            raise DataError(
                f"{path} is {pixels.shape[1]}×{pixels.shape[0]} pixels, but the first training "
                f"image is {shape[1]}×{shape[0]}. Give size= (in a recipe, data.size) to bring all "
                "images to one size."
            )
        images[index] = torch.from_numpy(pixels).permute(2, 0, 1)
    return images, torch.tensor([label for label, _ in listing], dtype=torch.int64)


def _read_image(path: Path, size: int | None) -> npt.NDArray[np.uint8]:
    """One image as H,W,3."""
    try:
        image = read_picture(path, "RGB")
    except ImportError as error:
        raise missing_package("Pillow", "The data set 'folder'") from error
    except PixelError as error:
        raise DataError(f"{error}.") from error
    except Exception as error:  # a damaged file can raise nearly anything from a decoder
        raise DataError(f"{path} cannot be read as an image: {error}.") from error
    return np.array(image if size is None else _resize_and_crop(image, size))


def _resize_and_crop(image: Image, size: int) -> Image:
    from PIL.Image import Resampling

    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    resized = image.resize((width, height), Resampling.BILINEAR)
    return resized.crop((left, top, left + size, top + size))
