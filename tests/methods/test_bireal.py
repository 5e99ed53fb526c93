"""Bi-Real: approximate-sign gradient of the inputs, per-filter scale of the weights."""

import torch

import unflip
from unflip.layers import BinaryLinear
from unflip.methods.pieces import ApproxSign, ClippedFilterMeanSign


def test_inputs_have_the_approximate_sign_gradient() -> None:
    edges = torch.tensor([0.0, -0.0, 1, -1, 1.0000001, -1.0000001, 1e4, -1e4, 1e-30, -1e-30])
    points = torch.cat([edges, torch.linspace(-1.5, 1.5, 301)])
    x = points.clone().requires_grad_()
    out = ApproxSign()(x)
    assert torch.equal(out, torch.where(points >= 0, 1.0, -1.0))
    upstream = torch.randn(len(x))
    out.backward(upstream)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, upstream * (2 - 2 * points.abs()).clamp(min=0))
    assert x.grad[0] == 2 * upstream[0]
    assert x.grad[2:8].abs().max() == 0


def test_weights_are_filter_mean_times_sign_with_a_clipped_gradient() -> None:
    points = torch.tensor([[0.0, -0.0, 0.5, -0.5], [1, -1, 1.0001, -1.0001], [8, -8, 30, -30]])
    weight = points.clone().requires_grad_()
    binary = ClippedFilterMeanSign()(weight)
    scale = torch.tensor([[0.25], [4.0002 / 4], [19]])
    torch.testing.assert_close(binary, scale * torch.where(points >= 0, 1.0, -1.0))
    upstream = torch.randn(3, 4)
    binary.backward(upstream)
    assert weight.grad is not None
    assert torch.equal(weight.grad, upstream * (points.abs() <= 1))  # no α, as in the released code


def test_the_scale_is_of_a_filter() -> None:
    weight = torch.stack([torch.full((2, 3, 3), 0.1), torch.full((2, 3, 3), -0.3)])
    assert ClippedFilterMeanSign().code(weight).scales.shape == (1, 2, 1, 1, 1)
    torch.testing.assert_close(ClippedFilterMeanSign()(weight), weight)


def test_a_layer_and_after_step() -> None:
    layer = BinaryLinear(2, 2, bias=False, method="bireal")
    layer.weight.data = torch.tensor([[4.0, -2.0], [0.0, -0.5]])
    assert layer(torch.tensor([[0.0, -7.0]])).tolist() == [[6, 0.5]]
    before = layer.weight.detach().clone()
    unflip.after_step(layer)
    assert torch.equal(layer.weight, before)
