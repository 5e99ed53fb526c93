"""The matrix products of ``operator.py``, whose docstring has the formulas. Factors are halves, sums are float32."""

from __future__ import annotations

import torch
from torch import Tensor

# For each column of an image: it and its neighbors (first, end), and the taps that they meet.
NEIGHBORS = ((slice(0, 2), slice(1, 3)), (slice(0, 3), slice(0, 3)), (slice(1, 3), slice(0, 2)))
# For each row of taps: the rows of images that have a row there, and those rows.
SHIFTS = ((slice(1, 3), slice(0, 2)), (slice(0, 3), slice(0, 3)), (slice(0, 2), slice(1, 3)))
MIDDLE_FIRST = (1, 0, 2)  # the middle one covers all; the others are added to it


def _set_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """The products of matrices of halves, in float32."""
    if a.is_cuda:
        torch.bmm(a, b, out_dtype=torch.float32, out=total)
    else:
        total.copy_(a.float() @ b.float())


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.is_cuda:
        torch.baddbmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a.float() @ b.float()


def _times(part: slice, size: int) -> slice:
    """The same part of rows or columns that are ``size`` long."""
    return slice(part.start * size, part.stop * size)


def sum_over_taps(x: Tensor, taps: Tensor) -> Tensor:
    """x: (layers, rows and filters, columns and channels); taps: (layers, 3, columns and channels, out).

    The result is (columns, layers, rows and filters, out).
    """
    layers, pixels, wide = x.shape
    out = x.new_empty(3, layers, pixels, taps.shape[-1], dtype=torch.float32)
    for column, (near, met) in enumerate(NEIGHBORS):
        around, factors = x[..., _times(near, wide // 3)], taps[:, :, _times(met, wide // 3)]
        for d in MIDDLE_FIRST:
            to, of = (_times(rows, pixels // 3) for rows in SHIFTS[d])
            put = _set_product if d == 1 else _add_product
            put(out[column][:, to], around[:, of], factors[:, d])
    return out


def weight_products(grads: Tensor, x: Tensor) -> Tensor:
    """grads: (columns, layers, rows and filters, out); x: (layers, rows and filters, columns and channels).

    The result is (layers, out, 3, 3, channels).
    """
    _, layers, pixels, out = grads.shape
    channels = x.shape[-1] // 3
    total = x.new_empty(layers, out, 3, 3 * channels, dtype=torch.float32)
    for d, shift in enumerate(SHIFTS):
        to, of = (_times(rows, pixels // 3) for rows in shift)
        for column in MIDDLE_FIRST:
            near, met = (_times(part, channels) for part in NEIGHBORS[column])
            put = _set_product if column == 1 else _add_product
            put(total[:, :, d, met], grads[column][:, to].transpose(1, 2), x[:, of, near])
    return total.view(layers, out, 3, 3, channels)
