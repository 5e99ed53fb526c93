"""Operations element by element, and those on pixels and channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from unflip.imports.errors import CannotImport
from unflip.imports.onnx_file import Node
from unflip.imports.qonnx_builder import (
    F32,
    Builder,
    Operand,
    Value,
    any_value,
    constant,
    floats,
    image,
    integers,
    op,
    per_channel,
    positive,
    refuse_padding_rule,
    value_of,
)
from unflip.packing.ir import affine, clamp, prelu

SOFTMAX_OF_ONE_AXIS = 13  # the first opset with it


@op("BatchNormalization")
def _batch_norm(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    node.only(training_mode=0)
    x = value_of(b, node, inputs[0])
    names = ("scale", "bias", "mean", "variance")
    gamma, beta, mean, variance = (
        floats(node, inputs, i, what, (x.channels,)).astype(np.float64)
        for i, what in enumerate(names, 1)
    )
    spread = variance + node.number("epsilon", 1e-5)
    if not (spread > 0).all():
        raise CannotImport(f"{node.title}: a variance plus epsilon is not positive")
    scale = gamma / np.sqrt(spread)
    return b.step(node, x, affine(scale.astype(F32), (beta - mean * scale).astype(F32)))


@op("Add", "Sub", "Mul", "Div")
def _arithmetic(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    if len(inputs) != 2 or inputs[0] is None or inputs[1] is None:
        raise CannotImport(f"{node.title} should have two inputs")
    left, right = inputs
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        raise CannotImport(
            f"{node.title} computes a constant; fold constants before: qonnx-cleanup does that"
        )
    if isinstance(left, np.ndarray):
        if node.op not in ("Add", "Mul"):
            raise CannotImport(f"{node.title}: a constant can only be its second input")
        left, right = right, left
    x = value_of(b, node, left)
    if isinstance(right, Value):
        return _add_values(b, node, x, b.as_float(node, right))
    numbers = per_channel(node, x, right)
    if node.op == "Div" and not numbers.all():
        raise CannotImport(f"{node.title} divides by 0")
    steps = {
        "Add": lambda: affine(None, numbers),
        "Sub": lambda: affine(None, -numbers),
        "Mul": lambda: affine(numbers, None),
        "Div": lambda: affine((1 / numbers.astype(np.float64)).astype(F32), None),
    }
    return b.step(node, x, steps[node.op]())


def _add_values(b: Builder, node: Node, x: Value, other: Value) -> Value:
    if node.op != "Add":
        raise CannotImport(
            f"{node.title} of two values is not supported; only their sum and constants are"
        )
    if (x.shape, x.flat) != (other.shape, other.flat):
        raise CannotImport(f"{node.title} adds values of shapes {x.shape} and {other.shape}")
    return b.step(node, x, {"step": "add", "value": other.number})


@op("Neg")
def _neg(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    return b.step(node, value_of(b, node, inputs[0]), affine(np.full(1, -1, F32), None))


@op("Relu")
def _relu(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    return b.step(node, value_of(b, node, inputs[0]), clamp(0.0, None))


@op("Clip")
def _clip(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    limits: list[float | None] = []
    for place, what in ((1, "min"), (2, "max")):
        given = place < len(inputs) and inputs[place] is not None
        number = constant(node, inputs, place, what) if given else node.attributes.get(what)
        if number is not None and np.size(number) != 1:
            raise CannotImport(f"{node.title}: its {what} should be one number")
        limits.append(None if number is None else float(np.asarray(number).reshape(-1)[0]))
    low, high = limits
    if low is not None and high is not None and low > high:
        raise CannotImport(f"{node.title}: min={low:g} is above max={high:g}")
    return b.step(node, value_of(b, node, inputs[0]), clamp(low, high))


@op("PRelu")
def _prelu(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    x = value_of(b, node, inputs[0])
    return b.step(node, x, prelu(per_channel(node, x, constant(node, inputs, 1, "slope"))))


@op("LeakyRelu")
def _leaky_relu(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    slope = np.full(1, node.number("alpha", 0.01), F32)
    return b.step(node, value_of(b, node, inputs[0]), prelu(slope))


@op("Sigmoid", "Tanh", "Elu")
def _curve(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    node.only(alpha=1.0)
    return b.add("curve", node, [value_of(b, node, inputs[0])], function=node.op.lower())


@op("Softmax", "LogSoftmax")
def _softmax(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    x = value_of(b, node, inputs[0])
    axis = node.whole("axis", -1)
    if axis != 1 and not (x.flat and axis == -1):
        raise CannotImport(f"{node.title}: axis={axis}; only the channels, axis 1, are supported")
    if b.opset < SOFTMAX_OF_ONE_AXIS and not x.flat and x.shape[1:] != (1, 1):
        raise CannotImport(
            f"{node.title}: before opset {SOFTMAX_OF_ONE_AXIS} it is over channels and pixels together; export with a "
            "newer opset"
        )
    return b.add("softmax" if node.op == "Softmax" else "log_softmax", node, [x])


# --- pixels and channels


@op("MaxPool", "AveragePool")
def _pool(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    x = image(node, any_value(node, inputs[0]))
    refuse_padding_rule(node)
    node.only(ceil_mode=0, dilations=[1, 1], storage_order=0)
    top, left, bottom, right = node.wholes("pads", [0] * 4)
    if "kernel_shape" not in node.attributes:
        raise CannotImport(f"{node.title} has no kernel_shape")
    kernel = positive(node, "kernel_shape")
    if (top, left) != (bottom, right) or 2 * top > kernel[0] or 2 * left > kernel[1]:
        raise CannotImport(
            f"{node.title}: pads={[top, left, bottom, right]} for a kernel of {kernel}; they should be equal on both "
            "sides, and at most half of the kernel"
        )
    window: dict[str, Any] = {"kernel": kernel, "stride": positive(node, "strides")}
    window |= {"padding": [top, left], "ceil": False}
    if node.op == "AveragePool":
        counted = bool(node.whole("count_include_pad", 0))
        return b.add("avg_pool", node, [b.as_float(node, x)], **window, count_padding=counted)
    pooled = b.add("max_pool", node, [replace(x, code=None)], **window)
    return replace(pooled, code=x.code)


@op("GlobalAveragePool")
def _global_pool(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    return b.add("mean", node, [image(node, value_of(b, node, inputs[0]))])


@op("ReduceMean")
def _reduce_mean(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    x = image(node, value_of(b, node, inputs[0]))
    axes = node.attributes.get("axes")
    if len(inputs) > 1 and inputs[1] is not None:
        axes = integers(node, inputs, 1, "axes")
    if not _are_pixels(axes):
        raise CannotImport(
            f"{node.title}: axes={axes!r:.40}; only a mean over the pixels, axes 2 and 3, is supported"
        )
    return b.add("mean", node, [x], flat=not node.whole("keepdims", 1))


@op("Flatten")
def _flatten(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    node.only(axis=1)
    return _flat(b, node, any_value(node, inputs[0]))


@op("Reshape")
def _reshape(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    """Constants of any shape; values only from an image to a vector."""
    shape = integers(node, inputs, 1, "shape")
    if isinstance(inputs[0], np.ndarray):
        old = inputs[0].shape if not node.whole("allowzero", 0) else ()
        kept = [old[i] if n == 0 and i < len(old) else n for i, n in enumerate(shape)]
        try:
            return inputs[0].reshape(kept)
        except ValueError as error:
            raise CannotImport(f"{node.title}: {error!s:.150}") from None
    x = any_value(node, inputs[0])
    size = int(np.prod(x.shape))
    if len(shape) != 2 or shape[0] not in (1, 0, -1) or shape[1] not in (size, -1):
        raise CannotImport(
            f"{node.title}: shape={shape!r:.60} for a value of {' × '.join(map(str, x.shape))}; only (1, {size}) or "
            f"(-1, {size}) is supported"
        )
    return _flat(b, node, x)


@op("Squeeze")
def _squeeze(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    x = any_value(node, inputs[0])
    axes = integers(node, inputs, 1, "axes") if len(inputs) > 1 else node.attributes.get("axes")
    if x.shape[1:] != (1, 1) or x.flat or not _are_pixels(axes):
        raise CannotImport(f"{node.title}: only an image of one pixel can become a vector")
    return _flat(b, node, x)


def _are_pixels(axes: Any) -> bool:
    return isinstance(axes, list) and sorted(axis % 4 for axis in axes) == [2, 3]


def _flat(b: Builder, node: Node, x: Value) -> Value:
    if x.flat:
        return x
    code = x.code
    if code is not None and code["thresholds"].shape[1] > 1:  # one row per channel
        pixels = x.shape[1] * x.shape[2]
        code = code | {"thresholds": np.repeat(code["thresholds"], pixels, axis=1)}
    return replace(b.add("flatten", node, [replace(x, code=None)], flat=True), code=code)


@op("Concat")
def _concat(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    node.only(axis=1)
    parts = [value_of(b, node, x) for x in inputs]
    if len({(part.shape[1:], part.flat) for part in parts}) != 1:
        raise CannotImport(f"{node.title}: its inputs have different heights or widths")
    return b.add("concat", node, parts)


@op("Pad")
def _pad(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    node.only(mode="constant")
    x = image(node, value_of(b, node, inputs[0]))
    pads = integers(node, inputs, 1, "pads")
    if len(inputs) > 2 and inputs[2] is not None and np.any(constant(node, inputs, 2, "value")):
        raise CannotImport(f"{node.title}: only a padding by 0 is supported")
    fits = len(pads) == 8 and not pads[0] and not pads[4] and all(0 <= n <= 2**16 for n in pads)
    if len(inputs) > 3 or not fits:
        raise CannotImport(
            f"{node.title}: pads={pads!r:.60}; 8 numbers are needed, and 0 for the batch"
        )
    return b.add("pad", node, [x], before=pads[1:4], after=pads[5:])


@op("Slice")
def _slice(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    x = image(node, value_of(b, node, inputs[0]))
    starts, ends = (integers(node, inputs, i, what) for i, what in ((1, "starts"), (2, "ends")))
    axes = integers(node, inputs, 3, "axes") if len(inputs) > 3 else list(range(len(starts)))
    steps = integers(node, inputs, 4, "steps") if len(inputs) > 4 else [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise CannotImport(f"{node.title}: its starts, ends, axes and steps differ in number")
    start, stop, step = [0, 0, 0], list(x.shape), [1, 1, 1]
    for first, end, axis, by in zip(starts, ends, axes, steps, strict=True):
        place = axis % 4 - 1
        if place < 0 or by < 1 or not -4 <= axis < 4:
            raise CannotImport(
                f"{node.title}: axis {axis} with step {by}; only channels and pixels with steps from 1 are supported"
            )
        size = x.shape[place]
        start[place], stop[place], step[place] = *slice(first, end).indices(size)[:2], by
    return b.add("slice", node, [x], start=start, stop=stop, step=step)
