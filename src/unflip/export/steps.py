"""The element-wise steps of convolutions and maps."""

from __future__ import annotations

import inspect
from typing import Any

from unflip.export.exporter import STEPS, Exporter, Value, op, step
from unflip.packing.file import PackedFileError


@op
def map_(e: Exporter, inputs: list[int], *, steps: list[dict[str, Any]]) -> Value:
    return apply_steps(e, e.any_value(inputs[0]), steps)


def apply_steps(e: Exporter, x: Value, steps: list[dict[str, Any]], exact: bool = False) -> Value:
    """``exact``: x contains integers, or multiples of one number, and must keep them exact."""
    for entry in steps:
        kind = entry.get("step", "")
        fields = {key: value for key, value in entry.items() if key != "step"}
        function = STEPS.get(kind)
        if function is None:
            raise PackedFileError(f"unknown step {kind!r}; the known ones are {', '.join(STEPS)}")
        if function is affine:
            fields["exact"] = exact
        try:
            inspect.signature(function).bind(e, x, **fields)
        except TypeError as error:
            raise PackedFileError(f"step {kind}: {error}") from None
        x = x._replace(name=function(e, x, **fields))
    return x


@step
def affine(
    e: Exporter,
    x: Value,
    *,
    scale: str | None = None,
    shift: str | None = None,
    exact: bool = False,
) -> str:
    name = x.name
    for operator, tensor in (("Mul", scale), ("Add", shift)):
        if tensor is not None:
            constant = e.channels(tensor, x.flat)
            name = e.onnx.node(operator, *((constant, name) if exact else (name, constant)))
    return name


@step
def prelu(e: Exporter, x: Value, *, slope: str) -> str:
    return e.onnx.node("PRelu", x.name, e.channels(slope, x.flat))


@step
def clamp(e: Exporter, x: Value, *, low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return x.name
    if low == 0 and high is None:
        return e.onnx.node("Relu", x.name)
    limits = ["" if limit is None else e.onnx.number(limit) for limit in (low, high)]
    return e.onnx.node("Clip", x.name, *limits[: 1 if high is None else 2])


@step
def add(e: Exporter, x: Value, *, value: int) -> str:
    other = e.as_flat(e.any_value(value)) if x.flat else e.float_value(value)
    if other.shape != x.shape:
        raise PackedFileError(
            f"it adds a value of shape {other.shape} to {x.shape}; both must have the same shape"
        )
    return e.onnx.node("Add", x.name, other.name)


@step
def mul(e: Exporter, x: Value, *, value: int) -> str:
    if x.flat:
        return e.as_flat(Value(mul(e, e.as_image(x), value=value), x.shape)).name
    other = e.float_value(value)
    (channels, *size), groups = x.shape, other.shape[0]
    whole = other.shape == (channels, 1, 1)
    if not whole and (channels % groups or other.shape[1:] != x.shape[1:]):
        raise PackedFileError(
            f"it multiplies {x.shape} by {other.shape}; the factor must be g × H × W, or C × 1 × 1"
        )
    if groups in (1, channels):
        return e.onnx.node("Mul", x.name, other.name)
    split = e.reshape(x.name, groups, channels // groups, *size)
    factor = e.reshape(other.name, groups, 1, *size)
    return e.reshape(e.onnx.node("Mul", split, factor), *x.shape)
