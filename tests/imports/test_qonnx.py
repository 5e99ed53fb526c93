"""``unflip import qonnx`` on small files that the tests write, and on brevitas's if it is installed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from brevitas_worker import NETWORKS, PYTHON, from_brevitas
from torch import nn

import unflip as package
from unflip import binarize, models
from unflip.imports import CannotImport, qonnx
from unflip.imports.onnx_file import parse_onnx
from unflip.packing import make_packed, read
from unflip.packing.file import write
from unflip.packing.reference import evaluate

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'unflip[onnx]'")

from onnx import helper  # noqa: E402
from qonnx_ops import DOMAIN, run_qonnx  # noqa: E402
from qonnx_writer import File  # noqa: E402

from unflip.export.qonnx import to_model  # noqa: E402


def imported(model: Any) -> qonnx.Imported:
    return qonnx.build(parse_onnx(model.SerializeToString(), "file"))


def check(file: File) -> qonnx.Imported:
    """onnx's evaluator and the imported network agree on inputs with many ties."""
    found = imported(file.model())
    x = file.numbers(4, *file.shape)
    [expected] = run_qonnx(file.model(), x)
    ours = evaluate(found.packed, torch.from_numpy(x)).numpy().reshape(expected.shape)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
    return found


def kinds(found: qonnx.Imported) -> list[str]:
    return [op["op"] for op in found.packed.graph["ops"]]


# --- networks


def test_a_network_of_most_operations() -> None:
    file = File(3, 12, 12)
    file.node("Mul", np.float32(2))
    file.node("Sub", np.float32(0.125))
    file.conv(8, 3, 3, 3, pads=[1, 1, 1, 1])
    first = file.norm(8)
    file.sign()
    file.conv(8, 8, 3, 3, pads=[1, 1, 1, 1], scale=0.5)
    file.node("Add", file.norm(8), first)
    file.node("PRelu", file.numbers(8, 1, 1))
    file.sign(0.75)
    file.node("MaxPool", kernel_shape=[2, 2], strides=[2, 2])
    file.conv(8, 4, 3, 3, group=2, strides=[2, 2])
    file.node("Clip", np.float32(-1), np.float32(2))
    file.quant(bits=3, scale=0.5)
    file.node("Flatten")
    file.linear(32, 10)
    file.node("Div", np.full((1, 10), 2, np.float32))
    found = check(file)
    assert kinds(found).count("quantize") == 3
    assert found.classes == 10
    assert found.changes[0].startswith("weights of 4 layers")
    assert all("bits" in op for op in found.packed.graph["ops"] if op["op"] == "conv")


@pytest.mark.parametrize(("signed", "narrow"), [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize(
    ("bits", "scale", "zero"), [(2, 0.25, 0), (4, 0.3, 0), (8, 0.01, 3), (1, 0.5, 0)]
)
def test_quantizers_with_ties(
    signed: int, narrow: int, bits: int, scale: float, zero: float
) -> None:
    file = File(6, 1, 1)
    file.quant(bits=bits, scale=scale, zero=zero, signed=signed, narrow=narrow)
    file.conv(5, 6, 1, 1)
    if bits == 1 and signed:  # qonnx takes the sign; the evaluator of the tests does not
        file.nodes[0] = helper.make_node(
            "BipolarQuant", ["input", "c0"], ["v0"], name="Quant_0", domain=DOMAIN
        )
    check(file)


@pytest.mark.parametrize("rounding", ["CEIL", "FLOOR", "HALF_EVEN"])
def test_rounding(rounding: str) -> None:
    """Against numpy, at the neighbors of every threshold."""
    file = File(1, 1, 1)
    file.quant(bits=3, scale=0.3, rounding_mode=rounding)
    file.conv(1, 1, 1, 1)
    found = imported(file.model())
    code = next(op for op in found.packed.graph["ops"] if op["op"] == "quantize")
    edges = found.packed.tensors[code["thresholds"]].reshape(-1)
    x = np.concatenate([edges, np.nextafter(edges, np.float32(-9)), np.nextafter(edges, np.float32(9))])  # fmt: skip
    function = {"CEIL": np.ceil, "FLOOR": np.floor, "HALF_EVEN": np.round}[rounding]
    whole = function(np.clip(x / np.float32(0.3), -4, 3)) * np.float32(0.3)
    ours = evaluate(found.packed, torch.from_numpy(x).reshape(-1, 1, 1, 1)).numpy().reshape(-1)
    np.testing.assert_allclose(np.abs(ours), np.abs(whole), rtol=1e-6)


def test_codes_that_become_floats() -> None:
    """A sum and a mean of signs, and a quantized output."""
    file = File(4, 6, 6)
    file.conv(4, 4, 3, 3)
    left = file.sign()
    file.node("AveragePool", kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1])
    file.node("Add", left, file.last)
    file.node("GlobalAveragePool")
    file.node("Flatten")
    file.quant(bits=4, scale=0.125)
    check(file)


@pytest.mark.parametrize(
    ("op", "inputs", "options"),
    [
        ("Relu", (), {}),
        ("LeakyRelu", (), {"alpha": 0.25}),
        ("Sigmoid", (), {}),
        ("Tanh", (), {}),
        ("Elu", (), {}),
        ("Softmax", (), {"axis": 1}),
        ("LogSoftmax", (), {"axis": 1}),
        ("Neg", (), {}),
        ("Identity", (), {}),
        ("GlobalAveragePool", (), {}),
        ("ReduceMean", (np.array([2, 3]),), {"keepdims": 0}),
        ("Pad", (np.array([0, 1, 2, 0, 0, 0, 1, 3]),), {}),
        ("Slice", (np.array([1, 0]), np.array([9, -1]), np.array([1, 3]), np.array([2, 1])), {}),
        ("Reshape", (np.array([1, -1]),), {}),
    ],
)
def test_other_operations(op: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    file = File(3, 5, 6)
    file.conv(4, 3, 1, 1, scale=0.25)
    file.node(op, *inputs, **options)
    check(file)


def test_thresholds_per_channel_before_flatten() -> None:
    file = File(3, 2, 2)
    thresholds = np.array([[-1, 0.5], [0, 1], [0.25, 2]], np.float32)
    file.node("MultiThreshold", thresholds, out_dtype="UINT2")
    file.node("Flatten")
    file.node("Gemm", file.last, np.sign(file.numbers(5, 12) + 0.01), file.numbers(5), transB=1)
    check(file)


def test_softmax_over_channels_and_pixels_is_refused() -> None:
    """Before opset 13, axis=1 meant all dimensions from 1 on."""
    file = File(3, 5, 6)
    file.conv(4, 3, 1, 1, scale=0.25)
    file.node("Softmax", axis=1)
    model = file.model()
    for entry in model.opset_import:
        if entry.domain == "":
            entry.version = 11
    with pytest.raises(CannotImport, match="before opset 13 it is over channels and pixels"):
        imported(model)


def test_gemm_with_folded_weights() -> None:
    """After qonnx-cleanup, or from other tools: weights are constants of one absolute value per filter."""
    file = File(12)
    signs = np.sign(file.numbers(5, 12) + 0.01)
    scales = np.abs(file.numbers(5, 1)) + 0.125
    file.sign()
    file.node("Gemm", file.last, (signs * scales).astype(np.float32), file.numbers(5), transB=1)
    file.node("Gemm", file.last, file.numbers(5, 3), transB=0)
    found = check(file)
    assert "stored as 32-bit floats: Gemm_2" in found.changes[1]


def perceptron() -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(48, 32, bias=False), nn.BatchNorm1d(32)]
    layers += [nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.Linear(32, 10, bias=False)]
    return binarize(nn.Sequential(*layers), "binarynet", keep_first_and_last=False, quiet=True)


NETS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "resnet20": lambda: models.create("resnet20", {"name": "dorefa", "inputs": "pm1"}, width=8),
    "two bits": lambda: models.create("resnet20", {"name": "dorefa", "input_bits": 2}, width=8),
}


@pytest.mark.parametrize("name", NETS)
def test_our_own_files_come_back(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 4, 4) if name == "perceptron" else torch.randn(4, 3, 12, 12)
    model = NETS[name]()
    with torch.no_grad():
        model.train()(x)
    packed = make_packed(model.eval(), x[:1])
    again = imported(to_model(packed)).packed
    assert torch.allclose(evaluate(again, x), evaluate(packed, x), rtol=1e-4, atol=1e-4)


def test_the_command_writes_where_a_network_comes_from(unflip: Any, tmp_path: Path) -> None:
    file = File(3, 8, 8)
    file.sign()
    file.conv(4, 3, 3, 3)
    file.node("GlobalAveragePool")
    file.node("Flatten")
    source, out = tmp_path / "small.onnx", tmp_path / "small.unflip"
    source.write_bytes(file.model().SerializeToString())
    labels = tmp_path / "labels.txt"
    labels.write_text("a one\nb two\nc three\nd four\n")
    options = ("--pixels", "-1..1", "--labels", labels, "--license", "MIT")
    made = unflip("import", "qonnx", source, "-o", out, *options)
    assert made.code == 0, made.err
    for text in ("weights of 1 layers", "values -1..1", "license: MIT"):
        assert text in made.out
    graph = read(out).graph
    assert graph["labels"] == ["one", "two", "three", "four"]
    assert graph["input"]["preprocess"] == {"mean": [0.5] * 3, "std": [0.5] * 3}
    assert graph["source"]["file SHA-256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert graph["source"]["format"] == "QONNX, written by test"
    x = file.numbers(4, 3, 8, 8)
    [expected] = run_qonnx(file.model(), x)
    try:
        network = package.load(out)
    except ImportError:
        pytest.skip("the native runtime is not built")
    assert np.allclose(network(x), expected, atol=1e-5)


# --- the real brevitas


@pytest.mark.skipif(not PYTHON, reason="set UNFLIP_BREVITAS_PYTHON to a Python with brevitas")
@pytest.mark.parametrize("name", NETWORKS)
def test_brevitas(name: str, tmp_path: Path) -> None:
    path, x, expected = from_brevitas(name, tmp_path)
    found = qonnx.load(path)
    assert "stored as 32-bit floats" not in "".join(found.changes)
    write(tmp_path / "network.unflip", found.packed)
    ours = package.load(tmp_path / "network.unflip")(x)
    assert np.allclose(ours, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
