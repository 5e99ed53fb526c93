"""IR-Net: balanced standardized weights, power-of-two scale, the error decay estimator and its schedule."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.irnet import DecayingSign, ErrorDecay, StandardizedSign

POINTS = torch.cat(
    [
        torch.tensor([0, 1, -1, 1e-9, -1e-9, 50, -50], dtype=torch.float64),
        torch.linspace(-3, 3, 301, dtype=torch.float64),
    ]
)


def decay(t: float, t_min: float = 1e-3, t_max: float = 10) -> ErrorDecay:
    made = ErrorDecay(t_min, t_max, POINTS)
    made.t.fill_(t)
    return made


@pytest.mark.parametrize("t", [1e-3, 0.03, 0.5, 1, 2.5, 10])
def test_the_estimator(t: float) -> None:
    x = POINTS.clone().requires_grad_()
    out = DecayingSign(decay(t))(x)
    assert torch.equal(out.detach(), torch.where(POINTS >= 0, 1.0, -1.0).double())
    upstream = torch.randn(len(x), dtype=torch.float64)
    out.backward(upstream)
    assert x.grad is not None
    k = max(1 / t, 1)
    expected = k * t * (1 - np.tanh(t * POINTS.numpy()) ** 2)
    inside = POINTS.abs() <= 1  # the hardtanh of their network
    torch.testing.assert_close(x.grad, upstream * torch.from_numpy(expected) * inside)
    # the derivative of k·tanh(t·x), by differences
    step = 1e-6
    higher, lower = np.tanh(t * (POINTS.numpy() + step)), np.tanh(t * (POINTS.numpy() - step))
    assert np.allclose(expected, k * (higher - lower) / (2 * step), atol=1e-6)


def test_first_and_last_epoch() -> None:
    layer = BinaryLinear(4, 4, method="irnet")
    parts = (layer.weight_binarizer, layer.input_binarizer)
    epochs = 400
    for epoch, t in (
        (0, 1e-3),
        (100, 1e-2),
        (200, 0.1),
        (300, 1),
        (399, 10 ** (-3 + 4 * 399 / 400)),
    ):
        unflip.start_epoch(layer, epoch, epochs)
        for part in parts:
            assert isinstance(part, StandardizedSign | DecayingSign)
            assert part.decay.t.item() == pytest.approx(t, rel=1e-6)
    x = torch.tensor([0.0, 0.5, 1.0, -1.0, 2.0])
    for epoch, slopes in (
        (0, [1, 1, 1, 1, 0]),  # k·t = 1: the identity's, as far as the hardtanh
        (399, [9.772, 2.2e-3, 1.3e-7, 1.3e-7, 0]),  # t = 9.772: all but sign's own
    ):
        unflip.start_epoch(layer, epoch, epochs)
        leaf = x.clone().requires_grad_()
        layer.input_binarizer(leaf).sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, torch.tensor(slopes).float(), rtol=0.05, atol=1e-5)


def test_the_schedule_fills_in_place_and_is_not_state() -> None:
    layer = BinaryLinear(4, 4, method=methods.get("irnet", t_min=0.1, t_max=1.6))
    assert isinstance(layer.input_binarizer, DecayingSign)
    t = layer.input_binarizer.decay.t
    assert t.item() == pytest.approx(0.1)
    unflip.start_epoch(layer, 1, 4)
    assert layer.input_binarizer.decay.t is t
    assert t.item() == pytest.approx(0.2)
    assert set(layer.state_dict()) == {"weight", "bias"}
    before = layer.code()
    unflip.start_epoch(layer, 3, 4)
    assert torch.equal(layer.code().signs, before.signs)
    assert torch.equal(layer.code().scales, before.scales)


def test_weights_by_hand() -> None:
    # Filter 1: mean 2, deviations −1, −1, −1, 3, std √(12/3) = 2, mean|ŵ| = 0.75: 2^round(−0.415) = 1.
    # Filter 2: mean 0, deviations ±4, 0, 0: std √(32/3), mean|ŵ| = 2/√(32/3) = 0.612: 2^round(−0.707) = 0.5.
    weight = torch.tensor([[1.0, 1.0, 1.0, 5.0], [4.0, 0.0, 0.0, -4.0]])
    code = StandardizedSign(decay(1)).code(weight)
    assert code.signs.tolist() == [[[-1, -1, -1, 1], [1, 1, 1, -1]]]
    assert code.scales.tolist() == [[[1], [0.5]]]
    balanced = StandardizedSign(decay(1)).standardized(weight)
    torch.testing.assert_close(balanced[0], torch.tensor([-0.5, -0.5, -0.5, 1.5]))


def reference(weight: Tensor, t: float) -> Tensor:
    """2^s · k·tanh(t·Ŵ) with the scale held fixed: its gradient is the method's."""
    flat = weight.flatten(1)
    mean = flat.sum(1, keepdim=True) / flat.shape[1]
    variance = ((flat - mean) ** 2).sum(1, keepdim=True) / (flat.shape[1] - 1)
    balanced = (flat - mean) / variance**0.5
    exponent = (balanced.detach().abs().mean(1, keepdim=True).log() / math.log(2)).round()
    return (2**exponent * max(1 / t, 1) * torch.tanh(t * balanced)).view_as(weight)


@pytest.mark.parametrize("t", [1e-3, 0.7, 4])
@pytest.mark.parametrize("shape", [(5, 12), (4, 3, 3, 3), (6, 2, 1, 1), (3, 1, 5, 2)])
def test_gradient_goes_through_mean_and_std(shape: tuple[int, ...], t: float) -> None:
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(shape, dtype=torch.float64)
    (found,) = torch.autograd.grad(StandardizedSign(decay(t))(weight), weight, upstream)
    (expected,) = torch.autograd.grad(reference(weight, t), weight, upstream)
    torch.testing.assert_close(found, expected)
    # W may be shifted and stretched without a change: so along those no gradient
    torch.testing.assert_close(found.flatten(1).sum(1), torch.zeros(shape[0]).double())
    assert torch.allclose((found * weight).flatten(1).sum(1), torch.zeros(shape[0]).double())


def test_filters_without_spread() -> None:
    binarizer = StandardizedSign(decay(1).float())
    # the third: std 0.25, ŵ = 1, −1, 0 with mean|ŵ| = 2/3, and 2^round(−0.585) = 1/2
    values = [[0.0, 0.0, 0.0], [0.25, 0.25, 0.25], [0.25, -0.25, 0.0]]
    weight = torch.tensor(values, requires_grad=True)
    out = binarizer(weight)
    assert out.tolist() == [[0, 0, 0], [0, 0, 0], [0.5, -0.5, 0.5]]
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    depthwise = BinaryConv2d(3, 3, 1, groups=3, bias=False, method="irnet")
    depthwise.weight.data = torch.tensor([0.3, -0.3, 6.0]).view(3, 1, 1, 1)
    assert depthwise.binary_weight().flatten().tolist() == [0.25, -0.25, 8]
    depthwise(torch.randn(2, 3, 4, 4)).sum().backward()
    assert depthwise.weight.grad is not None
    assert depthwise.weight.grad.abs().min() > 0


def test_eval_is_frozen_and_what_inputs_are() -> None:
    model = nn.Sequential(BinaryConv2d(3, 8, 3, method="irnet"), nn.BatchNorm2d(8))
    unflip.start_epoch(model, 7, 10)
    x = torch.randn(4, 3, 6, 6)
    model(x)
    assert torch.equal(unflip.freeze(model)(x), model.eval()(x))
    part = BinaryLinear(2, 2, method="irnet").input_binarizer
    assert (part.bits, part.unit, part.fused_as) == (1, True, None)


@pytest.mark.parametrize("options", [{"t_min": 0}, {"t_min": 2, "t_max": 1}, {"t_max": math.inf}])
def test_options_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"irnet: t_min=.* and t_max=.* should be finite"):
        methods.get("irnet", **options)
