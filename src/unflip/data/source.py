"""Sources: the images of a data set as training reads them, batch by batch, on the device.

Everything random about an epoch is its plan, drawn on the CPU from (seed, epoch) alone. So a resumed
run, another device and every rank of a distributed run see the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from unflip.data.spec import InputSpec

if TYPE_CHECKING:
    from unflip.data.image_set import ImageSet


class Source(Protocol):
    """What training asks of a data set. ``len(source)`` is the number of training images.

    A plan says for each image of an epoch which one it is and how it is changed (cropped, flipped). Its first column is
    the image; the other columns are the source's own.

    ``resident`` tells whether :meth:`batch` computes on the device, from the plan alone. Then it may be compiled and
    captured in a CUDA graph, and the plan is on the device. Otherwise the source is streamed: the plan stays on the
    CPU, and :meth:`batch` may read files and decode.
    """

    @property
    def spec(self) -> InputSpec: ...

    @property
    def resident(self) -> bool: ...

    @property
    def test_count(self) -> int: ...

    def __len__(self) -> int: ...

    def plan(self, seed: int, epoch: int, batch_size: int) -> Tensor:
        """An epoch as int64 of shape (steps, batch, columns) on the CPU; a last partial batch is dropped.

        It depends on the arguments alone, not on earlier calls or the global random state.
        """

    def batch(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        """The images of some rows of a plan, float of shape N,C,H,W and normalized, and their labels; on the device."""

    def test_batches(
        self, size: int, part: tuple[int, int] = (0, 1)
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The test images in order, ``size`` at a time (the last batch may be smaller), as :meth:`batch` gives them.

        ``part`` is (number, count): only the images of :func:`numbers_of_part`. A process among several that evaluate
        together asks for its own part.
        """


@runtime_checkable
class FinitePictures(Protocol):
    """What a source may offer besides: only finitely many pictures (an image, its crop and flip) can occur.

    A teacher then computes its logits for all of them before training (``train/teacher.py``).
    """

    def pictures(self) -> tuple[int, ...]:
        """How many values each column of a plan takes, from 0 on. Every combination is a picture."""


@runtime_checkable
class StreamedSource(Source, Protocol):
    """What a source with ``resident = False`` may offer besides: batches that are decoded ahead of training.

    ``batch(plan)`` equals ``normalize`` of the same rows from :meth:`stream` exactly.
    """

    def stream(
        self, plan: Tensor, first: int = 0
    ) -> AbstractContextManager[Iterator[tuple[Tensor, Tensor]]]:
        """The decoded batches of ``plan[first:]`` in order: uint8 images N,H,W,C and int64 labels on the CPU, pinned if
        the device is a GPU.

        Decoding begins with this call. A batch stays valid until the next but one is asked for: a copy to a GPU must be
        finished by then. Several streams may be open, such as that of the next epoch.
        """

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 images N,H,W,C on the device as normalized float N,C,H,W (channels last). May be captured."""

    def close(self) -> None:
        """End what decodes ahead. It starts again if needed."""


@contextmanager
def closing(source: Source) -> Iterator[Source]:
    """``source``, whose worker processes end on exit if it has any."""
    try:
        yield source
    finally:
        if isinstance(source, StreamedSource):
            source.close()


class MemorySource:
    """An ``ImageSet`` on the device: uint8, channels last, the training images with their border to crop from.

    The columns of a plan are image, top, left and flip.
    """

    resident = True

    def __init__(self, data: ImageSet, device: torch.device) -> None:
        self.spec = data.spec
        _, self.height, self.width = data.spec.shape
        self.padding, self.flip = data.crop_padding, data.flip
        self.mean = (torch.tensor(data.mean) * 255).to(device)
        self.std = (torch.tensor(data.std) * 255).to(device)
        self.train_labels = _tensor(data.train_labels, device)
        self.test_labels = _tensor(data.test_labels, device)
        self.test = _channels_last(data.test_images, device)
        # Padding a normalized image with zeros, as is usual, is padding the raw image with its mean. uint8 cannot hold
        # that value, so the border is set to zero after normalizing.
        p = self.padding
        self.train = F.pad(_channels_last(data.train_images, device), (0, 0, p, p, p, p))

    @property
    def test_count(self) -> int:
        return len(self.test_labels)

    def __len__(self) -> int:
        return len(self.train_labels)

    def plan(self, seed: int, epoch: int, batch_size: int) -> Tensor:
        generator = torch.Generator().manual_seed(mix(seed, epoch))
        count, tops, _, flips = self.pictures()
        order = torch.randperm(count, generator=generator)
        shifts = torch.randint(0, tops, (count, 2), generator=generator)
        mirrored = torch.randint(0, flips, (count, 1), generator=generator)
        rows = torch.cat([order[:, None], shifts, mirrored], dim=1)
        return in_batches(rows, batch_size)

    def batch(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        index, top, left, flip = plan.unbind(-1)
        down = torch.arange(self.height, device=plan.device)
        across = torch.arange(self.width, device=plan.device)
        rows = top[:, None] + down
        columns = left[:, None] + torch.where(flip[:, None] > 0, self.width - 1 - across, across)
        raw = self.train[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        inside = (
            _inside(rows, self.padding, self.height)[:, :, None]
            & _inside(columns, self.padding, self.width)[:, None, :]
        )
        images = (raw.float() - self.mean) / self.std * inside[..., None]
        return images.permute(0, 3, 1, 2), self.train_labels[index]

    def test_batches(
        self, size: int, part: tuple[int, int] = (0, 1)
    ) -> Iterator[tuple[Tensor, Tensor]]:
        mine = numbers_of_part(self.test_count, part)
        for start in mine[::size]:
            batch = slice(start, min(start + size, mine.stop))
            images = (self.test[batch].float() - self.mean) / self.std
            yield images.permute(0, 3, 1, 2), self.test_labels[batch]

    def pictures(self) -> tuple[int, ...]:
        shifts = 2 * self.padding + 1
        return len(self), shifts, shifts, 2 if self.flip else 1


def in_batches(rows: Tensor, batch_size: int) -> Tensor:
    """The rows of an epoch as a plan (steps, batch, columns); a last partial batch is dropped."""
    steps = len(rows) // batch_size
    return rows[: steps * batch_size].view(steps, batch_size, rows.shape[1])


def numbers_of_part(count: int, part: tuple[int, int]) -> range:
    """The numbers of the images in part (number, of how many parts). Every image is in exactly one part."""
    number, parts = part
    return range(number * count // parts, (number + 1) * count // parts)


def mix(seed: int, epoch: int) -> int:
    """A seed for a generator: neighboring seeds and epochs must not share one (splitmix64's multipliers)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 1) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) & (2**63 - 1)


def _channels_last(images: npt.NDArray[np.uint8], device: torch.device) -> Tensor:
    return _tensor(images, device).permute(0, 2, 3, 1).contiguous()


def _tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copied where torch could not share it: torch takes only writable memory without negative strides."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(device)


def _inside(position: Tensor, padding: int, size: int) -> Tensor:
    return (position >= padding) & (position < padding + size)
