"""``unflip import larq``: the forms of a config, the command, and configs that are refused."""

from __future__ import annotations

import copy
import hashlib
import json
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from keras_writer import Net
from larq_cases import SIGN, build, conv, small

import unflip as package
from unflip.imports import CannotImport, larq
from unflip.imports.keras_config import known_name, parse_config
from unflip.imports.keras_h5 import KerasFile
from unflip.imports.larq_quantizers import KERNELS, SETTINGS
from unflip.packing import read

needs_h5py = pytest.mark.skipif(
    find_spec("h5py") is None, reason="reading Keras's files needs h5py"
)


def sequential(net: Net) -> Any:
    layers = [{"class_name": e["class_name"], "config": e["config"]} for e in net.layers]
    return {"class_name": "Sequential", "config": {"name": "small", "layers": layers}}


def test_sequential_models_and_old_configs():
    net = small()
    forms = [sequential(net), sequential(net), sequential(net)]
    first = forms[1]["config"]["layers"].pop(0)  # the first layer states the shape of the input
    forms[1]["config"]["layers"][0]["config"] |= {
        "batch_input_shape": first["config"]["batch_input_shape"]
    }
    forms[2]["config"] = forms[2]["config"]["layers"]
    x = torch.from_numpy(net.x).float().permute(0, 3, 1, 2)
    for form in forms:
        found = build(net, form)
        assert np.allclose(found.model(x).detach().numpy(), net.output, atol=1e-4)


def test_a_subclass_of_model_with_a_functional_config():
    net = small()
    config = net.config() | {"class_name": "Larq>MyModel"}
    assert build(net, config).classes == 3


def test_a_model_inside_a_model():
    """Transfer learning: Sequential([base, Dense]). The weights of the base are in one group."""
    net = small()
    inner = sequential(net)["config"]["layers"]
    base = {"class_name": "Sequential", "config": {"name": "base", "layers": inner[:4]}}
    outer = {"class_name": "Sequential", "config": {"name": "small", "layers": [base, *inner[4:]]}}
    arrays = {
        path if path.startswith("logits") else f"base/{path.partition('/')[2]}": a
        for path, a in net.arrays().items()
    }
    text = json.dumps(outer).encode()
    found = larq.build(parse_config(text, "small.h5"), KerasFile("small.h5", text, arrays))
    x = torch.from_numpy(net.x).float().permute(0, 3, 1, 2)
    assert np.allclose(found.model(x).detach().numpy(), net.output, atol=1e-4)


# --- the command


@needs_h5py
def test_the_command_writes_where_a_network_comes_from(unflip, tmp_path):
    net = small()
    source, out = net.write(tmp_path / "small.h5"), tmp_path / "small.unflip"
    (tmp_path / "names.txt").write_text("a cat\nb dog\nc cow\n")
    made = unflip(
        *("import", "larq", source, "-o", out, "--pixels", "-1..1"),
        *("--labels", tmp_path / "names.txt", "--license", "MIT"),
    )
    assert made.code == 0, made.err
    for text in (
        "padding with +1 (1)",
        "softmax",
        "1 quantized layers",
        "values -1..1",
        "license: MIT",
    ):
        assert text in made.out
    graph = read(out).graph
    assert graph["labels"] == ["cat", "dog", "cow"]
    assert graph["input"]["preprocess"] == {"mean": [0.5] * 3, "std": [0.5] * 3}
    assert graph["source"]["file SHA-256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert graph["source"]["license"] == "MIT"
    assert graph["source"]["format"] == "Keras HDF5, model small"
    x = np.ascontiguousarray(net.x.transpose(0, 3, 1, 2), np.float32)
    assert np.allclose(package.load(out)(x), net.output, rtol=1e-4, atol=1e-4)


@needs_h5py
def test_weights_with_a_config_beside_them(unflip, tmp_path):
    net = small()
    weights = net.write(tmp_path / "weights.h5", with_config=False)
    (tmp_path / "model.json").write_text(json.dumps(net.config()))
    out = tmp_path / "small.unflip"
    alone = unflip("import", "larq", weights, "-o", out)
    assert alone.code == 1
    assert "has weights only; give the model's config (model.to_json()) with --config" in alone.err
    assert not out.exists()
    made = unflip("import", "larq", weights, "--config", tmp_path / "model.json", "-o", out)
    assert made.code == 0, made.err
    assert "the preprocessing is not known (--pixels states it)" in made.out
    graph = read(out).graph
    assert graph["input"]["preprocess"] is None
    assert graph["source"]["graph"] == "model.json"
    assert graph["source"]["license"] == "not stated"


@needs_h5py
def test_the_networks_of_larq_zoo_have_its_preprocessing(unflip, tmp_path):
    net = Net(8, 8, 3)
    net.add("QuantConv2D", **conv(4, **SIGN))
    net.add("GlobalAveragePooling2D")
    net.add("Dense", units=1000)
    config = net.config()
    config["config"]["name"] = "quicknet"
    config["config"]["layers"][0]["config"]["batch_input_shape"] = [None, None, None, 3]
    source, out = net.write(tmp_path / "small.h5", config), tmp_path / "small.unflip"
    open_size = unflip("import", "larq", source, "-o", out)
    assert "the size of its images is open; give it with --size" in open_size.err
    made = unflip("import", "larq", source, "-o", out, "--size", "8")
    assert made.code == 0, made.err
    graph = read(out).graph
    assert graph["input"]["preprocess"]["mean"] == [0.485, 0.456, 0.406]
    assert graph["source"]["classes"] == "1,000 ImageNet classes in the order of sorted WNIDs"
    assert graph["source"]["page"] == "https://github.com/larq/zoo"


def changed(net: Net, name: str, /, **fields: Any) -> Any:
    """The config of a network with other settings of one layer; inbound_nodes and class_name are not settings."""
    config = copy.deepcopy(net.config())
    [entry] = [e for e in config["config"]["layers"] if e["name"] == name]
    for key, value in fields.items():
        (entry if key in ("inbound_nodes", "class_name") else entry["config"])[key] = value
    return config


BAD = {
    "unknown layer": ("mean", {"class_name": "GRU"}, "GRU 'mean': this layer is not supported"),
    "custom quantizer": (
        "binary",
        {"kernel_quantizer": "mine"},
        "'mine' is not a supported quantizer",
    ),
    "inputs": (
        "binary",
        {"input_quantizer": "magnitude_aware_sign", "pad_values": 0.0},
        "not supported for inputs",
    ),
    "pad": ("binary", {"pad_values": -1.0}, "pad_values=-1.0 should be 0, or 1 with a sign"),
    "pad of floats": ("stem", {"pad_values": 1.0}, "pad_values=1.0 should be 0, or 1 with a sign"),
    "shape": (
        "binary",
        {"filters": 8},
        r"kernel of layer 'binary' has shape \(3, 3, 4, 4\); the layer needs",
    ),
    "huge": ("logits", {"units": 10**12}, "units=1000000000000 should be a whole number"),
    "text": ("stem", {"filters": "4"}, "filters='4' should be a whole number"),
    "true": ("stem", {"filters": True}, "filters=True should be a whole number"),
    "kernel": ("stem", {"kernel_size": [3]}, "kernel_size=.* should be two whole numbers"),
    "causal": ("stem", {"padding": "causal"}, "padding='causal' should be 'valid' or 'same'"),
    "layout": (
        "stem",
        {"data_format": "channels_first"},
        "data_format='channels_first' should be 'channels_last'",
    ),
    "activation": ("stem", {"activation": "softplus"}, "activation 'softplus' is not supported"),
    "axis": ("norm", {"axis": [1]}, r"axis=\[1\] should be the channels"),
    "epsilon": ("norm", {"epsilon": float("nan")}, "epsilon=nan should be a finite number"),
    "missing": ("stem", {"use_bias": True}, "bias of layer 'stem': the file does not have it"),
    "unused": ("norm", {"scale": False}, "no layer uses these weights: norm/norm/gamma:0"),
    "itself": ("stem", {"inbound_nodes": [[["stem", 0, 0, {}]]]}, "the graph has a cycle"),
    "cycle": ("stem", {"inbound_nodes": [[["binary", 0, 0, {}]]]}, "the graph has a cycle"),
    "nothing": (
        "stem",
        {"inbound_nodes": [[["other", 0, 0, {}]]]},
        "takes the result of 'other', which is not there",
    ),
    "output": (
        "stem",
        {"inbound_nodes": [[["image", 0, 3, {}]]]},
        "takes output 3 of a layer that has fewer",
    ),
    "node": (
        "stem",
        {"inbound_nodes": [[["image", -1, 0, {}]]]},
        "inbound_nodes should be lists of",
    ),
    "keyword": ("stem", {"inbound_nodes": [[["image", 0, 0, {"code": 1}]]]}, "called with .'code'"),
    "training": (
        "norm",
        {"inbound_nodes": [[["stem", 0, 0, {"training": True}]]]},
        "called with .'training'",
    ),
    "no name": ("binary", {"kernel_quantizer": {"config": {}}}, "should be a name, or an object"),
    "large": ("norm", {"epsilon": 10**400}, "epsilon=1000.* should be a finite number"),
    "dilation": ("binary", {"dilation_rate": [10**6, 1]}, "at most 65,536 are supported"),
    "twice": ("stem", {"name": "norm"}, "two layers have the name 'norm'"),
    "lambda": (
        "mean",
        {"class_name": "Lambda", "function": ["4wE=", None, None]},
        "contains code, which is never run",
    ),
    "deep kernel": ("binary", {"kernel_size": [99, 99], "padding": "valid"}, "the layer needs"),
    "size": ("image", {"batch_input_shape": [None, 10**6, 10**6, 3]}, "at most 67,108,864 values"),
    "zero": ("image", {"batch_input_shape": [None, 8, 8, 0]}, "sizes start at 1"),
    "dims": ("image", {"batch_input_shape": [None, 8]}, "needs an image|the layer needs"),
    "float shape": ("image", {"batch_input_shape": [None, 8.5, 8, 3]}, "sizes start at 1"),
}


def with_settings(name: str, /, **settings: Any) -> dict[str, Any]:
    return {"class_name": name, "config": settings}


UNKNOWN = "has the unknown setting threshold='mean'; known are"
BAD_SETTINGS = {
    "of a kernel": (
        {"kernel_quantizer": with_settings("SteSign", clip_value=1.0, threshold="mean")},
        rf"QuantConv2D 'binary' kernel_quantizer .*: the quantizer SteSign {UNKNOWN} clip_value, "
        ".* remove it from the model's config, and give that with --config FILE",
    ),
    "of an input": ({"input_quantizer": with_settings("SteTern", threshold="mean")}, UNKNOWN),
    "of an activation": ({"activation": with_settings("ApproxSign", threshold="mean")}, UNKNOWN),
    "of a no-op": ({"kernel_quantizer": with_settings("NoOp", threshold="mean")}, UNKNOWN),
    "of another quantizer": (
        {"kernel_quantizer": with_settings("SteSign", k_bit=2)},
        "the quantizer SteSign has the unknown setting k_bit=2",
    ),
    "another mode": (
        {"kernel_quantizer": with_settings("DoReFa", mode="gradients")},
        "QuantConv2D 'binary' kernel_quantizer .*: mode='gradients' should be 'activations' or",
    ),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_settings_of_quantizers_that_are_refused(case):
    """If they were ignored, the imported network could compute something else."""
    net = small()
    fields, message = BAD_SETTINGS[case]
    with pytest.raises(CannotImport, match=message):
        build(net, changed(net, "binary", **fields))


def test_unknown_settings_of_a_quantizer_that_is_a_layer_are_refused():
    net = small()
    config = changed(net, "mean", class_name="SteSign", threshold="mean")
    with pytest.raises(CannotImport, match=f"SteSign 'mean': the quantizer SteSign {UNKNOWN}"):
        build(net, config)


@pytest.mark.parametrize(
    ("name", "setting"),
    [("SteSign", {"clip_value": None}), ("SwishSign", {"beta": 2.0}), ("NoOp", {"precision": 1})],
)
def test_settings_that_act_only_in_training_are_accepted(name, setting):
    net = small()
    keras = {"name": "q", "trainable": True, "dtype": "float32", "dynamic": True, "metrics": []}
    quantizer = with_settings(name, **keras, **setting)
    assert build(net, changed(net, "binary", kernel_quantizer=quantizer)).classes == 3


def test_the_settings_of_every_quantizer_are_known():
    assert SETTINGS.keys() == {*KERNELS, "NoOp"}


@pytest.mark.parametrize("case", BAD)
def test_configs_that_are_refused(case):
    net = small()
    name, fields, message = BAD[case]
    with pytest.raises(CannotImport, match=message):
        build(net, changed(net, name, **fields))


def test_a_lambda_that_splits_into_too_many_parts():
    net = small()
    net.layers[-2]["name"] = "mean_split"
    net.layers[-1]["inbound_nodes"] = [[["mean_split", 0, 0, {}]]]
    code = {
        "name": "mean_split",
        "module": "larq_zoo.core.utils",
        "function": ["", None, [[10**9]]],
    }
    net.layers[-2] |= {"class_name": "Lambda", "config": code}
    with pytest.raises(CannotImport, match="should split 4 channels into equal parts"):
        build(net)


def nested(levels: int) -> Any:
    model: Any = {"class_name": "Dense", "config": {"name": "last", "units": 1}}
    for level in range(levels):
        model = {"class_name": "Sequential", "config": {"name": f"m{level}", "layers": [model]}}
    return model


def sequential_of(layers: list[Any]) -> Any:
    first = {"class_name": "InputLayer", "config": {"name": "x", "batch_input_shape": [None, 3]}}
    return {"class_name": "Sequential", "config": {"name": "m", "layers": [first, *layers]}}


BAD_CONFIGS = {
    "no JSON": (b"\x80\x04", "bad JSON"),
    "deep JSON": (
        b'{"config":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "bad JSON|should be an object",
    ),
    "a list": (b"[1]", "every layer should be an object"),
    "a subclass": (
        b'{"class_name": "MyModel", "config": {"name": "m"}}',
        "Sequential or functional one",
    ),
    "no layers": (
        b'{"class_name": "Sequential", "config": {"name": "m", "layers": []}}',
        "no list of layers",
    ),
    "nested": (json.dumps(nested(30)).encode(), "nested more than 8 levels|first layer"),
    "many": (
        json.dumps(
            sequential_of([{"class_name": "Dropout", "config": {"name": "d"}}] * 10_001)
        ).encode(),
        "more than 10,000 layers",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_texts_that_are_not_a_model(case):
    text, message = BAD_CONFIGS[case]
    with pytest.raises(CannotImport, match=f"model.json: .*({message})"):
        parse_config(text, "model.json")


def test_a_model_without_quantizers_is_refused():
    net = Net(4, 4, 3)
    net.add("Conv2D", **conv(4))
    with pytest.raises(CannotImport, match="no layer has a quantizer"):
        build(net)


def test_classes_of_other_packages_are_refused() -> None:
    """They may share a name with a layer of Keras and compute something else."""
    assert [known_name(name, "layer") for name in ("ReLU", "Larq>SteSign")] == ["ReLU", "SteSign"]
    with pytest.raises(CannotImport, match=r"layer 'a': 'acme>ReLU' is of the package 'acme'"):
        known_name("acme>ReLU", "layer 'a'")
