"""Image sets that are held whole in memory, and what their loaders share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from unflip.data.errors import DataError
from unflip.data.hashes import classes_in_words, short_hash
from unflip.data.spec import InputSpec

if TYPE_CHECKING:
    import torch

    from unflip.data.source import Source

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Training and test images, and what a recipe must know to feed them to a network.

    Images are uint8 arrays of shape N,C,H,W and labels int64 arrays of shape N. `mean` and `std` are
    those of each channel on the scale 0..1. `crop_padding` is the width of the border around an image
    from which a random crop of the original size is taken (0: no crop). `flip` tells whether a
    mirrored image still belongs to its class.
    """

    train_images: Pixels
    train_labels: Labels
    test_images: Pixels
    test_labels: Labels
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
                f"test_images must have the C,H,W of train_images, {train_shape}; they have {test_shape}."
            )
        if self.crop_padding < 0:
            raise DataError(f"crop_padding={self.crop_padding} must be 0 (no crop) or more.")
        _ = self.spec  # checks classes, mean and std

    @cached_property
    def spec(self) -> InputSpec:
        """Shape, classes and normalization of the inputs."""
        channels, height, width = self.train_images.shape[1:]
        return InputSpec((channels, height, width), self.classes, self.mean, self.std)

    def __len__(self) -> int:
        """The number of training images."""
        return len(self.train_images)

    def split(self, validation: int) -> ImageSet:
        """The last `validation` training images become the test set; the real test set is dropped.

        Hyper-parameters are chosen on the result, so the test images cannot leak into the choice.
        The split is by position, and so the same in every run: CIFAR-10 comes shuffled, and the
        other loaders order their images so that every tail is stratified. `mean` and `std` stay, so
        that the network sees the same inputs with and without the split.
        """
        count = len(self)
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
        """A hash of the pixels and labels in their order, whatever folder they come from.

        CIFAR-10 takes a fifth of a second, less than reading it.
        """
        return {
            "training images": _digest(self.train_images, self.train_labels),
            "test images": _digest(self.test_images, self.test_labels),
            "classes": classes_in_words(self.classes),
        }

    def source(self, device: torch.device, workers: int | None = None) -> Source:
        """All images on `device`, for training. No workers are needed, since nothing is decoded. Needs torch."""
        from unflip.data.source import MemorySource

        return MemorySource(self, device)


def _digest(images: Pixels, labels: Labels) -> str:
    size = " × ".join(map(str, images.shape[1:]))
    return f"{len(images):,} of {size} ({short_hash(images, labels)})"


def channel_statistics(images: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images, on the scale 0..1.

    Counting the 256 levels first makes the float64 result exact to rounding, and avoids a float64
    copy of the images, which would take eight times their memory.
    """
    levels = np.arange(256) / 255
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = np.bincount(images[:, channel].ravel(), minlength=256)
        share = counts / counts.sum()
        mean = _sum(share * levels)
        means.append(mean)
        stds.append(math.sqrt(_sum(share * (levels - mean) ** 2)))
    return tuple(means), tuple(stds)


def _sum(values: npt.NDArray[np.float64]) -> float:
    """The sum of 256 numbers in a fixed order, the same to the last bit on every machine.

    The order is that of torch.sum on AVX2: four accumulators of four lanes each.
    """
    a, b, c, d = values.reshape(-1, 4, 4).sum(axis=0).sum(axis=0).tolist()
    return float(a + b + c + d)  # not sum(), which newer versions of Python compensate


def stratified_order(labels: Labels) -> npt.NDArray[np.int64]:
    """An order of the examples in which every head and every tail holds the classes in proportion.

    Each example is placed by its relative position within its class, which keeps the order inside
    a class. A set sorted by class would otherwise lose whole classes to `ImageSet.split`.
    """
    position = np.empty(len(labels), dtype=np.float64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        position[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.lexsort((labels, position))


def _check_part(part: str, images: Pixels, labels: Labels, classes: int) -> None:
    for name, array in ((f"{part}_images", images), (f"{part}_labels", labels)):
        if not isinstance(array, np.ndarray):
            raise DataError(
                f"{name} must be a numpy array, not {type(array).__name__}; tensor.numpy() makes one."
            )
    if images.dtype != np.uint8 or images.ndim != 4 or images.size == 0:
        raise DataError(
            f"{part}_images must be a non-empty uint8 array of shape N,C,H,W; "
            f"found {images.dtype} of shape {images.shape}."
        )
    if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{part}_labels must be an int64 array of shape ({len(images)},), one label per image; "
            f"found {labels.dtype} of shape {labels.shape}."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"{part}_labels must lie in 0..{classes - 1}, because there are {classes} classes; "
            f"found {low}..{high}."
        )
