"""Constants, quantizers, and products with weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from unflip.imports.errors import CannotImport
from unflip.imports.onnx_file import Array, Node
from unflip.imports.qonnx_builder import (
    F32,
    Builder,
    Operand,
    Value,
    any_value,
    constant,
    floats,
    image,
    op,
    per_channel,
    positive,
    refuse_padding_rule,
    value_of,
)
from unflip.imports.qonnx_quantizers import Quant, bipolar, bipolar_code, multi_threshold_code
from unflip.packing.ir import affine


@op("Constant")
def _constant_node(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    for key in ("value", "value_float", "value_int", "value_ints"):
        if key in node.attributes and node.attributes[key] is not None:
            found = np.asarray(node.attributes[key])
            if found.dtype.kind in "fiub":
                return found
            raise CannotImport(f"{node.title}: its {key} is not a number")
    raise CannotImport(f"{node.title}: only value, value_float, value_int and value_ints are read")


@op("Identity", "Dropout", "Cast")
def _identity(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    if node.op == "Cast" and node.whole("to", 1) != 1:
        raise CannotImport(f"{node.title}: only a cast to 32-bit floats is supported")
    if node.op == "Dropout" and len(inputs) > 2 and inputs[2] is not None and np.any(inputs[2]):
        raise CannotImport(
            f"{node.title}: it is in training mode; export the network in evaluation mode"
        )
    found: Operand = inputs[0]
    return found


@op("Transpose")
def _transpose(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    array = constant(node, inputs, 0, "input")
    order = node.attributes.get("perm", list(range(array.ndim))[::-1])
    if not isinstance(order, list) or sorted(order) != list(range(array.ndim)):
        raise CannotImport(f"{node.title}: perm={order!r:.60} for {array.ndim} dimensions")
    return array.transpose(order)


# --- quantizers


@op("BipolarQuant")
def _bipolar_quant(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    scale = constant(node, inputs, 1, "scale")
    if isinstance(inputs[0], np.ndarray):
        _refuse_growth(node, inputs[0], scale)
        return bipolar(inputs[0], scale)
    return _coded(b, node, inputs[0], bipolar_code(node, scale))


@op("Quant", "IntQuant")
def _quant(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    names = ("scale", "zero point", "bit width")
    quant = Quant(node, *(constant(node, inputs, i, what) for i, what in enumerate(names, 1)))
    if isinstance(inputs[0], np.ndarray):
        _refuse_growth(node, inputs[0], quant.scale, quant.zero)
        return quant(inputs[0])
    return _coded(b, node, inputs[0], quant.code())


@op("MultiThreshold")
def _multi_threshold(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    x = any_value(node, inputs[0])
    thresholds = constant(node, inputs, 1, "thresholds")
    return _coded(b, node, x, multi_threshold_code(node, thresholds, x.channels))


def _coded(b: Builder, node: Node, x: Operand | None, code: dict[str, Any]) -> Value:
    return replace(value_of(b, node, x), code=code)


def _refuse_growth(node: Node, weight: Array, *parameters: Array) -> None:
    """Refuse parameters that do not broadcast to the weight, before anything is computed."""
    shapes = [weight.shape, *(array.shape for array in parameters)]
    try:
        fits = np.broadcast_shapes(*shapes) == weight.shape
    except ValueError:
        fits = False
    if not fits:
        raise CannotImport(
            f"{node.title}: parameters of shapes {shapes[1:]!r:.100} do not broadcast to {weight.shape!r:.60}"
        )


# --- products


def _weights(b: Builder, node: Node, weight: Array) -> dict[str, Any]:
    """Bits and scales if each filter has one absolute value, else floats."""
    size = np.abs(weight.reshape(len(weight), -1))
    if size.shape[1] and (size == size[:, :1]).all() and (size > 0).all():
        b.binary += 1
        bits = np.packbits((weight > 0).reshape(-1), bitorder="little")
        return {"bits": bits, "scales": size[:, 0].astype(F32).reshape(1, -1)}
    b.floats.append(node.name)
    return {"weight": weight.astype(F32)}


def _product(
    b: Builder, node: Node, x: Value, weight: Array, bias: Array | None, **window: Any
) -> Value:
    fields = _weights(b, node, weight)
    source = b.as_code(node, x) if "bits" in fields else b.as_float(node, x)
    out = b.add("conv", node, [source], shape=list(weight.shape), **window, **fields)
    return out if bias is None else b.step(node, out, affine(None, bias))


def _linear(b: Builder, node: Node, x: Value, weight: Array, bias: Array | None) -> Value:
    """``weight`` is (outputs, inputs)."""
    if not x.flat or weight.ndim != 2 or weight.shape[1] != x.channels or not len(weight):
        raise CannotImport(
            f"{node.title}: weights of shape {weight.shape} (outputs, inputs) for an input of "
            f"{' × '.join(map(str, x.shape))}; flatten images before it"
        )
    window = {"stride": [1, 1], "padding": [0] * 4, "dilation": [1, 1], "groups": 1}
    return _product(b, node, x, weight[:, :, None, None], bias, **window)


@op("Gemm")
def _gemm(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    node.only(alpha=1.0, beta=1.0, transA=0)
    x, weight = any_value(node, inputs[0]), constant(node, inputs, 1, "weight")
    if weight.ndim != 2:
        raise CannotImport(f"{node.title}: weights of shape {weight.shape}; a matrix is needed")
    weight = weight if node.whole("transB", 0) else weight.T
    bias = None
    if len(inputs) > 2 and inputs[2] is not None:
        out = replace(x, shape=(len(weight), 1, 1))
        bias = per_channel(node, out, constant(node, inputs, 2, "bias"))
    return _linear(b, node, x, weight, bias)


@op("MatMul")
def _matmul(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    weight = constant(node, inputs, 1, "weight")
    return _linear(b, node, any_value(node, inputs[0]), weight.T, None)


@op("Conv")
def _conv(b: Builder, node: Node, inputs: list[Any]) -> Operand:
    x, weight = image(node, any_value(node, inputs[0])), constant(node, inputs, 1, "weight")
    groups = node.whole("group", 1)
    if weight.ndim != 4 or groups < 1 or len(weight) % groups or not weight.size:
        raise CannotImport(
            f"{node.title}: weights of shape {weight.shape} and {groups} groups; only 2-dimensional convolutions are "
            "supported"
        )
    if weight.shape[1] * groups != x.channels:
        raise CannotImport(
            f"{node.title}: weights of shape {weight.shape} and {groups} groups for {x.channels} channels"
        )
    refuse_padding_rule(node)
    node.only(kernel_shape=list(weight.shape[2:]))
    bias = None
    if len(inputs) > 2 and inputs[2] is not None:
        bias = floats(node, inputs, 2, "bias", (len(weight),))
    return _product(
        b,
        node,
        x,
        weight,
        bias,
        stride=positive(node, "strides"),
        dilation=positive(node, "dilations"),
        padding=node.wholes("pads", [0] * 4),
        groups=groups,
    )
