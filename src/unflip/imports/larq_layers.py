"""The table of Keras's and Larq's layers, with norms, pools, shapes and operations on several values.

A handler checks the settings of a layer, loads its weights and adds torch modules to the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from torch import nn

from unflip.imports.errors import CannotImport
from unflip.imports.keras_config import LARGEST_NUMBER, Layer
from unflip.imports.larq_activations import (
    activation,
    elu,
    identity,
    leaky_relu,
    prelu,
    quantizer_layer,
    relu,
    rescaling,
    softmax,
)
from unflip.imports.larq_builder import Builder, Value, image, same_kind
from unflip.imports.larq_modules import (
    AddToLast,
    AsImage,
    Channels,
    Combine,
    Concat,
    GlobalPool,
    Pool,
)
from unflip.imports.larq_products import (
    NO_PADDING,
    conv2d,
    dense,
    depthwise_conv2d,
    geometry,
    separable_conv2d,
    zeros,
)
from unflip.imports.larq_quantizers import KERNELS

LEAST_EPSILON = 1.001e-5  # TensorFlow's fused BatchNorm, of images, uses no smaller one


def batch_norm(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    [x] = inputs
    axis = layer.config.get("axis", -1)
    axis = axis[0] if isinstance(axis, list) and len(axis) == 1 else axis
    if axis not in (-1, 1 if x.vector else 3):
        raise layer.wrong("axis", "the channels, -1")
    if layer.config.get("renorm") or layer.config.get("virtual_batch_size"):
        raise CannotImport(f"{layer.title}: renorm and virtual_batch_size are not supported")
    epsilon = layer.number("epsilon", 1e-3)
    if not x.vector:
        epsilon = max(epsilon, LEAST_EPSILON)
    variance = b.vector(layer, "moving_variance", x)
    if (variance < 0).any() or not 0 <= epsilon < 1e6 or (variance + epsilon == 0).any():
        raise CannotImport(f"{layer.title}: variance + epsilon should be above 0")
    norm = (nn.BatchNorm1d if x.vector else nn.BatchNorm2d)(x.shape[0], eps=epsilon)
    state = norm.state_dict() | {
        "running_mean": b.vector(layer, "moving_mean", x),
        "running_var": variance,
    }
    if layer.flag("scale", True):
        state["weight"] = b.vector(layer, "gamma", x)
    if layer.flag("center", True):
        state["bias"] = b.vector(layer, "beta", x)
    norm.load_state_dict(state)
    return b.add(layer, norm, [x], x.shape)


def _pool(kind: str) -> Handler:
    def handler(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
        x = image(layer, inputs[0])
        kernel = layer.pair("pool_size", 2)
        g = geometry(layer, x, kernel, layer.pair("strides", list(kernel)))
        shape = (x.shape[0], *g.size)
        b.count(layer, math.prod(shape) * math.prod(kernel))
        if kernel == x.shape[1:] and g.size == (1, 1) and g.padding == NO_PADDING:
            return b.add(layer, GlobalPool(kind, keep=True), [x], shape)
        return b.add(layer, Pool(kind, kernel, g.stride, g.padding), [x], shape)

    return handler


def _global_pool(kind: str) -> Handler:
    def handler(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
        x = image(layer, inputs[0])
        keep = layer.flag("keepdims", False)
        value = b.add(layer, GlobalPool(kind, keep), [x], (x.shape[0], 1, 1))
        return value._replace(vector=not keep)

    return handler


def zero_padding(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    x = image(layer, inputs[0])
    found = layer.config.get("padding", 1)
    found = [found, found] if type(found) is int else found
    sides = [[n, n] if type(n) is int else n for n in found] if isinstance(found, list) else []
    right = len(sides) == 2 and all(isinstance(s, list) and len(s) == 2 for s in sides)
    if not right or any(
        type(n) is not int or not 0 <= n <= LARGEST_NUMBER for s in sides for n in s
    ):
        raise layer.wrong("padding", "[[top, bottom], [left, right]]")
    return zeros(b, layer, x, ((sides[0][0], sides[0][1]), (sides[1][0], sides[1][1])))


def flatten(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    [x] = inputs
    if x.vector:
        return x
    channels, height, width = x.shape
    order = x.order
    if height * width > 1:
        places = np.arange(math.prod(x.shape)).reshape(x.shape)  # of our features
        order = (places if order is None else places[order]).transpose(1, 2, 0).ravel()
    value = b.add(layer, nn.Flatten(), [x], (channels * height * width, 1, 1))
    return value._replace(vector=True, order=order)


def reshape(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    [x] = inputs
    channels, height, width = x.shape
    target = layer.config.get("target_shape")
    if (
        not isinstance(target, list)
        or not all(type(n) is int for n in target)
        or target.count(-1) > 1
    ):
        raise layer.wrong("target_shape", "a list of sizes")
    if -1 in target:
        rest = -math.prod(target)
        target = [math.prod(x.shape) // rest if n == -1 and rest > 0 else n for n in target]
    if math.prod(target) != math.prod(x.shape) or len(target) not in (1, 3) or min(target) < 1:
        raise layer.wrong("target_shape", f"{math.prod(x.shape)} features, as a vector or an image")
    if len(target) == 3 and target == [height, width, channels] and not x.vector:
        return x
    if target[:-1] not in ([], [1, 1]):
        raise layer.wrong("target_shape", f"[{math.prod(x.shape)}] or [1, 1, {math.prod(x.shape)}]")
    flat = flatten(b, layer, [x])
    if len(target) == 1:
        return flat
    return b.add(layer, AsImage(), [flat], flat.shape)._replace(vector=False)


# --- several inputs


def _combine(kind: str) -> Handler:
    def handler(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
        same_kind(layer, inputs, "combines")
        largest = max(inputs, key=lambda v: math.prod(v.shape))
        for value in inputs:
            gate = kind == "Multiply" and value.shape == (largest.shape[0], 1, 1)
            if value.shape != largest.shape and not gate:
                raise CannotImport(
                    f"{layer.title} combines shapes {largest.shape} and {value.shape} (channels, height, width)"
                )
        return b.add(layer, Combine(kind), inputs, largest.shape, like=largest)

    return handler


def concatenate(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    first = inputs[0]
    layer.choice("axis", -1, -1, 1 if first.vector else 3)
    return _concat(b, layer, inputs)


def _concat(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    first = inputs[0]
    if any(v.vector != first.vector or v.shape[1:] != first.shape[1:] for v in inputs):
        raise CannotImport(
            f"{layer.title} joins shapes {[v.shape for v in inputs[:8]]} (channels, height, width); only channels may "
            "differ"
        )
    order = None
    if any(v.order is not None for v in inputs):
        starts = np.cumsum([0, *(v.shape[0] for v in inputs)])
        orders = [np.arange(v.shape[0]) if v.order is None else v.order for v in inputs]
        order = np.concatenate([start + o for start, o in zip(starts[:-1], orders, strict=True)])
    shape = (sum(v.shape[0] for v in inputs), *first.shape[1:])
    return b.add(layer, Concat(), inputs, shape)._replace(order=order)


# --- operations without a layer class

FUNCTIONS = {
    "__operators__.add": "Add",
    "math.add": "Add",
    "math.subtract": "Subtract",
    "math.multiply": "Multiply",
}


def operation(b: Builder, layer: Layer, inputs: list[Value]) -> Value | list[Value]:
    """``x + y`` and the like of tensors in a functional model."""
    name = layer.config.get("function")
    if name == "nn.relu" and len(inputs) == 1:
        return b.add(layer, nn.ReLU(), inputs, inputs[0].shape)
    if name not in FUNCTIONS or len(inputs) != 2:
        raise CannotImport(
            f"{layer.title}: the operation {name!r:.80} with {len(inputs)} tensors is not supported; supported are "
            f"{', '.join(FUNCTIONS)} of two tensors, and nn.relu"
        )
    return _combine(FUNCTIONS[name])(b, layer, inputs)


def zoo_lambda(b: Builder, layer: Layer, inputs: list[Value]) -> Value | list[Value]:
    """The Lambda layers of larq-zoo, known by their module and name. Their code is neither read nor run."""
    name, module = layer.path[-1], layer.config.get("module")
    for (where, ending), (count, handler) in LAMBDAS.items():
        if module == where and name.endswith(ending) and count in (None, len(inputs)):
            b.note("Lambda layers of larq-zoo", "known by their names, their code is not run")
            return handler(b, layer, inputs)
    raise CannotImport(
        f"{layer.title} contains code, which is never run. Replace it by a layer, or by an operation such as x + y; "
        "only the Lambda layers of larq-zoo's own networks are known"
    )


def _split(b: Builder, layer: Layer, inputs: list[Value]) -> list[Value]:
    x = image(layer, inputs[0])
    function = layer.config.get("function")
    captured = function[2] if isinstance(function, list) and len(function) == 3 else None
    count = captured[0] if isinstance(captured, list) and captured else None
    [parts] = count if isinstance(count, list) and len(count) == 1 else [None]
    if (
        type(parts) is not int
        or not 1 <= parts <= x.shape[0]
        or x.shape[0] % parts
        or x.order is not None
    ):
        raise CannotImport(f"{layer.title} should split {x.shape[0]} channels into equal parts")
    each = x.shape[0] // parts
    shape = (each, *x.shape[1:])
    return [b.add(layer, Channels(i * each, (i + 1) * each), [x], shape) for i in range(parts)]


def _add_to_last(b: Builder, layer: Layer, inputs: list[Value]) -> Value:
    x, y = inputs
    if x.vector or y.vector or x.shape[1:] != y.shape[1:] or x.shape[0] < y.shape[0]:
        raise CannotImport(f"{layer.title} should add an image to the last channels of another one")
    return b.add(layer, AddToLast(), [x, y], x.shape)


Handler = Callable[[Builder, Layer, list[Value]], Value | list[Value]]

# module and end of the name -> the number of inputs (None: any), and its handler
LAMBDAS: dict[tuple[str, str], tuple[int | None, Handler]] = {
    ("larq_zoo.core.utils", "_split"): (1, _split),
    ("larq_zoo.core.utils", "_concat"): (None, _concat),
    ("larq_zoo.literature.meliusnet", "_improve_merge"): (2, _add_to_last),
    ("larq_zoo.literature.real_to_bin_nets", "_out"): (1, identity),
}

MANY = 4096
# class -> the least and the largest number of inputs, and its handler
HANDLERS: dict[str, tuple[int, int, Handler]] = {
    "Activation": (1, 1, activation),
    "ActivityRegularization": (1, 1, identity),
    "Add": (2, MANY, _combine("Add")),
    "AlphaDropout": (1, 1, identity),
    "Average": (2, MANY, _combine("Average")),
    "AveragePooling2D": (1, 1, _pool("average")),
    "BatchNormalization": (1, 1, batch_norm),
    "BatchNormalizationV1": (1, 1, batch_norm),
    "Concatenate": (1, MANY, concatenate),
    "Conv2D": (1, 1, conv2d),
    "Dense": (1, 1, dense),
    "DepthwiseConv2D": (1, 1, depthwise_conv2d),
    "Dropout": (1, 1, identity),
    "ELU": (1, 1, elu),
    "Flatten": (1, 1, flatten),
    "GaussianDropout": (1, 1, identity),
    "GaussianNoise": (1, 1, identity),
    "GlobalAveragePooling2D": (1, 1, _global_pool("average")),
    "GlobalMaxPooling2D": (1, 1, _global_pool("max")),
    "Lambda": (1, MANY, zoo_lambda),
    "LeakyReLU": (1, 1, leaky_relu),
    "MaxPooling2D": (1, 1, _pool("max")),
    "Multiply": (2, MANY, _combine("Multiply")),
    "PReLU": (1, 1, prelu),
    "QuantConv2D": (1, 1, conv2d),
    "QuantDense": (1, 1, dense),
    "QuantDepthwiseConv2D": (1, 1, depthwise_conv2d),
    "QuantSeparableConv2D": (1, 1, separable_conv2d),
    "ReLU": (1, 1, relu),
    "Rescaling": (1, 1, rescaling),
    "Reshape": (1, 1, reshape),
    "SeparableConv2D": (1, 1, separable_conv2d),
    "Softmax": (1, 1, softmax),
    "SpatialDropout2D": (1, 1, identity),
    "Subtract": (2, 2, _combine("Subtract")),
    "TFOpLambda": (1, 2, operation),
    "ZeroPadding2D": (1, 1, zero_padding),
    **dict.fromkeys(KERNELS, (1, 1, quantizer_layer)),
}
