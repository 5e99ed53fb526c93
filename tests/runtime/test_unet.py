"""A small U-Net with 1-bit convolutions: up by transposed convolutions and bilinearly, with skips between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unflip
from unflip.export.onnx import to_model
from unflip.packing import read


class Block(nn.Sequential):
    def __init__(self, channels: int, filters: int) -> None:
        conv = nn.Conv2d(channels, filters, 3, padding=1, bias=False)
        super().__init__(conv, nn.BatchNorm2d(filters), nn.PReLU(filters))


class UNet(nn.Module):
    """Classes of each pixel; the size need not be a multiple of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Block(3, 8)
        self.down1, self.down2 = Block(8, 16), Block(16, 16)
        self.up2 = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.merge2 = Block(32, 16)
        self.up1 = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        )
        self.merge1 = Block(16, 8)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = F.max_pool2d(self.stem(x), 2)
        middle = self.down1(F.max_pool2d(top, 2))
        bottom = self.down2(F.max_pool2d(middle, 2))
        up = self.merge2(torch.cat([self.up2(bottom), middle], 1))
        up = self.merge1(torch.cat([self.up1(up), top], 1))
        return F.interpolate(self.head(up), x.shape[2:], mode="bilinear", align_corners=False)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """With norms that have seen data, and weights of both signs."""
    torch.manual_seed(5)
    model = unflip.binarize(UNet(), "reactnet", skip=["up2", "up1.0"], quiet=True)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 40, 48))
    return model.eval()


@pytest.fixture(scope="module")
def path(trained: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unet") / "unet.unflip"
    unflip.pack(trained, torch.randn(2, 3, 40, 48), path)
    return path


def assert_close(found: Any, expected: Any) -> None:
    """Nearly all pixels: rounding may turn a sign here and there, which those beside it see."""
    assert found.shape == expected.shape
    assert (np.abs(found - expected) <= 1e-4 * np.abs(expected).max()).mean() > 0.99


def test_the_frozen_model_and_the_packed_one(trained: nn.Module, path: Path) -> None:
    x = torch.randn(4, 3, 40, 48)
    with torch.no_grad():
        expected = unflip.freeze(trained)(x).numpy()
    assert_close(unflip.load(path)(x).numpy(), expected)


def test_what_is_in_the_file(path: Path) -> None:
    ops = read(path).graph["ops"]
    assert sum(op["op"] == "conv" and "bits" in op for op in ops) >= 4
    kinds = {op["op"] for op in ops}
    assert kinds == {"quantize", "conv", "max_pool", "pixel_shuffle", "slice", "concat", "resize"}


def test_every_instruction_set(
    path: Path, instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, results = torch.randn(3, 3, 40, 48), set()
    for isa in instruction_sets:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        results |= {unflip.load(path, threads=n)(x).numpy().tobytes() for n in (1, 2)}
    assert len(results) == 1


def test_onnx(path: Path) -> None:
    pytest.importorskip("onnx", reason="needs onnx: pip install 'unflip[onnx]'")
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime to run what it wrote")
    model = to_model(read(path)).SerializeToString()
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    x = torch.randn(4, 3, 40, 48)
    found = session.run(None, {"input": x.numpy()})[0]
    assert_close(found, unflip.load(path)(x).numpy())


def test_show_and_bench(unflip: Any, path: Path) -> None:
    shown = unflip("show", path)
    assert shown.code == 0, shown.err
    assert "resize" in shown.out
    timed = unflip("bench", path, "--runs", 2)
    assert timed.code == 0, timed.err
    assert "pixel_shuffle" in timed.out
