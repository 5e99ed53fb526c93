"""ReCU: the rectified clamp, its quantile and schedule, the learned scale, inputs scaled by their spread."""

import math

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.recu import RectifiedSign, ScaledApproxSign


def rectified(weight: Tensor, tau: float = 0.85) -> RectifiedSign:
    made = RectifiedSign(0.85, 0.99, weight)
    made.tau.fill_(tau)
    return made


def reference(weight: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """(Ŵ, the clamp's bound)."""
    flat = weight.flatten(1)
    deviations = flat - flat.sum(1, keepdim=True) / flat.shape[1]
    variance = (deviations**2).sum(1, keepdim=True) / (flat.shape[1] - 1)
    standard = deviations * 8**0.5 / (variance + 1e-5) ** 0.5
    # The τ-quantile of a Laplace distribution with mean 0 and mean |x| = b: 1 − e^(−q/b)/2 = τ
    b = standard.detach().abs().mean()
    bound = b * math.log(1 / (2 * (1 - tau)))
    assert (1 - torch.exp(-bound / b) / 2).item() == pytest.approx(tau)
    return standard.view_as(weight), bound


def test_weights_by_hand() -> None:
    # mean 1, deviations 1, −1, 0, 0; then α
    weight = torch.tensor([[2.0, 0.0, 1.0, 1.0], [-1.0, 1.0, 3.0, -5.0]])
    binarizer = rectified(weight)
    assert binarizer.alpha.tolist() == [[0.5], [0.5]]
    with torch.no_grad():
        binarizer.alpha.copy_(torch.tensor([[0.25], [-2.0]]))
    assert binarizer.code(weight).signs.tolist() == [[[1, -1, 1, 1], [-1, 1, 1, -1]]]
    assert binarizer(weight).tolist() == [[0.25, -0.25, 0.25, 0.25], [2, -2, -2, 2]]


@pytest.mark.parametrize("tau", [0.85, 0.95, 0.99])
@pytest.mark.parametrize("shape", [(5, 40), (4, 3, 3, 3), (6, 2, 1, 1)])
def test_gradients(shape: tuple[int, ...], tau: float) -> None:
    weight = torch.distributions.Laplace(0.0, 0.1).sample(shape).double().requires_grad_()
    binarizer = rectified(weight, tau)
    with torch.no_grad():
        binarizer.alpha.copy_(torch.randn_like(binarizer.alpha))
    alpha = binarizer.alpha
    upstream = torch.randn(shape, dtype=torch.float64)
    found = torch.autograd.grad(binarizer(weight), [weight, alpha], upstream)
    standard, bound = reference(weight, tau)
    inside = standard.detach().abs() <= bound
    if tau == 0.85 and weight[0].numel() > 2:
        assert 0 < inside.double().mean() < 1
    (through,) = torch.autograd.grad(standard, weight, upstream * alpha.detach() * inside)
    torch.testing.assert_close(found[0], through)
    signs = torch.where(standard.detach() >= 0, 1.0, -1.0).double()
    torch.testing.assert_close(found[1].flatten(), (upstream * signs).flatten(1).sum(1))


def test_the_schedule() -> None:
    layer = BinaryLinear(6, 4, method="recu")
    binarizer = layer.weight_binarizer
    assert isinstance(binarizer, RectifiedSign)
    tau = binarizer.tau
    before = layer.code()
    taus = []
    for epoch in (0, 300, 599):
        unflip.start_epoch(layer, epoch, 600)
        taus.append(tau.item())
        assert torch.equal(layer.code().signs, before.signs), "the clamp keeps every sign"
    assert binarizer.tau is tau
    assert taus[0] == pytest.approx(0.85)
    # A·e^(i/N) + B with A = (τ_max − τ_min)/(e − 1), B = τ_min − A
    a = 0.14 / (math.e - 1)
    assert taus[1] == pytest.approx(a * math.exp(0.5) + 0.85 - a, rel=1e-6)
    assert taus[2] == pytest.approx(0.99, abs=4e-4)
    binarizer.start_epoch(600, 600)  # where it would end
    assert tau.item() == pytest.approx(0.99)
    assert set(layer.state_dict()) == {"weight", "bias", "weight_binarizer.alpha"}


@pytest.mark.parametrize(
    ("shape", "sample"), [((3, 20), (-1,)), ((2, 4, 5, 3), (-3, -2, -1)), ((4, 5, 3), (-3, -2, -1))]
)
def test_inputs_in_training(shape: tuple[int, ...], sample: tuple[int, ...]) -> None:
    x = (1.5 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    out = ScaledApproxSign(sample)(x)
    assert torch.equal(out, torch.where(x >= 0, 1.0, -1.0).double())
    upstream = torch.randn(shape, dtype=torch.float64)
    (found,) = torch.autograd.grad(out, x, upstream)
    mean = x.mean(sample, keepdim=True)
    scaled = x / (((x - mean) ** 2).mean(sample, keepdim=True) + 1e-5) ** 0.5
    slope = (2 - 2 * scaled.detach().abs()).clamp(min=0)
    (expected,) = torch.autograd.grad(scaled, x, upstream * slope)
    torch.testing.assert_close(found, expected)


def test_inputs_in_evaluation() -> None:
    points = torch.tensor([0.0, -0.0, 0.25, -0.25, 1, -1, 30, -30])
    x = points.clone().requires_grad_()
    out = ScaledApproxSign((-1,)).eval()(x)
    assert out.tolist() == [1, 1, 1, -1, 1, -1, 1, -1]
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 1.5, 1.5, 0, 0, 0, 0]


def test_a_layer_says_what_its_sample_is() -> None:
    conv, linear = BinaryConv2d(2, 3, 3, method="recu"), BinaryLinear(2, 3, method="recu")
    assert isinstance(conv.input_binarizer, ScaledApproxSign)
    assert isinstance(linear.input_binarizer, ScaledApproxSign)
    assert conv.input_binarizer.sample == (-3, -2, -1)
    assert linear.input_binarizer.sample == (-1,)
    part = linear.input_binarizer
    assert (part.bits, part.unit, part.fused_as) == (1, True, None)


def test_filters_of_one_weight_and_constant_ones() -> None:
    depthwise = BinaryConv2d(3, 3, 1, groups=3, bias=False, method="recu")
    depthwise.weight.data = torch.tensor([0.3, -0.3, 0.0]).view(3, 1, 1, 1)
    assert depthwise.binary_weight().flatten().tolist() == [0.5, -0.5, 0.5]
    layer = BinaryLinear(3, 2, method="recu")
    layer.weight.data = torch.tensor([[0.0, 0.0, 0.0], [0.25, 0.25, 0.25]])
    layer(torch.zeros(2, 3)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def test_half_precision_squares_nothing_in_half() -> None:
    x = (300 * torch.randn(2, 50)).half().requires_grad_()
    ScaledApproxSign((-1,))(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("sign", [1, -1])
def test_the_learned_scale_in_half_precision(sign: int) -> None:
    """The product of signs in float16, times the scale: the same output and gradients, α below zero too."""
    layer = BinaryConv2d(8, 6, 3, method="recu")
    assert isinstance(layer.weight_binarizer, RectifiedSign)
    alpha = layer.weight_binarizer.alpha
    with torch.no_grad():
        alpha.mul_(sign)
    x = torch.randn(2, 8, 6, 6)
    upstream = torch.randn(2, 6, 4, 4)
    results = []
    for half in (False, True):
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            out = layer(x)
        results.append(torch.autograd.grad((out.float() * upstream).sum(), [layer.weight, alpha]))
    for full, found in zip(*results, strict=True):
        torch.testing.assert_close(found, full, rtol=1e-2, atol=1e-2 * float(full.abs().max()))


def test_eval_is_frozen() -> None:
    model = nn.Sequential(BinaryConv2d(3, 8, 3, method="recu"), nn.BatchNorm2d(8))
    with torch.no_grad():
        model[0].weight_binarizer.alpha.uniform_(-1, 1)  # type: ignore[union-attr,operator]
    x = torch.randn(4, 3, 6, 6)
    model(x)
    assert torch.equal(unflip.freeze(model)(x), model.eval()(x))


@pytest.mark.parametrize("options", [{"tau_min": 0.5}, {"tau_max": 1}, {"tau_max": 0.8}])
def test_options_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"recu: tau_min=.* and tau_max=.*0.5 < tau_min"):
        methods.get("recu", **options)
