"""How often the signs of a trained binary network are wrong, estimated from the network itself.

LNS calls sign(W) of a pretrained network a noisy label, flipped at a rate ρ that its paper chooses by trial. The usual
estimators of ρ measure how certain a model is of its labels. Here the label is a function of the input, so they all
return 0. Asking for the label again does work: train short branches of the network that differ only in the order of the
data, and compare their signs.

**Two branches.** Two copies of a sign, each flipped independently with probability ρ, disagree with probability

    d = 2ρ(1 − ρ),   so   ρ = (1 − √(1 − 2d)) / 2

**Three branches** tell ρ₊ = P(−1 | clean +1) from ρ₋ = P(+1 | clean −1). Let π be the share of clean +1, a = 1 − ρ₊ and
b = ρ₋ the probabilities of seeing +1 where the clean sign is +1 and −1. The shares of +1, of pairs of branches that
are both +1, and of triples that are all +1 are

    m₁ = πa + (1 − π)b,   m₂ = πa² + (1 − π)b²,   m₃ = πa³ + (1 − π)b³

a and b are the roots of x² − e₁x + e₂, so a² = e₁a − e₂, a³ = e₁a² − e₂a, and likewise for b. Weighted by π and 1 − π:

    m₂ = e₁m₁ − e₂,   m₃ = e₁m₂ − e₂m₁   ⟹   e₁ = (m₃ − m₁m₂) / (m₂ − m₁²),   e₂ = e₁m₁ − m₂

The larger root is a. (The majority of three as the clean sign would be simpler, but the majority can be wrong too.)

Rates are estimated per layer, and within a layer per bin of |w| (quantiles of the baseline), because small weights flip
more often.

Assumption: given the clean sign, the flips of the branches are independent. Branches share their start, so they do not
show a sign that is wrong in all of them because the *baseline* had it wrong: the estimate is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unflip.layers import binary_layers


@dataclass(frozen=True)
class Bin:
    """The weights of one layer with low <= |w| < high; the first and the last bin are unbounded."""

    low: float
    high: float
    weights: int
    disagreement: float  # share of pairs of branches that disagree
    rho: float  # assuming ρ₊ = ρ₋
    rho_plus: float  # equal to rho if there are two branches
    rho_minus: float


@dataclass(frozen=True)
class FlipRates:
    """layer -> its bins, from small |w| to large; ``whole`` has one bin per layer."""

    bins: dict[str, list[Bin]]
    whole: dict[str, Bin]

    def for_weights(
        self, model: nn.Module, floor: float = 1e-4, ceiling: float = 0.49
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """(ρ₊, ρ₋) of every weight by its |w|, for ``methods.lns.set_flip_rates``.

        Rates are clamped to ``floor`` .. ``ceiling``: a bin without an observed flip can still have flips.
        """
        rates = {}
        for name, layer in binary_layers(model):
            if name not in self.bins:
                raise ValueError(
                    f"no flip rates for layer {name!r}, only for {', '.join(self.bins)}"
                )
            size, found = layer.weight.detach().abs(), self.bins[name]
            edges = size.new_tensor([b.low for b in found[1:]])
            place = torch.bucketize(size, edges, right=True)
            plus, minus = size.new_tensor([(b.rho_plus, b.rho_minus) for b in found]).T
            limited = [r.clamp(floor, ceiling)[place] for r in (plus, minus)]
            rates[name] = (limited[0], limited[1])
        return rates

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> FlipRates:
        """The inverse of :meth:`plain`."""
        bins = {name: [Bin(**b) for b in found] for name, found in values["bins"].items()}
        return cls(bins, {name: Bin(**b) for name, b in values["whole"].items()})


def symmetric_rate(disagreement: float) -> float:
    """ρ of two copies that disagree on a share d; from d = 1/2 on, the signs are random and ρ = 1/2."""
    return (1 - math.sqrt(max(0.0, 1 - 2 * disagreement))) / 2


def separate_rates(m1: float, m2: float, m3: float) -> tuple[float, float] | None:
    """(ρ₊, ρ₋) from the shares of +1, of pairs and of triples of +1; None if the shares do not determine them."""
    spread = m2 - m1 * m1  # π(1 − π)(a − b)²
    if not spread > 0:
        return None
    e1 = (m3 - m1 * m2) / spread
    root = e1 * e1 - 4 * (e1 * m1 - m2)  # (a − b)²
    if not root > 0:
        return None
    a, b = (e1 + math.sqrt(root)) / 2, (e1 - math.sqrt(root)) / 2
    return min(max(1 - a, 0.0), 1.0), min(max(b, 0.0), 1.0)


def estimate_rates(
    latent: Mapping[str, Tensor], branches: Sequence[Mapping[str, Tensor]], bins: int = 8
) -> FlipRates:
    """Per layer, from the baseline's latent weights and the signs of two or three branches."""
    if len(branches) not in (2, 3):
        raise ValueError(
            f"{len(branches)} branches given; use two (which give ρ) or three (which give ρ₊ and ρ₋)"
        )
    if bins < 1:
        raise ValueError(f"bins={bins} should be 1 or more")
    by_bin: dict[str, list[Bin]] = {}
    whole: dict[str, Bin] = {}
    for name, weight in latent.items():
        size = weight.detach().flatten().abs().double().cpu()
        seen = torch.stack([b[name].detach().flatten().cpu() for b in branches])
        if seen.shape[1] != len(size):
            raise ValueError(
                f"layer {name!r} has {seen.shape[1]} signs for {len(size)} weights; "
                "flip rates can be estimated only for methods with one sign per weight"
            )
        inner = size.sort().values[[len(size) * i // bins for i in range(1, bins)]]
        place = torch.bucketize(size, inner, right=True)
        edges = [0.0, *inner.tolist(), float(size.max())]
        by_bin[name] = [
            _bin(seen[:, place == i], edges[i], edges[i + 1])
            for i in range(bins)
            if (place == i).any()
        ]
        whole[name] = _bin(seen, 0.0, edges[-1])
    return FlipRates(by_bin, whole)


def _bin(seen: Tensor, low: float, high: float) -> Bin:
    """``seen``: (branches, weights) of ±1."""
    positive = (seen > 0).double()
    pairs = [(i, j) for i in range(len(seen)) for j in range(i)]
    disagreement = sum((seen[i] != seen[j]).double().mean().item() for i, j in pairs) / len(pairs)
    rho = symmetric_rate(disagreement)
    separate = None
    if len(seen) == 3:
        m2 = sum((positive[i] * positive[j]).mean().item() for i, j in pairs) / len(pairs)
        separate = separate_rates(positive.mean().item(), m2, positive.prod(0).mean().item())
    plus, minus = separate or (rho, rho)
    return Bin(low, high, seen.shape[1], disagreement, rho, plus, minus)


def compare_branches(
    baseline: nn.Module, branches: Sequence[nn.Module], bins: int = 8
) -> FlipRates:
    """Flip rates of the binary layers of ``baseline``, from two or three copies that were trained further."""
    latent = {name: layer.weight for name, layer in binary_layers(baseline)}
    signs = [{name: layer.code().signs for name, layer in binary_layers(b)} for b in branches]
    return estimate_rates(latent, signs, bins)
