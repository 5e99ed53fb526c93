"""Convolutions and dense layers of Keras and Larq."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unflip.imports.errors import CannotImport
from unflip.imports.keras_config import Layer
from unflip.imports.larq_activations import activated, levels
from unflip.imports.larq_builder import Builder, Value, image
from unflip.imports.larq_modules import Sides, conv_of, linear_of, same_padding
from unflip.imports.larq_quantizers import (
    Kernel,
    Quantizer,
    already_binary,
    input_binarizer,
    quantized,
    quantizer,
)
from unflip.imports.mxnet_params import Array
from unflip.methods.base import BinaryWeight

LARGEST_PADDING = 65_536
SIGNS = ("SteSign", "ApproxSign", "SwishSign")
NO_PADDING: tuple[Sides, Sides] = ((0, 0), (0, 0))


class _Product(NamedTuple):
    """A kernel for a layer: in Keras's layout, with its quantizer."""

    kernel: Array
    found: Quantizer
    inputs: Quantizer

    def weight(self, rows: Callable[[Array], Array], filters: int) -> Tensor | BinaryWeight:
        """In torch's layout, which ``rows`` makes of an array of the kernel's shape."""
        code = self._code()
        if code is None:
            return torch.from_numpy(np.ascontiguousarray(rows(self.kernel)))
        signs = torch.from_numpy(np.stack([rows(part) for part in code.signs]))
        ones = [1] * (signs.dim() - 2)
        scales = [np.resize(scale, filters if scale.size > 1 else 1) for scale in code.scales]
        offset = torch.full([1, *ones], code.offset) if code.offset else None
        return BinaryWeight(
            signs, torch.from_numpy(np.stack(scales)).view(len(signs), -1, *ones), offset
        )

    def _code(self) -> Kernel | None:
        if self.found.name is not None:
            return quantized(self.found, self.kernel)
        return already_binary(self.kernel) if self.inputs.name is not None else None


def _source(x: Value, found: Quantizer) -> tuple[Value, Quantizer]:
    """The value to quantize: a quantizer that made x may do the layer's work."""
    if x.quantized is not None:
        source, before = x.quantized
        if found.name is None or (found.name in SIGNS and before.name in SIGNS):
            return source, before
    return x, found


def _padded(
    b: Builder, layer: Layer, x: Value, found: Quantizer, padding: tuple[Sides, Sides]
) -> tuple[Value, tuple[Sides, Sides]]:
    """Larq pads after the quantizer with ``pad_values``. +1 is the sign of a zero that is padded before it."""
    pad = layer.number("pad_values", 0.0)
    if pad == 0 or padding == NO_PADDING:
        return x, padding
    if pad != 1 or found.name not in SIGNS:
        raise layer.wrong("pad_values", "0, or 1 with a sign as input quantizer")
    b.note("padding with +1", "zeros are padded before the sign, and sign(0) = +1")
    return zeros(b, layer, x, padding), NO_PADDING


def zeros(b: Builder, layer: Layer, x: Value, padding: tuple[Sides, Sides]) -> Value:
    (top, bottom), (left, right) = padding
    channels, height, width = x.shape
    shape = (channels, height + top + bottom, width + left + right)
    return b.add(layer, nn.ZeroPad2d((left, right, top, bottom)), [x], shape)


class Geometry(NamedTuple):
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[Sides, Sides]
    size: tuple[int, int]  # of the result


def geometry(layer: Layer, x: Value, kernel: tuple[int, int], stride: tuple[int, int]) -> Geometry:
    """Of a convolution or pool."""
    same = layer.choice("padding", "valid", "valid", "same") == "same"
    dilation = layer.pair("dilation_rate", 1)
    sides, size = [], []
    for pixels, k, s, d in zip(x.shape[1:], kernel, stride, dilation, strict=True):
        before, after = same_padding(pixels, k, s, d) if same else (0, 0)
        sides.append((before, after))
        size.append((pixels + before + after - d * (k - 1) - 1) // s + 1)
    if min(size) < 1:
        raise CannotImport(
            f"{layer.title}: kernel {kernel} is larger than its input, {x.shape[1:]} pixels"
        )
    if max(map(max, sides)) > LARGEST_PADDING:
        raise CannotImport(
            f"{layer.title} pads {sides} pixels; at most {LARGEST_PADDING:,} are supported"
        )
    return Geometry(kernel, stride, dilation, (sides[0], sides[1]), (size[0], size[1]))


def _bias(b: Builder, layer: Layer, outputs: int) -> Tensor | None:
    return (
        torch.from_numpy(b.weight(layer, "bias", (outputs,)))
        if layer.flag("use_bias", True)
        else None
    )


def _convolve(
    b: Builder,
    layer: Layer,
    x: Value,
    product: _Product,
    groups: int,
    bias: Tensor | None,
    g: Geometry,
) -> Value:
    """A convolution with groups, or a depthwise one if there is a group per channel."""
    kernel = product.kernel
    depthwise = kernel.shape[2] != x.shape[0] // groups
    outputs = kernel.shape[2] * kernel.shape[3] if depthwise else kernel.shape[3]
    if x.order is not None and groups > 1:
        raise CannotImport(
            f"{layer.title}: groups of channels after a flattened image are not supported"
        )
    b.count(layer, math.prod(g.size) * kernel.size)

    def rows(array: Array) -> Array:
        if depthwise:
            return array.transpose(2, 3, 0, 1).reshape(outputs, 1, *g.kernel)
        return _reordered(x, array.transpose(3, 2, 0, 1))

    weight = product.weight(rows, outputs)
    x, found = _source(x, product.inputs)
    x, padding = _padded(b, layer, x, found, g.padding)
    if not isinstance(weight, BinaryWeight):
        x, found = levels(b, layer, x, found), Quantizer(None, layer)
    conv = conv_of(weight, input_binarizer(found), bias, g.stride, padding, g.dilation, groups)
    return b.add(layer, conv, [x], (outputs, *g.size))._replace(order=None)


def _reordered(x: Value, weight: Array) -> Array:
    """A weight whose second axis is x's features, in our order."""
    if x.order is None:
        return np.ascontiguousarray(weight)
    found = np.empty_like(weight)
    found[:, x.order] = weight
    return found


def conv2d(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    x = image(layer, inputs[0])
    filters, groups = layer.whole("filters"), layer.whole("groups", 1)
    size, stride = layer.pair("kernel_size"), layer.pair("strides", 1)
    if x.shape[0] % groups or filters % groups:
        raise layer.wrong("groups", f"a divisor of {x.shape[0]} channels and {filters} filters")
    kernel = b.weight(layer, "kernel", (*size, x.shape[0] // groups, filters))
    product = _Product(
        kernel, quantizer(layer, "kernel_quantizer"), quantizer(layer, "input_quantizer")
    )
    g = geometry(layer, x, size, stride)
    return activated(b, layer, _convolve(b, layer, x, product, groups, _bias(b, layer, filters), g))


def depthwise_conv2d(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    x = image(layer, inputs[0])
    product = _depthwise(b, layer, x)
    bias = _bias(b, layer, math.prod(product.kernel.shape[2:]))
    g = geometry(layer, x, layer.pair("kernel_size"), layer.pair("strides", 1))
    return activated(b, layer, _convolve(b, layer, x, product, x.shape[0], bias, g))


def _depthwise(b: Builder, layer: Layer, x: Value) -> _Product:
    shape = (*layer.pair("kernel_size"), x.shape[0], layer.whole("depth_multiplier", 1))
    kernel = b.weight(layer, "depthwise_kernel", shape)
    return _Product(
        kernel, quantizer(layer, "depthwise_quantizer"), quantizer(layer, "input_quantizer")
    )


def separable_conv2d(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    x = image(layer, inputs[0])
    filters = layer.whole("filters")
    depthwise = _depthwise(b, layer, x)
    g = geometry(layer, x, layer.pair("kernel_size"), layer.pair("strides", 1))
    between = math.prod(depthwise.kernel.shape[2:])
    kernel = b.weight(layer, "pointwise_kernel", (1, 1, between, filters))
    x = _convolve(b, layer, x, depthwise, x.shape[0], None, g)
    point = _Product(kernel, quantizer(layer, "pointwise_quantizer"), Quantizer(None, layer))
    one = Geometry((1, 1), (1, 1), (1, 1), NO_PADDING, (x.shape[1], x.shape[2]))
    return activated(b, layer, _convolve(b, layer, x, point, 1, _bias(b, layer, filters), one))


def dense(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    [x] = inputs
    units = layer.whole("units")
    kernel = b.weight(layer, "kernel", (x.shape[0], units))
    bias = _bias(b, layer, units)
    found = quantizer(layer, "input_quantizer")
    if not x.vector:  # Dense multiplies the channels of each pixel
        product = _Product(kernel[None, None], quantizer(layer, "kernel_quantizer"), found)
        one = Geometry((1, 1), (1, 1), (1, 1), NO_PADDING, (x.shape[1], x.shape[2]))
        return activated(b, layer, _convolve(b, layer, x, product, 1, bias, one))
    product = _Product(kernel, quantizer(layer, "kernel_quantizer"), found)
    weight = product.weight(lambda array: _reordered(x, array.T), units)
    x, found = _source(x, found)
    if not isinstance(weight, BinaryWeight):
        x, found = levels(b, layer, x, found), Quantizer(None, layer)
    result = b.add(layer, linear_of(weight, input_binarizer(found), bias), [x], (units, 1, 1))
    return activated(b, layer, result._replace(order=None))
