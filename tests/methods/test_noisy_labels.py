"""Losses for noisy labels: values by hand, their limits, and LNS with each of them."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLayer, BinaryLinear
from unflip.methods.lns import LNS, MappedSign, set_flip_rates, warm_start
from unflip.methods.noisy_labels import (
    backward_loss,
    forward_loss,
    generalized_cross_entropy,
    smoothed_cross_entropy,
    symmetric_cross_entropy,
    unbiased_loss,
)

rates = st.tuples(st.floats(0, 0.99), st.floats(0, 1)).map(
    lambda r: (r[0] * r[1], r[0] * (1 - r[1]))
)
outputs = st.lists(st.floats(-20, 20), min_size=1, max_size=8)
labels = st.sampled_from([1.0, -1.0])


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def cross_entropy(q_hat: Tensor, label: Tensor, k: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(k * q_hat, (label + 1) / 2, reduction="none")


def grid() -> tuple[Tensor, Tensor]:
    """q̂ from −5 to 5 with both labels."""
    q_hat = torch.linspace(-5, 5, 41, dtype=torch.float64).repeat(2)
    return q_hat, torch.ones_like(q_hat).index_fill_(0, torch.arange(41), -1.0)


# --- forward correction -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(outputs, rates, labels)
def test_forward_is_the_probability_of_the_label_as_seen(
    values: list[float], rho: tuple[float, float], label: float
) -> None:
    q_hat, noisy = double(values), double([label] * len(values))
    p = torch.sigmoid(1.5 * q_hat)
    seen_plus = (1 - rho[0]) * p + rho[1] * torch.sigmoid(-1.5 * q_hat)
    seen = seen_plus if label > 0 else rho[0] * p + (1 - rho[1]) * torch.sigmoid(-1.5 * q_hat)
    found = forward_loss(q_hat, noisy, *rho, 1.5)
    torch.testing.assert_close(found, -seen.log(), rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(outputs, st.floats(1e-6, 0.49), labels)
def test_a_symmetric_rate_mixes_p_with_its_opposite(
    values: list[float], rho: float, label: float
) -> None:
    q_hat, noisy = double(values), double([label] * len(values))
    p = torch.sigmoid(2 * q_hat * noisy)
    expected = -((1 - rho) * p + rho * (1 - p)).log()
    found = forward_loss(q_hat, noisy, rho, rho, 2.0)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    assert (found <= -math.log(rho) + 1e-9).all(), "disagreeing costs no more than −log ρ"


def test_disagreement_is_bounded_and_its_gradient_vanishes() -> None:
    q_hat = double([-100.0, -1e4, 100.0, 1e4]).requires_grad_()
    noisy = double([1, 1, -1, -1])
    found = forward_loss(q_hat, noisy, 0.2, 0.05, 2.0)
    bound = [-math.log(0.05)] * 2 + [-math.log(0.2)] * 2  # ρ of the other sign
    torch.testing.assert_close(found.detach(), double(bound))
    (grad,) = torch.autograd.grad(found.sum(), q_hat)
    assert grad.abs().max() < 1e-12
    # the plain loss goes on: at ρ = 0 the bound is infinite
    plain = forward_loss(q_hat, noisy, 0.0, 0.0, 2.0)
    torch.testing.assert_close(plain.detach(), 2 * q_hat.detach().abs())
    (grad,) = torch.autograd.grad(plain.sum(), q_hat)
    torch.testing.assert_close(grad, -2 * noisy)


@pytest.mark.parametrize("loss", [forward_loss, backward_loss])
def test_without_noise_it_is_cross_entropy(loss: Callable[..., Tensor]) -> None:
    q_hat, noisy = grid()
    torch.testing.assert_close(loss(q_hat, noisy, 0.0, 0.0, 2.0), cross_entropy(q_hat, noisy, 2.0))


# --- backward correction ----------------------------------------------------------------------------------


@settings(deadline=None)
@given(outputs, rates, labels)
def test_backward_is_unbiased(values: list[float], rho: tuple[float, float], clean: float) -> None:
    q_hat, q = double(values), double([clean] * len(values))
    flip = rho[0] if clean > 0 else rho[1]
    kept, flipped = backward_loss(q_hat, q, *rho, 1.5), backward_loss(q_hat, -q, *rho, 1.5)
    mean = (1 - flip) * kept + flip * flipped
    rounding = 1e-13 * 100 / (1 - sum(rho))
    assert ((mean - cross_entropy(q_hat, q, 1.5)).abs() <= rounding).all()


def test_backward_is_patrinis_inverse_matrix() -> None:
    q_hat, noisy = grid()
    transition = double([[0.7, 0.3], [0.1, 0.9]])  # rows: clean +1, −1; columns: seen +1, −1
    both = torch.stack([cross_entropy(q_hat, double([s] * 82), 2.0) for s in (1.0, -1.0)])
    corrected = transition.inverse() @ both
    expected = torch.where(noisy > 0, corrected[0], corrected[1])
    torch.testing.assert_close(backward_loss(q_hat, noisy, 0.3, 0.1, 2.0), expected)


# --- losses without a rate --------------------------------------------------------------------------------


def test_generalized_cross_entropy_lies_between_cross_entropy_and_absolute_error() -> None:
    q_hat, noisy = grid()
    p = torch.sigmoid(2 * q_hat * noisy)
    loss = partial(generalized_cross_entropy, q_hat, noisy, 2.0)
    torch.testing.assert_close(loss(1.0), 1 - p)
    torch.testing.assert_close(loss(1e-9), -p.log(), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(loss(), (1 - p**0.7) / 0.7)
    x = q_hat.clone().requires_grad_()
    (grad,) = torch.autograd.grad(generalized_cross_entropy(x, noisy, 2.0, 0.7).sum(), x)
    # cross entropy's gradient, weighted down by p^q where the label is not believed
    torch.testing.assert_close(grad, p**0.7 * -2 * noisy * (1 - p))


def test_symmetric_cross_entropy_is_cross_entropy_and_its_reverse() -> None:
    q_hat, noisy = grid()
    p = torch.sigmoid(2 * q_hat)
    target = (noisy + 1) / 2
    # −Σ p log t over both signs, with log 1 = 0 and log 0 = −4
    reverse = -(p * torch.where(target == 1, 0.0, -4.0) + (1 - p) * torch.where(target == 0, 0.0, -4.0))  # fmt: skip
    expected = 0.3 * cross_entropy(q_hat, noisy, 2.0) + 0.7 * reverse
    torch.testing.assert_close(symmetric_cross_entropy(q_hat, noisy, 2.0, 0.3, 0.7), expected)
    plain = symmetric_cross_entropy(q_hat, noisy, 2.0, 1.0, 0.0)
    torch.testing.assert_close(plain, cross_entropy(q_hat, noisy, 2.0))


def test_smoothing_is_cross_entropy_on_a_softer_label() -> None:
    q_hat, noisy = grid()
    soft = 0.95 * (noisy + 1) / 2 + 0.05 * (1 - noisy) / 2
    expected = F.binary_cross_entropy_with_logits(2 * q_hat, soft, reduction="none")
    torch.testing.assert_close(smoothed_cross_entropy(q_hat, noisy, 2.0, 0.1), expected)
    plain = smoothed_cross_entropy(q_hat, noisy, 2.0, 0.0)
    torch.testing.assert_close(plain, cross_entropy(q_hat, noisy, 2.0))
    # where σ(s) = 1 − ε/2 it has its minimum; the other losses have theirs at infinity
    best = math.log(0.95 / 0.05) / 2
    x = double([best, -best]).requires_grad_()
    (grad,) = torch.autograd.grad(smoothed_cross_entropy(x, double([1, -1]), 2.0, 0.1).sum(), x)
    assert grad.abs().max() < 1e-12


def test_smoothing_is_a_backward_correction_the_wrong_way_round() -> None:
    """Lukasik et al.: c(s) + ε s / 2 and c(s) − ρ s / (1 − 2ρ) differ in the sign of the push."""
    q_hat, noisy = grid()
    plain = cross_entropy(q_hat, noisy, 2.0)
    rho = 0.05
    epsilon = 2 * rho / (1 - 2 * rho)
    outward = backward_loss(q_hat, noisy, rho, rho, 2.0) - plain
    inward = smoothed_cross_entropy(q_hat, noisy, 2.0, epsilon) - plain
    torch.testing.assert_close(outward, -inward)


@pytest.mark.parametrize("loss", [unbiased_loss, partial(forward_loss, sharpness=2.0)])
def test_a_rate_for_each_weight(loss: Callable[..., Tensor]) -> None:
    q_hat, noisy = double([0.5, -0.5, 2.0]), double([1, 1, -1])
    plus, minus = double([0.1, 0.2, 0.0]), double([0.0, 0.3, 0.4])
    found = loss(q_hat, noisy, plus, minus)
    for i in range(3):
        alone = loss(q_hat[i], noisy[i], plus[i].item(), minus[i].item())
        torch.testing.assert_close(found[i], alone)


# --- LNS with each of them --------------------------------------------------------------------------------

LOSSES = ["unbiased", "forward", "backward", "gce", "sce", "smoothing"]


def mapped(layer: nn.Module) -> MappedSign:
    assert isinstance(layer, BinaryLayer)
    assert isinstance(layer.weight_binarizer, MappedSign)
    return layer.weight_binarizer


def test_each_option_is_its_loss() -> None:
    options: dict[str, Any] = {"rho_plus": 0.1, "rho_minus": 0.2, "sharpness": 3.0}
    others = {"gce_q": 0.4, "sce_alpha": 0.3, "sce_beta": 0.6, "smoothing": 0.2}
    by_name: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "unbiased": lambda q, n: unbiased_loss(q, n, 0.1, 0.2),
        "forward": lambda q, n: forward_loss(q, n, 0.1, 0.2, 3.0),
        "backward": lambda q, n: backward_loss(q, n, 0.1, 0.2, 3.0),
        "gce": lambda q, n: generalized_cross_entropy(q, n, 3.0, 0.4),
        "sce": lambda q, n: symmetric_cross_entropy(q, n, 3.0, 0.3, 0.6),
        "smoothing": lambda q, n: smoothed_cross_entropy(q, n, 3.0, 0.2),
    }
    assert list(by_name) == LOSSES
    for name, loss in by_name.items():
        layer = BinaryConv2d(3, 5, 3, method=LNS(loss=name, alpha=2, **options, **others))  # type: ignore[arg-type]
        q_hat, noisy = mapped(layer).mapping(layer.weight), layer.weight.sign()
        torch.testing.assert_close(unflip.auxiliary_loss(layer), 2 * loss(q_hat, noisy).mean())


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains_compiles_and_warms_up(loss: str) -> None:
    layer = BinaryLinear(12, 8, method=LNS(loss=loss, rho_plus=0.0, rho_minus=0.1))  # type: ignore[arg-type]
    twin = copy.deepcopy(layer)
    torch._dynamo.reset()
    compiled = torch.compile(lambda: unflip.auxiliary_loss(twin), fullgraph=True, backend="aot_eager")  # fmt: skip
    eager = unflip.auxiliary_loss(layer)
    torch.testing.assert_close(compiled(), eager)
    eager.backward()
    compiled().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.abs().sum() > 0
    torch.testing.assert_close(twin.weight.grad, layer.weight.grad)
    half = copy.deepcopy(layer).half()
    assert unflip.auxiliary_loss(half).isfinite()
    assert warm_start(nn.Sequential(layer), steps=1500, lr=1e-2)["0"] > 0.99


def test_rates_of_their_own() -> None:
    config = LNS(loss="forward", rates="estimated", rho_plus=0.02, rho_minus=0.03)
    model = nn.Sequential(BinaryLinear(4, 3, method=config), BinaryLinear(3, 5, method=config))
    given = copy.deepcopy(model)
    for layer in given:
        mapped(layer).config = LNS(loss="forward", rho_plus=0.02, rho_minus=0.03)
    torch.testing.assert_close(unflip.auxiliary_loss(model), unflip.auxiliary_loss(given))

    chosen = {
        "0": (torch.rand(3, 4) / 2, torch.rand(3, 4) / 2),
        "1": (torch.tensor(0.1), torch.tensor(0.2)),
    }
    set_flip_rates(model, chosen)
    total = torch.zeros(())
    for name, layer in model.named_children():
        assert isinstance(layer, BinaryLinear)
        q_hat, noisy = mapped(layer).mapping(layer.weight), layer.weight.sign()
        plus, minus = (r.expand_as(noisy) for r in chosen[name])
        total = total + forward_loss(q_hat, noisy, plus, minus, 2.0).mean()
    torch.testing.assert_close(unflip.auxiliary_loss(model), total)
    state = model.state_dict()
    assert torch.equal(state["0.weight_binarizer.rho_plus"], chosen["0"][0]), "and they are saved"


def test_rates_add_up_per_weight() -> None:
    plus, minus = torch.tensor([0.7, 0.2]), torch.tensor([0.2, 0.7])
    model = nn.Sequential(BinaryLinear(2, 3, method=LNS(mapping="residual", rates="estimated")))
    set_flip_rates(model, {"0": (plus, minus)})
    assert unflip.auxiliary_loss(model).isfinite()
    with pytest.raises(ValueError, match="add up to"):
        unbiased_loss(plus, torch.ones(2), plus, minus + 0.2)


def test_rates_that_cannot_be_set() -> None:
    rate = torch.tensor(0.1)
    given = nn.Sequential(BinaryLinear(4, 3, method=LNS()))
    own = nn.Sequential(BinaryLinear(4, 3, method=LNS(rates="estimated")))
    with pytest.raises(ValueError, match="layer '0' has rates='given'"):
        set_flip_rates(given, {"0": (rate, rate)})
    with pytest.raises(ValueError, match="no flip rates for layer '0', only for 7"):
        set_flip_rates(own, {"7": (rate, rate)})
    with pytest.raises(ValueError, match="layer '0' should be >= 0 and add up to less than 1"):
        set_flip_rates(own, {"0": (rate, torch.tensor(0.95))})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "mae"}, "lns: loss='mae' is not one of 'unbiased', 'forward'"),
        ({"rates": "guessed"}, "lns: rates='guessed' is not one of 'given', 'estimated'"),
        (
            {"loss": "gce", "rates": "estimated"},
            "lns: loss='gce' does not use flip rates, but rates='estimated'",
        ),
        ({"sharpness": 0.0}, "sharpness=0.0 should be"),
        ({"gce_q": 0.0}, "gce_q=0.0 should be"),
        ({"gce_q": 1.1}, "gce_q=1.1 should be"),
        ({"sce_alpha": -1.0}, "sce_alpha=-1.0 should be"),
        ({"sce_beta": math.inf}, "sce_beta=inf should be"),
        ({"smoothing": 1.0}, "smoothing=1.0 should be"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        methods.get("lns", **options)
