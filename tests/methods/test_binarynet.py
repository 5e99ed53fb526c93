"""BinaryNet: plain signs, hard-tanh gradient of the inputs, clipped latent weights."""

import torch

import unflip
from unflip.layers import BinaryLinear
from unflip.methods.pieces import ClippedSign, PlainSign

POINTS = torch.tensor(
    [0.0, -0.0, 1e-30, -1e-30, 0.5, -0.5, 1, -1, 1.0000001, -1.0000001, 1e4, -1e4]
)


def test_weights_are_signs_without_a_scale() -> None:
    weight = POINTS.view(3, 4).clone().requires_grad_()
    binary = PlainSign()(weight)
    assert binary.flatten().tolist() == [1, 1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1]
    assert PlainSign().code(weight).scales.tolist() == [[[1]]]
    upstream = torch.randn(3, 4)
    binary.backward(upstream)
    assert weight.grad is not None
    assert torch.equal(weight.grad, upstream)


def test_inputs() -> None:
    x = POINTS.clone().requires_grad_()
    out = ClippedSign()(x)
    assert out.tolist() == [1, 1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1]
    upstream = torch.randn(len(x))
    out.backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream * (POINTS.abs() <= 1))


def test_a_layer_counts_agreements() -> None:
    layer = BinaryLinear(4, 1, bias=False, method="binarynet")
    layer.weight.data = torch.tensor([[0.1, -5.0, 0.0, 2.0]])
    assert layer(torch.tensor([[3.0, 3, -3, 0]])).item() == 1 - 1 - 1 + 1


def test_after_step_clips_to_one() -> None:
    layer = BinaryLinear(4, 1, method="binarynet")
    layer.weight.data = torch.tensor([[0.5, -5.0, 1.0, 2.0]])
    bias = layer.bias.detach().clone()
    weight = layer.weight
    unflip.after_step(layer)
    assert layer.weight is weight
    assert layer.weight.tolist() == [[0.5, -1, 1, 1]]
    assert torch.equal(layer.bias, bias)
    assert layer.weight.grad is None
    assert layer.weight.is_leaf
