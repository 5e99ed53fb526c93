"""Rows of a plan as pixels: read, decode, crop. The same code runs in worker processes and in the process that trains.

Does not import torch, because 16 worker processes that import it would take many seconds to start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from unflip.data.errors import DataError
from unflip.data.transforms import Transform
from unflip.pictures import PixelError, decode_pixels
from unflip.resize import Pixels

if TYPE_CHECKING:
    from unflip.data.store import Part

Rows = npt.NDArray[np.int64]  # (images, 2): the number in the part of the store, and the key


class Use(IntEnum):
    """Which part of a store rows refer to, and what is done with its images."""

    TRAIN = 0
    TEST = 1
    HELD_OUT = 2  # training images that are tested on


@dataclass(frozen=True)
class Decoder:
    """The parts of a store and a transform. A worker process gets it pickled."""

    train: Part
    test: Part
    transform: Transform

    def part(self, use: Use) -> Part:
        return self.test if use is Use.TEST else self.train

    def fill(
        self, use: Use, rows: Rows, out: Pixels, begin: Callable[[int], None] | None = None
    ) -> None:
        """Decode the images of ``rows`` into ``out``, uint8 of shape N,H,W,3. ``begin`` gets the number of each."""
        part, transform = self.part(use), self.transform
        for number, (index, key) in enumerate(rows.tolist()):
            if begin is not None:
                begin(index)
            try:
                image = decode_pixels(part.read(index), part.name(index))
                if use is Use.TRAIN:
                    transform.for_training(image, key, out[number])
                else:
                    transform.for_testing(image, out[number])
            except PixelError as error:
                raise DataError(f"{error}.") from error
            except MemoryError as error:
                raise DataError(
                    f"Memory ran out while {part.name(index)} was decoded. Use fewer workers: --image-workers N."
                ) from error

    def decoded(self, use: Use, rows: Rows) -> Pixels:
        """The images of ``rows``, decoded in this process."""
        size = self.transform.size
        images = np.empty((len(rows), size, size, 3), np.uint8)
        self.fill(use, rows, images)
        return images


@dataclass(frozen=True)
class RingShape:
    """How a ring of batches lies in shared memory: one number, then the slots.

    The number is the ticket of the stream that the ring belongs to. A slot has images, labels and rows of at most
    ``batch`` samples.
    """

    slots: int
    batch: int
    size: int

    HEADER = 64

    @property
    def image_bytes(self) -> int:
        return -(-self.batch * self.size**2 * 3 // 64) * 64  # labels begin at a multiple of 64

    @property
    def slot_bytes(self) -> int:
        return -(-(self.image_bytes + 3 * 8 * self.batch) // 64) * 64

    @property
    def bytes(self) -> int:
        return self.HEADER + self.slots * self.slot_bytes

    def ticket(self, memory: Pixels) -> npt.NDArray[np.int64]:
        return memory[:8].view(np.int64)

    def slot(self, memory: Pixels, number: int) -> tuple[Pixels, npt.NDArray[np.int64], Rows]:
        """Images, labels and rows of a slot, as views of ``memory``."""
        start = self.HEADER + number * self.slot_bytes
        images = memory[start : start + self.batch * self.size**2 * 3]
        start += self.image_bytes
        numbers = memory[start : start + 3 * 8 * self.batch].view(np.int64)
        return (
            images.reshape(self.batch, self.size, self.size, 3),
            numbers[: self.batch],
            numbers[self.batch :].reshape(self.batch, 2),
        )
