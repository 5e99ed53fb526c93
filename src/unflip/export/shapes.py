"""Pools, means, and ops that move or resize pixels and channels."""

from __future__ import annotations

import math

from unflip.export.exporter import Exporter, Shape, Value, op
from unflip.packing.file import PackedFileError


@op
def max_pool(
    e: Exporter,
    inputs: list[int],
    *,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil: bool,
) -> Value:
    x = e.float_value(inputs[0])
    size, extra = _pool_size(x.shape, kernel, stride, padding, ceil)
    pads = [*padding, padding[0] + extra[0], padding[1] + extra[1]]
    out = e.onnx.node("MaxPool", x.name, kernel_shape=kernel, strides=stride, pads=pads)
    return Value(out, (x.shape[0], *size))


@op
def avg_pool(
    e: Exporter,
    inputs: list[int],
    *,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil: bool,
    count_padding: bool,
) -> Value:
    """Padding that counts is added first. The padding of rounding up never counts."""
    x = e.float_value(inputs[0])
    size, extra = _pool_size(x.shape, kernel, stride, padding, ceil)
    name, before = x.name, padding
    if count_padding and any(padding):
        name = e.pad(name, [0, *padding], [0, *padding])
        before = [0, 0]
    pads = [*before, before[0] + extra[0], before[1] + extra[1]]
    out = e.onnx.node("AveragePool", name, kernel_shape=kernel, strides=stride, pads=pads)
    return Value(out, (x.shape[0], *size))


@op
def mean(e: Exporter, inputs: list[int]) -> Value:
    x = e.float_value(inputs[0])
    return Value(e.onnx.node("GlobalAveragePool", x.name), (x.shape[0], 1, 1))


@op
def mean_abs(e: Exporter, inputs: list[int], *, over: str, groups: int = 1) -> Value:
    x = e.float_value(inputs[0])
    magnitude = e.onnx.node("Abs", x.name)
    if over == "sample":
        axes = e.onnx.integers(1, 2, 3)
        return Value(e.onnx.node("ReduceMean", magnitude, axes), (1, 1, 1))
    if over != "channels":
        raise PackedFileError(f"over {over!r} must be 'channels' or 'sample'")
    channels, height, width = x.shape
    split = e.reshape(magnitude, groups, channels // groups, height, width)
    out = e.onnx.node("ReduceMean", split, e.onnx.integers(2), keepdims=0)
    return Value(out, (groups, height, width))


@op
def concat(e: Exporter, inputs: list[int]) -> Value:
    parts = [e.float_value(number) for number in inputs]
    out = e.onnx.node("Concat", *[part.name for part in parts], axis=1)
    return Value(out, (sum(part.shape[0] for part in parts), *parts[0].shape[1:]))


@op
def slice_(
    e: Exporter, inputs: list[int], *, start: list[int], stop: list[int], step: list[int]
) -> Value:
    x = e.float_value(inputs[0])
    ranges = [e.onnx.integers(*numbers) for numbers in (start, stop, (1, 2, 3), step)]
    sizes = [len(range(*bounds)) for bounds in zip(start, stop, step, strict=True)]
    return Value(e.onnx.node("Slice", x.name, *ranges), (sizes[0], sizes[1], sizes[2]))


@op
def pad(e: Exporter, inputs: list[int], *, before: list[int], after: list[int]) -> Value:
    x = e.float_value(inputs[0])
    c, h, w = (n + b + a for n, b, a in zip(x.shape, before, after, strict=True))
    return Value(e.pad(x.name, before, after), (c, h, w))


@op
def flatten(e: Exporter, inputs: list[int]) -> Value:
    x = e.float_value(inputs[0])
    features = math.prod(x.shape)
    return Value(e.reshape(x.name, features, 1, 1), (features, 1, 1))


@op
def upsample(e: Exporter, inputs: list[int], *, factor: list[int]) -> Value:
    """Repeats pixels with Expand. Resize is not used, because its rounding depends on an attribute."""
    x, (high, wide) = e.float_value(inputs[0]), factor
    c, h, w = x.shape
    split = e.reshape(x.name, c, h, 1, w, 1)
    spread = e.onnx.node("Expand", split, e.onnx.integers(1, c, h, high, w, wide))
    return Value(e.reshape(spread, c, h * high, w * wide), (c, h * high, w * wide))


@op
def resize(e: Exporter, inputs: list[int], *, size: list[int], align_corners: bool) -> Value:
    x, (high, wide) = e.float_value(inputs[0]), size
    out = e.onnx.node(
        "Resize",
        x.name,
        "",  # the region of interest and the scales, which the size replaces
        "",
        e.onnx.integers(high, wide),
        axes=[2, 3],
        mode="linear",
        coordinate_transformation_mode="align_corners" if align_corners else "half_pixel",
    )
    return Value(out, (x.shape[0], high, wide))


@op
def pixel_shuffle(e: Exporter, inputs: list[int], *, factor: list[int]) -> Value:
    x, (high, wide) = e.float_value(inputs[0]), factor
    channels, h, w = x.shape
    c = channels // (high * wide)
    split = e.reshape(x.name, c, high, wide, h, w)
    moved = e.onnx.node("Transpose", split, perm=[0, 1, 4, 2, 5, 3])
    return Value(e.reshape(moved, c, h * high, w * wide), (c, h * high, w * wide))


@op
def channel_shuffle(e: Exporter, inputs: list[int], *, groups: int) -> Value:
    x = e.float_value(inputs[0])
    channels, h, w = x.shape
    split = e.reshape(x.name, groups, channels // groups, h, w)
    moved = e.onnx.node("Transpose", split, perm=[0, 2, 1, 3, 4])
    return Value(e.reshape(moved, *x.shape), x.shape)


def _pool_size(
    shape: Shape, kernel: list[int], stride: list[int], padding: list[int], ceil: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The output's height and width, and the padding that rounding up adds at the bottom and right."""
    sizes, extras = [], []
    for i in (0, 1):
        padded = shape[1 + i] + 2 * padding[i]
        size = (padded - kernel[i]) // stride[i] + 1
        rest = (padded - kernel[i]) % stride[i]
        if ceil and rest and size * stride[i] < shape[1 + i] + padding[i]:
            size += 1
        sizes.append(size)
        extras.append(max(0, (size - 1) * stride[i] + kernel[i] - padded))
    return (sizes[0], sizes[1]), (extras[0], extras[1])
