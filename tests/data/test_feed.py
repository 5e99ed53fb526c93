"""Feeding the batches of streamed sources: order, restarts, several readers, and streams that are closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from unflip.data import InputSpec
from unflip.data.feed import Feed, empty_inputs, first_inputs
from unflip.data.source import StreamedSource, in_batches

CPU = torch.device("cpu")
BATCH, STEPS = 3, 5


class Numbers:
    """Image i is one pixel of value i; its label is 100 + i. The slots of the ring are used again, as workers do."""

    resident = False
    spec = InputSpec((1, 1, 1), ("a", "b"), (0.5,), (0.25,))
    test_count = 0

    def __init__(self, slots: int = 3) -> None:
        self.open, self.decoded = 0, 0
        self.ring = [torch.zeros(BATCH, 1, 1, 1, dtype=torch.uint8) for _ in range(slots)]

    def __len__(self) -> int:
        return BATCH * STEPS

    def plan(self, seed: int, epoch: int, batch_size: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1000 + epoch)
        order = torch.randperm(len(self), generator=generator)
        return in_batches(torch.stack([order, order], dim=1), batch_size)

    def batch(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        return self.normalize(plan[:, :1].to(torch.uint8).view(-1, 1, 1, 1)), 100 + plan[:, 0]

    @contextmanager
    def stream(self, plan: Tensor, first: int = 0) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
        self.open += 1
        try:
            yield self._batches(plan[first:])
        finally:
            self.open -= 1

    def _batches(self, plan: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for number, row in enumerate(plan):
            self.decoded += 1
            slot = self.ring[number % len(self.ring)]
            slot.view(-1).copy_(row[:, 0])
            yield slot, 100 + row[:, 0]

    def normalize(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - 0.5).div(0.25).permute(0, 3, 1, 2)

    def test_batches(self, size: int, part: tuple[int, int] = (0, 1)) -> Iterator[Any]:
        return iter(())

    def close(self) -> None: ...


class OnlyBatches(Numbers):
    """A source without a stream, as users write it."""

    stream: Any = None  # type: ignore[assignment]


def test_the_fake_source_is_streamed() -> None:
    assert isinstance(Numbers(), StreamedSource)


@pytest.mark.parametrize("first", [0, 2, STEPS - 1])
def test_steps_come_in_the_order_of_the_plan(first: int) -> None:
    source = Numbers()
    plan = source.plan(0, 0, BATCH)
    feed, target = Feed(source, CPU), first_inputs(source, plan, CPU)
    feed.start(plan, first)
    for row in plan[first:]:
        feed.fill(target)
        feed.fetch()  # the next batch must not overwrite the one that was filled in
        rows, images, labels = target
        assert torch.equal(rows, row)
        assert torch.equal(images.flatten().long(), row[:, 0])
        assert torch.equal(labels, 100 + row[:, 0])
    with pytest.raises(AssertionError, match="after the last one"):
        feed.fill(target)
    feed.close()
    assert source.open == 0


def test_several_targets_get_the_same_batch_which_is_decoded_once() -> None:
    source = Numbers()
    plan = source.plan(0, 0, BATCH)
    targets = [first_inputs(source, plan, CPU) for _ in range(3)]
    source.decoded = 0
    feed = Feed(source, CPU)
    feed.start(plan)
    for _ in plan:
        feed.fill(*targets)
        for other in targets[1:]:
            assert all(torch.equal(a, b) for a, b in zip(other, targets[0], strict=True))
    assert source.decoded == STEPS
    feed.close()


def test_a_new_start_closes_the_old_stream() -> None:
    source = Numbers()
    plan = source.plan(0, 0, BATCH)
    feed, target = Feed(source, CPU), first_inputs(source, plan, CPU)
    feed.start(plan)
    feed.fill(target)
    other = source.plan(0, 1, BATCH)
    feed.start(other, 3)
    assert source.open == 1
    feed.fill(target)
    assert torch.equal(target[0], other[3])
    feed.close()
    assert source.open == 0


def test_a_source_without_a_stream_gives_its_batches() -> None:
    source = OnlyBatches()
    plan = source.plan(0, 0, BATCH)
    target = first_inputs(source, plan, CPU)
    assert torch.equal(target[1], source.batch(plan[0])[0])
    assert target[1].shape == (BATCH, 1, 1, 1)


def test_inputs_keep_their_types_and_layout() -> None:
    source = Numbers()
    plan = source.plan(0, 0, BATCH)
    rows, images, labels = first_inputs(source, plan, CPU)
    assert (rows.dtype, images.dtype, labels.dtype) == (torch.int64, torch.uint8, torch.int64)
    like = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    _, copy, _ = empty_inputs((rows, like, labels), CPU)
    assert copy.stride() == like.stride()
