"""Large image sets such as ImageNet, decoded while training: the data set ``images``.

The images stay encoded in an ``ImageStore``. Worker processes decode, crop and flip them batch by batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from unflip.data.decoder import Decoder, Rows, Use
from unflip.data.errors import DataError
from unflip.data.image_set import stratified_order
from unflip.data.spec import InputSpec
from unflip.data.store import ImageStore, open_store
from unflip.data.transforms import Transform, epoch_keys, epoch_order
from unflip.data.worker_pool import Batch, WorkerPool, default_workers

if TYPE_CHECKING:
    import torch

    from unflip.data.source import Source

# Of ImageNet's training images, as PyTorch's reference and nearly all published networks use them.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SPLIT_SEED = 0

Numbers = npt.NDArray[np.int64]


def load_images(
    folder: Path | None,
    size: int = 224,
    resize: int | None = None,
    scale_min: float = 0.08,
    jitter: float = 0.0,
    lighting: float = 0.0,
    order: int | None = None,
) -> ImagesDataset:
    """The images of a pack, or of a folder with class folders or tars, as crops of ``size`` × ``size`` pixels.

    Training: random resized crops and flips as in PyTorch's reference; see ``Transform`` for ``scale_min``, ``jitter``
    and ``lighting``. Testing: the short side is resized to ``resize`` (by default 8/7 of ``size``: 256 for 224), and
    the center is cropped. ``order`` is a seed for the order and crops of all epochs; by default a run's own seed is
    used. Runs with the same ``order`` see the same batches.
    """
    if folder is None:
        raise DataError(
            "The data set 'images' needs a pack (NAME.pack) or a folder of images: give --data (folder= in Python)."
        )
    if order is not None and (type(order) is not int or order < 0):
        raise DataError(
            f"order={order!r} must be a whole number, 0 or more. Set data.order, or leave it out."
        )
    if type(size) is not int or size < 1:
        raise DataError(
            f"size={size!r} must be a whole number of pixels, at least 1. Set data.size."
        )
    transform = Transform(
        size, round(size * 8 / 7) if resize is None else resize, scale_min, jitter, lighting
    )
    store = open_store(Path(folder))
    for name, part in (("training", store.train), ("test", store.test)):
        if not len(part):
            raise DataError(f"{folder} has no {name} images. Give a pack or folder that has some.")
    return ImagesDataset(store, transform, order)


@dataclass(frozen=True, eq=False)
class ImagesDataset:
    """A store and how its images are prepared. ``held_out`` training images are tested on, if it is not 0."""

    store: ImageStore
    transform: Transform = field(default_factory=Transform)
    order: int | None = None
    held_out: int = 0

    @cached_property
    def spec(self) -> InputSpec:
        size = self.transform.size
        return InputSpec((3, size, size), self.store.classes, MEAN, STD)

    @property
    def fingerprint(self) -> dict[str, str]:
        found = self.store.fingerprint
        if not self.held_out:
            return found
        whole, count = found["training images"], self.held_out
        return found | {
            "training images": f"{whole} without {count:,} held out",
            "test images": f"{count:,} held out of {whole}",
        }

    def __len__(self) -> int:
        return len(self.store.train) - self.held_out

    def split(self, validation: int) -> ImagesDataset:
        """The same store with ``validation`` training images in place of the test images.

        They are the same in every run, and have the classes in proportion.
        """
        if not isinstance(validation, int) or not 0 < validation < len(self):
            raise DataError(
                f"validation={validation} must be a whole number from 1 to {len(self) - 1}: there are {len(self)} "
                "training images, and at least one must remain to train on."
            )
        return replace(self, held_out=self.held_out + validation)

    @cached_property
    def _split(self) -> tuple[Numbers, Numbers]:
        """The numbers of the training images and of the test images, in their parts of the store."""
        train, test = (
            np.arange(len(part), dtype=np.int64) for part in (self.store.train, self.store.test)
        )
        if not self.held_out:
            return train, test
        shuffled = epoch_order(SPLIT_SEED, 0, len(train))
        chosen = shuffled[stratified_order(self.store.train.labels[shuffled])]
        return np.sort(chosen[: -self.held_out]), np.sort(chosen[-self.held_out :])

    @property
    def test_count(self) -> int:
        return self.held_out or len(self.store.test)

    def plan(self, seed: int, epoch: int) -> Rows:
        """All rows of an epoch, in its order: the number of a training image, and its key."""
        seed = seed if self.order is None else self.order
        order = epoch_order(seed, epoch, len(self))
        return np.stack([order, epoch_keys(seed, epoch, len(self))[order]], axis=1)

    def train_rows(self, plan: Rows) -> Rows:
        """Rows of a plan, as a decoder takes them: with the numbers in the store."""
        return np.stack([self._split[0][plan[:, 0]], plan[:, 1]], axis=1)

    def test_rows(self, numbers: range, size: int) -> Iterator[Rows]:
        """Some of the test images, ``size`` at a time."""
        for first in numbers[::size]:
            index = self._split[1][first : min(first + size, numbers.stop)]
            yield np.stack([index, np.zeros_like(index)], axis=1)

    @property
    def test_use(self) -> Use:
        return Use.HELD_OUT if self.held_out else Use.TEST

    @property
    def decoder(self) -> Decoder:
        return Decoder(self.store.train, self.store.test, self.transform)

    def test_batches(self, size: int, workers: int | None = None) -> Iterator[Batch]:
        """All test images in order as arrays: uint8 of shape N,H,W,3 and labels. Does not need torch."""
        pool = WorkerPool(self.decoder, default_workers() if workers is None else workers)
        try:
            rows = self.test_rows(range(self.test_count), size)
            with pool.stream(self.test_use, rows, size) as batches:
                yield from batches
        finally:
            pool.close()

    def source(self, device: torch.device, workers: int | None = None) -> Source:
        """Batches for training, decoded by ``workers`` processes (None: one per CPU). Needs torch."""
        from unflip.data.images_source import ImagesSource

        return ImagesSource(self, device, default_workers() if workers is None else workers)
