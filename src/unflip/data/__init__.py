"""Image sets, whole and in memory as uint8 tensors.

The sets 1-bit networks are studied on fit in a GPU's memory, so a loader returns every image at
once and the training loop crops and flips there. The loaders live in `digits`, `cifar` and
`folders`; `load` picks one by name. scikit-learn and Pillow are imported only by the loaders that
need them.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["KNOWN", "DataError", "ImageSet", "channel_statistics", "load", "stratified_order"]

KNOWN = ("cifar10", "digits", "folder")


class DataError(ValueError):
    """Data that is missing, damaged, or not what it should be. The message says what to do."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Training and test images with what a recipe needs to know to feed them to a network.

    Images are uint8 of shape N,C,H,W and labels int64 of shape N. `mean` and `std` are those of
    each channel on the scale 0..1. `crop_padding` is the width of the border around an image from
    which a random crop of the original size is taken (0: no crop); `flip` says whether a mirrored
    image still belongs to its class.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int
    flip: bool

    def __post_init__(self) -> None:
        _check_part("train", self.train_images, self.train_labels, len(self.classes))
        _check_part("test", self.test_images, self.test_labels, len(self.classes))
        train_shape, test_shape = self.train_images.shape[1:], self.test_images.shape[1:]
        if train_shape != test_shape:
            raise DataError(
                f"test_images must have the C,H,W of train_images, {tuple(train_shape)}; "
                f"they have {tuple(test_shape)}."
            )
        _check_statistics(self.mean, self.std, channels=train_shape[0])
        if self.crop_padding < 0:
            raise DataError(f"crop_padding={self.crop_padding} must be 0 (no crop) or more.")

    def split(self, validation: int) -> ImageSet:
        """Hold the last `validation` training images out as the test set, and drop the real one.

        Hyper-parameters are chosen on what this returns, so the test images cannot leak into the
        choice. The split is by position, hence the same in every run: CIFAR-10 comes shuffled, and
        the other loaders order their images so that every tail is stratified. `mean` and `std`
        stay, so that the network sees the same inputs with and without the split.
        """
        count = len(self.train_images)
        if not isinstance(validation, int) or not 0 < validation < count:
            raise DataError(
                f"validation={validation} must be a whole number from 1 to {count - 1}: there are "
                f"{count} training images, and at least one must remain to train on."
            )
        kept = count - validation
        return replace(
            self,
            train_images=self.train_images[:kept],
            train_labels=self.train_labels[:kept],
            test_images=self.train_images[kept:],
            test_labels=self.train_labels[kept:],
        )

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """What tells these images from others, wherever they lie: their pixels and labels in order, hashed.

        CIFAR-10 takes a fifth of a second, and reading any set takes longer.
        """
        names = textwrap.shorten(", ".join(self.classes), 60, placeholder=" …")
        return {
            "training images": _digest(self.train_images, self.train_labels),
            "test images": _digest(self.test_images, self.test_labels),
            "classes": f"{len(self.classes)}: {names} ({_hash('/'.join(self.classes).encode())})",
        }


def load(name: str, folder: Path | None = None, size: int | None = None) -> ImageSet:
    """Load the image set called `name`.

    "digits" ships with scikit-learn and needs no folder; "cifar10" has a default folder (see
    `unflip.data.cifar.load_cifar10`); "folder" is a tree of images and needs one, and takes a `size` (see
    `unflip.data.folders.load_folder`).
    """
    if size is not None and name in KNOWN and name != "folder":
        raise DataError(f"size={size} is for the data set 'folder'; images of {name!r} have one.")
    if name == "digits":
        from unflip.data.digits import load_digits

        return load_digits()
    if name == "cifar10":
        from unflip.data.cifar import load_cifar10

        return load_cifar10(folder)
    if name == "folder":
        from unflip.data.folders import load_folder

        if folder is None:
            raise DataError(
                "The data set 'folder' needs folder=, the directory of the images (--data DIR)."
            )
        return load_folder(folder, size)
    raise DataError(f"name={name!r} is not a known data set; the known ones: {', '.join(KNOWN)}.")


def _digest(images: Tensor, labels: Tensor) -> str:
    size = " × ".join(map(str, images.shape[1:]))
    parts = (t.cpu().contiguous().numpy().data for t in (images, labels))
    return f"{len(images):,} of {size} ({_hash(*parts)})"


def _hash(*parts: bytes | memoryview) -> str:
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        total.update(part)
    return total.hexdigest()


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images, on the scale 0..1.

    Counting the 256 levels first makes the float64 result exact to rounding, and spares the
    eightfold memory of a float64 copy of the images.
    """
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].flatten(), minlength=256).double()
        share = counts / counts.sum()
        mean = (share * levels).sum()
        means.append(mean.item())
        stds.append((share * (levels - mean) ** 2).sum().sqrt().item())
    return tuple(means), tuple(stds)


def stratified_order(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """An order of the examples in which every head and every tail holds the classes in proportion.

    Each example is placed by its relative position within its class, which keeps the order inside
    a class. A set sorted by class would otherwise lose whole classes to `ImageSet.split`.
    """
    position = np.empty(len(labels), dtype=np.float64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        position[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.lexsort((labels, position))


def missing_package(package: str, purpose: str) -> DataError:
    """The error for an optional package that is not installed; the caller raises it."""
    return DataError(f"{purpose} needs {package}. Install it with: pip install 'unflip[train]'")


def _check_part(part: str, images: Tensor, labels: Tensor, classes: int) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.numel() == 0:
        raise DataError(
            f"{part}_images must be a non-empty uint8 tensor of shape N,C,H,W; "
            f"found {images.dtype} of shape {tuple(images.shape)}."
        )
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{part}_labels must be an int64 tensor of shape ({len(images)},), one label an image; "
            f"found {labels.dtype} of shape {tuple(labels.shape)}."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"{part}_labels must lie in 0..{classes - 1}, for there are {classes} classes; "
            f"found {low}..{high}."
        )


def _check_statistics(mean: Sequence[float], std: Sequence[float], channels: int) -> None:
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise DataError(
                f"{name}={tuple(values)} must have one value for each of the {channels} channels."
            )
    if not all(value > 0 for value in std):
        raise DataError(
            f"std={tuple(std)} must be positive: a channel with the same value in every pixel "
            "cannot be normalized."
        )
