"""BWN: per-filter scale times sign; inputs stay float."""

import pytest
import torch
import torch.nn.functional as F

import unflip
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.bwn import BWNSign


def test_weights_are_filter_mean_times_sign() -> None:
    weight = torch.tensor([[1.0, -3.0, 0.0, -4.0], [-0.5, -0.0, 1.5, 0.0]])
    binary = BWNSign()(weight)
    assert binary.tolist() == [[2, -2, 2, -2], [-0.5, 0.5, 0.5, 0.5]]
    code = BWNSign().code(torch.randn(5, 2, 3, 3))
    assert code.scales.shape == (1, 5, 1, 1, 1)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6, 1, 1), (2, 3, 2, 2), (1, 6, 4, 1)])
def test_weight_gradient(shape: tuple[int, ...]) -> None:
    points = [0.0, -0.0, 1e-8, -1e-8, 0.5, -0.5, 1, -1, 1.0001, -1.0001, 30, -30]
    weight = torch.tensor(points * 2).view(shape).requires_grad_()
    upstream = torch.randn(shape)
    BWNSign()(weight).backward(upstream)
    w = weight.detach()
    n = w[0].numel()
    alpha = w.abs().flatten(1).sum(1).div(n).view(-1, *[1] * (w.dim() - 1))
    assert weight.grad is not None
    expected = upstream * (1 / n + alpha * (w.abs() <= 1))
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6, 1, 1), (2, 3, 2, 2), (6, 1, 4, 1)])
def test_the_released_gradient(shape: tuple[int, ...]) -> None:
    """n (1 − 1/c) times the paper's, and 0 at |W| = 1, where clipped weights are."""
    points = [0.0, -0.0, 1e-8, -1e-8, 0.5, -0.5, 1, -1, 1.0001, -1.0001, 0.999, -0.999]
    weight = torch.tensor(points * 2, dtype=torch.float64).view(shape).requires_grad_()
    upstream = torch.randn(shape, dtype=torch.float64)
    BWNSign("released")(weight).backward(upstream)
    w = weight.detach()
    n, c = w[0].numel(), w.shape[1]
    alpha = w.abs().flatten(1).sum(1).div(n).view(-1, *[1] * (w.dim() - 1))
    factor = n * (1 - 1 / c) if c > 1 else n
    expected = upstream * factor * (1 / n + alpha * (w.abs() < 1))
    torch.testing.assert_close(weight.grad, expected)


def test_inputs_stay_float() -> None:
    layer = BinaryConv2d(4, 6, 3, stride=2, padding=1, groups=2, method="bwn")
    assert layer.input_binarizer.bits == 32
    x = torch.randn(2, 4, 7, 7, requires_grad=True)
    out = layer(x)
    w = layer.weight.detach()
    binary = w.abs().mean((1, 2, 3), keepdim=True) * torch.where(w >= 0, 1.0, -1.0)
    y = x.detach().clone().requires_grad_()
    expected = F.conv2d(y, binary, layer.bias, 2, 1, 1, 2)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(x.grad, y.grad)


def test_after_step_leaves_the_weights() -> None:
    layer = BinaryLinear(3, 2, method="bwn")
    layer.weight.data.mul_(100)
    before = layer.weight.detach().clone()
    unflip.after_step(layer)
    assert torch.equal(layer.weight, before)


def test_centered_weights_are_centered_over_channels_and_clipped() -> None:
    layer = BinaryConv2d(4, 6, 3, method=unflip.methods.get("bwn", centered=True))
    layer.weight.data.mul_(20)
    before = layer.weight.detach().clone()
    unflip.after_step(layer)
    expected = (before - before.mean(1, keepdim=True)).clamp(-1, 1)
    torch.testing.assert_close(layer.weight.detach(), expected)


def test_unknown_gradients_name_the_right_ones() -> None:
    with pytest.raises(ValueError, match="bwn: gradient='code' is not one of 'paper', 'released'"):
        unflip.methods.get("bwn", gradient="code")
