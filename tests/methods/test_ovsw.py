"""OvSW: scaled gradients, decay of silent weights, the average of flips, inputs scaled by their deviation."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.ovsw import DeviationScaledSign, SilenceAwareSign

SHAPES = [(5, 40), (4, 3, 3, 3), (6, 2, 1, 1)]


def binarizer(weight: Tensor, **options: float) -> SilenceAwareSign:
    values = {"delta": 0.04, "sigma": 9e-4, "momentum": 0.999, "threshold": 1e-4, **options}
    return SilenceAwareSign(weight, **values)


def parts(layer: nn.Module) -> SilenceAwareSign:
    part = layer.weight_binarizer
    assert isinstance(part, SilenceAwareSign)
    return part


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_and_their_gradient(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out = binarizer(weight)(weight)
    rows = weight.detach().flatten(1)
    expected = []
    for row in rows:
        deviations = row - row.sum() / len(row)
        standard = deviations / ((deviations**2).sum() / (len(row) - 1) + 1e-5) ** 0.5
        expected.append(standard.abs().sum() / len(row))
    alpha = torch.stack(expected).view(-1, *[1] * (len(shape) - 1))
    torch.testing.assert_close(out, alpha * torch.where(weight >= 0, 1.0, -1.0).double())
    upstream = torch.randn(shape, dtype=torch.float64)
    (found,) = torch.autograd.grad(out, weight, upstream)
    torch.testing.assert_close(found, alpha * upstream)


@pytest.mark.parametrize("shape", SHAPES)
def test_small_gradients_are_scaled_and_silent_weights_decayed(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    part = binarizer(weight, delta=0.5, sigma=0.25, threshold=0.3)
    part.flips.uniform_(0, 0.6)
    grad = torch.randn(shape, dtype=torch.float64)
    for filter_, size in zip(grad, torch.logspace(-3, 3, len(grad)), strict=True):
        filter_.mul_(size)  # some filters below the bound, some above
    weight.grad = grad.clone()
    part.before_step(weight)
    scaled = 0
    for i, (g, w) in enumerate(zip(grad, weight.detach(), strict=True)):
        bound = 0.5 * (w**2).sum().sqrt()
        length = (g**2).sum().sqrt()
        scaled += int(length < bound)
        expected = g * bound / length if length < bound else g
        silent = part.flips[i] < 0.3
        torch.testing.assert_close(weight.grad[i], expected + 0.25 * silent * w)
    assert 0 < scaled < len(grad)


def test_a_filter_without_gradient_is_only_decayed() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    part = binarizer(weight)
    weight.grad = torch.zeros(2, 3)
    part.before_step(weight)
    torch.testing.assert_close(weight.grad, torch.full((2, 3), 9e-4))


def test_the_average_of_flips() -> None:
    weight = torch.tensor([[1.0, -1.0, 2.0]], requires_grad=True)
    part = binarizer(weight, momentum=0.75)
    expected = torch.zeros(1, 3)
    for signs in ([1, 1, 1], [-1, 1, 1], [1, 1, 1], [1, 1, 1]):
        new = torch.tensor([signs]).float()
        flipped = (new * weight.detach() < 0).float()
        part.before_step(weight)
        weight.data.copy_(new)
        part.after_step(weight)
        expected = 0.75 * expected + 0.25 * flipped
        torch.testing.assert_close(part.flips, expected)
    assert part.flips.tolist()[0][2] == 0, "its sign never changed"
    assert part.signs_before is None


def test_a_step_of_sgd_by_hand() -> None:
    layer = BinaryLinear(6, 3, bias=False, method="ovsw").double()
    x = torch.randn(5, 6, dtype=torch.float64)
    before = layer.weight.detach().clone()
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    task = layer.weight.grad.clone()
    unflip.before_step(layer)
    torch.optim.SGD([layer.weight], lr=0.5).step()
    unflip.after_step(layer)
    factor = (0.04 * before.norm(dim=1) / task.norm(dim=1)).clamp(min=1)[:, None]
    torch.testing.assert_close(
        layer.weight.detach(), before - 0.5 * (factor * task + 9e-4 * before)
    )


def test_a_loop_without_before_step_is_warned() -> None:
    layer = BinaryLinear(4, 3, method="ovsw")
    with pytest.warns(UserWarning, match=r"ovsw: .* without unflip.before_step") as found:
        unflip.after_step(layer)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unflip.before_step(layer)  # no gradient yet
        unflip.after_step(layer)


@pytest.mark.parametrize(
    ("shape", "sample"), [((3, 20), (-1,)), ((2, 4, 5, 3), (-3, -2, -1)), ((4, 5, 3), (-3, -2, -1))]
)
def test_inputs_in_training(shape: tuple[int, ...], sample: tuple[int, ...]) -> None:
    x = (1.5 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    out = DeviationScaledSign(sample)(x)
    assert torch.equal(out, torch.where(x >= 0, 1.0, -1.0).double())
    upstream = torch.randn(shape, dtype=torch.float64)
    (found,) = torch.autograd.grad(out, x, upstream)
    fixed = x.detach()
    mean = fixed.mean(sample, keepdim=True)
    s = (((fixed - mean) ** 2).mean(sample, keepdim=True) + 1e-5) ** 0.5
    torch.testing.assert_close(found, upstream * (2 - 2 * (fixed / s).abs()).clamp(min=0) / s)


def test_state_survives_copies_and_saving() -> None:
    layer = BinaryConv2d(2, 3, 3, method="ovsw")
    parts(layer).flips.uniform_()
    twin = copy.deepcopy(layer)
    other = BinaryConv2d(2, 3, 3, method={"name": "ovsw", "delta": 0.5})
    other.load_state_dict(layer.state_dict())
    for found in (twin, other):
        assert torch.equal(parts(found).flips, parts(layer).flips)
    assert set(layer.state_dict()) == {"weight", "bias", "weight_binarizer.flips"}


def test_filters_of_one_weight_and_constant_ones() -> None:
    depthwise = BinaryConv2d(3, 3, 1, groups=3, bias=False, method="ovsw")
    depthwise.weight.data = torch.tensor([0.25, -0.5, 0.0]).view(3, 1, 1, 1)
    assert depthwise.binary_weight().flatten().tolist() == [0.25, -0.5, 0.0]
    layer = BinaryLinear(3, 2, method="ovsw")
    layer.weight.data = torch.tensor([[0.0, 0.0, 0.0], [0.25, 0.25, 0.25]])
    layer(torch.zeros(2, 3)).sum().backward()
    unflip.before_step(layer)
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def test_eval_is_frozen() -> None:
    model = nn.Sequential(BinaryConv2d(3, 8, 3, method="ovsw"), nn.BatchNorm2d(8))
    x = torch.randn(4, 3, 6, 6)
    model(x)
    assert torch.equal(unflip.freeze(model)(x), model.eval()(x))


@pytest.mark.parametrize("option", ["delta", "sigma", "threshold", "momentum"])
@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_options_are_refused_by_name(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"ovsw: {option}={value} should be"):
        methods.get("ovsw", **{option: value})


def test_lns_cannot_wrap_it() -> None:
    with pytest.raises(ValueError, match=r"ovsw.*gradients of latent weights"):
        methods.get("lns", base="ovsw")
