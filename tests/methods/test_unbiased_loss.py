"""The loss of LNS: unbiased under flipped labels, the paper's gradient, and which rates it accepts."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.methods.lns import (
    unbiased_loss,
)

Net = Callable[..., nn.Module]


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
def test_rates_out_of_range(rho_plus: float, rho_minus: float, words: str, float_net: Net) -> None:
    with pytest.raises(ValueError, match=words):
        unbiased_loss(torch.zeros(1), torch.ones(1), rho_plus, rho_minus)
    with pytest.raises(ValueError, match=words):
        methods.get("lns", rho_plus=rho_plus, rho_minus=rho_minus)
    with pytest.raises(ValueError, match=words):
        unflip.binarize(float_net(), "lns", rho_plus=rho_plus, rho_minus=rho_minus)


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


def test_rates_given_as_tensors_are_checked_too() -> None:
    half = torch.tensor(0.6)
    with pytest.raises(ValueError, match=r"add up to 1.2"):
        unbiased_loss(torch.ones(2), torch.ones(2), half, half)
