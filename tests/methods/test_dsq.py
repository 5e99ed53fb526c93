"""DSQ: the soft step, its gradient, the learned range and temperature."""

import math

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.dsq import SoftStep, SoftStepInputs, SoftStepWeights

RANGES = [(-1, 1, 0.2), (-2.5, 2.5, 0.2), (-0.3, 1.7, 0.05), (-2, -0.5, 0.5), (0.1, 0.9, 0.89)]


def soft_step(lower: float, upper: float, alpha: float) -> SoftStep:
    made = SoftStep(1, 0.2, torch.zeros((), dtype=torch.float64))
    with torch.no_grad():
        made.lower.fill_(lower)
        made.upper.fill_(upper)
        made.alpha.fill_(alpha)
    return made


def papers_phi(x: Tensor, lower: Tensor, upper: Tensor, alpha: Tensor) -> Tensor:
    """s·tanh(k(x − m)) between the bounds, as the paper writes it."""
    s, k = 1 / (1 - alpha), torch.log(2 / alpha - 1) / (upper - lower)
    inside = torch.minimum(torch.maximum(x, lower), upper)
    return s * torch.tanh(k * (inside - (lower + upper) / 2))


def points(lower: float, upper: float) -> Tensor:
    """Both sides of the range, the bounds left out: there the derivative is one-sided."""
    return torch.linspace(lower - 1.01, upper + 1.03, 200, dtype=torch.float64)


@pytest.mark.parametrize(("lower", "upper", "alpha"), RANGES)
def test_phi_is_the_papers(lower: float, upper: float, alpha: float) -> None:
    step = soft_step(lower, upper, alpha)
    x = points(lower, upper).requires_grad_()
    leaves = [x, *step.parameters()]
    theirs = papers_phi(x, *step.parameters())
    torch.testing.assert_close(step(x), theirs)
    upstream = torch.randn_like(x)
    found = torch.autograd.grad(step(x), leaves, upstream)
    torch.testing.assert_close(found, torch.autograd.grad(theirs, leaves, upstream))
    middle, ends = (lower + upper) / 2, torch.tensor([lower, upper]).double()
    torch.testing.assert_close(step(ends), torch.tensor([-1, 1]).double())
    torch.testing.assert_close(step(torch.tensor([middle]).double()), torch.zeros(1).double())
    # and x's gradient as a formula
    s, k = 1 / (1 - alpha), math.log(2 / alpha - 1) / (upper - lower)
    slope = s * k * (1 - torch.tanh(k * (x.detach() - middle)) ** 2)
    inside = (x.detach() >= lower) & (x.detach() <= upper)
    torch.testing.assert_close(found[0], upstream * slope * inside)


@pytest.mark.parametrize(("lower", "upper", "alpha"), RANGES)
def test_inputs(lower: float, upper: float, alpha: float) -> None:
    step = soft_step(lower, upper, alpha)
    x = points(lower, upper).requires_grad_()
    out = SoftStepInputs(step)(x)
    assert torch.equal(out, torch.where(x >= (lower + upper) / 2, 1.0, -1.0).double())
    upstream = torch.randn_like(x)
    leaves = [x, *step.parameters()]
    found = torch.autograd.grad(out, leaves, upstream)
    theirs = papers_phi(x, *step.parameters())
    torch.testing.assert_close(found, torch.autograd.grad(theirs, leaves, upstream))


def test_weights_by_hand() -> None:
    # mean|W| = 2: V = 0.5, −0.5, 2, −1; range [−1, 1.5]: middle 0.25, Δ/2 = 1.25, so ±2.5
    weight = torch.tensor([[1.0, -1.0], [4.0, -2.0]], dtype=torch.float64)
    binarizer = SoftStepWeights(soft_step(-1, 1.5, 0.2))
    assert binarizer(weight).tolist() == [[2.5, -2.5], [2.5, -2.5]]
    assert binarizer.code(weight).scales.tolist() == [[[2.5]]]
    # the boundary goes with the positive
    assert binarizer.code(torch.tensor([[0.25, 1.75]]).double()).signs.tolist() == [[[1, 1]]]


@pytest.mark.parametrize(("lower", "upper", "alpha"), RANGES)
@pytest.mark.parametrize("shape", [(5, 9), (4, 3, 2, 2), (3, 1, 1, 1)])
def test_gradients_of_weights(
    shape: tuple[int, ...], lower: float, upper: float, alpha: float
) -> None:
    step = soft_step(lower, upper, alpha)
    weight = (0.1 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    unit = weight.detach().abs().mean()
    upstream = torch.randn(shape, dtype=torch.float64)
    found = torch.autograd.grad(
        SoftStepWeights(step)(weight), [weight, *step.parameters()], upstream
    )
    # E · Δ/2 · sign(φ), the product rule by hand
    width = upper - lower
    phi = papers_phi(weight / unit, *step.parameters())
    through = upstream * unit * width / 2
    expected = list(torch.autograd.grad(phi, [weight, *step.parameters()], through))
    signs = torch.where(weight.detach() / unit >= (lower + upper) / 2, 1.0, -1.0).double()
    outer = (upstream * unit * signs).sum() / 2
    expected[1] = expected[1] - outer
    expected[2] = expected[2] + outer
    torch.testing.assert_close(found, tuple(expected))


def test_where_a_layer_starts() -> None:
    layer = BinaryConv2d(4, 6, 3, method=methods.get("dsq", alpha=0.3))
    for part, bound in ((layer.weight_binarizer, 2.5), (layer.input_binarizer, 1.0)):
        assert isinstance(part, SoftStepWeights | SoftStepInputs)
        values = [p.item() for p in part.step.parameters()]
        assert values == pytest.approx([-bound, bound, 0.3])
    part = layer.input_binarizer
    assert (part.bits, part.unit, part.fused_as) == (1, True, None)


def test_values_out_of_range_act_as_if_clipped_and_come_back() -> None:
    x = torch.linspace(-2, 2, 51, dtype=torch.float64)
    too_far, edge = soft_step(1, -1, 1.7), soft_step(-0.1, 0.1, 0.9)
    torch.testing.assert_close(too_far(x), edge(x))
    upstream = torch.randn_like(x)
    found = torch.autograd.grad(too_far(x), list(too_far.parameters()), upstream)
    expected = torch.autograd.grad(edge(x), list(edge.parameters()), upstream)
    torch.testing.assert_close(found, expected)
    assert (SoftStepWeights(too_far).code(torch.ones(2, 2).double()).scales > 0).all()
    tiny = soft_step(-1, 1, -3)
    torch.testing.assert_close(tiny(x), soft_step(-1, 1, 0.001)(x))


def test_a_layer_of_zeros() -> None:
    layer = BinaryLinear(3, 2, method="dsq")
    nn.init.zeros_(layer.weight)
    out = layer(torch.randn(4, 3))
    out.sum().backward()
    assert out.isfinite().all()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def test_learned_sums_are_not_taken_in_half_precision() -> None:
    layer = BinaryLinear(64, 32, method="dsq")
    x = torch.randn(512, 64).half()
    with torch.autocast("cpu", dtype=torch.float16):
        binary = layer.input_binarizer(x)
    assert binary.dtype == torch.float32
    (1000 * binary).sum().backward()
    for name, parameter in layer.input_binarizer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_eval_is_frozen() -> None:
    model = nn.Sequential(BinaryConv2d(3, 8, 3, method="dsq"), nn.BatchNorm2d(8))
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(4, 3, 6, 6)
    model(x)
    frozen = unflip.freeze(model)
    assert torch.equal(frozen(x), model.eval()(x))
    kept = {name for name, _ in frozen.named_parameters() if "binarizer" in name}
    assert kept == {f"0.input_binarizer.step.{n}" for n in ("lower", "upper", "alpha")}


@pytest.mark.parametrize("alpha", [0, 1, -0.2])
def test_options_are_refused_by_name(alpha: float) -> None:
    with pytest.raises(ValueError, match=rf"dsq: alpha={alpha} should be in \[0.001, 0.9\]"):
        methods.get("dsq", alpha=alpha)
