"""A transposed convolution as an ordinary one and a pixel shuffle, so that the runtime needs no kernels for it.

Along an axis, output pixel y has a part of input pixel i by tap k where y + padding = stride · i + dilation · k. Output
pixels that are ``stride`` apart see the same taps, so each of these *phases* is a small convolution of its own, without
the zeros between pixels that a transposed convolution is often explained by. The phases of both axes are filters of one
convolution, and pixel_shuffle puts what they make side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """Height or width. Of ``rows · stride`` pixels, those from ``crop`` on are the output."""

    stride: int
    crop: int
    rows: int
    before: int  # padding of the ordinary convolution
    after: int
    dilation: int  # and its kernel
    taps: int
    places: tuple[
        tuple[int, int], ...
    ]  # of each tap: its phase, and where it is in that phase's kernel


def axis(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> Axis:
    """The one with the fewest taps, and of these the one that crops least."""
    cut = [
        _axis(size, out, [dilation * k - padding + crop for k in range(kernel)], stride, crop)
        for crop in range(stride)
    ]
    return min(cut, key=lambda found: (found.taps, found.crop))


def _axis(size: int, out: int, shifts: list[int], stride: int, crop: int) -> Axis:
    """Row q of a phase has, by each of its taps, input pixel q − back."""
    rows = (out - 1 + crop) // stride + 1
    back, phases = zip(*(divmod(shift, stride) for shift in shifts), strict=True)
    # A kernel that reaches the first row and the last: padding is never negative, whatever was cut off.
    last, first = max(*back, 0), min(*back, rows - size)
    step = gcd(last - first, *(last - b for b in back)) or 1
    places = tuple((phase, (last - b) // step) for phase, b in zip(phases, back, strict=True))
    taps = (last - first) // step + 1
    return Axis(stride, crop, rows, last, rows - size - first, step, taps, places)


def spread(weight: Tensor, groups: int, high: Axis, wide: Axis) -> Tensor:
    """The ordinary convolution's weight: all phases of a filter, then those of the next."""
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
