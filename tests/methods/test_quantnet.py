"""Quantization Networks: soft in training, the step in evaluation, the temperature that rises."""

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.quantnet import SigmoidInputs, SigmoidWeights, Temperature


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def temperature(t: float) -> Temperature:
    made = Temperature(10, torch.zeros((), dtype=torch.float64))
    made.value.fill_(t)
    return made


def weights(t: float, alpha: float = 0.8, beta: float = 1.25) -> SigmoidWeights:
    made = SigmoidWeights(temperature(t), torch.zeros((), dtype=torch.float64))
    with torch.no_grad():
        made.alpha.fill_(alpha)
        made.beta.fill_(beta)
    return made


def inputs(t: float, beta: float = 1, threshold: float = 0.05) -> SigmoidInputs:
    made = SigmoidInputs(temperature(t), threshold, torch.zeros((), dtype=torch.float64))
    with torch.no_grad():
        made.beta.fill_(beta)
    return made.train()


def test_weights_by_hand() -> None:
    weight = torch.tensor([[2.0, -0.5], [0.0, -4.0]], dtype=torch.float64)
    binarizer = weights(10)
    # M = 4, so the scale is 0.8 · 4; x = 1.25 · W / 4 = 0.625, −0.15625, 0, −1.25; tanh(T·x/2)
    code = binarizer.code(weight)
    assert code.signs.tolist() == [[[1, -1], [1, -1]]]
    assert code.scales.tolist() == [[[3.2]]]
    soft = 3.2 * torch.tanh(torch.tensor([[3.125, -0.78125], [0, -6.25]], dtype=torch.float64))
    torch.testing.assert_close(binarizer(weight), soft)
    assert binarizer.eval()(weight).tolist() == [[3.2, -3.2], [3.2, -3.2]]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("t", [1, 10, 400])
@pytest.mark.parametrize("shape", [(5, 9), (4, 3, 2, 2), (1, 1)])
def test_gradients_of_weights(shape: tuple[int, ...], t: float, training: bool) -> None:
    alpha, beta = 0.7, 1.4
    binarizer = weights(t, alpha, beta).train(training)
    weight = (0.1 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    out = binarizer(weight)
    upstream = torch.randn(shape, dtype=torch.float64)
    found = torch.autograd.grad(out, [weight, binarizer.alpha, binarizer.beta], upstream)
    w = weight.detach()
    largest = w.abs().max()
    x = beta * w / largest
    slope = 2 * sigma(x) * (1 - sigma(x))
    soft = 2 * sigma(t * x) - 1 if training else torch.where(w >= 0, 1.0, -1.0).double()
    torch.testing.assert_close(out.detach(), alpha * largest * soft)
    torch.testing.assert_close(found[0], upstream * alpha * beta * slope)
    torch.testing.assert_close(found[1], (upstream * largest * soft).sum())
    torch.testing.assert_close(found[2], (upstream * alpha * w * slope).sum())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("t", [1, 10, 400])
def test_inputs(t: float, training: bool) -> None:
    beta, threshold = 1.5, 0.3
    part = inputs(t, beta, threshold).train(training)
    points = torch.cat([torch.tensor([0.2, 0, -0.0]), torch.linspace(-3, 3, 201)]).double()
    x = points.clone().requires_grad_()
    out = part(x)
    z = beta * points - threshold
    expected = sigma(t * z) if training else (z >= 0).double()
    torch.testing.assert_close(out.detach(), expected)
    upstream = torch.randn_like(points)
    found = torch.autograd.grad(out, [x, part.beta], upstream)
    slope = sigma(z) * (1 - sigma(z))
    torch.testing.assert_close(found[0], upstream * beta * slope)
    torch.testing.assert_close(found[1], (upstream * points * slope).sum())


def test_the_boundary_goes_with_one() -> None:
    part = inputs(10, threshold=0.25).eval()
    assert part(torch.tensor([0.25, 0.2499, -0.25]).double()).tolist() == [1, 0, 0]


def test_at_the_end_soft_is_the_step() -> None:
    """At T = 2000 only weights within a thousandth of the largest are not yet binary."""
    weight = torch.randn(50, 40, dtype=torch.float64)
    away = weight.abs() > 0.006 * weight.abs().max()
    soft, step = weights(2000)(weight), weights(2000).eval()(weight)
    torch.testing.assert_close(soft[away], step[away], rtol=1e-5, atol=1e-5)
    assert torch.equal(soft.sign(), step.sign())


def test_the_schedule() -> None:
    layer = BinaryLinear(6, 4, method="quantnet")
    assert isinstance(layer.weight_binarizer, SigmoidWeights)
    assert isinstance(layer.input_binarizer, SigmoidInputs)
    t = layer.weight_binarizer.temperature.value
    before = layer.code()
    assert t.item() == 10
    for epoch, expected in ((0, 10), (1, 20), (99, 1000), (199, 2000), (399, 2000)):
        unflip.start_epoch(layer, epoch, 400)
        assert t.item() == expected
        assert layer.input_binarizer.temperature.value.item() == expected
    assert layer.weight_binarizer.temperature.value is t
    assert torch.equal(layer.code().signs, before.signs)
    assert torch.equal(layer.code().scales, before.scales)
    own = {"weight_binarizer.alpha", "weight_binarizer.beta", "input_binarizer.beta"}
    assert set(layer.state_dict()) == {"weight", "bias"} | own


def test_what_inputs_are() -> None:
    """0 and 1 in evaluation, where sums of products are integers; anything between in training."""
    layer = BinaryConv2d(3, 4, 3, method="quantnet")
    part = layer.input_binarizer
    assert (part.bits, part.fused_as) == (1, None)
    assert not part.unit
    layer.eval()
    assert part.unit
    assert set(part(torch.randn(50)).unique().tolist()) == {0, 1}
    frozen = unflip.freeze(layer.train())
    assert frozen.input_binarizer.unit  # type: ignore[union-attr]
    assert not layer.input_binarizer.unit


def test_eval_is_frozen_and_training_is_not() -> None:
    model = nn.Sequential(BinaryConv2d(3, 8, 3, method="quantnet"), nn.BatchNorm2d(8))
    with torch.no_grad():
        model[0].weight_binarizer.alpha.neg_()  # type: ignore[union-attr,operator]
        model[0].weight_binarizer.beta.neg_()  # type: ignore[union-attr,operator]
    x = torch.randn(4, 3, 6, 6)
    soft = model(x)
    frozen = unflip.freeze(model)
    assert torch.equal(frozen(x), model.eval()(x))
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(frozen(x), model(x))
    assert not torch.allclose(frozen(x), soft)


def test_frozen_stays_hard_in_training_mode() -> None:
    """Its weights are hard; soft inputs beside them would be a network that no one trained."""
    frozen = unflip.freeze(BinaryConv2d(3, 4, 3, method="quantnet"))
    x = torch.randn(2, 3, 6, 6)
    expected = frozen(x)
    assert torch.equal(frozen.train()(x), expected)
    assert frozen.input_binarizer.unit  # type: ignore[union-attr]


def test_soft_values_are_rounded_under_autocast() -> None:
    """They are no signs: products of units would be wrong by much more."""
    layer = BinaryConv2d(3, 4, 3, method="quantnet")
    x = torch.randn(2, 3, 6, 6)
    with torch.autocast("cpu", dtype=torch.float16):
        out = layer(x)
    torch.testing.assert_close(out.float(), layer(x), rtol=2e-3, atol=2e-3)


def test_a_layer_of_zeros() -> None:
    layer = BinaryLinear(3, 2, method="quantnet")
    nn.init.zeros_(layer.weight)
    layer(torch.randn(4, 3)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "quantnet: temperature=0 should be > 0 and <= 2000"),
        ({"temperature": 2001}, "quantnet: temperature=2001 should be"),
        ({"threshold": -1}, "quantnet: threshold=-1 should be"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.get("quantnet", **options)


def test_the_family_is_what_the_weights_mean() -> None:
    assert methods.get("quantnet", temperature=20).family == "quantnet"
    assert methods.get("quantnet", threshold=0.5).family == "quantnet(threshold=0.5)"
