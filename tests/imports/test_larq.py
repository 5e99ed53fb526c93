"""``unflip import larq`` on small Keras files that the tests write, compared with plain numpy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from keras_worker import PYTHON, Keras
from keras_writer import Net, compute
from larq_cases import DEPTHWISE, NORM, SIGN, build, conv

import unflip as package
from unflip.imports import larq_quantizers
from unflip.imports.keras_config import Layer
from unflip.imports.larq_modules import same_padding
from unflip.packing import read


def ours(net: Net) -> tuple[Any, Any]:
    """The imported network, and its result for the input of ``net``."""
    found = build(net)
    x = torch.from_numpy(net.x).float()
    with torch.no_grad():
        return found, found.model(x.permute(0, 3, 1, 2) if x.dim() == 4 else x)


@pytest.fixture(scope="module")
def keras() -> Iterator[Keras | None]:
    """The real Keras, if there is one."""
    worker = Keras() if PYTHON else None
    yield worker
    if worker is not None:
        worker.close()


def assert_equal(net: Net, path: Path, keras: Keras | None) -> Any:
    """numpy, the imported torch model, the packed file in the runtime and, if there is one, Keras are equal."""
    found, result = ours(net)
    expected = net.output
    if keras is not None:
        real = keras.output(net.write(path / "small.h5"), net.x)
        assert np.allclose(real, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    expected = expected.transpose(0, 3, 1, 2) if expected.ndim == 4 else expected
    assert result.shape == expected.shape
    assert np.allclose(result.numpy(), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    example = torch.randn(2, *found.shape, generator=torch.Generator().manual_seed(0))
    package.pack(found.model, example, path / "small.unflip")
    x = net.x.transpose(0, 3, 1, 2) if net.x.ndim == 4 else net.x
    packed = package.load(path / "small.unflip")(np.ascontiguousarray(x, np.float32))
    size = 1e-4 * np.abs(expected).max()
    assert np.allclose(packed.reshape(expected.shape), expected, rtol=1e-4, atol=size)
    return found


def test_a_network_of_most_layers(keras, tmp_path):
    """SAME at stride 2 (uneven), both paddings, shortcuts, pools, a flattened image before norms and dense layers."""
    net = Net(14, 18, 3)
    net.add("Conv2D", **conv(8, 3, strides=[2, 2], padding="same", use_bias=True))
    net.add("BatchNormalization", **NORM, scale=False)
    net.add("Activation", activation="relu")
    net.add("MaxPooling2D", pool_size=[3, 3], strides=[2, 2], padding="same")
    first = net.add("BatchNormalization", **NORM)
    net.add("QuantConv2D", **conv(8, padding="same", pad_values=1.0, activation="relu", **SIGN))
    net.add("BatchNormalization", **NORM, center=False)
    second = net.add("Add", first, net.last)
    net.add("QuantConv2D", **conv(16, strides=[2, 2], padding="same", pad_values=0.0, **SIGN))
    net.add("PReLU", shared_axes=[1, 2])
    left = net.add("BatchNormalization", **NORM)
    net.add("AveragePooling2D", second, pool_size=[2, 2], strides=[2, 2], padding="same")
    right = net.add("Conv2D", **conv(16, 1))
    net.add("Concatenate", left, right, axis=-1)
    net.add(
        "QuantSeparableConv2D",
        **conv(8, padding="same", pad_values=1.0),
        **DEPTHWISE,
        pointwise_quantizer=None,
    )
    net.add("Dropout", rate=0.5)
    net.add("Flatten")
    net.add("BatchNormalization", axis=[1], epsilon=1e-4)
    net.add("PReLU", shared_axes=None)
    net.add("QuantDense", units=12, use_bias=False, **SIGN)
    net.add("BatchNormalization", axis=[1], epsilon=1e-3)
    net.add("Dense", units=7, use_bias=True, activation="softmax")
    found = assert_equal(net, tmp_path, keras)
    assert (found.shape, found.classes, found.name) == ((3, 14, 18), 7, "small")
    assert "the softmax at the end is left out: the network returns logits" in found.changes


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 2), (2, 1), (3, 2), (4, 1), (3, 3)])
def test_paddings_of_convolutions_and_pools(keras, tmp_path, size, kernel, stride):
    net = Net(size, size + 1, 4, seed=kernel)
    options = {"padding": "same", "strides": [stride, stride]}
    each = [
        net.add("QuantConv2D", "image", **conv(4, kernel, pad_values=pad, **options, **SIGN))
        for pad in (0.0, 1.0)
    ]
    each.append(net.add("Conv2D", "image", **conv(4, kernel, **options)))
    each.append(
        net.add(
            "QuantDepthwiseConv2D",
            "image",
            kernel_size=[kernel] * 2,
            use_bias=False,
            **options,
            **DEPTHWISE,
        )
    )
    for kind in ("MaxPooling2D", "AveragePooling2D"):
        each.append(net.add(kind, "image", pool_size=[kernel, kernel], **options))
    net.add("Concatenate", *each, axis=3)
    assert_equal(net, tmp_path, keras)


@pytest.mark.parametrize("size", range(1, 12))
def test_same_padding_gives_tensorflows_size(size):
    for kernel in range(1, 6):
        for stride in range(1, 4):
            before, after = same_padding(size, kernel, stride)
            assert 0 <= after - before <= 1
            assert (size + before + after - kernel) // stride + 1 == -(-size // stride)


def quantizer(name: str, **config: Any) -> dict[str, Any]:
    return {"module": "larq.quantizers", "class_name": name, "config": {"name": "q", **config}}


TERNARY = quantizer("SteTern", threshold_value=0.2, ternary_weight_networks=False)
INPUTS = {
    "sign": "ste_sign",
    "object": quantizer("SteSign", clip_value=1.25),
    "approx": "approx_sign",
    "swish": "swish_sign",
    "heaviside": "ste_heaviside",
    "ternary": TERNARY,
    "dorefa 1": quantizer("DoReFa", k_bit=1, mode="activations"),
    "dorefa 2": quantizer("DoReFa", k_bit=2, mode="activations"),
    "dorefa 4": quantizer("DoReFa", k_bit=4, mode="activations"),
    "float": None,
}
WEIGHTS = {
    "sign": "ste_sign",
    "approx": "approx_sign",
    "swish": "swish_sign",
    "magnitude": "magnitude_aware_sign",
    "xnor": "xnor_weight_scale",
    "layer": "magnitude_aware_sign_unclipped",
    "heaviside": "ste_heaviside",
    "ternary": TERNARY,
    "ternary of the mean": quantizer("SteTern", ternary_weight_networks=True),
    "dorefa 1": quantizer("DoReFa", k_bit=1, mode="weights"),
    "dorefa 2": quantizer("DoReFa", k_bit=2, mode="weights"),
    "dorefa 3 of activations": quantizer("DoReFa", k_bit=3, mode="activations"),
    "no-op": quantizer("NoOp", precision=1),
    "float": None,
}
PAIRS = [(i, "sign") for i in INPUTS] + [("sign", w) for w in WEIGHTS if w != "sign"]


@pytest.mark.parametrize(
    ("inputs", "weights"), [*PAIRS, ("dorefa 2", "dorefa 2"), ("ternary", "float")]
)
def test_quantizers(keras, tmp_path, inputs, weights):
    net = Net(6, 6, 4)
    net.add(
        "QuantConv2D",
        **conv(
            6, padding="same", input_quantizer=INPUTS[inputs], kernel_quantizer=WEIGHTS[weights]
        ),
    )
    net.add("BatchNormalization", **NORM)
    net.add(
        "QuantDepthwiseConv2D",
        kernel_size=[3, 3],
        depth_multiplier=2,
        strides=[1, 1],
        input_quantizer=INPUTS[inputs],
        depthwise_quantizer=WEIGHTS[weights],
    )
    net.add(
        "QuantSeparableConv2D",
        **conv(5),
        pointwise_quantizer=WEIGHTS[weights],
        depthwise_quantizer="ste_sign",
    )
    net.add("GlobalAveragePooling2D")
    net.add("BatchNormalization", axis=[1], epsilon=1e-3)
    kernel = WEIGHTS["sign" if weights == "xnor" else weights]  # it has no meaning for a matrix
    net.add("QuantDense", units=3, input_quantizer=INPUTS[inputs], kernel_quantizer=kernel)
    assert_equal(net, tmp_path, keras)


@pytest.mark.parametrize(
    "value",
    [
        "ste_sign",
        "Larq>SteSign",
        {"class_name": "SteSign", "config": {"clip_value": 1.0}},
        {"module": "builtins", "class_name": "function", "config": "ste_sign"},
    ],
)
def test_a_quantizer_has_several_spellings(value):
    found = larq_quantizers.quantizer(Layer("QuantConv2D", ("conv",), {"key": value}), "key")
    assert found.name == "SteSign"


@pytest.mark.parametrize("pad", [0.0, 1.0])
def test_float_kernels_with_binary_inputs_and_kernels_that_are_binary_already(keras, tmp_path, pad):
    net = Net(6, 6, 4)
    options = {"padding": "same", "pad_values": pad, "strides": [2, 2]}
    net.add("QuantConv2D", **conv(4, input_quantizer="ste_sign", **options))
    stored = net.add(
        "QuantConv2D",
        **conv(
            4,
            input_quantizer="ste_sign",
            kernel_quantizer=quantizer("NoOp", precision=1),
            **options,
        ),
    )
    before = net.layers[-2]["name"]
    kernel = np.sign(net.weights[stored]["kernel"]) * np.float32([0.5, 1, 2, 4])
    net.weights[stored]["kernel"] = kernel.astype(np.float32)
    net.values[stored] = compute(
        "Conv2D", net.layers[-1]["config"], net.weights[stored], [net.values[before]]
    )
    found = assert_equal(net, tmp_path, keras)
    ops = read(tmp_path / "small.unflip").graph["ops"]
    assert [op["shape"] for op in ops if "bits" in op] == [[4, 1, 1, 1], [4, 4, 3, 3]]
    assert found.classes == 16


def test_a_sign_as_activation_needs_no_float_signs(keras, tmp_path):
    """Activation('ste_sign') before a binary layer is that layer's quantizer."""
    net = Net(6, 6, 4)
    sign = net.add("Activation", activation="ste_sign")
    one = net.add("QuantConv2D", sign, **conv(4, padding="same", kernel_quantizer="ste_sign"))
    two = net.add("QuantConv2D", sign, **conv(4, padding="same", pad_values=1.0, **SIGN))
    net.add("Add", one, two)
    net.add("BatchNormalization", **NORM)
    assert_equal(net, tmp_path, keras)
    ops = read(tmp_path / "small.unflip").graph["ops"]
    assert [op["shape"] for op in ops if "bits" in op] == [[4, 4, 3, 3]] * 2


def test_a_sign_may_also_stay_float(keras, tmp_path):
    net = Net(6, 6, 4)
    sign = net.add("Activation", activation="ste_sign")
    net.add("AveragePooling2D", pool_size=[3, 3], strides=[1, 1], padding="same")
    net.add("Concatenate", sign, net.last)
    assert_equal(net, tmp_path, keras)


def test_gates_reshapes_and_other_small_layers(keras, tmp_path):
    net = Net(7, 6, 4)
    net.add("Rescaling", scale=0.5, offset=0.1)
    net.add("ZeroPadding2D", padding=[[1, 2], [0, 1]])
    base = net.add(
        "QuantConv2D", **conv(6, 3, groups=2, dilation_rate=[2, 2], padding="same", **SIGN)
    )
    net.add("GlobalMaxPooling2D")
    net.add("Dense", units=6, activation="sigmoid")
    gate = net.add("Reshape", target_shape=[1, 1, 6])
    net.add("Multiply", base, gate)
    net.add("LeakyReLU", alpha=0.1)
    net.add("ReLU", max_value=6.0, negative_slope=0.0, threshold=0.0)
    net.add("Dense", units=5, activation="hard_tanh")  # of each pixel
    net.add("Reshape", target_shape=[1, 1, int(np.prod(net.output.shape[1:]))])
    net.add("QuantConv2D", **conv(9, 1, **SIGN))  # as BinaryAlexNet does
    first = net.add("Flatten")
    net.add("Activation", activation="hard_sigmoid")
    net.add("Average", first, net.last)
    net.add("Activation", activation="leaky_tanh")
    net.add("Subtract", first, net.last)
    assert_equal(net, tmp_path, keras)


def test_flattened_images_joined_with_other_vectors(keras, tmp_path):
    net = Net(5, 4, 3)
    flat = net.add("Flatten")
    mean = net.add("GlobalAveragePooling2D", "image")
    net.add("Concatenate", mean, flat, mean)
    net.add("BatchNormalization", axis=[1], epsilon=1e-3)
    net.add("QuantDense", units=5, **SIGN)
    assert_equal(net, tmp_path, keras)


def test_vectors_as_input(keras, tmp_path):
    net = Net(20)
    net.add("QuantDense", units=8, **SIGN)
    net.add("BatchNormalization", axis=[1], epsilon=1e-3)
    net.add("QuantDense", units=3, **SIGN)
    assert assert_equal(net, tmp_path, keras).shape == (20,)


def test_operations_of_tensors_and_a_layer_that_is_used_twice(keras, tmp_path):
    net = Net(6, 6, 4)
    net.add("QuantConv2D", name="conv", **conv(4, padding="same", **SIGN))
    first = net.output
    second = compute("Conv2D", net.layers[-1]["config"], net.weights["conv"], [first])
    net.layers[-1]["inbound_nodes"].append([["conv", 0, 0, {"training": False}]])
    add = {"name": "tf.__operators__.add", "function": "__operators__.add"}
    node = ["conv", 0, 0, {"y": ["conv", 1, 0], "name": None}]
    net.layers.append(
        {"class_name": "TFOpLambda", "config": add, "name": add["name"], "inbound_nodes": [node]}
    )
    net.last, net.weights[add["name"]] = add["name"], {}
    net.values[net.last] = first + second
    assert_equal(net, tmp_path, keras)


def test_lambda_layers_of_larq_zoo_are_known_by_name(tmp_path):
    """MeliusNet's split, concat and improvement block."""
    net = Net(6, 6, 4)
    code = ["4wEAAAA=", None, [[2], {"axis": -1}, {"class_name": "function", "config": "split"}]]

    def zoo(name: str, module: str, *inputs: Any) -> None:
        config = {
            "name": name,
            "function": code,
            "function_type": "lambda",
            "module": f"larq_zoo.{module}",
        }
        net.layers.append(
            {
                "class_name": "Lambda",
                "config": config,
                "name": name,
                "inbound_nodes": [list(inputs)],
            }
        )
        net.weights[name] = {}

    zoo("stem_split", "core.utils", ["image", 0, 0, {}])
    zoo("stem_concat", "core.utils", ["stem_split", 0, 1, {}], ["stem_split", 0, 0, {}])
    net.values["stem_concat"] = net.x[..., [2, 3, 0, 1]]
    net.add("QuantConv2D", "stem_concat", **conv(3, padding="same", **SIGN))
    zoo(
        "block_improve_merge",
        "literature.meliusnet",
        ["stem_concat", 0, 0, {}],
        [net.last, 0, 0, {}],
    )
    zoo("block_out", "literature.real_to_bin_nets", ["block_improve_merge", 0, 0, {}])
    total = net.values["stem_concat"].copy()
    total[..., 1:] += net.output
    net.last = "block_out"
    net.values[net.last] = total
    found = assert_equal(net, tmp_path, None)
    assert (
        "Lambda layers of larq-zoo (4): known by their names, their code is not run"
        in found.changes
    )
