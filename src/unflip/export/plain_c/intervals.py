"""Whole numbers that reach a threshold: then bits follow from comparisons of whole numbers, without floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from unflip.export.plain_c.plan import Task
from unflip.export.plain_c.sums import Whole
from unflip.export.whole_steps import evaluated

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32

MOST_TRIED = 2**26  # a layer with more results is too large for a microcontroller
MOST_NUMBER = 2**30  # the difference of two numbers fits 32 bits
SMALL_NUMBER = 2**14  # and 16 bits


def find_intervals(task: Task, whole: Whole) -> tuple[Array, Array] | None:
    """For each step and channel, the first number that reaches it, and how many do, if they are consecutive."""
    if whole.most >= MOST_NUMBER:
        return None
    with np.errstate(all="ignore"):
        found = _bisected(task, whole) if _is_monotone(task, whole) else _tried(task, whole)
    if found is None:
        return None
    kind = np.int16 if whole.most < SMALL_NUMBER else np.int32
    return found[0].astype(kind), found[1].astype(kind)


def _is_monotone(task: Task, whole: Whole) -> bool:
    """Whether results rise or fall with the number. Rounding keeps the order; NaN, at an end first, does not."""
    if any(s["step"] == "prelu" and bool((s["slope"] < 0).any()) for s in task.steps):
        return False
    ends = np.array([-whole.most, whole.most])
    return not np.isnan(_results(task, whole, np.broadcast_to(ends, (task.out[0], 2)))).any()


def _bisected(task: Task, whole: Whole) -> tuple[Array, Array]:
    most, steps, channels = whole.most, len(_strict(task)), task.out[0]
    sign = _signs(task, whole)[:, None]
    # The first number that reaches a step, times sign, is from low to high.
    low = np.full((channels, steps), -most, np.int64)
    high = np.full((channels, steps), most + 1, np.int64)
    while bool((low < high).any()):
        middle = (low + high) // 2
        reached = _reached(task, _results(task, whole, sign * middle))
        high = np.where(reached, middle, high)
        low = np.where(reached, low, np.minimum(middle + 1, high))
    many = most + 1 - low
    return np.where((sign < 0) | (many == 0), -most, low).T, many.T


def _signs(task: Task, whole: Whole) -> Array:
    """1 where results rise with the number or are constant, -1 where they fall."""
    factors = [whole.scale, *(s["scale"] for s in task.steps if "scale" in s)]
    sign = np.ones(task.out[0], np.int64)
    for factor in factors:
        sign = sign * np.where(factor < 0, -1, 1)
    return sign


def _tried(task: Task, whole: Whole) -> tuple[Array, Array] | None:
    """All numbers, one by one."""
    most, channels = whole.most, task.out[0]
    numbers = np.arange(-most, most + 1, dtype=np.int64)
    if numbers.size * channels > MOST_TRIED:
        return None
    v = _results(task, whole, np.broadcast_to(numbers, (channels, numbers.size)))
    reached = np.stack([_reached(task, v, s) for s in range(len(_strict(task)))])
    many = reached.sum(-1)
    first = reached.argmax(-1)
    last = reached.shape[-1] - 1 - reached[..., ::-1].argmax(-1)
    if not bool(((many == 0) | (last - first + 1 == many)).all()):
        return None
    return first - most, many


def _strict(task: Task) -> list[bool]:
    assert task.quantizer is not None
    return task.quantizer.strict


def _reached(task: Task, v: Array, step: int | None = None) -> Array:
    """Of results (channels, steps), each compared with its own step; or (channels, count), with one step."""
    q = task.quantizer
    assert q is not None
    thresholds = np.broadcast_to(q.thresholds, (len(q.strict), task.out[0])).T
    own = slice(None) if step is None else slice(step, step + 1)
    return np.where(np.array(q.strict)[own], v > thresholds[:, own], v >= thresholds[:, own])


def _results(task: Task, whole: Whole, numbers: Array) -> Array:
    """What is compared with thresholds, for numbers (channels, count)."""
    v = whole.scale[:, None] * numbers.astype(F32)
    for step in task.steps:
        v = evaluated(step, v)
    return v
