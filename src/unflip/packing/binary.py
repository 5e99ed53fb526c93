"""Converts a frozen binary or 8-bit layer to ops of the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unflip.ends import FrozenInt8Layer
from unflip.freeze import FrozenLayer
from unflip.methods.base import InputCode
from unflip.packing.codes import input_code
from unflip.packing.convert import Converter, Ref, numbers
from unflip.packing.file import Array
from unflip.packing.ir import CannotPack, Fields, affine, conv_fields


def binary_layer(
    c: Converter, out: Tensor, x: Ref, number: int, shape: list[int], *geometry: Any
) -> Ref:
    """quantize → conv, with the method's factor and the bias as steps of the conv."""
    layer, name = c.traced.layers[number], c.traced.names[number]
    _refuse_padding(layer, name)
    fields = _fields(x.tensor, shape, geometry)
    if isinstance(layer, FrozenInt8Layer):
        return _int8_layer(c, out, x, layer, fields)
    code = input_code(layer, name)
    source = x if code is None else _quantized(c, layer, code, x)
    steps: list[Fields] = []
    if code is not None and code.k_map:
        steps.append({"step": "mul", "value": _k_map(c, layer, x, out, fields).value})
    if isinstance(layer.bias, Tensor):
        steps.append(affine(None, numbers(layer.bias)))
    result = c.emit("conv", [source], out, **fields, **_binary_weight(layer))
    return c.map(result, out, *steps) if steps else result


def _int8_layer(c: Converter, out: Tensor, x: Ref, layer: FrozenInt8Layer, fields: Fields) -> Ref:
    """to_bytes → conv, with the bias as its step."""
    quantizer = layer.byte_input
    with torch.no_grad():
        numbers_ = quantizer.numbers(x.tensor)
    source = c.emit(
        "to_bytes",
        [x],
        numbers_,
        numbers_,
        scale=quantizer.scale.numpy(),
        shift=quantizer.shift.numpy(),
        zero=quantizer.zero.numpy().astype(np.uint8),
    )
    whole = layer.bytes.numpy().view(np.uint8).reshape(fields["shape"])
    scales = _same_columns(layer.scales.numpy()[None])
    result = c.emit("conv", [source], out, **fields, bytes=whole, scales=scales)
    bias = layer.bias
    return result if bias is None else c.map(result, out, affine(None, numbers(bias)))


def _quantized(c: Converter, layer: FrozenLayer, code: InputCode, x: Ref) -> Ref:
    inputs = [x]
    if code.relative:
        inputs.append(c.emit("mean_abs", [x], (1, 1, 1), over="sample"))
    fields: Fields = {
        "thresholds": _same_columns(code.thresholds.numpy()),
        "strict": list(code.strict),
        "coding": code.coding,
        "scales": [float(scale) for scale in code.scales],
        "offset": float(code.offset),
    }
    with torch.no_grad():
        binary = layer.input_binarizer(x.tensor)
    return c.emit("quantize", inputs, binary, binary, **fields)


def _k_map(c: Converter, layer: FrozenLayer, x: Ref, out: Tensor, fields: Fields) -> Ref:
    """XNOR-Net's factor: the mean of |x| over a group's channels, then over the kernel's window."""
    groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
    _, height, width = c.shape(x.tensor)
    size = c.emit("mean_abs", [x], (groups, height, width), over="channels", groups=groups)
    if not isinstance(layer, nn.Conv2d):
        return size
    _, height, width = c.shape(out)
    kernel = layer.kernel_size
    box = np.full((groups, 1, *kernel), 1 / (kernel[0] * kernel[1]), np.float32)
    geometry = {**fields, "shape": list(box.shape)}
    return c.emit("conv", [size], (groups, height, width), **geometry, weight=box)


def _refuse_padding(layer: nn.Module, name: str) -> None:
    if isinstance(layer, nn.Conv2d) and layer.padding_mode not in ("zeros", "constant"):
        raise CannotPack(
            f"layer {name!r} has padding_mode={layer.padding_mode!r}; the runtime pads with zeros only"
        )


def _fields(x: Tensor, shape: list[int], geometry: Any) -> Fields:
    if len(shape) > 2:
        return conv_fields(shape, *geometry)
    if x.dim() != 2:
        raise CannotPack(
            f"a linear layer has an input of shape {tuple(x.shape)}; it needs vectors (N, F): "
            "flatten the input first"
        )
    return conv_fields([*shape, 1, 1])


def _binary_weight(layer: FrozenLayer) -> Fields:
    scales = layer.scales.detach().flatten(1).numpy()
    fields: Fields = {"bits": layer.bits.numpy(), "scales": _same_columns(scales)}
    if layer.offset is not None:
        fields["offset"] = layer.offset.detach().flatten().numpy()
    return fields


def _same_columns(table: Array) -> Array:
    """(n, 1) if all columns are equal."""
    return table[:, :1] if (table == table[:, :1]).all() else table
