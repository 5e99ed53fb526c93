"""8-bit ends in the runtime: the bits of the frozen network, on every instruction set, from floats and pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip.packing import CannotPack
from unflip.packing.file import Packed, read, write
from unflip.packing.reference import evaluate

Check = Callable[[nn.Module, Tensor, dict[str, list[float]]], None]


def normalized(image: Tensor, preprocess: dict[str, list[float]]) -> Tensor:
    mean, std = (torch.tensor(preprocess[key]).view(-1, 1, 1) for key in ("mean", "std"))
    return (image / 255 - mean) / std


@pytest.fixture
def check(instruction_sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Packed and frozen network give the same bits: on each instruction set, one and two threads, floats and pixels."""

    def compare(model: nn.Module, image: Tensor, preprocess: dict[str, list[float]]) -> None:
        x, path = normalized(image, preprocess), tmp_path / "model.unflip"
        unflip.pack(model.eval(), x, path, preprocess=preprocess)
        with torch.no_grad():
            expected = model(x)
        assert torch.equal(evaluate(read(path), x).reshape(expected.shape), expected)
        for isa in instruction_sets:
            monkeypatch.setenv("UNFLIP_ISA", isa)
            for threads in (1, 2):
                network = unflip.load(path, threads=threads)
                assert network.takes_pixels
                for given in (x, image.to(torch.uint8)):
                    assert torch.equal(network(given).reshape(expected.shape), expected), isa

    return compare


SHAPES: list[dict[str, Any]] = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 7, "padding": 3, "stride": 2},
    {"kernel_size": (2, 5), "padding": (0, 4), "stride": (1, 3), "dilation": (3, 1)},
    {"kernel_size": 3, "dilation": (1, 2), "padding": "same", "bias": False},
    {"kernel_size": 1},
    {"kernel_size": 4, "stride": 4, "groups": 3},
]


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("filters", [3, 24, 66])
def test_convolutions(check: Check, options: dict[str, Any], filters: int) -> None:
    torch.manual_seed(filters)
    preprocess = {"mean": [0.1, 0.485, 0.9], "std": [0.229, 0.1, 0.7]}
    model = nn.Sequential(nn.Conv2d(3, filters, **options), nn.Conv2d(filters, 2, 1))
    unflip.binarize(model, "dorefa", ends="int8", preprocess=preprocess, quiet=True)
    check(unflip.freeze(model)[0], torch.randint(256, (3, 3, 13, 11)), preprocess)


@pytest.mark.parametrize(("dilation", "width"), [(2, 6), (2, 9), ((1, 2), 12), (3, 8)], ids=str)
def test_dilated_windows_of_one_channel(check: Check, dilation: Any, width: int) -> None:
    """Taps are read one by one, although some are as far apart as the bytes of a row."""
    torch.manual_seed(width)
    preprocess = {"mean": [0.5], "std": [0.25]}
    for padding in ("same", 0):
        first = nn.Conv2d(1, 8, 3, dilation=dilation, padding=padding)
        model = nn.Sequential(first, nn.Conv2d(8, 2, 1))
        unflip.binarize(model, "dorefa", ends="int8", preprocess=preprocess, quiet=True)
        check(unflip.freeze(model)[0], torch.randint(256, (2, 1, 7, width)), preprocess)


def test_a_whole_network(check: Check) -> None:
    """±1 weights and inputs between the ends: all sums are of whole numbers, so even the logits have the same bits."""
    torch.manual_seed(0)
    preprocess = {"mean": [0.5], "std": [0.25]}
    model = nn.Sequential(
        nn.Conv2d(1, 16, 7, stride=2, padding=3),
        nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.Flatten(),
        nn.Linear(32 * 6 * 5, 10),
    )
    unflip.binarize(model, "bireal", ends="int8", preprocess=preprocess, quiet=True)
    image = torch.randint(256, (4, 1, 23, 20))
    model.train()(normalized(image, preprocess))
    check(unflip.freeze(model), image, preprocess)


class Block(nn.Module):
    def __init__(self, shortcut: nn.Module, filters: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, filters, 3, stride, padding=1, bias=False)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.shortcut(x)


SHORTCUTS = {
    "strided": lambda: nn.Conv2d(16, 32, 1, stride=2),
    "pooled": lambda: nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(16, 32, 1, bias=False)),
    "windows": lambda: nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=4),
    "depthwise": lambda: nn.Conv2d(16, 32, (3, 5), stride=2, padding=(1, 2), groups=16),
}


@pytest.mark.parametrize("shortcut", SHORTCUTS)
def test_shortcuts(check: Check, shortcut: str) -> None:
    """Two residual blocks of ±1 convolutions, whose sums are exact. Their features show every bit of the shortcuts."""
    torch.manual_seed(0)
    preprocess = {"mean": [0.5], "std": [0.25]}
    stem = nn.Conv2d(1, 16, 3, padding=1)
    model = nn.Sequential(
        stem, Block(nn.Conv2d(16, 16, 1), 16), Block(SHORTCUTS[shortcut](), 32, 2)
    )
    given: dict[str, Any] = {"ends": "int8", "shortcuts": "int8", "preprocess": preprocess}
    unflip.binarize(model, "binarynet", ["*.shortcut"], quiet=True, **given)
    image = torch.randint(256, (3, 1, 12, 10))
    model.train()(normalized(image, preprocess))
    frozen = unflip.freeze(model)
    x = normalized(image, preprocess)
    assert torch.equal(frozen(x), model.eval()(x))
    check(frozen, image, preprocess)


def test_saturated_inputs_and_weights(check: Check) -> None:
    """The largest products of bytes, which 16-bit instructions would saturate."""
    preprocess = {"mean": [0.0, 1.0], "std": [1.0, 1.0]}
    model = nn.Sequential(nn.Conv2d(2, 16, 5, bias=False), nn.Conv2d(16, 2, 1))
    unflip.binarize(model, "dorefa", ends="int8", preprocess=preprocess, quiet=True)
    for sign in (-1, 1):
        model[0].weight.data.fill_(sign)
        image = torch.tensor([0, 255]).view(2, 1, 1, 1).expand(2, 2, 9, 9)
        check(unflip.freeze(model)[0], image, preprocess)


def test_features_outside_of_their_range_saturate(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(70, 33), nn.Linear(33, 5))
    unflip.binarize(model, "dorefa", ends="int8", quiet=True)
    x = torch.randn(6, 70)
    model.train()(x)
    last = unflip.freeze(model)[1]
    wide = torch.cat([torch.randn(4, 33), torch.randn(4, 33) * 1e6, torch.full((1, 33), 3e38)])
    unflip.pack(last, wide, tmp_path / "a.unflip")
    network = unflip.load(tmp_path / "a.unflip")
    assert torch.equal(network(wide), last(wide).detach())
    assert not network.takes_pixels
    with pytest.raises(TypeError, match=r"must be float32, not torch\.uint8"):
        network(wide.to(torch.uint8))


def test_ties_round_to_even(tmp_path: Path, instruction_sets: list[str], monkeypatch: Any) -> None:
    """n + 1/2 for every n, and the floats next to it."""
    half = np.arange(-2, 258, dtype=np.float32) + np.float32(0.5)
    x = np.concatenate(
        [half, np.nextafter(half, np.float32(-1e9)), np.nextafter(half, np.float32(1e9))]
    )
    path = tmp_path / "a.unflip"
    write(path, _identity())
    expected = np.clip(np.rint(x), 0, 255)
    for isa in instruction_sets:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        assert np.array_equal(unflip.load(path)(x[:, None]).ravel(), expected)


def _identity() -> Packed:
    """One number: round(clamp(x, 0, 255))."""
    window = {"stride": [1, 1], "dilation": [1, 1], "padding": [0] * 4, "groups": 1, "steps": []}
    ops = [
        {"op": "to_bytes", "name": "a", "inputs": [0], "scale": "one", "shift": "no", "zero": "z"},
        {"op": "conv", "name": "b", "inputs": [1], "shape": [1] * 4, "bytes": "w", "scales": "s"},
    ]
    ops[1] |= window
    tensors = {
        "one": np.ones(1, np.float32),
        "no": np.zeros(1, np.float32),
        "z": np.zeros(1, np.uint8),
        "w": np.ones((1, 1, 1, 1), np.uint8),
        "s": np.ones((1, 1), np.float32),
    }
    shape = {"shape": [1, 1, 1], "preprocess": None}
    return Packed({"input": shape, "ops": ops, "output": 2, "labels": None}, tensors)


def test_pixels_need_the_same_normalization(tmp_path: Path) -> None:
    """A file for other images than those the layer was made for takes floats alone."""
    torch.manual_seed(0)
    made_for, other = {"mean": [0.5], "std": [0.25]}, {"mean": [0.4], "std": [0.25]}
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 1))
    unflip.binarize(model, "dorefa", ends="int8", preprocess=made_for, quiet=True)
    x = torch.randn(2, 1, 5, 5)
    for preprocess, pixels in ((made_for, True), (other, False), (None, False)):
        unflip.pack(model, x, tmp_path / "a.unflip", preprocess=preprocess)
        network = unflip.load(tmp_path / "a.unflip")
        assert network.takes_pixels is pixels


def test_other_padding_is_refused(tmp_path: Path) -> None:
    preprocess = {"mean": [0.5], "std": [0.25]}
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), nn.Conv2d(4, 2, 1))
    unflip.binarize(model, "dorefa", ends="int8", preprocess=preprocess, quiet=True)
    with pytest.raises(CannotPack, match="padding_mode='reflect'"):
        unflip.pack(model, torch.randn(1, 1, 5, 5), tmp_path / "a.unflip")
