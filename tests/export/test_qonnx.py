"""QONNX files: equal to the runtime in onnx's evaluator, and in the real qonnx and hls4ml where those are installed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_net import Net
from torch import Tensor, nn

from unflip import binarize, load, models
from unflip.cost import cost
from unflip.packing import PackedFileError, pack
from unflip.packing.reference import evaluate

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'unflip[onnx]'")

from qonnx_ops import run_qonnx  # noqa: E402
from qonnx_worker import PYTHON, in_qonnx  # noqa: E402

from unflip.export.qonnx import export, to_model  # noqa: E402

needs_qonnx = pytest.mark.skipif(
    not PYTHON, reason="set UNFLIP_QONNX_PYTHON to a Python with qonnx and hls4ml"
)
PM1 = {"name": "dorefa", "inputs": "pm1"}
TWO_BITS = {"name": "dorefa", "input_bits": 2}


def check(net: Net, x: Any = None) -> Any:
    """The file equals the plain evaluation. Numbers are small eighths, so that ties happen."""
    packed = net.packed()
    x = net.numbers(3, *net.shape) if x is None else x
    expected = evaluate(packed, torch.from_numpy(x)).numpy()
    expected = expected[:, :, 0, 0] if expected.shape[2:] == (1, 1) else expected
    model = to_model(packed)
    [found] = run_qonnx(model, x[:, :, 0, 0] if net.shape[1:] == (1, 1) else x)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    return model


def kinds(model: Any) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


CODES: list[dict[str, Any]] = [
    {},
    {"strict": [True], "channels": 5},
    {"scales": [1.0], "offset": 0.0},
    {"scales": [0.7], "offset": -0.3},
    {"steps": 2, "coding": "levels", "scales": [1.0, 2.0], "offset": -1.0, "strict": [False, True]},
    {"steps": 3, "coding": "levels", "scales": [1 / 3, 2 / 3], "offset": 0.0, "channels": 5},
    {"steps": 2, "scales": [1.0, 0.5], "offset": -0.5, "strict": [True, False]},
    {"steps": 7, "coding": "levels", "scales": [0.3, 0.6, 1.2], "offset": 0.1, "strict": [True] * 7},
    {"steps": 7, "coding": "levels", "scales": [1.0, 2.0, 4.0], "offset": -4.0, "channels": 5},
]  # fmt: skip


@pytest.mark.parametrize("fields", CODES)
@pytest.mark.parametrize("unit", [False, True])
def test_codes(fields: dict[str, Any], unit: bool) -> None:
    net = Net((5, 6, 7))
    inputs = [0, net.op("mean_abs", 0, over="sample")] if unit else [0]
    net.conv(net.quantize(*inputs, **fields), [4, 5, 3, 3], padding=[1, 1, 1, 1])
    assert kinds(check(net))["BipolarQuant"] >= 1


@pytest.mark.parametrize("source", ["code", "code with an offset", "floats"])
@pytest.mark.parametrize(("bases", "offset"), [(1, False), (3, False), (1, True)])
@pytest.mark.parametrize("groups", [1, 2])
def test_binary_weights(source: str, bases: int, offset: bool, groups: int) -> None:
    net = Net((6, 7, 5))
    fields: dict[str, Any] = {"scales": [0.7], "offset": 0.1} if "offset" in source else {}
    x = 0 if source == "floats" else net.quantize(0, **fields)
    own = {"offset": net.tensor(4)} if offset else {}
    window = {"padding": [2, 1, 0, 1], "stride": [2, 1], "dilation": [1, 2]}
    net.conv(x, [4, 6 // groups, 3, 2], bases, groups=groups, **window, **own)
    check(net)


@pytest.mark.parametrize("step", ["affine", "prelu", "clamp", "negative prelu"])
@pytest.mark.parametrize("fields", CODES)
def test_whole_thresholds(step: str, fields: dict[str, Any]) -> None:
    """A sign after BatchNorm is taken of the whole number: no Mul is left, and ties fall as in the runtime."""
    net = Net((8, 5, 5))
    steps: list[dict[str, Any]] = [
        {"step": "affine", "scale": net.tensor(5), "shift": net.tensor(5)}
    ]
    if "prelu" in step:
        slope = np.abs(net.numbers(5)) * (-1 if "negative" in step else 1)
        steps.append({"step": "prelu", "slope": net.keep(slope)})
    elif step == "clamp":
        steps.append({"step": "clamp", "low": -1.5, "high": 1.5})
    hidden = net.conv(net.quantize(0), [5, 8, 3, 3], scales=net.tensor(1, 5), steps=steps)
    net.conv(net.quantize(hidden, **fields), [3, 5, 1, 1], scales=net.keep(np.ones((1, 3), "f4")))
    model = check(net)
    if not fields and step == "affine":
        assert not kinds(model)["Mul"]
        assert kinds(model)["Add"] <= 2


@pytest.mark.parametrize("signs", [False, True])
def test_factors_that_stay_separate(signs: bool) -> None:
    """The product of scale and factor overflows: a sum of 0 then gave NaN instead of 0."""
    net = Net((4, 3, 3))
    factor = net.keep(np.full(3, 1e20, np.float32))
    steps = [{"step": "affine", "scale": factor}, {"step": "clamp", "low": -1, "high": 1}]
    scales = net.keep(np.full((1, 3), 1e30, np.float32))
    x = net.conv(net.quantize(0), [3, 4, 1, 1], scales=scales, steps=steps)
    if signs:
        code = net.quantize(x)
        net.tensors[net.ops[-1]["thresholds"]][:] = 0
        net.conv(code, [2, 3, 1, 1])
    check(net)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("channels", [1, 4])
def test_bytes(channels: int, vector: bool) -> None:
    """8-bit ends: saturation, ties, padding with another number than 0."""
    net = Net((4, 1, 1) if vector else (4, 9, 9))
    kernel, groups, padding = (1, 1, [0] * 4) if vector else (3, 2, [1, 0, 2, 1])
    shape = [6, 4 // groups, kernel, kernel]
    whole = net.random.integers(-127, 128, shape).astype(np.int8).view(np.uint8)
    code = net.op(
        "to_bytes",
        0,
        scale=net.keep(np.full(channels, 60.0, np.float32)),
        shift=net.keep(net.random.integers(0, 512, channels).astype(np.float32) / 2),
        zero=net.keep(net.random.integers(0, 256, channels).astype(np.uint8)),
    )
    window = {"stride": [1, 1], "dilation": [1, 1], "padding": padding, "groups": groups}
    steps = [{"step": "affine", "shift": net.tensor(6)}]
    own = {"bytes": net.keep(whole), "scales": net.tensor(1, 6)}
    net.op("conv", code, shape=shape, steps=steps, **window, **own)
    assert kinds(check(net))["Quant"] == 2


def test_vectors_are_products_of_matrices() -> None:
    """Also with shortcuts, factors, activations and a softmax; images become vectors and vectors images."""
    net = Net((3, 4, 4))
    flat = net.op("flatten", 0)
    first = net.conv(net.quantize(flat), [6, 48, 1, 1])
    steps = [
        {"step": "add", "value": first},
        {"step": "prelu", "slope": net.tensor(6)},
        {"step": "mul", "value": first},
    ]
    second = net.conv(net.quantize(first), [6, 6, 1, 1], steps=steps)
    curved = net.op("curve", second, function="tanh")
    again = net.op("upsample", curved, factor=[2, 2])
    mean = net.op("mean", again)
    net.op("map", mean, steps=[{"step": "mul", "value": net.op("mean_abs", mean, over="sample")}])
    net.op("softmax", len(net.ops))
    model = check(net)
    assert kinds(model)["MatMul"] == 2
    assert not kinds(model)["Conv"]


def test_file(tmp_path: Path) -> None:
    """The domain, fixed sizes, metadata; nothing that is not used."""
    net = Net((4, 5, 5))
    net.conv(net.quantize(0), [4, 4, 3, 3])
    net.conv(net.quantize(1 + len(net.ops) - 1), [4, 4, 1, 1])
    net.labels, net.preprocess = ["a"] * 4, {"mean": [0.5] * 4, "std": [0.2] * 4}
    model = to_model(net.packed())
    used = {name for node in model.graph.node for name in (*node.input, *node.output)}
    assert {tensor.name for tensor in model.graph.initializer} <= used
    assert {i.domain: i.version for i in model.opset_import}["qonnx.custom_op.general"] == 1
    assert [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [1, 4, 5, 5]
    assert not kinds(model)["Identity"]
    assert model.graph.output[0].name in model.graph.node[-1].output
    texts = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert texts == {"labels": net.labels, "preprocess": net.preprocess}


def test_refusals() -> None:
    net = Net((4, 5, 5))
    net.conv(net.quantize(0), [4, 4, 1, 1])
    net.ops[-1]["op"] = "deconv"
    with pytest.raises(PackedFileError, match=r"op 1 \(deconv 'conv1'\): unknown op; the known"):
        to_model(net.packed())


def trained(model: nn.Module, x: Tensor) -> nn.Module:
    """BatchNorm as after training, with factors of both signs."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.weight, -1.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(x)
    return model.eval()


def perceptron(method: Any) -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32)]
    layers += [nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.Linear(32, 10, bias=False)]
    return binarize(nn.Sequential(*layers), method, keep_first_and_last=False, quiet=True)


def convolutions(method: Any) -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3, bias=False), nn.BatchNorm2d(16)]
    layers += [nn.Conv2d(16, 16, 3, bias=False), nn.BatchNorm2d(16), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(256, 10, bias=False))
    return binarize(model, method, keep_first_and_last=False, quiet=True)


def exported(model: nn.Module, x: Tensor, folder: Path) -> tuple[Path, Any]:
    """The QONNX file, and what the runtime computes."""
    pack(model, x[:1], folder / "m.unflip")
    try:
        network = load(folder / "m.unflip")
    except ImportError as error:
        pytest.skip(str(error))
    export(folder / "m.unflip", folder / "m.onnx")
    return folder / "m.onnx", network(x.numpy())


@pytest.mark.parametrize("method", [PM1, "dorefa", "binarynet", "adabin", "tbn", "reactnet"])
def test_the_runtime_has_the_same_bits(method: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 1, 8, 8)
    path, ours = exported(trained(perceptron(method), x), x, tmp_path)
    [found] = run_qonnx(onnx.load(path), x.numpy())
    assert np.array_equal(found, ours)


def test_resnet20(tmp_path: Path) -> None:
    """Float ends, shortcuts by slices, PReLU."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    model = trained(models.create("resnet20", PM1, width=8), x)
    path, ours = exported(model, x, tmp_path)
    [found] = run_qonnx(onnx.load(path), x.numpy())
    assert np.allclose(found, ours, atol=1e-4 * np.abs(ours).max())


def test_command(unflip: Any, tmp_path: Path) -> None:
    x = torch.randn(4, 1, 8, 8)
    path, _ = exported(trained(perceptron(PM1), x), x, tmp_path)
    target = tmp_path / "again.onnx"
    done = unflip("export", tmp_path / "m.unflip", "--qonnx", target)
    assert done.code == 0, done.err
    assert target.read_bytes() == path.read_bytes()
    wrong = unflip("export", tmp_path / "m.unflip", "--qonnx", tmp_path / "m.qonnx")
    assert "--qonnx" in wrong.err
    assert "should end in .onnx" in wrong.err
    both = unflip("export", tmp_path / "m.unflip", "--qonnx", target, "--c", tmp_path)
    assert "give one of them" in both.err


# --- the real packages --------------------------------------------------------------------------------------


@needs_qonnx
@pytest.mark.parametrize("method", [PM1, "binarynet", "adabin", "tbn", TWO_BITS])
def test_qonnx_computes_the_same_bits(method: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 1, 8, 8)
    path, ours = exported(trained(perceptron(method), x), x, tmp_path)
    [found], _ = in_qonnx(path, x.numpy())
    assert np.array_equal(found, ours)


def counted(model: nn.Module, x: Tensor) -> dict[str, float]:
    """The multiplications of ``unflip.cost``, by QONNX's names of types."""
    names = {1: "BIPOLAR", 2: "UINT2", 8: "8", 32: "FLOAT32"}
    found: Counter[str] = Counter()
    for layer in cost(model, x).layers:
        found[f"op_mac_{names[layer.input_bits]}_{names[layer.weight_bits]}"] += layer.macs
    return dict(found)


@needs_qonnx
@pytest.mark.parametrize("method", [PM1, TWO_BITS])
def test_qonnx_counts_what_we_count(method: Any, tmp_path: Path) -> None:
    """Multiplications by type, and bits of weights, of a network with shortcuts and float ends."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    model = trained(models.create("resnet20", method, width=8), x)
    path, ours = exported(model, x, tmp_path)
    [found], report = in_qonnx(path, x.numpy())
    assert np.allclose(found, ours, atol=1e-4 * np.abs(ours).max())
    assert {key: n for key, n in report.items() if key.startswith("op_mac")} == counted(model, x)
    layers = cost(model, x).layers
    binary = sum(layer.weight_bits == 1 for layer in layers)
    assert binary == len(layers) - 2
    weights = {name: p.numel() for name, p in model.named_parameters() if name.endswith("weight")}
    ones = sum(weights[f"{layer.name}.weight"] for layer in layers if layer.weight_bits == 1)
    assert report["mem_w_BIPOLAR"] == ones


@needs_qonnx
@pytest.mark.parametrize("network", [perceptron, convolutions])
def test_hls4ml_simulates_the_same_bits(network: Any, tmp_path: Path) -> None:
    """Its C++, compiled here. Scores are whole numbers, so nothing is rounded by fixed-point types."""
    torch.manual_seed(0)
    x = torch.randint(0, 256, (64, 1, 8, 8)) / 256 * 2 - 1
    path, ours = exported(trained(network("binarynet"), x), x, tmp_path)
    assert np.array_equal(ours, ours.round())
    [found], _ = in_qonnx(path, x.numpy(), "hls4ml")
    assert np.array_equal(found, ours)
