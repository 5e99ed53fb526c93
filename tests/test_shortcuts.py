"""8-bit shortcuts: which layers they are, that evaluation and frozen layers agree, counts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import models
from unflip.ends import (
    FeatureInput,
    FrozenInt8Conv2d,
    Int8Conv2d,
    quantize_ends,
    quantize_shortcuts,
)
from unflip.packing import make_packed
from unflip.packing.describe import describe

PREPROCESS = {"mean": [0.5] * 3, "std": [0.25] * 3}
ENDS: dict[str, Any] = {"ends": "int8", "preprocess": PREPROCESS}
SKIP = ["*.shortcut"]


class Block(nn.Module):
    def __init__(self, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.shortcut(x)


def net(shortcut: nn.Module | None = None) -> nn.Sequential:
    """Stem, a block with a shortcut, classifier."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        Block(shortcut or nn.Conv2d(8, 16, 1, stride=2, bias=False)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def with_shortcuts(shortcut: nn.Module | None = None, **options: Any) -> nn.Sequential:
    model = net(shortcut)
    unflip.binarize(model, "dorefa", SKIP, shortcuts="int8", quiet=True, **options)
    return model


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def kinds(model: nn.Module) -> list[str]:
    return [layer.reason for layer in unflip.summary(model)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["float", "dorefa", "int8", "float"]),
        (ENDS, ["int8", "dorefa", "int8", "int8"]),
        ({"keep_first_and_last": False}, ["dorefa", "dorefa", "int8", "dorefa"]),
    ],
)
def test_ends_and_shortcuts_do_not_depend_on_each_other(
    options: dict[str, Any], expected: list[str]
) -> None:
    model = with_shortcuts(**options)
    assert kinds(model) == expected
    shortcut = model[1].shortcut
    assert isinstance(shortcut, Int8Conv2d)
    assert isinstance(shortcut.byte_input, FeatureInput)


def test_the_report_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    unflip.binarize(net(), "dorefa", SKIP, shortcuts="int8", **ENDS)
    assert "8 bits: 0, 1.shortcut, 4 (424 weights)" in capsys.readouterr().out


SHORTCUTS = {
    "strided": nn.Conv2d(8, 16, 1, stride=2, bias=False),
    "pooled": nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(8, 16, 1)),
    "groups": nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4),
    "depthwise": nn.Conv2d(8, 16, (3, 5), stride=2, padding=(1, 2), groups=8),
}


@pytest.mark.parametrize("shortcut", SHORTCUTS.values(), ids=SHORTCUTS)
def test_a_frozen_network_is_the_evaluated_one(shortcut: nn.Module) -> None:
    model = with_shortcuts(shortcut, **ENDS)
    model.train()(images()).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in shortcut.parameters())
    frozen = unflip.freeze(model)
    assert torch.equal(frozen(images()), model.eval()(images()))
    layers = [m for m in frozen[1].shortcut.modules() if isinstance(m, nn.Conv2d)]
    assert [type(layer) for layer in layers] == [FrozenInt8Conv2d]


def test_training_is_close_to_float() -> None:
    model, plain = with_shortcuts(), net()[1].shortcut
    x = torch.randn(4, 8, 6, 6)
    rounded = model[1].shortcut.train()(x)
    exact = model[1].shortcut.eval()(x)
    assert torch.allclose(rounded, exact, atol=1e-5)
    assert (exact - plain(x)).abs().max() < 0.05


def test_cost_counts_eight_bits() -> None:
    model = with_shortcuts()
    model.train()(images())
    for counted in (model, unflip.freeze(model)):
        layer = unflip.cost(counted, images()).layers[2]
        assert (layer.weight_bits, layer.input_bits) == (8, 8)
        assert layer.memory_bits == 8 * 128 + 32 * 16  # weights, scales
        assert layer.flops == layer.macs


def test_weights_of_a_float_twin_fit_both_ways() -> None:
    model = with_shortcuts()
    model.train()(images())
    seen = model[1].shortcut.byte_input.range.clone()
    other = net()
    nn.init.ones_(other[1].shortcut.weight)
    unflip.load_twin(model, other.state_dict())
    assert model[1].shortcut.weight.eq(1).all()
    assert torch.equal(model[1].shortcut.byte_input.range, seen)
    unflip.load_twin(unflip.binarize(net(), "dorefa", SKIP, quiet=True), model.state_dict())


@pytest.mark.parametrize("variant", ["bireal", "plain"])
def test_a_resnet18_has_a_smaller_file(variant: str) -> None:
    """With an average pool before the 1 × 1 convolution, and with a stride."""
    torch.manual_seed(0)
    model = models.create("resnet18", "dorefa", variant=variant, widths=(0.25,) * 4)
    quantize_ends(model, PREPROCESS)
    x = torch.randn(2, 3, 64, 64)
    before = describe(make_packed(_seen(model, x), x[:1])).rows
    quantize_shortcuts(model)
    after = describe(make_packed(_seen(model, x), x[:1])).rows
    assert [row.weight_bits for row in before].count(32) == 3
    assert [row.weight_bits for row in after].count(32) == 0
    assert [row.weight_bits for row in after].count(8) == 5
    assert sum(row.float_macs for row in after) == 0
    saved = sum(row.bytes for row in before) - sum(row.bytes for row in after)
    weights = 16 * 32 + 32 * 64 + 64 * 128
    scales = 32 + 64 + 128
    to_bytes = 3 * (4 + 4 + 1)  # scale, shift, zero; less if several layers have equal ones
    assert 0 <= saved - (3 * weights - 4 * scales - to_bytes) < to_bytes


def _seen(model: nn.Module, x: Tensor) -> nn.Module:
    with torch.no_grad():
        model.train()(x)
    return model.eval()


def test_refused_options() -> None:
    with pytest.raises(ValueError, match="shortcuts='int4' is not one of 'float', 'int8'"):
        unflip.binarize(net(), "dorefa", SKIP, shortcuts="int4", quiet=True)  # type: ignore[arg-type]
    model = net()
    with pytest.raises(
        ValueError, match=r"shortcuts='int8': Sequential has no float conv.*; remove shortcuts"
    ):
        unflip.binarize(model, "dorefa", shortcuts="int8", quiet=True, **ENDS)
    assert type(model[0]) is nn.Conv2d, "a refused model stays as it is"
    with pytest.raises(ValueError, match="CifarResNet has no float convolution besides its first"):
        quantize_shortcuts(models.create("resnet20", "dorefa"))


def test_a_layer_that_cannot_have_eight_bits_is_named() -> None:
    class Other(nn.Conv2d):
        pass

    model = net(Other(8, 16, 1, stride=2))
    with pytest.raises(
        ValueError,
        match=r"shortcuts='int8': layer '1.shortcut' \(Other\) cannot have 8 bits: .* shortcuts='float'",
    ):
        unflip.binarize(model, "dorefa", SKIP, shortcuts="int8", quiet=True)
    assert kinds(model) == ["float"] * 4


def test_a_range_that_is_unknown_cannot_be_frozen() -> None:
    with pytest.raises(ValueError, match=r"'1.shortcut' cannot be frozen: it has seen no batch"):
        unflip.freeze(with_shortcuts())
