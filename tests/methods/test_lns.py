"""LNS: the equations of the paper, the mapping network, warm start, and each option."""

import copy
import math
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.kernels.mapping import shared_predictions
from unflip.layers import (
    BinaryConv2d,
    BinaryLayer,
    BinaryLinear,
    binary_layers,
    state_restored,
)
from unflip.methods import ParameterGroup, Preparation
from unflip.methods import warm_start as warm_start_module
from unflip.methods.lns import (
    CHUNK,
    LNS,
    MappedSign,
    MappingNetwork,
    mapped_layers,
    sign_agreement,
    unbiased_loss,
    warm_start,
)

OTHERS = [name for name in methods.names() if name != "lns"]
BASES = [name for name in OTHERS if methods.get(name).unfit_for_lns is None]


def mapped(layer: nn.Module) -> MappedSign:
    assert isinstance(layer, BinaryLayer)
    assert isinstance(layer.weight_binarizer, MappedSign)
    return layer.weight_binarizer


def float_net() -> nn.Sequential:
    """A small residual-free network as one would train on small images."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.PReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.PReLU(),
        nn.Conv2d(32, 32, 1, groups=2),
        nn.BatchNorm2d(32),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 24),
        nn.BatchNorm1d(24),
        nn.Linear(24, 10),
    )


def lns_net(**options: Any) -> nn.Module:
    return unflip.binarize(float_net(), "lns", quiet=True, **options)


def same_net(**options: Any) -> nn.Module:
    """Of the same weights every time."""
    torch.manual_seed(0)
    return lns_net(**options)


# --- the loss -------------------------------------------------------------------------------------------

# (ρ₊, ρ₋) anywhere in ρ₊ + ρ₋ < 1
rates = st.tuples(st.floats(0, 0.999), st.floats(0, 1)).map(
    lambda r: (r[0] * r[1], r[0] * (1 - r[1]))
)
outputs = st.lists(st.floats(-100, 100), min_size=1, max_size=8)


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(deadline=None, max_examples=200)
@given(outputs, rates, st.sampled_from([1.0, -1.0]))
def test_expectation_over_flips_is_the_clean_loss(
    values: list[float], rho: tuple[float, float], clean: float
) -> None:
    q_hat, q = double(values), double([clean] * len(values))
    flip = rho[0] if clean > 0 else rho[1]  # ρ₊ is the rate at which a +1 is flipped
    kept, flipped = unbiased_loss(q_hat, q, *rho), unbiased_loss(q_hat, -q, *rho)
    expected = (q_hat - q) ** 2
    error = ((1 - flip) * kept + flip * flipped - expected).abs()
    rounding = 1e-14 * (1 + q_hat.abs()) ** 2 / (1 - sum(rho))
    assert (error <= rounding).all()


@settings(deadline=None, max_examples=200)
@given(outputs, rates, st.sampled_from([1.0, -1.0]))
def test_gradient_is_the_papers(
    values: list[float], rho: tuple[float, float], label: float
) -> None:
    q_hat, noisy = double(values).requires_grad_(), double([label] * len(values))
    (grad,) = torch.autograd.grad(unbiased_loss(q_hat, noisy, *rho).sum(), q_hat)
    own = rho[0] if label > 0 else rho[1]
    expected = 2 * (q_hat - noisy) - 4 * own * noisy / (1 - sum(rho))
    torch.testing.assert_close(grad, expected.detach(), rtol=1e-10, atol=1e-10 / (1 - sum(rho)))


@settings(deadline=None)
@given(outputs, rates, st.sampled_from([1.0, -1.0]))
def test_the_correction_moves_the_target_and_nothing_else(
    values: list[float], rho: tuple[float, float], label: float
) -> None:
    same, other = rho if label > 0 else rho[::-1]
    target = label * (1 - other + same) / (1 - sum(rho))
    q_hat, noisy = double([0.0, *values]), double([label] * (len(values) + 1))
    rest = unbiased_loss(q_hat, noisy, *rho) - (q_hat - target) ** 2
    rounding = 1e-12 * (1 + 100 + abs(target)) ** 2
    assert rest.max() - rest.min() <= rounding


@settings(deadline=None)
@given(outputs, st.floats(0, 0.49), st.sampled_from([1.0, -1.0]))
def test_a_symmetric_rate_stretches_the_target(
    values: list[float], rho: float, label: float
) -> None:
    q_hat, noisy = double([0.0, *values]), double([label] * (len(values) + 1))
    rest = unbiased_loss(q_hat, noisy, rho, rho) - (q_hat - noisy / (1 - 2 * rho)) ** 2
    assert rest.max() - rest.min() <= 1e-12 * (101 + 1 / (1 - 2 * rho)) ** 2
    torch.testing.assert_close(rest[0].item(), 1 - 1 / (1 - 2 * rho) ** 2, rtol=1e-9, atol=1e-12)


def test_the_loss_by_hand() -> None:
    q_hat = double([0.5, 0.5, -2])
    noisy = double([1, -1, -1])
    found = unbiased_loss(q_hat, noisy, 0.2, 0.3)
    expected = [
        (0.7 * 0.25 - 0.2 * 2.25) / 0.5,
        (0.8 * 2.25 - 0.3 * 0.25) / 0.5,
        (0.8 * 1.0 - 0.3 * 9.0) / 0.5,
    ]
    torch.testing.assert_close(found, double(expected))
    assert torch.equal(unbiased_loss(q_hat, noisy, 0, 0), (q_hat - noisy) ** 2)
    assert torch.equal(found, unbiased_loss(q_hat, noisy.to(torch.int8), 0.2, 0.3))


def flipped(clean: Tensor, rho_plus: float, rho_minus: float, generator: torch.Generator) -> Tensor:
    """Noisy labels: a +1 flipped with probability ρ₊, a −1 with ρ₋."""
    rate = torch.where(clean > 0, rho_plus, rho_minus)
    flips = torch.rand(clean.shape, generator=generator) < rate
    return torch.where(flips, -clean, clean)


def test_monte_carlo() -> None:
    generator = torch.Generator().manual_seed(1)
    n, rho_plus, rho_minus = 200_000, 0.35, 0.1
    for cls in (1.0, -1.0):
        clean = torch.full((n,), cls, dtype=torch.float64)
        q_hat = 0.5 * clean + torch.randn(n, generator=generator, dtype=torch.float64)
        noisy = flipped(clean, rho_plus, rho_minus, generator)

        def bias(loss: Tensor, q_hat: Tensor = q_hat, clean: Tensor = clean) -> float:
            """How many standard errors the mean is away from the clean risk."""
            difference = loss - (q_hat - clean) ** 2
            return abs(difference.mean() / (difference.std() / math.sqrt(n))).item()

        assert bias(unbiased_loss(q_hat, noisy, rho_plus, rho_minus)) < 4
        assert bias((q_hat - noisy) ** 2) > 20, "without the correction it is biased"
        assert bias(unbiased_loss(q_hat, noisy, rho_minus, rho_plus)) > 20, "rates the wrong way"


def test_risk_converges_at_the_rate_of_the_theorem() -> None:
    """|R̂ on noisy labels − R on clean ones| falls as n^(−1/2)."""
    generator = torch.Generator().manual_seed(2)
    rho_plus, rho_minus, repeats = 0.2, 0.05, 200
    sizes = [2**k for k in range(6, 15, 2)]
    corrected, plain = [], []
    for n in sizes:
        clean = torch.where(torch.rand(repeats, n, generator=generator) < 0.5, 1.0, -1.0)
        q_hat = 0.8 * clean + 0.5 * torch.randn(repeats, n, generator=generator)
        risk = 0.2**2 + 0.5**2  # E (q̂ − q)²
        noisy = flipped(clean, rho_plus, rho_minus, generator)
        losses = unbiased_loss(q_hat, noisy, rho_plus, rho_minus)
        corrected.append((losses.mean(1) - risk).square().mean().sqrt())
        plain.append((((q_hat - noisy) ** 2).mean(1) - risk).square().mean().sqrt())

    def slope(errors: list[Tensor]) -> float:
        x = torch.tensor(sizes).log()
        y = torch.stack(errors).log()
        return (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()

    assert slope(corrected) == pytest.approx(-0.5, abs=0.04)
    assert corrected[-1] < 0.02
    assert slope(plain) > -0.1, "the plain loss settles on a wrong risk"


@pytest.mark.parametrize(
    ("rho_plus", "rho_minus", "words"),
    [
        (0.5, 0.5, "rho_plus=0.5 and rho_minus=0.5 add up to 1.0.*rho_plus . rho_minus < 1"),
        (0.9, 0.2, "add up to 1.1.*< 1"),
        (0.1, 0.9, "add up to 1.0.*< 1"),
        (-0.1, 0.2, "rho_plus=-0.1 should be a probability, 0 <= rho_plus < 1"),
        (0.2, -1e-9, "rho_minus=-1e-09 should be a probability"),
        (1.0, 0.0, "rho_plus=1.0 should be"),
        (0.0, 1.5, "rho_minus=1.5 should be"),
        (math.nan, 0.1, "rho_plus=nan should be"),
        (0.1, math.inf, "rho_minus=inf should be"),
    ],
)
def test_rates_out_of_range(rho_plus: float, rho_minus: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        unbiased_loss(torch.zeros(1), torch.ones(1), rho_plus, rho_minus)
    with pytest.raises(ValueError, match=words):
        methods.get("lns", rho_plus=rho_plus, rho_minus=rho_minus)
    with pytest.raises(ValueError, match=words):
        unflip.binarize(float_net(), "lns", rho_plus=rho_plus, rho_minus=rho_minus)


@pytest.mark.parametrize("alpha", [-1, math.nan, math.inf])
def test_alpha_out_of_range(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"lns: alpha={alpha} should be a finite number >= 0"):
        LNS(alpha=alpha)


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        ("loss_on", "before", "'before_sign', 'after_sign'"),
        ("reduction", "max", "'mean', 'sum'"),
        ("labels", "moving", "'following', 'frozen'"),
        ("gradient", "none", "'identity', 'clipped'"),
        ("mapping", "deep", "'plain', 'residual'"),
        ("statistics", "running", "'filters', 'fixed'"),
    ],
)
def test_unknown_choices_name_the_right_ones(option: str, value: str, known: str) -> None:
    with pytest.raises(ValueError, match=f"lns: {option}='{value}' is not one of {known}"):
        methods.get("lns", **{option: value})


def test_base_is_another_method() -> None:
    with pytest.raises(ValueError, match="lns: base='lns' would map a mapping"):
        LNS(base="lns")
    with pytest.raises(ValueError, match=r"unknown method 'dorfa'. Did you mean 'dorefa'"):
        LNS(base="dorfa")
    with pytest.raises(ValueError, match="unknown option of method 'dorefa' 'input'"):
        LNS(base={"name": "dorefa", "input": "pm1"})


@pytest.mark.parametrize("base", sorted(set(OTHERS) - set(BASES)))
def test_a_method_that_cannot_be_a_base_says_why(base: str) -> None:
    with pytest.raises(ValueError, match=f"lns: base='{base}' does not work: .+"):
        LNS(base=base)


# --- the mapping network --------------------------------------------------------------------------------


@pytest.mark.parametrize(("c", "out"), [(16, 16), (3, 10), (1, 4)])
def test_mapping_has_the_papers_shape(c: int, out: int) -> None:
    f = mapped(BinaryConv2d(c, out, 3, method="lns")).mapping
    convs = [m for m in f.modules() if isinstance(m, nn.Conv2d)]
    assert [tuple(m.weight.shape) for m in convs] == [
        (2 * c, c, 3, 3),
        (2 * c, 2 * c, 3, 3),
        (c, 2 * c, 3, 3),
    ]
    for m in convs:
        assert (m.stride, m.padding, m.dilation, m.groups) == ((1, 1), (1, 1), (1, 1), 1)
    assert f.norm1.weight.shape == f.norm2.bias.shape == (2 * c,)


def test_mapping_is_conv_norm_relu_twice_and_conv() -> None:
    layer = BinaryConv2d(4, 9, 3, method="lns")
    f = mapped(layer).mapping
    with torch.no_grad():
        for norm in (f.norm1, f.norm2):
            norm.weight.uniform_(0.5, 2)
            norm.bias.uniform_(-1, 1)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean = x.mean((0, 2, 3), keepdim=True)
        var = (x - mean).square().mean((0, 2, 3), keepdim=True)
        unit = (x - mean) / (var + 1e-5).sqrt()
        return unit * weight[:, None, None] + bias[:, None, None]

    h = F.conv2d(layer.weight, f.conv1.weight, padding=1)
    h = norm(h, f.norm1.weight, f.norm1.bias).relu()
    h = norm(F.conv2d(h, f.conv2.weight, padding=1), f.norm2.weight, f.norm2.bias).relu()
    expected = F.conv2d(h, f.conv3.weight, f.conv3.bias, padding=1)
    torch.testing.assert_close(f(layer.weight), expected)


LAYERS: dict[str, Any] = {
    "3x3": lambda **o: BinaryConv2d(4, 10, 3, **o),
    "1x1": lambda **o: BinaryConv2d(6, 10, 1, **o),
    "5x5": lambda **o: BinaryConv2d(3, 6, 5, padding=2, **o),
    "11x11": lambda **o: BinaryConv2d(3, 4, 11, padding=5, stride=4, **o),
    "1x3": lambda **o: BinaryConv2d(4, 6, (1, 3), **o),
    "3x1": lambda **o: BinaryConv2d(4, 6, (3, 1), **o),
    "2x2": lambda **o: BinaryConv2d(4, 6, 2, **o),
    "grouped": lambda **o: BinaryConv2d(8, 12, 3, groups=4, **o),
    "depthwise": lambda **o: BinaryConv2d(6, 6, 3, groups=6, **o),
    "depthwise 1x1": lambda **o: BinaryConv2d(6, 6, 1, groups=6, **o),
    "one filter": lambda **o: BinaryConv2d(4, 1, 3, **o),
    "linear": lambda **o: BinaryLinear(20, 12, **o),
    "linear 513": lambda **o: BinaryLinear(CHUNK + 1, 5, **o),
    "linear 1300": lambda **o: BinaryLinear(1300, 3, **o),
    "1x1 600": lambda **o: BinaryConv2d(600, 4, 1, **o),
}


def an_input(layer: BinaryLayer) -> Tensor:
    if isinstance(layer, nn.Linear):
        return torch.randn(3, layer.in_features)
    assert isinstance(layer, nn.Conv2d)
    return torch.randn(2, layer.in_channels, 12, 12)


@pytest.mark.parametrize("statistics", ["filters", "fixed"])
@pytest.mark.parametrize("kind", LAYERS)
def test_any_layer(kind: str, statistics: str) -> None:
    layer = LAYERS[kind](method={"name": "lns", "statistics": statistics})
    f = mapped(layer).mapping
    assert f(layer.weight).shape == layer.weight.shape
    x = an_input(layer)
    out = layer(x)
    assert out.isfinite().all()
    (out.square().mean() + unflip.auxiliary_loss(layer)).backward()
    assert layer.weight.grad is not None
    assert (layer.weight.grad != 0).float().mean() > 0.6, "f passes gradient to all of W"
    for name, parameter in f.named_parameters():
        assert parameter.grad is not None, name
        if parameter.dim() == 4:  # no tap of a kernel is dead: it would see nothing but padding
            assert (parameter.grad.abs().sum((0, 1)) > 0).all(), name
    assert torch.equal(unflip.freeze(layer)(x), layer.eval()(x))


def fixed(layer: BinaryLayer) -> MappingNetwork:
    assert layer.method.statistics == "fixed"  # type: ignore[attr-defined]
    return mapped(layer).mapping


def moved_by(f: MappingNetwork, weight: Tensor, index: tuple[int, ...]) -> Tensor:
    """Where q̂ changes when one weight does."""
    other = weight.detach().clone()
    other[index] += 10
    with torch.no_grad():
        return f(weight) != f(other)


def test_f_sees_a_whole_filter_and_only_that() -> None:
    layer = BinaryConv2d(4, 6, 3, method={"name": "lns", "statistics": "fixed"})
    moved = moved_by(fixed(layer), layer.weight, (2, 1, 0, 0))
    assert moved[2].flatten(1).any(1).all(), "every channel of the filter"
    assert moved[2, :, 2, 2].any(), "three 3×3 convolutions reach the opposite corner"
    assert not moved[[0, 1, 3, 4, 5]].any(), "filters are the batch"


def test_statistics_over_filters_tie_the_filters_together() -> None:
    layer = BinaryConv2d(4, 6, 3, method="lns")
    f = mapped(layer).mapping
    assert moved_by(f, layer.weight, (2, 1, 0, 0)).flatten(1).any(1).all()
    # and make f blind to the scale of W, as BatchNorm is
    torch.testing.assert_close(f(8 * layer.weight), f(layer.weight), rtol=1e-2, atol=1e-3)


def test_groups_share_f_and_keep_their_filters_apart() -> None:
    layer = BinaryConv2d(8, 12, 3, groups=4, method={"name": "lns", "statistics": "fixed"})
    f = fixed(layer)
    assert f.conv1.in_channels == 2
    weight = layer.weight.detach().clone()
    weight[9] = weight[0]  # the same filter in another group
    with torch.no_grad():
        q_hat = f(weight)
    torch.testing.assert_close(q_hat[9], q_hat[0])


@pytest.mark.parametrize("inputs", [CHUNK, CHUNK + 1, 700, 1025, 1300])
def test_wide_rows_are_cut_into_chunks_that_share_f(inputs: int) -> None:
    layer = BinaryLinear(inputs, 3, method={"name": "lns", "statistics": "fixed"})
    f = fixed(layer)
    chunks = math.ceil(inputs / CHUNK)
    width = math.ceil(inputs / chunks)
    assert f.conv1.weight.shape == (2 * width, width, 1, 1)
    for place in (0, width - 1, inputs - 1):
        moved = moved_by(f, layer.weight, (1, place))
        chunk = place // width
        assert moved[1, chunk * width : (chunk + 1) * width].float().mean() > 0.9
        moved[1, chunk * width : (chunk + 1) * width] = False
        assert not moved.any(), "nothing outside the row's own chunk"


def test_a_single_filter_of_single_values_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 1, 1), nn.Flatten(), nn.Linear(9, 2))
    with pytest.raises(ValueError, match=r"cannot binarize '1': lns: .*\(1, 4, 1, 1\).*skip it"):
        unflip.binarize(model, "lns")
    assert type(model[1]) is nn.Conv2d, "the model is left as it was"
    with pytest.raises(
        ValueError, match="skip it"
    ):  # its warm start would measure the same nothing
        unflip.binarize(model, "lns", statistics="fixed")


# --- the layer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
def test_weights_are_the_bases_scale_times_sign_of_f(base: str) -> None:
    layer = BinaryConv2d(4, 6, 3, method=LNS(base=base))
    plain = BinaryConv2d(4, 6, 3, method=base)
    plain.weight = layer.weight
    q_hat = mapped(layer).mapping(layer.weight)
    signs = torch.where(q_hat >= 0, 1.0, -1.0)
    assert 0.1 < (signs != plain.code().signs[0]).float().mean() < 0.9, "an untrained f"
    assert torch.equal(layer.code().signs[0], signs)
    assert torch.equal(layer.code().scales, plain.code().scales)
    assert torch.equal(layer.binary_weight(), plain.code()._replace(signs=signs[None]).dense())
    assert torch.equal(mapped(layer).noisy_labels(layer.weight), plain.code().signs[0])


def trained_like(model: nn.Module) -> nn.Module:
    """Filters whose mean is not 0, and learned scales and the like that are not where they started."""
    with torch.no_grad():
        for _, layer in binary_layers(model):
            means = torch.randn(len(layer.weight), *[1] * (layer.weight.dim() - 1))
            layer.weight.add_(0.5 * layer.weight.std() * means)
            for parameter in layer.weight_binarizer.parameters():
                parameter.add_(0.3 * torch.rand_like(parameter))
    return model


@pytest.mark.parametrize("base", BASES)
def test_what_the_base_has_learned_is_taken_over(base: str) -> None:
    plain = trained_like(unflip.binarize(float_net(), base, quiet=True))
    model, again = lns_net(base=base), lns_net(base=base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unflip.load_twin(model, plain.state_dict())
        unflip.load_twin(again, model.state_dict())
    for _, layer in binary_layers(plain):
        for lns in (model, again):
            twin = lns.get_submodule(layer.path)
            assert isinstance(twin, BinaryLayer)
            assert torch.equal(twin.code().scales, layer.code().scales)
            assert torch.equal(mapped(twin).noisy_labels(twin.weight), layer.code().signs[0])


def test_what_the_base_should_have_learned_and_the_twin_lacks_is_named() -> None:
    model, other = lns_net(base="recu"), unflip.binarize(float_net(), "recu", quiet=True)
    with pytest.warns(
        UserWarning, match=r"nothing that fits 2\.weight_binarizer\.base\.alpha, 5\."
    ):
        unflip.load_twin(model, float_net().state_dict())
    state = other.state_dict()
    state["5.weight_binarizer.alpha"] = torch.zeros(3)
    with pytest.warns(UserWarning, match=r"nothing that fits 5\.weight_binarizer\.base\.alpha: "):
        unflip.load_twin(model, state)


@pytest.mark.parametrize("base", BASES)
def test_lns_wraps_every_other_method(base: str) -> None:
    model = lns_net(base=base)
    plain = unflip.binarize(float_net(), base, quiet=True)
    unflip.load_twin(model, plain.state_dict())
    layers = list(zip(binary_layers(model), binary_layers(plain), strict=True))
    for (_, layer), (_, twin) in layers:
        assert type(layer.input_binarizer) is type(twin.input_binarizer)
        assert layer.input_binarizer.bits == twin.input_binarizer.bits
        with torch.no_grad():
            layer.weight.mul_(20)
            twin.weight.mul_(20)
    unflip.after_step(model)
    unflip.after_step(plain)
    for (_, layer), (_, twin) in layers:
        assert torch.equal(layer.weight, twin.weight), "after_step of the base"
        # with f put right, the whole layer is that of the base
        mapped(layer).mapping.forward = mapped(layer).noisy_labels  # type: ignore[method-assign]
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(model.eval()(x), plain.eval()(x))


def test_base_with_options() -> None:
    layer = BinaryLinear(4, 3, method=LNS(base={"name": "dorefa", "inputs": "pm1"}))
    assert layer.input_binarizer(torch.tensor([-0.2, 0.2])).tolist() == [-1, 1]
    assert layer.method == LNS(base=methods.get("dorefa", inputs="pm1"))
    assert "inputs=pm1" in str(layer.method)


def test_sign_of_zero_is_plus_one() -> None:
    layer = BinaryLinear(8, 6, method="lns")
    f = mapped(layer).mapping
    nn.init.zeros_(f.conv3.weight)
    nn.init.zeros_(f.conv3.bias)
    assert (f(layer.weight) == 0).all()
    assert (layer.code().signs == 1).all()
    assert (layer.binary_weight() > 0).all()


@pytest.mark.parametrize("gradient", ["identity", "clipped"])
@pytest.mark.parametrize("base", BASES)
def test_gradient_goes_through_the_sign_to_w_and_theta(base: str, gradient: str) -> None:
    """∂L/∂q̂ = E · ∂L/∂Q, where clipped only for |q̂| ≤ 1; from there f's own Jacobian."""
    layer = BinaryConv2d(4, 10, 3, method=LNS(base=base, gradient=gradient))
    f = mapped(layer).mapping
    with torch.no_grad():
        f.conv3.weight.mul_(3)  # so that some |q̂| > 1
    upstream = torch.randn(layer.weight.shape)
    leaves = [layer.weight, *f.parameters()]
    found = torch.autograd.grad(layer.binary_weight(), leaves, upstream)
    q_hat = f(layer.weight)
    inside = q_hat.abs() <= 1
    assert 0.1 < inside.float().mean() < 0.9
    through = upstream * layer.code().scales[0] * (inside if gradient == "clipped" else 1)
    expected = torch.autograd.grad(q_hat, leaves, through)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("of", ["classification", "auxiliary"])
def test_both_losses_reach_both_w_and_theta(of: str) -> None:
    model = lns_net()
    x, target = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
    if of == "classification":
        F.cross_entropy(model(x), target).backward()
    else:
        unflip.auxiliary_loss(model).backward()
    for name, layer in binary_layers(model):
        assert layer.weight.grad is not None
        assert layer.weight.grad.abs().sum() > 0, name
        for key, parameter in mapped(layer).mapping.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.abs().sum() > 0, (name, key)
    outside = [p for n, p in model.named_parameters() if n in ("0.weight", "3.weight", "14.bias")]
    assert len(outside) == 3
    for parameter in outside:
        reached = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert reached == (of == "classification")


# Bases that take signs of something other than W; docs/lns.md names them.
SHIFTED = {"abc", "adabin", "bbg", "dsq", "irnet", "recu"}


@pytest.mark.parametrize("base", [*BASES, "abc"])
def test_residual_starts_with_the_signs_of_a_base_that_takes_those_of_w(base: str) -> None:
    method = methods.get(base, weight_bases=1) if base == "abc" else methods.get(base)
    plain = trained_like(unflip.binarize(float_net(), method, quiet=True))
    model = lns_net(base=method, mapping="residual")
    unflip.load_twin(model, plain.state_dict())
    assert (unflip.flip_rate(plain, model) > 0) == (base in SHIFTED)


@pytest.mark.parametrize("inputs", ["01", "pm1"])
def test_residual_starts_as_the_base_method(inputs: str) -> None:
    base = methods.get("dorefa", inputs=inputs)
    model = lns_net(base=base, mapping="residual")
    plain = unflip.binarize(float_net(), base, quiet=True)
    unflip.load_twin(plain, model.state_dict())
    x = torch.randn(4, 3, 8, 8)
    runs = []
    for net in (model, plain):
        leaf = x.clone().requires_grad_()
        out = net(leaf)
        out.square().mean().backward()
        grads = {n: p.grad for n, p in net.named_parameters() if "binarizer" not in n}
        runs.append((out.detach(), leaf.grad, grads))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    torch.testing.assert_close(runs[0][2], runs[1][2], rtol=1e-5, atol=1e-8)  # one E / E apart
    for _, layer in binary_layers(model):
        f = mapped(layer).mapping
        assert f.conv3.weight.grad is not None
        assert f.conv3.weight.grad.abs().sum() > 0, "g can leave zero"
    assert set(sign_agreement(model).values()) == {1.0}
    assert unflip.flip_rate(model, plain) == 0


def test_residual_of_weights_that_are_all_zero() -> None:
    layer = BinaryLinear(8, 6, method=LNS(mapping="residual"))
    with torch.no_grad():
        layer.weight.zero_()
    assert (layer.code().signs == 1).all()
    assert layer(torch.randn(2, 8)).isfinite().all()


def test_residual_adds_w_over_its_mean_size() -> None:
    layer = BinaryConv2d(4, 6, 3, method=LNS(mapping="residual"))
    f = mapped(layer).mapping
    nn.init.normal_(f.conv3.weight)
    plain = copy.deepcopy(f)
    plain.residual = False
    w = layer.weight
    torch.testing.assert_close(f(w) - plain(w), w / w.abs().mean(), rtol=1e-4, atol=1e-5)


# --- the same function everywhere -----------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("statistics", ["filters", "fixed"])
def test_f_is_the_same_in_training_evaluation_and_freezing(statistics: str, warm: bool) -> None:
    model = lns_net(statistics=statistics)
    if warm:
        reached = warm_start(model, steps=40, agreement=0.9)
        assert reached == sign_agreement(model)
    x = torch.randn(4, 3, 8, 8)

    def q_hats(training: bool) -> list[Tensor]:
        model.train(training)
        model(x)  # a step that would move running statistics
        return [
            mapped(layer).mapping(layer.weight).detach().clone()
            for _, layer in binary_layers(model)
        ]

    first = q_hats(True)
    state = {k: v.clone() for k, v in model.state_dict().items() if "binarizer" in k}
    for again in (q_hats(True), q_hats(False), q_hats(True)):
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a, b)
    now = model.state_dict()
    assert all(torch.equal(now[k], v) for k, v in state.items())
    frozen = unflip.freeze(model)
    for q_hat, signs in zip(first, unflip.signs(frozen).values(), strict=True):
        assert torch.equal(torch.where(q_hat >= 0, 1, -1).to(torch.int8), signs[0])
    assert torch.equal(frozen(x), model.eval()(x))


def test_fixed_statistics_are_those_of_the_warm_start_for_ever() -> None:
    model = lns_net(statistics="fixed")
    binarizers = [mapped(layer) for _, layer in binary_layers(model)]
    assert all((b.mapping.norm1.mean == 0).all() for b in binarizers)
    warm_start(model, steps=10)
    for _, layer in binary_layers(model):
        f = mapped(layer).mapping
        x = f.conv1(f._images(layer.weight)).detach()
        torch.testing.assert_close(f.norm1.mean, x.mean((0, 2, 3)))
        torch.testing.assert_close(f.norm1.var, x.var((0, 2, 3), correction=0))
        h = F.relu(f.norm1(x))
        torch.testing.assert_close(f.norm2.mean, f.conv2(h).detach().mean((0, 2, 3)))
    kept = [(b.mapping.norm1.mean.clone(), b.mapping.norm2.var.clone()) for b in binarizers]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        loss = model(torch.randn(4, 3, 8, 8)).square().mean() + unflip.auxiliary_loss(model)
        loss.backward()
        optimizer.step()
    for b, (mean, var) in zip(binarizers, kept, strict=True):
        assert torch.equal(b.mapping.norm1.mean, mean)
        assert torch.equal(b.mapping.norm2.var, var)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_signs_do_not_depend_on_autocast(dtype: torch.dtype) -> None:
    model = lns_net().eval()
    outside = unflip.signs(model)
    x = torch.randn(4, 3, 8, 8)
    with torch.autocast("cpu", dtype=dtype):
        assert unflip.flip_rate(outside, model) == 0
        model.train()
        loss = model(x).float().square().mean() + unflip.auxiliary_loss(model)
    loss.backward()
    for _, layer in binary_layers(model):
        assert layer.weight.grad is not None
        assert layer.weight.grad.abs().sum() > 0


# --- warm start -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"statistics": "fixed"}, {"labels": "frozen"}], ids=str)
def test_warm_start_teaches_f_the_signs_and_touches_nothing_else(options: dict[str, Any]) -> None:
    model = lns_net(**options)
    model(torch.randn(16, 3, 8, 8))  # BatchNorm buffers that are not their initial values
    latent = {n: layer.weight for n, layer in binary_layers(model)}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert max(sign_agreement(model).values()) < 0.9
    seen: dict[str, float] = {}
    reached = warm_start(model, progress=seen.__setitem__)
    assert seen == reached == sign_agreement(model)
    assert set(reached) == {"2", "5", "8", "12"}
    total = sum(w.numel() for w in latent.values())
    assert sum(reached[n] * w.numel() for n, w in latent.items()) / total > 0.999
    assert min(reached.values()) > 0.999, reached

    after = model.state_dict()
    assert after.keys() == before.keys()
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert changed
    assert all(".weight_binarizer.mapping." in k for k in changed), changed
    assert {"1.running_mean", "1.num_batches_tracked", "2.weight"} <= set(before) - changed
    assert all(layer.weight is latent[n] for n, layer in binary_layers(model))
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert model.training
    assert all(m.training for m in model.modules())


@pytest.mark.filterwarnings("ignore:after 40 steps")
@pytest.mark.parametrize(
    ("options", "taught"),
    [
        ({"alpha": 0.1}, 0),
        ({"alpha": 0.0, "labels": "frozen", "loss_on": "after_sign"}, 0),
        ({"reduction": "sum", "gradient": "clipped"}, 0),
        ({"lr": 0.5, "warm_steps": 7}, 0),
        ({"rho_plus": 0.02}, 4),
        ({"loss": "gce"}, 4),
        ({"statistics": "fixed"}, 4),
    ],
    ids=str,
)
def test_a_mapping_that_begins_as_another_is_not_taught_again(
    options: dict[str, Any], taught: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sweep of α one run learns, and the others have what they would have learned, to the bit."""
    memo: dict[str, Any] = {}
    warm_start(same_net(), steps=40, memo=memo)
    alone, beside = same_net(**options), same_net(**options)
    reached = warm_start(alone, steps=40)
    calls, teach = [], warm_start_module._teach
    monkeypatch.setattr(
        warm_start_module, "_teach", lambda *args: (calls.append(args), teach(*args))
    )
    assert warm_start(beside, steps=40, memo=memo) == reached
    assert len(calls) == taught
    states = alone.state_dict(), beside.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
    assert not any(b.untaught for _, _, b in mapped_layers(beside))


@pytest.mark.filterwarnings("ignore:after 4. steps")
def test_other_weights_or_steps_are_taught_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memo: dict[str, Any] = {}
    warm_start(same_net(), steps=40, memo=memo)
    calls: list[Any] = []
    monkeypatch.setattr(warm_start_module, "_teach", lambda *args: calls.append(args))
    other = same_net()
    with torch.no_grad():
        other.get_parameter("5.weight")[0, 0, 0, 0] += 0.01
    warm_start(other, steps=40, memo=memo)
    assert len(calls) == 1
    warm_start(same_net(), steps=41, memo=memo)
    assert len(calls) == 5


def test_warm_start_works_without_gradients_around_it() -> None:
    model = nn.Sequential(BinaryLinear(8, 6, method="lns")).eval()
    with torch.no_grad():
        before = sign_agreement(model)["0"]
        assert warm_start(model, steps=200, lr=1e-2)["0"] > before
    assert not model.training


def test_warm_start_of_a_model_without_lns() -> None:
    model = unflip.binarize(float_net(), "dorefa", quiet=True)
    with pytest.raises(ValueError, match="no LNS layer: binarize it with method='lns' first"):
        warm_start(model)
    with pytest.raises(ValueError, match="no LNS layer"):
        sign_agreement(model)


def test_warm_start_after_agreement_changes_nothing() -> None:
    model = lns_net(mapping="residual")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert set(warm_start(model).values()) == {1.0}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


# --- before the first epoch -----------------------------------------------------------------------------


class Prepared:
    """A preparation that records what a method asks of it."""

    def __init__(self, memo: dict[str, Any] | None = None) -> None:
        self.memo = memo
        self.said: list[str] = []
        self.asked: list[tuple[int, int, float]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def branches(self, count: int, epochs: int, rate: float) -> tuple[nn.Module, list[nn.Module]]:
        self.asked.append((count, epochs, rate))
        baseline = unflip.binarize(float_net(), "dorefa", quiet=True)
        copies = [copy.deepcopy(baseline) for _ in range(count)]
        with torch.no_grad():
            for number, one in enumerate(copies):
                for _, layer in binary_layers(one):
                    layer.weight[number].neg_()  # another filter in each
        return baseline, copies


@pytest.mark.filterwarnings("ignore:after 30 steps")
def test_prepare_is_the_warm_start_of_its_options() -> None:
    options = {"warm_steps": 30, "warm_lr": 1e-2, "warm_agreement": 0.9}
    model, expected, preparation = same_net(**options), same_net(), Prepared()
    LNS(**options).prepare(model, preparation)  # type: ignore[arg-type]
    reached = warm_start(expected, 30, 1e-2, 0.9)
    assert sign_agreement(model) == reached
    assert preparation.said == [
        f"warm start: signs agree on {min(reached.values()):.4%} or more in each of 4 layers"
    ]
    assert preparation.asked == []
    assert not any(b.untaught for _, _, b in mapped_layers(model))


@pytest.mark.filterwarnings("ignore:after 5 steps")
def test_runs_side_by_side_share_their_warm_start() -> None:
    preparation = Prepared(memo={})
    for alpha in (0.0, 1.0):
        method = LNS(warm_steps=5, alpha=alpha)
        method.prepare(same_net(warm_steps=5, alpha=alpha), preparation)
    assert preparation.memo is not None
    assert len(preparation.memo) == 4


def test_without_warm_steps_nothing_is_prepared() -> None:
    model, preparation = same_net(warm_steps=0), Prepared()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    LNS(warm_steps=0).prepare(model, preparation)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(b.untaught for _, _, b in mapped_layers(model))
    assert preparation.said == []


def test_prepare_estimates_flip_rates_from_branches() -> None:
    method = LNS(rates="estimated", warm_steps=0)
    model, preparation = same_net(rates="estimated", warm_steps=0), Prepared()
    method.prepare(model, preparation)
    assert preparation.asked == [(3, 2, 0.1)]
    [said] = preparation.said
    assert said.startswith("flip rates of the baseline's layers: ")
    for _, _, binarizer in mapped_layers(model):
        assert (binarizer.rho_plus != 0.005).any()


def test_only_estimated_rates_need_a_start() -> None:
    assert LNS().needs_start() is None
    assert "the network that the run starts from" in (LNS(rates="estimated").needs_start() or "")
    assert not LNS.from_scratch
    assert all(methods.config_class(name).from_scratch for name in OTHERS)


@pytest.mark.parametrize("lr", [None, 0.25])
def test_theta_is_a_parameter_group(lr: float | None) -> None:
    model = lns_net(base="recu")
    [group] = LNS(base="recu", lr=lr).parameter_groups(model)
    assert (group.name, group.lr) == ("mapping", lr)
    theta = {n for n, p in model.named_parameters() if any(p is q for q in group.parameters)}
    assert theta == {n for n, _ in model.named_parameters() if ".mapping." in n}
    assert LNS().parameter_groups(float_net()) == []


@pytest.mark.parametrize("base", OTHERS)
def test_other_methods_prepare_nothing(base: str) -> None:
    method, preparation = methods.get(base), Prepared()
    model = unflip.binarize(float_net(), base, quiet=True)
    method.prepare(model, preparation)
    assert method.parameter_groups(model) == []
    assert method.needs_start() is None
    assert preparation.said == []


def test_a_base_prepares_too() -> None:
    @dataclass(frozen=True)
    class Calibrated(type(methods.get("dorefa"))):  # type: ignore[misc]
        def prepare(self, model: nn.Module, preparation: Preparation) -> None:
            preparation.say("calibrated")

        def parameter_groups(self, model: nn.Module) -> list[ParameterGroup]:
            return [ParameterGroup("steps", [], 0.5)]

    method, preparation = LNS(base=Calibrated(), warm_steps=0), Prepared()
    method.prepare(lns_net(), preparation)
    assert preparation.said == ["calibrated"]
    groups = method.parameter_groups(lns_net())
    assert [group.name for group in groups] == ["mapping", "steps"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warm_steps": -1}, "lns: warm_steps=-1 should be >= 0; 0 means no warm start"),
        ({"warm_steps": 2.0}, "lns: warm_steps=2.0 should be a whole number"),
        ({"warm_steps": True}, "lns: warm_steps=True should be a whole number"),
        ({"warm_lr": 0}, "lns: warm_lr=0 should be a finite number > 0.*warm_steps=0"),
        ({"warm_lr": math.inf}, "lns: warm_lr=inf should be a finite number > 0"),
        ({"warm_agreement": 0.5}, "lns: warm_agreement=0.5 should be a share of signs"),
        ({"warm_agreement": 99.95}, "warm_agreement=99.95 should be a share .*<= 1"),
        ({"lr": 0}, "lns: lr=0 should be a finite number > 0; leave it out"),
        ({"lr": math.nan}, "lns: lr=nan should be a finite number > 0"),
        ({"lr": "fast"}, "lns: lr='fast' should be a number or None"),
    ],
    ids=str,
)
def test_options_of_the_training_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        methods.get("lns", **options)


def test_options_of_the_training_do_not_change_the_family() -> None:
    trained = LNS(lr=0.1, warm_steps=0, warm_lr=0.1, warm_agreement=1.0)
    assert trained.family == LNS().family == "lns(base=dorefa)"


def test_a_long_warm_start_says_how_far_it_is() -> None:
    for every, expected in (
        (1e9, []),
        (0.0, ["warm start: finished layer 1 (layer1.0.conv1); its signs agree on 50.0000%"]),
    ):
        said: list[str] = []
        warm_start_module.tell_layers(said.append, every)("layer1.0.conv1", 0.5)
        assert said == expected


def test_a_state_filled_in_place_counts_as_taught() -> None:
    model = lns_net()
    state_restored(model)
    assert untaught_warnings(model) == 0


def test_predict_is_f_of_w_and_none_for_other_methods() -> None:
    layer = BinaryLinear(8, 6, method="lns")
    assert torch.equal(mapped(layer).predict(layer.weight), mapped(layer).mapping(layer.weight))
    assert BinaryLinear(8, 6, method="dorefa").weight_binarizer.predict(layer.weight) is None


# --- labels ---------------------------------------------------------------------------------------------


@torch.no_grad()
def flip_some(layer: BinaryLayer) -> Tensor:
    layer.weight[0].neg_()
    return torch.where(layer.weight >= 0, 1.0, -1.0)


def test_following_labels_follow_and_frozen_ones_do_not() -> None:
    for labels, follows in (("following", True), ("frozen", False)):
        layer = BinaryLinear(8, 6, method=LNS(labels=labels))
        first = mapped(layer).noisy_labels(layer.weight).clone()
        assert torch.equal(first, torch.where(layer.weight >= 0, 1.0, -1.0))
        signs = flip_some(layer)
        now = mapped(layer).noisy_labels(layer.weight)
        assert torch.equal(now, signs if follows else first)
        q_hat = mapped(layer).mapping(layer.weight)
        expected = unbiased_loss(q_hat, now, 0.005, 0.005).mean()
        torch.testing.assert_close(unflip.auxiliary_loss(layer), expected)


def test_a_pretrained_networks_weights_bring_new_frozen_labels() -> None:
    source = unflip.binarize(float_net(), "dorefa", quiet=True)
    model = lns_net(labels="frozen")
    unflip.load_twin(model, source.state_dict())
    for (_, layer), (_, twin) in zip(binary_layers(model), binary_layers(source), strict=True):
        signs = torch.where(twin.weight >= 0, 1.0, -1.0)
        assert torch.equal(mapped(layer).noisy_labels(layer.weight), signs)
        assert mapped(layer).labels.dtype == torch.int8


def test_the_warm_start_takes_frozen_labels_again() -> None:
    layer = BinaryLinear(8, 6, method=LNS(labels="frozen"))
    signs = flip_some(layer)
    warm_start(layer, steps=0)
    assert torch.equal(mapped(layer).noisy_labels(layer.weight), signs)


def test_frozen_labels_travel_with_the_state_dict() -> None:
    layer, other = (BinaryLinear(8, 6, method=LNS(labels="frozen")) for _ in range(2))
    first = mapped(layer).labels.clone()
    flip_some(layer)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(mapped(other).labels, first)
    assert torch.equal(other.weight, layer.weight)


# --- the auxiliary loss ---------------------------------------------------------------------------------


def test_auxiliary_loss_is_alpha_times_the_sum_over_layers() -> None:
    model = lns_net(alpha=2.5, rho_plus=0.1, rho_minus=0.2)
    expected = {}
    for name, layer in binary_layers(model):
        q_hat, w = mapped(layer).mapping(layer.weight), layer.weight
        labels = torch.where(w >= 0, 1.0, -1.0)
        expected[name] = 2.5 * unbiased_loss(q_hat, labels, 0.1, 0.2).mean()
    losses = unflip.auxiliary_losses(model)
    torch.testing.assert_close(losses, expected)
    assert list(losses) == ["2", "5", "8", "12"]
    torch.testing.assert_close(unflip.auxiliary_loss(model), sum(expected.values()))


def test_alpha_scales_the_loss() -> None:
    layer = BinaryLinear(8, 6, method=LNS(alpha=1))
    one = unflip.auxiliary_loss(layer)
    state = layer.state_dict()
    for alpha in (0, 0.5, 5):
        other = BinaryLinear(8, 6, method=LNS(alpha=alpha))
        other.load_state_dict(dict(state))
        torch.testing.assert_close(unflip.auxiliary_loss(other), alpha * one)


@pytest.mark.parametrize("base", BASES)
def test_other_methods_have_no_auxiliary_loss(base: str) -> None:
    model = unflip.binarize(float_net(), base, quiet=True)
    assert unflip.auxiliary_losses(model) == {}
    assert unflip.auxiliary_loss(model).item() == 0
    assert unflip.auxiliary_loss(float_net()).item() == 0


@pytest.mark.parametrize("gradient", ["identity", "clipped"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss_on", ["before_sign", "after_sign"])
def test_loss_options_against_closed_forms(loss_on: str, reduction: str, gradient: str) -> None:
    config = LNS(
        alpha=1.5,
        rho_plus=0.1,
        rho_minus=0.3,
        loss_on=loss_on,  # type: ignore[arg-type]
        reduction=reduction,  # type: ignore[arg-type]
        gradient=gradient,  # type: ignore[arg-type]
    )
    layer = BinaryConv2d(4, 10, 3, method=config)
    f = mapped(layer).mapping
    with torch.no_grad():
        f.conv3.weight.mul_(3)
    q_hat = f(layer.weight)
    labels = torch.where(layer.weight >= 0, 1.0, -1.0)
    own = torch.where(labels > 0, 0.1, 0.3)
    other = torch.where(labels > 0, 0.3, 0.1)
    value = q_hat.detach()
    if loss_on == "after_sign":
        value = torch.where(value >= 0, 1.0, -1.0)
    each = ((1 - other) * (value - labels) ** 2 - own * (value + labels) ** 2) / 0.6
    count = labels.numel() if reduction == "mean" else 1
    loss = unflip.auxiliary_loss(layer)
    torch.testing.assert_close(loss, 1.5 * each.sum() / count)
    if loss_on == "after_sign":  # two values: 0 is never among them
        expected = (labels == value) * -4 * own / 0.6 + (labels != value) * 4 * (1 - other) / 0.6
        torch.testing.assert_close(each, expected)

    # to q̂ the paper's gradient; through the sign only for |q̂| ≤ 1 when it is clipped
    to_q = 2 * (value - labels) - 4 * own * labels / 0.6
    inside = q_hat.detach().abs() <= 1
    assert 0.1 < inside.float().mean() < 0.9
    if loss_on == "after_sign" and gradient == "clipped":
        to_q = to_q * inside
    leaves = [layer.weight, *f.parameters()]
    expected_grads = torch.autograd.grad(q_hat, leaves, 1.5 * to_q / count)
    found = torch.autograd.grad(loss, leaves)
    for grad, expected_grad in zip(found, expected_grads, strict=True):
        size = expected_grad.abs().max().item()
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5 * size)


@pytest.mark.parametrize("made_half", [True, False])
def test_a_sum_in_half_precision_is_finite(made_half: bool) -> None:
    """More weights than float16 can count."""
    conv = nn.Conv2d(96, 96, 3)
    if made_half:
        conv.half()
    layer = unflip.binarize(conv, LNS(reduction="sum"), keep_first_and_last=False, quiet=True)
    loss = unflip.auxiliary_loss(layer.half())
    assert loss.isfinite()
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()
    mean = copy.deepcopy(layer).float()
    torch.testing.assert_close(loss, unflip.auxiliary_loss(mean), rtol=1e-2, atol=0)


def test_predictions_can_be_shared_by_the_two_losses() -> None:
    model = lns_net()
    twin = copy.deepcopy(model)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for _, layer in binary_layers(model):
        mapped(layer).mapping.register_forward_hook(count)
    x = torch.randn(4, 3, 8, 8)
    with shared_predictions(model):
        (model(x).square().mean() + unflip.auxiliary_loss(model)).backward()
    assert calls == 4
    (twin(x).square().mean() + unflip.auxiliary_loss(twin)).backward()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model(x)
    assert calls == 8, "outside, f(W) is computed again"
    with shared_predictions(unflip.binarize(float_net(), "dorefa", quiet=True)):
        pass


def test_minimising_the_loss_brings_q_to_the_stretched_target() -> None:
    torch.manual_seed(3)
    q_hat = torch.zeros(6, requires_grad=True)
    noisy = torch.tensor([1.0, -1, 1, -1, 1, -1])
    optimizer = torch.optim.SGD([q_hat], lr=0.2)
    for _ in range(100):
        optimizer.zero_grad()
        unbiased_loss(q_hat, noisy, 0.2, 0.2).sum().backward()
        optimizer.step()
    torch.testing.assert_close(q_hat.detach(), noisy / 0.6)


def test_warm_start_of_a_half_precision_model_is_fitted_in_float32() -> None:
    model = unflip.binarize(
        nn.Sequential(nn.Conv2d(16, 32, 3)).half(), "lns", keep_first_and_last=False, quiet=True
    )
    [share] = warm_start(model).values()
    assert share > 0.999
    assert all(p.dtype == torch.float16 and p.isfinite().all() for p in model.parameters())


def test_warm_start_that_falls_short_says_so() -> None:
    model = unflip.binarize(
        nn.Sequential(nn.Conv2d(16, 32, 3)), "lns", keep_first_and_last=False, quiet=True
    )
    with pytest.warns(
        UserWarning, match=r"after 1 steps of warm start .* too few labels: 0 \d.*warm_steps"
    ):
        warm_start(model, steps=1)


def untaught_warnings(model: nn.Module, times: int = 2) -> int:
    """How often training says that a mapping has not learned its signs, over several losses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            unflip.auxiliary_loss(model)
    return sum("has not learned the signs" in str(w.message) for w in caught)


def test_training_without_a_warm_start_is_said_once() -> None:
    model = lns_net()
    layers = len(list(binary_layers(model)))
    assert untaught_warnings(copy.deepcopy(model).eval()) == 0
    with torch.no_grad():
        assert untaught_warnings(model) == 0
    assert untaught_warnings(copy.deepcopy(model)) == layers, "once per layer"
    assert untaught_warnings(lns_net(mapping="residual")) == 0
    trained = lns_net()
    trained.load_state_dict(model.state_dict())
    assert untaught_warnings(trained) == 0


@pytest.mark.filterwarnings("ignore:after 1 steps")
@pytest.mark.parametrize("labels", ["following", "frozen"])
def test_a_warm_start_is_of_the_weights_at_hand(labels: str) -> None:
    model = lns_net(labels=labels)
    warm_start(model, steps=1)
    assert untaught_warnings(copy.deepcopy(model)) == 0
    unflip.load_twin(model, float_net().state_dict())
    assert untaught_warnings(copy.deepcopy(model)) > 0, "other weights have other signs"
    warm_start(model, steps=1)
    assert untaught_warnings(model) == 0


def test_a_compiled_step_does_not_know_of_the_warning() -> None:
    model = lns_net()
    compiled = torch.compile(
        lambda: unflip.auxiliary_loss(model), fullgraph=True, backend="aot_eager"
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lns: a mapping network")
        compiled()


def test_layers_that_are_not_3x3_have_room_enough() -> None:
    """AlexNet's first layer has three channels: twice that is too few to learn 23,232 signs."""
    layer = unflip.BinaryConv2d(3, 64, 11, stride=4, method="lns")
    assert layer.weight_binarizer.mapping.conv1.out_channels == 32
    assert (
        unflip.BinaryConv2d(3, 64, 3, method="lns").weight_binarizer.mapping.conv1.out_channels == 6
    )


def test_rates_given_as_tensors_are_checked_too() -> None:
    half = torch.tensor(0.6)
    with pytest.raises(ValueError, match=r"add up to 1.2"):
        unbiased_loss(torch.ones(2), torch.ones(2), half, half)
