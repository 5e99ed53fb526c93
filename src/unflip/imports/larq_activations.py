"""Keras's activations, and quantizers that are used as activations or layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import nn

from unflip.imports.errors import CannotImport
from unflip.imports.keras_config import Layer
from unflip.imports.larq_builder import Builder, Value, along
from unflip.imports.larq_modules import Clip, Levels
from unflip.imports.larq_quantizers import (
    ALIASES,
    KERNELS,
    Quantizer,
    checked,
    input_binarizer,
    quantizer,
)

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "swish": nn.SiLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "mish": nn.Mish,
    "hard_sigmoid": lambda: Clip(0.0, 1.0, 0.2, 0.5),
    "hard_tanh": lambda: Clip(-1.0, 1.0),
    "leaky_tanh": lambda: Clip(-1.0, 1.0, outside=0.2),
    "clip_by_value_activation": lambda: Clip(0.0, 1.0),  # larq-zoo's DoReFaNet
    "softmax": lambda: nn.Softmax(1),
}


def activated(b: Builder, layer: Layer, x: Value) -> Value:
    """The setting ``activation`` of a layer, applied to its result."""
    name, settings = layer.function("activation")
    if name in (None, "linear"):
        return x
    assert name is not None
    if ALIASES.get(name, name) in (*KERNELS, "NoOp"):
        return levels(b, layer, x, quantizer(layer, "activation"))
    if name not in ACTIVATIONS or settings.config:
        raise CannotImport(
            f"{layer.title}: activation {name!r:.80} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    return b.add(layer, ACTIVATIONS[name](), [x], x.shape)


def levels(b: Builder, layer: Layer, x: Value, found: Quantizer) -> Value:
    if found.name is None:
        return x
    value = b.add(layer, Levels(input_binarizer(found), x.shape[0]), [x], x.shape)
    return value._replace(quantized=(x, found))


def activation(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    return activated(b, layer, inputs[0])


def quantizer_layer(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    return levels(b, layer, inputs[0], checked(layer.kind, layer))


def relu(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    [x] = inputs
    if layer.number("threshold", 0.0) != 0:
        raise layer.wrong("threshold", "0")
    slope, most = (
        _number_or_none(layer, "negative_slope") or 0.0,
        _number_or_none(layer, "max_value"),
    )
    if slope:
        x = b.add(layer, nn.LeakyReLU(slope), [x], x.shape)
        return x if most is None else b.add(layer, Clip(None, most), [x], x.shape)
    return b.add(layer, nn.ReLU() if most is None else Clip(0.0, most), [x], x.shape)


def _number_or_none(layer: Layer, key: str) -> float | None:
    return None if layer.config.get(key) is None else layer.number(key, 0.0)


def leaky_relu(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    key = "alpha" if "alpha" in layer.config else "negative_slope"
    return b.add(layer, nn.LeakyReLU(layer.number(key, 0.3)), inputs, inputs[0].shape)


def elu(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    return b.add(layer, nn.ELU(layer.number("alpha", 1.0)), inputs, inputs[0].shape)


def softmax(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    layer.choice("axis", -1, -1, 1 if inputs[0].vector else 3)
    return b.add(layer, nn.Softmax(1), inputs, inputs[0].shape)


def prelu(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    [x] = inputs
    channels, *size = x.shape
    whole = [channels] if x.vector else [*size, channels]
    shared = layer.config.get("shared_axes") or []
    if not isinstance(shared, list) or any(n not in range(1, len(whole) + 1) for n in shared):
        raise layer.wrong("shared_axes", "null or a list of axes, such as [1, 2]")
    shape = tuple(1 if axis in shared else n for axis, n in enumerate(whole, 1))
    rows = b.weight(layer, "alpha", shape).reshape(-1, shape[-1])
    if (rows != rows[:1]).any():
        raise CannotImport(
            f"{layer.title} has a slope per pixel; use shared_axes=[1, 2], one slope per channel"
        )
    slopes = along(x, np.broadcast_to(rows[0], (channels,)))
    module = nn.PReLU(channels)
    module.weight = nn.Parameter(slopes)
    return b.add(layer, module, [x], x.shape)


def rescaling(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    scale, shift = layer.number("scale", 1.0), layer.number("offset", 0.0)
    return b.add(layer, Clip(None, None, scale, shift), inputs, inputs[0].shape)


def identity(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    return inputs[0]
