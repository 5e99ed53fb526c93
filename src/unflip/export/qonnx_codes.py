"""Floats to small integers, in QONNX."""

from __future__ import annotations

import numpy as np

from unflip.export.exporter import Code, Value
from unflip.export.qonnx_exporter import F32, QonnxExporter
from unflip.packing.file import Array, PackedFileError

FEW_STEPS = 3  # with more thresholds, one MultiThreshold node replaces a sign per threshold


def quantize(
    e: QonnxExporter,
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
    x, limits = e.any_value(inputs[0]), e.tensors[thresholds]
    if len(inputs) > 1:
        signs = _signs_with_unit(e, x, limits, strict, inputs[1])
    else:
        x, limits = _not_strict(e, inputs[0], limits, strict)
        if coding == "levels" and len(strict) > FEW_STEPS:
            return _level_code(e, _count(e, x, limits), len(strict), scales, offset, x)
        signs = [_sign(e, x, limit) for limit in limits]
    if len(signs) == 1 and offset == -scales[0] / 2:
        return Code([(scales[0] / 2, signs[0])], 0.0, x.shape, x.flat)
    bits = [e.whole(sign, 1, signed=False) for sign in signs]  # −1 is clipped to 0
    if coding == "levels" and len(strict) > 1:
        return _level_code(e, e.sum(bits), len(strict), scales, offset, x)
    return Code(list(zip(scales, bits, strict=True)), offset, x.shape, x.flat)


def _not_strict(
    e: QonnxExporter, number: int, limits: Array, strict: list[bool]
) -> tuple[Value, Array]:
    """The same comparisons as x >= limit: of whole numbers if possible, else with the next float for x > limit."""
    whole = e.whole_thresholds(number, limits, strict)
    if whole is not None:
        return whole
    above = np.nextafter(limits, F32(np.inf))
    return e.any_value(number), np.where(np.array(strict)[:, None], above, limits)


def _sign(e: QonnxExporter, x: Value, limit: Array) -> str:
    """x − limit is exact at 0, so its sign is that of the comparison."""
    if not limit.any():
        return e.bipolar(x.name)
    return e.bipolar(e.onnx.node("Add", x.name, e.per_channel(-limit, x.flat)))


def _signs_with_unit(
    e: QonnxExporter, x: Value, limits: Array, strict: list[bool], unit: int
) -> list[str]:
    factor = e.as_flat(e.any_value(unit)) if x.flat else e.float_value(unit)
    found = []
    for limit, above in zip(limits, strict, strict=True):
        threshold = e.onnx.node("Mul", factor.name, e.per_channel(limit, x.flat))
        pair = (threshold, x.name) if above else (x.name, threshold)
        sign = e.bipolar(e.onnx.node("Sub", *pair))
        found.append(e.onnx.node("Neg", sign) if above else sign)
    return found


def _count(e: QonnxExporter, x: Value, limits: Array) -> str:
    """The number of thresholds that are reached."""
    bits = len(limits).bit_length()
    table = e.onnx.constant(np.sort(limits, 0).T)
    return e.onnx.node(
        "MultiThreshold", x.name, table, domain="qonnx.custom_op.general", out_dtype=f"UINT{bits}"
    )


def _level_code(
    e: QonnxExporter, level: str, steps: int, scales: list[float], offset: float, x: Value
) -> Code:
    """Signed numbers if the offset is a whole number of steps and they fit the same bits."""
    bits, first = steps.bit_length(), offset / scales[0]
    half = 2 ** (bits - 1)
    if first and first == round(first) and -half <= first and steps + first < half:
        level = e.whole(e.plus(level, first), bits, signed=True)
        largest = int(max(-first, steps + first))
        return Code([(scales[0], level)], 0.0, x.shape, x.flat, largest)
    level = e.whole(level, bits, signed=False)
    return Code([(scales[0], level)], offset, x.shape, x.flat, steps)


def to_bytes(e: QonnxExporter, inputs: list[int], *, scale: str, shift: str, zero: str) -> Code:
    x = e.any_value(inputs[0])
    product = e.onnx.node("Mul", x.name, e.channels(scale, x.flat))
    place = e.onnx.node("Add", product, e.channels(shift, x.flat))
    zeros = e.tensors[zero].astype(np.float64)
    return Code([(1.0, e.whole(place, 8, signed=False))], 0.0, x.shape, x.flat, 255, zeros)
