"""BinaryConnect: sign or a random sign of the weights, float inputs, latent weights clipped."""

import pytest
import torch

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.base import FloatInput
from unflip.methods.binaryconnect import StochasticSign
from unflip.methods.pieces import PlainSign


def test_deterministic_sign_with_the_identity_gradient() -> None:
    points = torch.tensor([[0.0, -0.0, 1e-30, -1e-30], [0.4, -1, 7, -7]])
    weight = points.clone().requires_grad_()
    binarizer = PlainSign()
    binary = binarizer(weight)
    assert binary.tolist() == [[1, 1, 1, -1], [1, -1, 1, -1]]
    assert binarizer.code(weight).scales.shape == (1, 1, 1)
    upstream = torch.randn(2, 4)
    binary.backward(upstream)
    assert weight.grad is not None
    assert torch.equal(weight.grad, upstream)


def test_stochastic_sign_has_the_hard_sigmoids_probability() -> None:
    points = torch.tensor([-3, -1, -0.5, 0, 0.2, 0.999, 1, 3], dtype=torch.float64)
    weight = points.repeat(20_000, 1).requires_grad_()
    binary = StochasticSign()(weight)
    assert set(binary.unique().tolist()) == {-1, 1}
    share = (binary == 1).double().mean(0)
    expected = ((points + 1) / 2).clamp(0, 1)
    # five standard deviations; none where the probability is 0 or 1
    spread = 5 * (expected * (1 - expected) / len(weight)).sqrt()
    assert ((share - expected).abs() <= spread).all()
    upstream = torch.randn_like(binary)
    binary.backward(upstream)
    assert weight.grad is not None
    assert torch.equal(weight.grad, upstream)


def test_stochastic_sign_is_drawn_in_training_alone() -> None:
    layer = BinaryLinear(40, 30, method={"name": "binaryconnect", "stochastic": True})
    assert not torch.equal(layer.binary_weight(), layer.binary_weight())
    assert torch.equal(layer.code().signs, layer.code().signs)
    x = torch.randn(5, 40)
    frozen = unflip.freeze(layer)
    layer.eval()
    assert torch.equal(layer.binary_weight(), torch.where(layer.weight >= 0, 1.0, -1.0))
    assert torch.equal(layer(x), frozen(x))


def test_stochastic_sign_keeps_nan_and_compiles() -> None:
    binarizer = StochasticSign()
    assert binarizer(torch.tensor([torch.nan])).isnan().all()
    layer = BinaryConv2d(4, 8, 3, method=methods.get("binaryconnect", stochastic=True))
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(2, 4, 5, 5))
    out.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.abs().sum() > 0


def test_inputs_stay_float() -> None:
    layer = BinaryLinear(2, 1, bias=False, method="binaryconnect")
    layer.weight.data = torch.tensor([[0.3, -0.2]])
    assert isinstance(layer.input_binarizer, FloatInput)
    assert layer.input_binarizer.bits == 32
    assert layer(torch.tensor([[0.25, -7.0]])).tolist() == [[7.25]]


def test_latent_weights_are_clipped_after_a_step() -> None:
    layer = BinaryLinear(2, 2, method="binaryconnect")
    layer.weight.data = torch.tensor([[1.5, -0.5], [0.25, -9.0]])
    unflip.after_step(layer)
    assert layer.weight.tolist() == [[1, -0.5], [0.25, -1]]


def test_options() -> None:
    with pytest.raises(ValueError, match="binaryconnect: stochastic='often' should be true or"):
        methods.get("binaryconnect", stochastic="often")
    # the same network, trained in two ways
    other = BinaryLinear(3, 2, method=methods.get("binaryconnect", stochastic=True))
    other.load_state_dict(BinaryLinear(3, 2, method="binaryconnect").state_dict())
