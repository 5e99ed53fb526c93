"""The streamed source of the data set ``images``: batches that worker processes decode ahead, as tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unflip.data.decoder import Use
from unflip.data.source import in_batches, numbers_of_part
from unflip.data.worker_pool import Batch, WorkerPool
from unflip.resize import Pixels

if TYPE_CHECKING:
    from unflip.data.images import ImagesDataset


class ImagesSource:
    """An ``ImagesDataset`` for training. The columns of a plan are image and key.

    The workers start with the first stream, and end with :meth:`close` or with this object.
    """

    resident = False

    def __init__(self, data: ImagesDataset, device: torch.device, workers: int) -> None:
        self.data, self.device, self.workers = data, device, workers
        self.spec, self.test_count = data.spec, data.test_count
        self.mean = (torch.tensor(data.spec.mean) * 255).to(device)
        self.std = (torch.tensor(data.spec.std) * 255).to(device)
        self._started: WorkerPool | None = None

    def __len__(self) -> int:
        return len(self.data)

    def plan(self, seed: int, epoch: int, batch_size: int) -> Tensor:
        return in_batches(torch.from_numpy(self.data.plan(seed, epoch)), batch_size)

    def batch(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.data.train_rows(plan.numpy())
        images = self.data.decoder.decoded(Use.TRAIN, rows)
        labels = torch.from_numpy(self.data.store.train.labels[rows[:, 0]])
        return self.normalize(torch.from_numpy(images).to(self.device)), labels.to(self.device)

    @contextmanager
    def stream(self, plan: Tensor, first: int = 0) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
        rows = map(self.data.train_rows, plan[first:].numpy())
        with self._pool().stream(Use.TRAIN, rows, plan.shape[1]) as batches:
            yield map(self._tensors, batches)

    def normalize(self, images: Tensor) -> Tensor:
        return ((images.float() - self.mean) / self.std).permute(0, 3, 1, 2)

    def test_batches(
        self, size: int, part: tuple[int, int] = (0, 1)
    ) -> Iterator[tuple[Tensor, Tensor]]:
        numbers = numbers_of_part(self.test_count, part)
        size = max(1, min(size, len(numbers)))
        rows = self.data.test_rows(numbers, size)
        with self._pool().stream(self.data.test_use, rows, size) as batches:
            for images, labels in map(self._tensors, batches):
                # These copies wait: the slot may be filled again once the next but one is asked for.
                yield self.normalize(images.to(self.device)), labels.to(self.device, copy=True)

    def close(self) -> None:
        """End the workers. A later stream starts new ones."""
        if self._started is not None:
            self._started.close()
            self._started = None

    def _pool(self) -> WorkerPool:
        if self._started is None or not self._started.close.alive:
            pin = _pinned if self.device.type == "cuda" else None
            self._started = WorkerPool(self.data.decoder, self.workers, pin)
        return self._started

    @staticmethod
    def _tensors(batch: Batch) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return torch.from_numpy(images), torch.from_numpy(labels)


def _pinned(memory: Pixels) -> Callable[[], None]:
    """Lock the shared memory's pages, so that a GPU reads batches from it without another copy on the host."""
    cuda = torch.cuda.cudart()
    code = int(cuda.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if code == 0:
        return partial(cuda.cudaHostUnregister, memory.ctypes.data)
    warnings.warn(
        f"decoded batches cannot be pinned (CUDA error {code}), so copies to the GPU are slower. "
        "Raise the limit of locked memory: ulimit -l",
        stacklevel=2,
    )
    return lambda: None
