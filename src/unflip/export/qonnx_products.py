"""Convolutions and linear layers in QONNX, and the ops that make vectors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from unflip.export.binary import conv_size
from unflip.export.exporter import Code, Shape, Value
from unflip.export.qonnx_exporter import F32, QonnxExporter, WholeSum
from unflip.export.steps import apply_steps
from unflip.export.whole_steps import can_be_folded
from unflip.packing.file import Array, PackedFileError


class _Layer(NamedTuple):
    """A convolution, or with ``flat`` a linear layer, apart from its weights."""

    name: str
    shape: list[int]
    stride: list[int]
    dilation: list[int]
    padding: list[int]
    groups: int
    flat: bool

    def product(self, e: QonnxExporter, x: str, weight: str) -> str:
        if self.flat:
            return e.onnx.node("MatMul", x, weight, name=self.name)
        return e.onnx.node(
            "Conv",
            x,
            weight,
            name=self.name,
            kernel_shape=self.shape[2:],
            strides=self.stride,
            dilations=self.dilation,
            pads=self.padding,
            group=self.groups,
        )

    def constant(self, e: QonnxExporter, weight: Array) -> str:
        weight = weight.astype(F32)
        return e.onnx.constant(weight.reshape(weight.shape[:2]).T if self.flat else weight)


def conv(
    e: QonnxExporter,
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
    """The fields are those of the format; the kind of weights decides about the nodes."""
    x = e.values[inputs[0]]
    flat = x.flat and shape[2:] == [1, 1] and groups == 1 and not any(padding)
    layer = _Layer(name, shape, stride, dilation, padding, groups, flat)
    out = (shape[0], *conv_size(x.shape, shape, stride, dilation, padding))
    code = _input_code(e, x, flat)
    if weight is not None and isinstance(x, Value):
        product = layer.product(e, code.terms[0][1], layer.constant(e, e.tensors[weight]))
        return apply_steps(e, Value(product, out, flat), steps)
    if scales is None or (bits is None and (bytes is None or code.zero is None)):
        raise PackedFileError(
            "needs 'weight' (for a float input), or 'scales' and 'bits' or 'bytes'"
        )
    if bytes is not None:
        signed = e.tensors[bytes].view(np.int8)
        total = _byte_product(e, layer, code, signed, e.tensors[scales])
        return apply_steps(e, Value(total, out, flat), steps)
    assert bits is not None
    own = e.tensors[scales]
    e.onnx.check_room(F32().nbytes * len(own) * math.prod(shape))
    signs = _signs(e.tensors[bits], len(own), shape)
    own = np.broadcast_to(own, (len(own), shape[0]))
    extra = None if offset is None else np.broadcast_to(e.tensors[offset], (shape[0],))
    own, extra, steps = _fold_scale(e, own, extra, steps)
    # Filters with a negative scale are negated, so that signs after them are taken of rising numbers.
    signs, own = signs * np.where(own < 0, F32(-1), F32(1))[..., None, None, None], np.abs(own)
    if isinstance(x, Code) and len(code.terms) == len(own) == 1 and extra is None:
        return _one_product(e, layer, code, signs[0], own[0], steps, out)
    parts = _all_products(e, layer, code, signs, own, extra)
    return apply_steps(e, Value(e.sum(parts), out, flat), steps)


def _input_code(e: QonnxExporter, x: Value | Code, flat: bool) -> Code:
    """The terms of the input, as images unless the product is of vectors."""
    code = x if isinstance(x, Code) else Code([(1.0, x.name)], 0.0, x.shape, x.flat)
    if not code.flat or flat:
        return code
    terms = [(factor, e.reshape(name, *x.shape)) for factor, name in code.terms]
    return code._replace(terms=terms, flat=False)


def _signs(bits: Array, bases: int, shape: list[int]) -> Array:
    count = bases * math.prod(shape)
    found = np.unpackbits(bits, bitorder="little")[:count].reshape(bases, *shape)
    return found.astype(F32) * 2 - 1


def _fold_scale(
    e: QonnxExporter, own: Array, extra: Array | None, steps: list[dict[str, Any]]
) -> tuple[Array, Array | None, list[dict[str, Any]]]:
    """A factor that directly follows becomes part of the scales, as in the runtime: the same rounding."""
    if not steps or steps[0].get("step") != "affine" or "scale" not in steps[0]:
        return own, extra, steps
    factor = e.tensors[steps[0]["scale"]]
    if not can_be_folded(own, extra, factor):
        return own, extra, steps
    rest = {key: value for key, value in steps[0].items() if key != "scale"}
    return own * factor, None if extra is None else extra * factor, [rest, *steps[1:]]


def _one_product(
    e: QonnxExporter,
    layer: _Layer,
    code: Code,
    signs: Array,
    own: Array,
    steps: list[dict[str, Any]],
    out: Shape,
) -> Value:
    """One product of whole numbers. A sign that follows can be taken of the whole number."""
    [(factor, term)] = code.terms
    number = layer.product(e, term, e.bipolar(layer.constant(e, signs)))
    scale = own * F32(factor)
    parts = [_times(e, number, scale, layer.flat)]
    if code.offset:
        parts.append(_offset_part(e, layer, code, signs, own))
    elif all(step.get("step") in ("affine", "prelu", "clamp") for step in steps):
        largest = signs[0].size * code.largest
        arrays = [_with_arrays(e, step) for step in steps]
        e.sums[len(e.values)] = WholeSum(number, layer.flat, largest, scale, arrays)
    return apply_steps(e, Value(e.sum(parts), out, layer.flat), steps)


def _all_products(
    e: QonnxExporter, layer: _Layer, code: Code, signs: Array, own: Array, extra: Array | None
) -> list[str]:
    """Every base with every term of the input; an offset of the weights is a filter of ones."""
    parts = [p for s, o in zip(signs, own, strict=True) for p in _scaled(e, layer, code, s, o)]
    if extra is not None and extra.any():
        filters = 1 if layer.groups == 1 else layer.shape[0]
        parts += _scaled(e, layer, code, np.ones((filters, *layer.shape[1:])), extra)
    return parts


def _with_arrays(e: QonnxExporter, step: dict[str, Any]) -> dict[str, Any]:
    return step | {k: e.tensors[step[k]] for k in ("scale", "shift", "slope") if k in step}


def _scaled(e: QonnxExporter, layer: _Layer, code: Code, signs: Array, own: Array) -> list[str]:
    """The terms of one base: its scale times a product of whole numbers each."""
    weight = e.bipolar(layer.constant(e, signs))
    parts = [
        _times(e, layer.product(e, term, weight), own * F32(factor), layer.flat)
        for factor, term in code.terms
    ]
    return [*parts, _offset_part(e, layer, code, signs, own)] if code.offset else parts


def _times(e: QonnxExporter, name: str, scale: Array, flat: bool) -> str:
    scale = scale.astype(F32)
    return name if (scale == 1).all() else e.onnx.node("Mul", name, e.per_channel(scale, flat))


def _offset_part(e: QonnxExporter, layer: _Layer, code: Code, signs: Array, own: Array) -> str:
    """The code's offset times the sum of the signs. It is a constant, which depends on the pixel at the borders."""
    sums = _window_sums(e, layer, signs, np.ones(1), code.shape)
    scale = (own * F32(code.offset)).reshape(-1, 1, 1)
    part = (scale * sums).astype(F32)
    return e.onnx.constant(part.reshape(-1) if layer.flat else part)


def _byte_product(e: QonnxExporter, layer: _Layer, code: Code, weight: Array, scales: Array) -> str:
    """Σ (n − zero) · byte = Σ n · byte − a constant, which is 0 for most networks."""
    quantized = e.whole(layer.constant(e, weight), 8, signed=True, narrow=True)
    number = layer.product(e, code.terms[0][1], quantized)
    assert code.zero is not None
    if code.zero.any():
        less = -_window_sums(e, layer, weight, code.zero, code.shape).astype(F32)
        number = e.onnx.node(
            "Add", number, e.onnx.constant(less.reshape(-1) if layer.flat else less)
        )
    return _times(e, number, np.broadcast_to(scales, (1, layer.shape[0]))[0], layer.flat)


def _window_sums(
    e: QonnxExporter, layer: _Layer, weight: Array, values: Array, shape: Shape
) -> Array:
    """Σ over the window of weight · the channel's value; nothing outside of the image.

    The result is (filters, height, width), or (filters, 1, 1) if no window leaves the image.
    """
    out = conv_size(shape, layer.shape, layer.stride, layer.dilation, layer.padding)
    if not any(layer.padding):
        out = (1, 1)
    filters, inputs, *kernel = weight.shape
    e.onnx.check_room(F32().nbytes * filters * math.prod(out))
    each = np.broadcast_to(values, (shape[0],)).reshape(layer.groups, inputs)
    group = np.arange(filters) * layer.groups // filters
    taps = (weight.astype(np.float64) * each[group][..., None, None]).sum(1)
    # The taps inside are a rectangle of the kernel: four sums from its corner give the sum of any rectangle.
    sums = np.zeros((filters, kernel[0] + 1, kernel[1] + 1))
    sums[:, 1:, 1:] = taps.cumsum(1).cumsum(2)
    top, bottom = _taps_inside(layer, 0, shape[1], out[0])
    left, right = _taps_inside(layer, 1, shape[2], out[1])
    top, bottom = top[:, None], bottom[:, None]
    found: Array = sums[:, bottom, right] - sums[:, top, right]
    found -= sums[:, bottom, left] - sums[:, top, left]
    return found


def _taps_inside(layer: _Layer, axis: int, size: int, count: int) -> tuple[Array, Array]:
    """The first tap inside the image and the one after the last, for each of ``count`` windows along an axis."""
    start = np.arange(count) * layer.stride[axis] - layer.padding[axis]
    kernel, dilation = layer.shape[2 + axis], layer.dilation[axis]
    first = np.clip(-(start // dilation), 0, kernel)
    last = np.clip(-((start - size) // dilation), 0, kernel)
    return first, np.maximum(first, last)


def flatten(e: QonnxExporter, inputs: list[int]) -> Value:
    x = e.any_value(inputs[0])
    return e.as_flat(x)._replace(shape=(math.prod(x.shape), 1, 1))


def mean(e: QonnxExporter, inputs: list[int]) -> Value:
    x = e.float_value(inputs[0])
    out = e.onnx.node("GlobalAveragePool", x.name)
    return e.as_flat(Value(out, (x.shape[0], 1, 1)))
