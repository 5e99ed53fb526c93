"""Activations, softmax and normalization."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from unflip.export.exporter import Exporter, Value, op
from unflip.packing.file import PackedFileError


@op
def curve(e: Exporter, inputs: list[int], *, function: str) -> Value:
    x = e.any_value(inputs[0])
    if function not in ACTIVATIONS:
        raise PackedFileError(
            f"unknown function {function!r}; the known ones are {', '.join(ACTIVATIONS)}"
        )
    return x._replace(name=ACTIVATIONS[function](e, x.name))


def _gelu(e: Exporter, x: str) -> str:
    """x · (1 + erf(x / √2)) / 2. ONNX has an operator for it only from opset 20 on."""
    edge = e.onnx.node("Erf", e.times(x, math.sqrt(0.5)))
    return e.onnx.node("Mul", x, e.times(e.plus(edge, 1.0), 0.5))


def _gelu_tanh(e: Exporter, x: str) -> str:
    cube = e.onnx.node("Mul", x, e.onnx.node("Mul", x, x))
    inner = e.onnx.node("Add", x, e.times(cube, 0.044715))
    gate = _sigmoid(e, e.times(inner, 2 * math.sqrt(2 / math.pi)))
    return e.onnx.node("Mul", x, gate)


def _sigmoid(e: Exporter, x: str) -> str:
    return e.onnx.node("Sigmoid", x)


@op
def softmax(e: Exporter, inputs: list[int]) -> Value:
    x = e.any_value(inputs[0])
    return x._replace(name=e.onnx.node("Softmax", x.name, axis=1))


@op
def log_softmax(e: Exporter, inputs: list[int]) -> Value:
    x = e.any_value(inputs[0])
    return x._replace(name=e.onnx.node("LogSoftmax", x.name, axis=1))


@op
def normalize(e: Exporter, inputs: list[int], *, groups: int, epsilon: float) -> Value:
    """Reshape each group to one channel, and normalize channels."""
    x = e.float_value(inputs[0])
    split = e.reshape(x.name, groups, -1, 1)
    ones, zeros = (e.onnx.constant(np.full(groups, v, np.float32)) for v in (1, 0))
    out = e.onnx.node("InstanceNormalization", split, ones, zeros, epsilon=epsilon)
    return Value(e.reshape(out, *x.shape), x.shape)


ACTIVATIONS: dict[str, Callable[[Exporter, str], str]] = {
    "sigmoid": _sigmoid,
    "tanh": lambda e, x: e.onnx.node("Tanh", x),
    "silu": lambda e, x: e.onnx.node("Mul", x, _sigmoid(e, x)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "elu": lambda e, x: e.onnx.node("Elu", x),
    "mish": lambda e, x: e.onnx.node("Mish", x),
}
