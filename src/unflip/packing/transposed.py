"""Writes a transposed convolution as an ordinary one and a pixel shuffle, so that the runtime needs no kernels for it.

Along an axis, tap k contributes input pixel i to output pixel y if y + padding = stride · i + dilation · k. Output
pixels that are ``stride`` apart use the same taps, so each of these *phases* is a separate small convolution. The
phases of both axes are filters of one convolution, and pixel_shuffle interleaves their results.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """Height or width. The output is the pixels from ``crop`` on, of ``rows · stride`` pixels."""

    stride: int
    crop: int
    rows: int
    before: int  # padding of the ordinary convolution
    after: int
    dilation: int  # and its kernel
    taps: int
    places: tuple[
        tuple[int, int], ...
    ]  # of each tap: its phase and its position in that phase's kernel


def axis(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> Axis:
    """The axis with the fewest taps and, among these, the smallest crop."""
    cut = [
        _axis(size, out, [dilation * k - padding + crop for k in range(kernel)], stride, crop)
        for crop in range(stride)
    ]
    return min(cut, key=lambda found: (found.taps, found.crop))


def _axis(size: int, out: int, shifts: list[int], stride: int, crop: int) -> Axis:
    """Each tap contributes input pixel q − back to row q of its phase."""
    rows = (out - 1 + crop) // stride + 1
    back, phases = zip(*(divmod(shift, stride) for shift in shifts), strict=True)
    # The kernel reaches the first and the last row, so padding is never negative.
    last, first = max(*back, 0), min(*back, rows - size)
    step = gcd(last - first, *(last - b for b in back)) or 1
    places = tuple((phase, (last - b) // step) for phase, b in zip(phases, back, strict=True))
    taps = (last - first) // step + 1
    return Axis(stride, crop, rows, last, rows - size - first, step, taps, places)


def spread(weight: Tensor, groups: int, high: Axis, wide: Axis) -> Tensor:
    """The weight of the ordinary convolution: all phases of a filter, then those of the next filter."""
    grouped = (
        weight.detach().unflatten(0, (groups, -1)).transpose(1, 2)
    )  # groups, filters, channels
    filters, channels = grouped.shape[1:3]
    shape = groups, filters, high.stride, wide.stride, channels, high.taps, wide.taps
    phases = weight.detach().new_zeros(shape)
    for y, (row, down) in enumerate(high.places):
        for x, (column, right) in enumerate(wide.places):
            phases[:, :, row, column, :, down, right] = grouped[..., y, x]
    return phases.flatten(0, 3)
