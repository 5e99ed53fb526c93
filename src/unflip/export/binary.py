"""Quantization and convolutions.

Binary weights stay bits in the file. Nodes before each convolution unpack them to ±1, which a runtime does once, when
it loads the file.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from unflip.export.exporter import Code, Exporter, Shape, Value, op
from unflip.export.steps import apply_steps
from unflip.packing.file import Array, PackedFileError

FLOAT, BOOL = 1, 9  # ONNX's numbers for types
MANY_STEPS = 7  # with more thresholds, a binary search replaces comparisons with each


@op
def quantize(
    e: Exporter,
    inputs: list[int],
    *,
    thresholds: str,
    strict: list[bool],
    coding: str,
    scales: list[float],
    offset: float,
) -> Code:
    if coding not in ("planes", "levels"):
        raise PackedFileError(f"coding {coding!r} must be 'planes' or 'levels'")
    x, limits = e.float_value(inputs[0]), e.tensors[thresholds]
    unit = e.float_value(inputs[1]).name if len(inputs) > 1 else None
    if coding == "levels":
        scales = scales[:1]  # the others follow by doubling: one scale for the number of steps
        if len(strict) > MANY_STEPS and len(set(strict)) == 1 and unit is None:
            return _code(e, [_rank(e, x.name, limits, strict[0])], scales, offset, x.shape)
    steps = [
        _step_reached(e, x.name, limit, above, unit)
        for limit, above in zip(limits, strict, strict=True)
    ]
    common = _common_unit(scales, offset)
    if common and len(steps) == 1:
        low, high = (e.onnx.number(v / common) for v in (offset, offset + scales[0]))
        return Code([(common, e.onnx.node("Where", steps[0], high, low))], 0.0, x.shape)
    terms = [e.onnx.node("Cast", step, to=FLOAT) for step in steps]
    terms = [e.sum(terms)] if coding == "levels" else terms
    return _code(e, terms, scales, offset, x.shape)


@op
def to_bytes(e: Exporter, inputs: list[int], *, scale: str, shift: str, zero: str) -> Code:
    x = e.float_value(inputs[0])
    place = e.onnx.node("Add", e.onnx.node("Mul", x.name, e.channels(scale)), e.channels(shift))
    inside = e.onnx.node("Clip", place, e.onnx.number(0), e.onnx.number(255))
    zeros = e.onnx.constant(e.tensors[zero].astype(np.float32).reshape(-1, 1, 1))
    numbers = e.onnx.node("Sub", e.onnx.node("Round", inside), zeros)
    return Code([(1.0, numbers)], 0.0, x.shape)


def _code(e: Exporter, terms: list[str], scales: list[float], offset: float, shape: Shape) -> Code:
    """One term if scales and offset have a common unit, so that one convolution is enough."""
    common = _common_unit(scales, offset)
    if common is None:
        return Code(list(zip(scales, terms, strict=True)), offset, shape)
    parts = [e.scaled(t, s / common) for s, t in zip(scales, terms, strict=True)]
    if offset:
        parts.append(e.onnx.number(offset / common))
    return Code([(common, e.sum(parts))], 0.0, shape)


def _rank(e: Exporter, x: str, limits: Array, strict: bool) -> str:
    """The number of steps that are reached, by binary search: one comparison per binary digit."""
    digits = len(limits).bit_length()
    table = np.full((limits.shape[1], 2**digits - 1), np.inf, np.float32)
    table[:, : len(limits)] = np.sort(limits, 0).T
    all_limits = e.onnx.constant(table.reshape(-1))
    first = np.arange(0, table.size, table.shape[1], dtype=np.int32).reshape(-1, 1, 1)
    start = at = e.onnx.constant(first)
    for half in (2**digit for digit in reversed(range(digits))):
        # "at" is the position of the channel's first threshold plus the steps known to be reached.
        probe = at if half == 1 else e.onnx.node("Add", at, e.int32(half - 1))
        limit = e.onnx.node("Gather", all_limits, probe)
        above = e.onnx.node("Greater" if strict else "GreaterOrEqual", x, limit)
        more = e.onnx.node("Where", above, e.int32(half), e.int32(0))
        at = e.onnx.node("Add", at, more)
    return e.onnx.node("Cast", e.onnx.node("Sub", at, start), to=FLOAT)


def _step_reached(e: Exporter, x: str, limit: Array, strict: bool, unit: str | None) -> str:
    threshold = e.onnx.constant(limit.reshape(-1, 1, 1))
    if unit is not None:
        threshold = e.onnx.node("Mul", unit, threshold)
    return e.onnx.node("Greater" if strict else "GreaterOrEqual", x, threshold)


@op
def conv(
    e: Exporter,
    inputs: list[int],
    *,
    name: str,
    shape: list[int],
    stride: list[int],
    dilation: list[int],
    padding: list[int],
    groups: int,
    steps: list[dict[str, Any]],
    weight: str | None = None,
    bits: str | None = None,
    bytes: str | None = None,
    scales: str | None = None,
    offset: str | None = None,
) -> Value:
    x = e.values[inputs[0]]
    geometry = {"strides": stride, "dilations": dilation, "pads": padding, "group": groups}
    if weight is not None and isinstance(x, Value):
        kernel = e.onnx.constant(e.tensors[weight])
        out = e.onnx.node("Conv", x.name, kernel, name=name, **geometry)
    elif bytes is not None and scales is not None and isinstance(x, Code):
        kernel = e.onnx.node("Cast", e.onnx.constant(e.tensors[bytes].view(np.int8)), to=FLOAT)
        out = _product(e, x, kernel, geometry, e.tensors[scales], name)
    elif bits is not None and scales is not None:
        kernels = _signs(e, bits, len(e.tensors[scales]), shape)
        code = x if isinstance(x, Code) else Code([(1.0, x.name)], 0.0, x.shape)
        parts = [
            _product(e, code, kernel, geometry, scale, name)
            for kernel, scale in zip(kernels, e.tensors[scales], strict=True)
        ]
        if offset is not None:
            ones = _ones(e, shape, groups)
            parts.append(_product(e, code, ones, geometry, e.tensors[offset], name))
        out = e.sum(parts)
    else:
        raise PackedFileError(
            "needs 'weight' (for a float input), or 'scales' and 'bits' or 'bytes'"
        )
    size = conv_size(x.shape, shape, stride, dilation, padding)
    return apply_steps(e, Value(out, (shape[0], *size)), steps, exact=weight is None)


def _signs(e: Exporter, bits: str, bases: int, shape: list[int]) -> list[str]:
    """Unpack bits to kernels of ±1 with ``shape``, one per base."""
    count = bases * math.prod(shape)
    packed = e.onnx.constant(e.tensors[bits].reshape(-1, 1))
    digits = e.onnx.constant(np.arange(8, dtype=np.uint8))
    one = e.onnx.constant(np.array(1, np.uint8))
    all_bits = e.onnx.node("BitShift", packed, digits, direction="RIGHT")
    flags = e.onnx.node("Cast", e.onnx.node("BitwiseAnd", all_bits, one), to=BOOL)
    signs = e.onnx.node("Where", flags, e.onnx.number(1), e.onnx.number(-1))
    if count % 8:
        signs = e.onnx.node("Reshape", signs, e.onnx.integers(-1))
        signs = e.onnx.node("Slice", signs, e.onnx.integers(0), e.onnx.integers(count))
    stacked = [bases * shape[0], *shape[1:]]
    signs = e.onnx.node("Reshape", signs, e.onnx.integers(*stacked))
    if bases == 1:
        return [signs]
    return e.onnx.nodes("Split", signs, outputs=bases, num_outputs=bases, axis=0)


def _ones(e: Exporter, shape: list[int], groups: int) -> str:
    """A kernel of ones, which sums a filter's inputs. Without groups, one filter is enough."""
    filters = 1 if groups == 1 else shape[0]
    size = e.onnx.integers(filters, *shape[1:])
    return e.onnx.node("Expand", e.onnx.number(1), size)


def _product(
    e: Exporter, code: Code, kernel: str, geometry: dict[str, Any], scale: Array, name: str
) -> str:
    """``scale · conv(code, kernel)``; the convolution is of integers."""
    parts = []
    for factor, term in [*code.terms, *_offset_term(e, code)]:
        out = e.onnx.node("Conv", term, kernel, name=name, **geometry)
        factors = (scale.astype(np.float64) * factor).astype(np.float32).reshape(-1, 1, 1)
        if (factors != 1).any():
            out = e.onnx.node("Mul", e.onnx.constant(factors), out)
        parts.append(out)
    return e.sum(parts)


def _offset_term(e: Exporter, code: Code) -> list[tuple[float, str]]:
    """A code's offset as an image of ones. Padding is 0, not the offset, so it cannot be a constant."""
    if code.offset == 0:
        return []
    size = e.onnx.integers(1, *code.shape)
    return [(code.offset, e.onnx.node("Expand", e.onnx.number(1), size))]


def _common_unit(scales: list[float], offset: float) -> float | None:
    """A number of which all scales and the offset are small multiples, or None if there is none."""
    exact = [Fraction(number) for number in (*scales, offset) if number]
    if not exact:
        return 1.0
    smallest = min(abs(number) for number in exact)
    for unit in (smallest, smallest / 2):
        ratios = [number / unit for number in exact]
        if all(ratio.denominator == 1 and abs(ratio) < 2**10 for ratio in ratios):
            return float(unit)
    return None


def conv_size(
    shape: Shape, kernel: list[int], stride: list[int], dilation: list[int], padding: list[int]
) -> tuple[int, int]:
    h, w = (
        (shape[1 + i] + padding[i] + padding[2 + i] - dilation[i] * (kernel[2 + i] - 1) - 1)
        // stride[i]
        + 1
        for i in (0, 1)
    )
    return h, w
