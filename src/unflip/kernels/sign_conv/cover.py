"""Which convolutions the kernels of the binary convolution cover, and the type that holds their sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from unflip.kernels.sign_conv.triton_launch import output_size

EXACT = 2048  # every integer up to this is a float16; beyond, up to twice this, every even one is
MOST_TERMS = 2**24  # every integer up to this is a float32
MOST_ELEMENTS = 2**31 - 2**20  # offsets are int32, and the last block reaches past the end
INPUTS = ("pm1", "01", "given")  # kernels know them by their numbers


def supports(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> bool:
    """Whether the kernels cover this layer. Arguments as of ``F.conv2d``; the padding is zeros."""
    return obstacle(x_shape, weight_shape, stride, padding, dilation, groups) is None


def obstacle(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> str | None:
    """Why the kernels do not cover a binary layer, or None."""
    problem = misfit(x_shape, weight_shape, stride, padding, dilation, groups)
    if problem is not None:
        return problem
    o, c, kh, kw = weight_shape
    if c % 16 or o % 16:
        return f"{c} and {o} channels are not both multiples of 16"
    if c * kh * kw > MOST_TERMS:
        return f"a sum has {c * kh * kw} terms; float32 is exact up to {MOST_TERMS}"
    return None


def product_type(weight_shape: Sequence[int], kind: int) -> torch.dtype:
    """A type that holds the product of a binary layer exactly.

    Inputs of ±1 make even sums, because a tap in the padding leaves out all channels, an even number. Real values of
    few channels (``stem_conv.py``) have short sums.
    """
    terms = math.prod(weight_shape[1:])
    even = INPUTS[kind] == "pm1" and weight_shape[1] % 2 == 0
    return torch.float16 if terms <= (2 * EXACT if even else EXACT) else torch.float32


def misfit(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> str | None:
    """Why the kernels cover no layer of these shapes, whatever its values, or None."""
    if len(x_shape) != 4 or len(weight_shape) != 4:
        return (
            f"input {tuple(x_shape)} and weight {tuple(weight_shape)} should have four dimensions"
        )
    if groups != 1 or single(dilation) != 1:
        return f"groups={groups} and dilation={dilation} are not supported, only 1"
    if single(stride) < 1 or single(padding) < 0:
        return f"stride {stride} or padding {padding} is not one number for both directions"
    (n, c, h, w), (o, weight_c, kh, kw) = x_shape, weight_shape
    if weight_c != c:
        return f"the input has {c} channels, the weight {weight_c}"
    if min(n, c, o, h, w, kh, kw) < 1:
        return f"input {tuple(x_shape)} or weight {tuple(weight_shape)} is empty"
    ho, wo = output_size((h, w), (kh, kw), single(stride), single(padding))
    if min(ho, wo) < 1:
        return f"a {kh}×{kw} kernel is larger than the padded {h}×{w} input"
    if max(n * h * w * c, n * ho * wo * o) > MOST_ELEMENTS:
        return "too many elements for 32-bit offsets"
    return None


def single(value: int | Sequence[int] | str) -> int:
    """2 of 2 or (2, 2); −1 if there is not one number for both directions."""
    if isinstance(value, int):
        return value
    if isinstance(value, str) or len(set(value)) != 1:
        return -1
    return value[0]
