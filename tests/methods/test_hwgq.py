"""HWGQ: a 2-bit quantized ReLU of the inputs, per-filter scale of the weights."""

import pytest
import torch

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.hwgq import HalfWave
from unflip.methods.pieces import FilterMeanSign

STEP = 0.538


def test_levels() -> None:
    below, above = [0.8069, 1.3449], [0.8071, 1.3451]  # round the thresholds 3Δ/2 and 5Δ/2
    x = torch.tensor(
        [-1e6, -1.0, -0.0, 0.0, 1e-6, 0.3, below[0], above[0], below[1], above[1], 1e6]
    )
    out = HalfWave("clipped")(x)
    steps = torch.tensor([0.0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3])
    torch.testing.assert_close(out, STEP * steps)
    assert torch.equal(HalfWave("clipped")(x.relu()), out), "a ReLU before it changes nothing"


def test_the_step_is_the_best_for_half_a_gaussian() -> None:
    x = torch.randn(
        1_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).abs()

    def error(step: float) -> float:
        return (x - step * (x / step - 0.5).ceil().clamp(1, 3)).square().mean().item()

    assert error(STEP) < min(error(STEP - 0.02), error(STEP + 0.02))


def test_half_precision_agrees() -> None:
    x = torch.tensor([0.0, 2.0**-24, 2.0**-23, 2.0**-26, 1e-30, -(2.0**-24), 0.5])
    single, half = HalfWave("clipped")(x), HalfWave("clipped")(x.half())
    assert torch.equal(single > 0, half > 0)


@pytest.mark.parametrize("backward", ["clipped", "log"])
def test_input_gradient(backward: str) -> None:
    edges = torch.tensor([0.0, -0.0, 1.614, -1.614, 1e-30, 1e5, -1e5], dtype=torch.float64)
    points = torch.cat([edges, torch.linspace(-3, 6, 901, dtype=torch.float64)])
    x = points.clone().requires_grad_()
    upstream = torch.randn_like(points)
    HalfWave(backward)(x).backward(upstream)  # type: ignore[arg-type]
    limit = 3 * STEP
    slope = ((points > 0) & (points <= limit)).double()
    if backward == "log":
        slope = torch.where(points > limit, 1 / (points - limit + 1), slope)
    torch.testing.assert_close(x.grad, upstream * slope)


def test_weights_are_filter_mean_times_sign_with_identity_gradient() -> None:
    points = torch.tensor([[0.0, -0.0, 0.5, -0.5], [8, -8, 30, -30]])
    weight = points.clone().requires_grad_()
    binary = FilterMeanSign()(weight)
    assert binary.tolist() == [[0.25, 0.25, 0.25, -0.25], [19, -19, 19, -19]]
    upstream = torch.randn(2, 4)
    binary.backward(upstream)
    assert weight.grad is not None
    assert torch.equal(weight.grad, upstream)


def test_a_layer() -> None:
    layer = BinaryLinear(2, 1, bias=False, method="hwgq")
    layer.weight.data = torch.tensor([[3.0, -1.0]])
    torch.testing.assert_close(layer(torch.tensor([[1.0, -5.0]])), torch.tensor([[2 * 2 * STEP]]))
    assert layer.input_binarizer.bits == 2
    assert not layer.input_binarizer.unit
    assert torch.equal(unflip.freeze(layer)(torch.ones(1, 2)), layer.eval()(torch.ones(1, 2)))


def test_two_bits_are_counted() -> None:
    layer = BinaryConv2d(8, 16, 3, bias=False, method="hwgq")
    spent = unflip.cost(layer, torch.randn(1, 8, 5, 5))
    assert spent.flops == 16 * 9 * 72 * 2 / 64
    assert spent.memory_bits == 16 * 72 + 32 * 16


def test_options() -> None:
    with pytest.raises(ValueError, match="hwgq: backward='relu' is not one of 'clipped', 'log'"):
        methods.get("hwgq", backward="relu")
