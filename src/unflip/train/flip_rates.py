"""How often the signs of a trained binary network are wrong, estimated from the network itself.

LNS calls sign(W) of a pretrained network a noisy label, flipped at a rate ρ that its paper chooses by trial. The usual
estimators of ρ look at how sure a model is of its labels. Here the label is a function of the input, so they all answer
0. What does work is asking for the label again: fork the network into short branches that differ in nothing but the
order of the data, and see where their signs disagree.

**Two branches.** Two copies of a sign, each flipped independently with probability ρ, disagree with probability

    d = 2ρ(1 − ρ),   so   ρ = (1 − √(1 − 2d)) / 2

**Three branches** tell ρ₊ = P(−1 | clean +1) from ρ₋ = P(+1 | clean −1). Let π be the share of clean +1, a = 1 − ρ₊ and
b = ρ₋ the probabilities of seeing +1 where the clean sign is +1 and −1. The share of +1, of pairs of branches that both
say +1, and of triples that all do are

    m₁ = πa + (1 − π)b,   m₂ = πa² + (1 − π)b²,   m₃ = πa³ + (1 − π)b³

a and b are the roots of x² − e₁x + e₂, so a² = e₁a − e₂, a³ = e₁a² − e₂a, and likewise for b. Weighted by π and 1 − π:

    m₂ = e₁m₁ − e₂,   m₃ = e₁m₂ − e₂m₁   ⟹   e₁ = (m₃ − m₁m₂) / (m₂ − m₁²),   e₂ = e₁m₁ − m₂

The larger root is a. (To take the majority of three for the clean sign would be simpler, but the majority errs itself.)

Both are done for every layer, and within it for bins of |w| (quantiles of the baseline), since small weights flip more.

What is assumed: flips of branches are independent given the clean sign. Branches share their start, so a sign that is
wrong in all of them because the *baseline* had it wrong is not seen: the estimate is a lower bound.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unflip.binarize import signs
from unflip.data import ImageSet
from unflip.data.source import Images, mix
from unflip.layers import binary_layers
from unflip.train.engine import Engine
from unflip.train.learner import Learner
from unflip.train.recipe import Recipe, Schedule


@dataclass(frozen=True)
class Bin:
    """The weights of one layer with low <= |w| < high; the first and last bin are open."""

    low: float
    high: float
    weights: int
    disagreement: float  # share of pairs of branches that disagree
    rho: float  # for ρ₊ = ρ₋
    rho_plus: float  # with two branches both are ρ
    rho_minus: float


@dataclass(frozen=True)
class FlipRates:
    """layer -> its bins, from small |w| to large; ``whole`` has one bin a layer."""

    bins: dict[str, list[Bin]]
    whole: dict[str, Bin]

    def for_weights(
        self, model: nn.Module, floor: float = 1e-4, ceiling: float = 0.49
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """(ρ₊, ρ₋) of every weight by its |w|: what ``methods.lns.set_flip_rates`` takes.

        Rates are kept between ``floor`` and ``ceiling``: that no flip was seen in a bin does not mean none can be.
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
    """ρ of two copies that disagree on a share d; past d = 1/2 there is nothing left to tell, and ρ = 1/2."""
    return (1 - math.sqrt(max(0.0, 1 - 2 * disagreement))) / 2


def separate_rates(m1: float, m2: float, m3: float) -> tuple[float, float] | None:
    """(ρ₊, ρ₋) from the shares of +1, of pairs and of triples of +1; None where they do not determine them."""
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
    """From the baseline's latent weights and the signs of two branches or three, by layer."""
    if len(branches) not in (2, 3):
        raise ValueError(f"{len(branches)} branches given: two give ρ, three give ρ₊ and ρ₋")
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
                "rates are estimated for methods with one sign a weight"
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


def flip_rates(
    baseline: nn.Module,
    recipe: Recipe,
    data: ImageSet,
    *,
    branches: int = 3,
    epochs: int = 2,
    rate: float = 0.1,
    bins: int = 8,
    seed: int = 0,
    device: str | None = None,
    eager: bool = False,
) -> FlipRates:
    """Train ``branches`` copies of ``baseline`` for ``epochs`` with other orders of the data, and compare their signs.

    ``recipe`` is the one the baseline was trained with; branches train at ``rate`` times its learning rates, constant.
    The baseline is left as it is.
    """
    if recipe.distill is not None:
        raise ValueError(
            f"recipe {recipe.name} has a teacher: its branches would have to learn from it too, which is not supported"
        )
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    short = recipe.model_copy(update={"epochs": epochs, "schedule": Schedule()})
    images = Images(data, found)
    learners = [
        Learner(short, copy.deepcopy(baseline).train(), images, found) for _ in range(branches)
    ]
    with Engine(learners, compiled=not eager, captured=not eager) as engine:
        for epoch in range(epochs):
            for branch, learner in enumerate(learners):
                learner.start_epoch(mix(seed, branch), epoch, rate)
            for _ in range(learners[0].steps):
                engine.step()
    latent = {name: layer.weight for name, layer in binary_layers(baseline)}
    return estimate_rates(latent, [signs(learner.model) for learner in learners], bins)
