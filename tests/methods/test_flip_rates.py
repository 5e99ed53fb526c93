"""Flip rates: known rates are recovered from simulated branches."""

import copy
import json
import math

import pytest
import torch
from torch import Tensor

import unflip
from unflip.methods.flip_rates import (
    FlipRates,
    compare_branches,
    estimate_rates,
    separate_rates,
    symmetric_rate,
)
from unflip.methods.lns import MappedSign, set_flip_rates


@pytest.mark.parametrize("rho", [0.0, 0.005, 0.1, 0.3, 0.5])
def test_symmetric_rate_inverts_the_disagreement_of_two(rho: float) -> None:
    assert symmetric_rate(2 * rho * (1 - rho)) == pytest.approx(rho, abs=1e-9)


def test_more_disagreement_than_chance_is_chance() -> None:
    assert symmetric_rate(0.5) == symmetric_rate(0.6) == 0.5


@pytest.mark.parametrize("share", [0.5, 0.3, 0.9])
@pytest.mark.parametrize("rho", [(0.1, 0.1), (0.2, 0.05), (0.0, 0.3), (0.4, 0.0)])
def test_separate_rates_invert_the_three_moments(share: float, rho: tuple[float, float]) -> None:
    a, b = 1 - rho[0], rho[1]
    m1, m2, m3 = (share * a**n + (1 - share) * b**n for n in (1, 2, 3))
    found = separate_rates(m1, m2, m3)
    assert found == pytest.approx(rho, abs=1e-9)


def test_moments_that_say_nothing() -> None:
    assert separate_rates(1.0, 1.0, 1.0) is None, "all +1: ρ₋ is anyone's guess"
    assert separate_rates(0.5, 0.25, 0.125) is None, "coins"


def simulated(
    plus: Tensor, minus: Tensor, branches: int, share: float, generator: torch.Generator
) -> list[Tensor]:
    """Branches whose signs are the clean ones, flipped independently."""
    clean = torch.rand(plus.shape, generator=generator) < share
    rate = torch.where(clean, plus, minus)
    flips = [torch.rand(plus.shape, generator=generator) < rate for _ in range(branches)]
    return [torch.where(clean ^ flip, 1, -1).to(torch.int8)[None] for flip in flips]


@pytest.mark.parametrize("branches", [2, 3])
def test_known_rates_that_fall_with_the_weight_are_recovered(branches: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(400, 2000, generator=generator)
    rho = 0.3 * torch.exp(-3 * weight.abs())
    seen = simulated(rho, rho, branches, 0.5, generator)
    rates = estimate_rates({"fc": weight}, [{"fc": s} for s in seen], bins=5)
    bins = rates.bins["fc"]
    assert [b.weights for b in bins] == pytest.approx([160_000] * 5, abs=2)  # equal |w|
    assert [b.high for b in bins[:-1]] == [b.low for b in bins[1:]]
    size = weight.abs()
    for b in bins:
        inside = (size >= b.low) & (size < b.high)
        assert b.rho == pytest.approx(rho[inside].mean().item(), rel=0.05, abs=1e-3)
        if branches == 2:
            assert b.rho_plus == b.rho_minus == b.rho
    assert bins[0].rho > 10 * bins[-1].rho
    assert rates.whole["fc"].weights == 800_000


def test_three_branches_tell_the_two_rates_apart() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(400, 2000, generator=generator)
    small = weight.abs() < weight.abs().median()
    plus, minus = torch.where(small, 0.2, 0.04), torch.where(small, 0.1, 0.01)
    seen = simulated(plus, minus, 3, 0.4, generator)
    rates = estimate_rates({"fc": weight}, [{"fc": s} for s in seen], bins=2)
    low, high = rates.bins["fc"]
    assert (low.rho_plus, low.rho_minus) == pytest.approx((0.2, 0.1), abs=0.005)
    assert (high.rho_plus, high.rho_minus) == pytest.approx((0.04, 0.01), abs=0.003)
    # a majority of three is itself wrong in 3ρ² − 2ρ³ of cases, and would hide as much
    votes = torch.stack(seen).float().sum(0)
    majority = (seen[0] != torch.where(votes > 0, 1, -1))[0][small].float().mean().item()
    assert majority < 0.125, "the true mean rate is 0.4 · 0.2 + 0.6 · 0.1 = 0.14"


def test_estimates_become_a_rate_for_each_weight() -> None:
    layer = unflip.BinaryLinear(20, 40, method={"name": "lns", "rates": "estimated"})
    size = layer.weight.detach().abs()
    seen = [torch.ones(40, 20, dtype=torch.int8) for _ in range(2)]
    middle = size.flatten().sort().values[400]
    seen[1][size < middle] = torch.where(torch.arange(400) < 100, -1, 1).to(torch.int8)
    rates = estimate_rates({"": layer.weight}, [{"": s} for s in seen], bins=2)
    found = rates.for_weights(layer)
    expected = torch.where(
        size < middle, (1 - math.sqrt(0.5)) / 2, 1e-4
    )  # d = 100 of 400, and none
    torch.testing.assert_close(found[""], (expected, expected))
    set_flip_rates(layer, found)
    assert isinstance(layer.weight_binarizer, MappedSign)
    torch.testing.assert_close(layer.weight_binarizer.rho_minus, expected)
    with pytest.raises(ValueError, match="no flip rates for layer '', only for fc"):
        FlipRates({"fc": rates.bins[""]}, {}).for_weights(layer)


def test_weights_of_one_size_are_one_bin() -> None:
    seen = torch.tensor([[1, 1, -1, 1]])
    rates = estimate_rates(
        {"a": torch.tensor([1.0, -1, 1, -1])}, [{"a": seen}, {"a": -seen}], bins=3
    )
    [only] = rates.bins["a"]
    assert (only.weights, only.disagreement, only.rho) == (4, 1.0, 0.5)


def test_what_is_refused() -> None:
    weight, seen = {"a": torch.ones(4)}, {"a": torch.ones(1, 4)}
    with pytest.raises(ValueError, match=r"1 branches given; use two .* or three"):
        estimate_rates(weight, [seen])
    with pytest.raises(ValueError, match="bins=0"):
        estimate_rates(weight, [seen, seen], bins=0)
    with pytest.raises(
        ValueError, match=r"layer 'a' has 8 signs for 4 weights.*one sign per weight"
    ):
        estimate_rates(weight, [{"a": torch.ones(2, 4)}] * 2)


def test_branches_are_compared_layer_by_layer() -> None:
    baseline = unflip.BinaryLinear(20, 40, method="dorefa")
    branches = [copy.deepcopy(baseline) for _ in range(2)]
    with torch.no_grad():
        branches[1].weight[:10].neg_()  # a quarter of the signs
    rates = compare_branches(baseline, branches)
    assert len(rates.bins[""]) == 8
    assert rates.whole[""].disagreement == pytest.approx(0.25)
    assert rates.whole[""].rho == pytest.approx((1 - math.sqrt(0.5)) / 2)
    assert FlipRates.from_plain(json.loads(json.dumps(rates.plain()))) == rates
