"""Convolutions and linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unflip.packing.convert import Converter, Ref, numbers
from unflip.packing.file import Array
from unflip.packing.ir import Fields, affine, conv_fields, sides_of
from unflip.packing.ops.registry import handles, pair
from unflip.packing.transposed import Axis, axis, spread


@handles("conv2d")
def conv2d(
    c: Converter,
    out: Tensor,
    x: Ref,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Ref:
    weight = c.constant(weight, "weight")
    dilation, kernel = pair(dilation), weight.shape[2:]
    padding = padding if isinstance(padding, str) else pair(padding)
    x, sides = _with_padding(c, x, sides_of(padding, kernel, dilation))
    fields = conv_fields(weight.shape, pair(stride), sides, dilation, groups)
    return _with_bias(c, out, [x], fields, weight, bias)


def _with_padding(c: Converter, x: Ref, sides: list[int]) -> tuple[Ref, list[int]]:
    """The convolution does the padding of pixels before it (F.pad, nn.ZeroPad2d)."""
    op = c.ops[x.value - 1] if x.value else None
    if op is None or op.kind != "pad" or op.fields["before"][0] or op.fields["after"][0]:
        return x, sides
    around = [*op.fields["before"][1:], *op.fields["after"][1:]]
    total = [a + b for a, b in zip(sides, around, strict=True)]
    return Ref(op.inputs[0], x.tensor), total


@handles("conv_transpose2d")
def conv_transpose2d(
    c: Converter,
    out: Tensor,
    x: Ref,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Ref:
    weight = c.constant(weight, "weight")
    sizes = zip(
        c.shape(x.tensor)[1:],
        c.shape(out)[1:],  # includes output_padding
        weight.shape[2:],
        pair(stride),
        pair(padding),
        pair(dilation),
        strict=True,
    )
    high, wide = (axis(*along) for along in sizes)
    kernel = spread(weight, groups, high, wide)
    sides = [high.before, wide.before, high.after, wide.after]
    fields = conv_fields(kernel.shape, [1, 1], sides, [high.dilation, wide.dilation], groups)
    phases = c.emit(
        "conv", [x], (len(kernel), high.rows, wide.rows), **fields, weight=_array(kernel)
    )
    return _biased(c, out, _interleaved(c, out, phases, high, wide), bias)


def _interleaved(c: Converter, out: Tensor, x: Ref, high: Axis, wide: Axis) -> Ref:
    """Interleave the pixels of the phases and crop them to the output."""
    channels, height, width = c.shape(out)
    factor = [high.stride, wide.stride]
    size = high.rows * high.stride, wide.rows * wide.stride
    if factor != [1, 1]:
        x = c.emit("pixel_shuffle", [x], (channels, *size), factor=factor)
    if size != (height, width):
        stop = [channels, high.crop + height, wide.crop + width]
        start = [0, high.crop, wide.crop]
        x = c.emit("slice", [x], (channels, height, width), start=start, stop=stop, step=[1, 1, 1])
    return x


@handles("conv_transpose1d", "conv_transpose3d")
def other_conv_transpose(c: Converter, out: Tensor, x: Ref, *rest: Any, **named: Any) -> Ref:
    raise c.refuse("only nn.ConvTranspose2d, for images, can be packed")


@handles("linear")
def linear(c: Converter, out: Tensor, x: Ref, weight: Any, bias: Any = None) -> Ref:
    weight = c.constant(weight, "weight")
    if x.tensor.dim() != 2:
        raise c.refuse(
            f"its input has shape {tuple(x.tensor.shape)}; a linear layer needs vectors (N, F): flatten the input first"
        )
    fields = conv_fields([*weight.shape, 1, 1])
    return _with_bias(c, out, [x], fields, weight[:, :, None, None], bias)


@handles("matmul", "mm")
def matmul(c: Converter, out: Tensor, x: Any, weight: Any) -> Ref:
    if not isinstance(x, Ref) or isinstance(weight, Ref) or weight.dim() != 2:
        raise c.refuse("only a vector times a constant matrix can be packed")
    return linear(c, out, x, weight.T)


def _with_bias(
    c: Converter, out: Tensor, x: list[Ref], fields: Fields, weight: Tensor, bias: Any
) -> Ref:
    return _biased(c, out, c.emit("conv", x, out, **fields, weight=_array(weight)), bias)


def _array(weight: Tensor) -> Array:
    return weight.detach().to(torch.float32).contiguous().numpy()


def _biased(c: Converter, out: Tensor, result: Ref, bias: Any) -> Ref:
    bias = c.constant(bias, "bias")
    return result if bias is None else c.map(result, out, affine(None, numbers(bias)))
