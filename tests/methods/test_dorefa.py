"""DoReFa: values and gradients against the formulas of the paper."""

from typing import Any

import pytest
import torch

import unflip
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.dorefa import DoReFa, UnitInterval
from unflip.methods.pieces import ClippedSign, LayerMeanSign

# 0, −0, both boundaries from both sides, the middle, and large values
POINTS = torch.tensor(
    [0.0, -0.0, 1e-8, -1e-8, 0.25, 0.5, -0.5, 0.75, 1, -1, 1.0000001, -1.0000001, 2, -2, 1e4, -1e4]
)


def test_weights_are_layer_mean_times_sign() -> None:
    weight = torch.tensor([[1.0, -3.0, 0.0], [-0.5, -0.0, 1.5]])
    binary = LayerMeanSign()(weight)
    assert torch.equal(binary, torch.tensor([[1.0, -1, 1], [-1, 1, 1]]))  # mean |W| = 6 / 6
    assert torch.equal(LayerMeanSign()(weight * 4), 4 * binary)
    code = LayerMeanSign().code(weight)
    assert code.signs.shape == (1, 2, 3)
    assert code.scales.shape == (1, 1, 1)


def test_the_scale_is_of_the_whole_layer_not_of_a_filter() -> None:
    weight = torch.stack([torch.full((2, 3, 3), 0.1), torch.full((2, 3, 3), -0.3)])
    binary = LayerMeanSign()(weight)
    torch.testing.assert_close(binary[0], torch.full((2, 3, 3), 0.2))
    torch.testing.assert_close(binary[1], torch.full((2, 3, 3), -0.2))


def test_weight_gradient_is_the_identity_everywhere() -> None:
    weight = POINTS.view(4, 4).clone().requires_grad_()
    upstream = torch.randn(4, 4)
    LayerMeanSign()(weight).backward(upstream)
    assert weight.grad is not None
    assert torch.equal(weight.grad, upstream)


def test_inputs_01_round_half_to_zero() -> None:
    out = UnitInterval(1)(POINTS)
    assert out.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_inputs_take_the_levels_of_the_paper(bits: int) -> None:
    n = 2**bits - 1
    x = torch.linspace(-0.5, 1.5, 4001)
    out = UnitInterval(bits)(x)
    assert torch.equal(out.unique(), torch.arange(n + 1) / n)
    torch.testing.assert_close(out, (x.clamp(0, 1) * n).round() / n)
    assert (out - x.clamp(0, 1)).abs().max() <= 0.5 / n + 1e-6


@pytest.mark.parametrize("bits", [1, 2, 5])
def test_inputs_01_gradient(bits: int) -> None:
    x = POINTS.clone().requires_grad_()
    upstream = torch.randn(len(x))
    UnitInterval(bits)(x).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream * ((POINTS >= 0) & (POINTS <= 1)))


def test_inputs_pm1() -> None:
    x = POINTS.clone().requires_grad_()
    upstream = torch.randn(len(x))
    out = ClippedSign()(x)
    assert torch.equal(out, torch.where(POINTS >= 0, 1.0, -1.0))
    out.backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream * (POINTS.abs() <= 1))


def test_a_layer_multiplies_the_two() -> None:
    layer = BinaryLinear(3, 2, method="dorefa")
    layer.weight.data = torch.tensor([[1.0, -3.0, 0.0], [-0.5, -0.0, 1.5]])
    layer.bias.data = torch.tensor([10.0, 20.0])
    x = torch.tensor([[0.6, 7.0, 0.5], [-1.0, 0.4, 0.51]])
    # inputs {0, 1}: [1, 1, 0] and [0, 0, 1]; weights [1, -1, 1] and [-1, 1, 1]
    assert layer(x).tolist() == [[10, 20], [11, 21]]
    layer.set_method({"name": "dorefa", "inputs": "pm1"})
    assert layer(x).tolist() == [[11, 21], [9, 23]]  # [1, 1, 1] and [-1, 1, 1]


def test_zero_padding_stays_zero() -> None:
    layer = BinaryConv2d(1, 1, 3, padding=1, bias=False, method=DoReFa(inputs="pm1"))
    layer.weight.data.fill_(0.5)
    out = layer(torch.ones(1, 1, 3, 3))
    assert out.tolist() == [[[[2, 3, 2], [3, 4.5, 3], [2, 3, 2]]]]


def test_after_step_leaves_the_weights() -> None:
    layer = BinaryLinear(3, 2, method="dorefa")
    layer.weight.data.mul_(100)
    before = layer.weight.detach().clone()
    unflip.after_step(layer)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("bits", [0, -1, 9, 1.5, 2.0, True, "2"])
def test_input_bits_out_of_range(bits: Any) -> None:
    with pytest.raises(ValueError, match=rf"dorefa: input_bits={bits!r} .*1 to 8"):
        DoReFa(input_bits=bits)


def test_pm1_has_one_bit() -> None:
    with pytest.raises(ValueError, match=r"input_bits=2 needs inputs='01'.*'pm1' has one bit"):
        DoReFa(inputs="pm1", input_bits=2)


def test_unknown_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="dorefa: inputs='0/1' is not one of '01', 'pm1'"):
        unflip.methods.get("dorefa", inputs="0/1")
