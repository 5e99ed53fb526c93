"""Batches of a streamed source on the device, each copied there while the step before it still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor

from unflip.data.source import Source, StreamedSource

Inputs = tuple[Tensor, Tensor, Tensor]  # rows of a plan, images (before normalize, if any), labels

VALID = 2  # batches of a stream that may be in use: the next but one overwrites the first


class Feed:
    """The inputs of one step after the other. ``close()`` ends the stream; a feed can be started again.

    On a GPU a batch is copied by a stream of its own into a buffer, and from there to where the step reads it: the slow
    copy overlaps with the step before.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source, self.device = source, device
        self._open = ExitStack()
        self._waiting: Iterator[Inputs] = iter(())
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: deque[torch.cuda.Event] = deque()
        self._read: torch.cuda.Event | None = None  # the buffer, by the step that was launched last
        self._buffer: Inputs | None = None
        self._full = False

    def start(self, plan: Tensor, first: int = 0) -> None:
        """Begin with step ``first`` of a plan (steps, batch, columns). A stream decodes from now on."""
        self.close()
        self._waiting = self._inputs(plan, first)

    def close(self) -> None:
        for event in self._copied:  # the slots of a closed stream are used again
            event.synchronize()
        self._copied.clear()
        self._open.close()
        self._full = False

    def fill(self, *targets: Inputs) -> None:
        """Copy the next inputs into the tensors of each target. Call :meth:`fetch` after the step was launched."""
        if not self._full:
            self._fetch()
        assert self._buffer is not None
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
        for target in targets:
            for to, value in zip(target, self._buffer, strict=True):
                to.copy_(value)
        if self._side is not None:
            self._read = torch.cuda.Event()
            self._read.record(torch.cuda.current_stream(self.device))
        self._full = False

    def fetch(self) -> None:
        """Begin to copy the inputs of the next step, if there is one, while the device computes."""
        if not self._full:
            self._fetch(needed=False)

    def _fetch(self, needed: bool = True) -> None:
        if len(self._copied) == VALID:
            self._copied.popleft().synchronize()
        inputs = next(self._waiting, None)
        if inputs is None:
            assert not needed, "a step was asked for after the last one of the plan"
            return
        if self._side is None or inputs[1].is_cuda:  # computed there, by the stream that reads it
            self._buffer = inputs
        else:
            self._copy(inputs)
        self._full = True

    def _copy(self, inputs: Inputs) -> None:
        assert self._side is not None
        if self._buffer is None:
            self._buffer = empty_inputs(inputs, self.device)
            # Its memory may have been that of a tensor which earlier operations still use.
            self._side.wait_stream(torch.cuda.current_stream(self.device))
        if self._read is not None:  # not until the step is over, which reads a copy
            self._side.wait_event(self._read)
        with torch.cuda.stream(self._side):
            for to, value in zip(self._buffer, inputs, strict=True):
                to.copy_(value, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._side)
        self._copied.append(event)

    def _inputs(self, plan: Tensor, first: int) -> Iterator[Inputs]:
        if not isinstance(self.source, StreamedSource):
            return ((row, *self.source.batch(row)) for row in plan[first:])
        batches = self._open.enter_context(self.source.stream(plan, first))
        return ((row, *batch) for row, batch in zip(plan[first:], batches, strict=True))


def empty_inputs(like: Inputs, device: torch.device) -> Inputs:
    """Tensors of the same shapes on the device, for inputs to be copied into."""
    rows, images, labels = (torch.empty_like(value, device=device) for value in like)
    return rows, images, labels


def first_inputs(source: Source, plan: Tensor, device: torch.device) -> Inputs:
    """The inputs of a plan's first step, in tensors that stay where they are."""
    feed = Feed(source, device)
    try:
        feed.start(plan[:1])
        feed.fetch()
        assert feed._buffer is not None
        inputs = empty_inputs(feed._buffer, device)
        feed.fill(inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return inputs
    finally:
        feed.close()
