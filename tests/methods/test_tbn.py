"""TBN: ternary inputs with a threshold of each sample's own, per-filter scale of the weights."""

import math

import pytest
import torch
from torch import nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.pieces import FilterMeanSign
from unflip.methods.tbn import Ternary


def test_inputs_by_hand() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0, -4.0], [0.1, -0.2, 0.3, -0.4], [0, 0, 0, 0], [1, 0, 0, 0]])
    out = Ternary(0.4, (-1,))(x)  # mean|x| 2.5: δ = 1; 0.25: δ = 0.1; 0; 0.25: δ = 0.1
    assert out.tolist() == [[1, -1, 1, -1], [1, -1, 1, -1], [0, 0, 0, 0], [1, 0, 0, 0]]
    out = Ternary(0.9, (-1,))(x)  # δ = 2.25; 0.225; 0
    assert out[:3].tolist() == [[0, 0, 1, -1], [0, 0, 1, -1], [0, 0, 0, 0]]


def test_the_threshold_is_reached_at_both_ends() -> None:
    x = torch.tensor([[1.0, -1.0, 3.0, -3.0]])
    assert Ternary(0.5, (-1,))(x).tolist() == [[1, -1, 1, -1]]  # δ = 1


def test_gradient() -> None:
    points = torch.cat([torch.linspace(-3, 3, 601), torch.tensor([1.0, -1, 1.0001, 1e5])]).double()
    x = points.clone().requires_grad_()
    upstream = torch.randn_like(points)
    out = Ternary(0.4, (-1,))(x)
    out.backward(upstream)
    delta = 0.4 * points.abs().mean()
    assert torch.equal(out, (points >= delta).double() - (points <= -delta).double())
    torch.testing.assert_close(x.grad, upstream * (points.abs() <= 1))


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3), nn.Linear(7, 4)], ids=str)
def test_a_sample_does_not_depend_on_those_beside_it(layer: nn.Module) -> None:
    """Nor on whether the layer is in training; each has its own scale."""
    binary = unflip.binarize(layer, "tbn", keep_first_and_last=False, quiet=True)
    shape = (3, 6, 6) if isinstance(layer, nn.Conv2d) else (7,)
    x = torch.randn(5, *shape) * torch.tensor([1e-3, 0.1, 1, 10, 1e3]).view(-1, *[1] * len(shape))
    together, alone = binary(x), torch.stack([binary(sample) for sample in x])
    torch.testing.assert_close(together, alone)
    assert torch.equal(binary.eval()(x), together)
    inputs = binary.get_submodule("input_binarizer")
    torch.testing.assert_close(inputs(1000 * x), inputs(x))


def test_weights_are_filter_mean_times_sign_with_identity_gradient() -> None:
    points = torch.tensor([[0.0, -0.0, 0.5, -0.5], [8, -8, 30, -30]])
    weight = points.clone().requires_grad_()
    binary = FilterMeanSign()(weight)
    assert binary.tolist() == [[0.25, 0.25, 0.25, -0.25], [19, -19, 19, -19]]
    upstream = torch.randn(2, 4)
    binary.backward(upstream)
    assert weight.grad is not None
    assert torch.equal(weight.grad, upstream)


def test_two_bits_that_are_units() -> None:
    layer = BinaryConv2d(8, 16, 3, bias=False, method="tbn")
    assert layer.input_binarizer.bits == 2
    assert layer.input_binarizer.unit
    assert layer.input_binarizer.fused_as is None
    spent = unflip.cost(layer, torch.randn(1, 8, 5, 5))
    assert spent.flops == 16 * 9 * 72 * 2 / 64
    x = torch.randn(4, 8, 5, 5)
    assert set(layer.input_binarizer(x).unique().tolist()) == {-1, 0, 1}
    assert torch.equal(unflip.freeze(layer)(x), layer.eval()(x))


def test_half_precision_sums_are_exact() -> None:
    layer = BinaryLinear(2000, 4, bias=False, method="tbn")
    x = torch.randn(8, 2000)
    with torch.autocast("cpu", dtype=torch.float16):
        half = layer(x)
    torch.testing.assert_close(half.float(), layer(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", [0, -0.4, math.nan, math.inf])
def test_the_threshold_is_checked(value: float) -> None:
    with pytest.raises(ValueError, match=rf"tbn: threshold={value} should be a finite number > 0"):
        methods.get("tbn", threshold=value)
