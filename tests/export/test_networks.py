"""Whole networks, from torch through the packed file to onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from unflip import binarize, freeze, load, methods, models
from unflip.export.onnx import export, to_model
from unflip.packing import PackedFileError, make_packed, pack, read
from unflip.packing.reference import evaluate, evaluate_outputs

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'unflip[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime to run what it wrote")


def run(model: bytes, x: Tensor) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"input": x.numpy()})[0]


def network(name: str, method: Any, images: Tensor, **options: Any) -> nn.Module:
    """BatchNorm as after training: statistics of the data, and a scale and shift of its own."""
    model = models.create(name, method, **options)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(images)
    return model.eval()


def assert_close(found: Any, expected: Any) -> None:
    """Three images of four at least: in a float layer sums may be rounded so that a sign falls the other way."""
    assert found.shape == expected.shape
    each = np.abs(found - expected).max(1) / np.abs(expected).max(1)
    assert (each < 1e-4).mean() >= 0.75, each


def test_resnet20(tmp_path: Path) -> None:
    """Outputs equal those of the frozen model; the file is no larger than the packed one."""
    images = torch.randn(16, 3, 32, 32)
    model = network("resnet20", {"name": "dorefa", "inputs": "pm1"}, images)
    labels = [f"class {i}" for i in range(10)]
    size = pack(model, images[:1], tmp_path / "m.unflip", labels=labels)
    assert export(tmp_path / "m.unflip", tmp_path / "m.onnx") <= 1.1 * size
    onnx.checker.check_model(onnx.load(tmp_path / "m.onnx"), full_check=True)
    with torch.no_grad():
        expected = freeze(model)(images).numpy()
    found = run((tmp_path / "m.onnx").read_bytes(), images)
    assert_close(found, expected)


def test_our_runtime(tmp_path: Path) -> None:
    images = torch.randn(8, 3, 16, 16)
    model = network("resnet20", "reactnet", images)
    pack(model, images[:1], tmp_path / "m.unflip")
    try:
        ours = load(tmp_path / "m.unflip")
    except ImportError as error:
        pytest.skip(str(error))
    export(tmp_path / "m.unflip", tmp_path / "m.onnx")
    assert_close(run((tmp_path / "m.onnx").read_bytes(), images), ours(images).numpy())


@pytest.mark.parametrize("method", methods.names())
def test_every_method(method: str) -> None:
    images = torch.randn(4, 3, 12, 12)
    model = network("resnet20", method, images, width=8)
    packed = make_packed(model, images[:1])
    expected = evaluate(packed, images).flatten(1).numpy()
    assert_close(run(to_model(packed).SerializeToString(), images), expected)


@pytest.mark.parametrize("variant", ["plain", "bireal", "bireal-prelu"])
def test_resnet18(variant: str) -> None:
    images = torch.randn(4, 3, 45, 37)  # odd sizes: pools round up
    model = network("resnet18", "xnor", images, variant=variant, width=8, num_classes=5)
    packed = make_packed(model, images[:1])
    expected = evaluate(packed, images).flatten(1).numpy()
    assert_close(run(to_model(packed).SerializeToString(), images), expected)


def test_command(unflip: Any, tmp_path: Path) -> None:
    images = torch.randn(4, 3, 8, 8)
    model = network("resnet20", "dorefa", images, width=8)
    path = tmp_path / "m.unflip"
    pack(model, images[:1], path)
    done = unflip("export", path)
    assert done.code == 0, done.err
    assert str(tmp_path / "m.onnx") in done.out
    assert run((tmp_path / "m.onnx").read_bytes(), images).shape == (4, 10)
    wrong = unflip("export", path, "-o", tmp_path / "m.tflite")
    assert wrong.code == 1
    assert "should end in .onnx" in wrong.err


class Detector(nn.Module):
    def __init__(self, head: Any) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.box, self.fc = nn.Conv2d(16, 4, 1), nn.Linear(16, 5)
        self.head = head

    def forward(self, x: Tensor) -> Any:
        stem = self.stem(x)
        body = self.bn(self.conv(stem)) + stem
        return self.head(stem, body, self.fc(body.mean((2, 3))), self.box(body))


HEADS: dict[str, Any] = {
    "dict": lambda stem, body, s, b: {"scores": s, "boxes": b, "7": stem, "again": b},
    "tuple": lambda stem, body, s, b: (b, s, body, body.relu()),
    "one": lambda stem, body, s, b: {"input_": s},
}


@pytest.mark.parametrize("name", HEADS)
def test_several_outputs(name: str, tmp_path: Path) -> None:
    """All of them, by their names; a tuple's are numbers, as values within the graph are."""
    torch.manual_seed(0)
    model = binarize(Detector(HEADS[name]), "xnor", quiet=True)
    images = torch.randn(16, 3, 8, 8)
    with torch.no_grad():
        model.train()(images)
    pack(model.eval(), images[:1], tmp_path / "m.unflip")
    export(tmp_path / "m.unflip", tmp_path / "m.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "m.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    expected = evaluate_outputs(read(tmp_path / "m.unflip"), images[:4])
    assert [output.name for output in session.get_outputs()] == list(expected)
    found = session.run(None, {"input": images[:4].numpy()})
    for array, right in zip(found, expected.values(), strict=True):
        assert_close(array.reshape(4, -1), right.flatten(1).numpy())


def test_an_output_called_input() -> None:
    packed = make_packed(Detector(lambda stem, *_: {"input": stem}), torch.randn(2, 3, 8, 8))
    with pytest.raises(
        PackedFileError, match="an output is named 'input', like the input of an ONNX"
    ):
        to_model(packed)
