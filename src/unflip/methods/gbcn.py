"""GBCN: Genetic Binary Convolutional Networks for Enhancing the Performance of 1-bit DCNNs.

Liu et al., 2019, arXiv:1911.11634.

The paper changes the binarization itself by a *balanced genetic algorithm* inside training, so that a binary network
leaves local minima where the signs no longer move.

Weights     Q = α · sign(W), α = ‖W‖₁ / n per filter; ∂L/∂W = ∂L/∂Q · 1[|W| ≤ 1]
Inputs      B = sign(x), ∂L/∂x = ∂L/∂B · max(0, 2 − 2|x|)           (both as Bi-Real Net)
Genetic     Each filter has a population of P sign patterns. Before every epoch but the first, one generation:
            crossover  each of P children takes each sign from one of two patterns drawn at random
            mutation   each sign of a child flips with probability μ · (1 − epoch / epochs)
            balance    every pattern gets as many +1 as sign(W) has in that filter: surplus signs, drawn at random,
                       are flipped
            selection  the P fittest of sign(W), population and children survive. The fitness of pattern S is
                       F(S) = ⟨S, W / mean|W| − κ ḡ / mean|ḡ|⟩: closeness to the latent weights, plus the decrease of
                       the loss to first order, with ḡ the running average of ∂L/∂Q
            champion   the fittest pattern becomes the filter's binarization: w ← −w where it differs from sign(w).
                       It is never less fit than sign(W), which competes too

Not verified: we had only the paper's abstract and found no code. The abstract says that a genetic algorithm modifies
the binarization, that it is balanced, and that it runs inside end-to-end training. Population, operators, fitness, what
is balanced, when generations happen, and the binarization of weights and inputs are our choices.

All random numbers come from (``seed``, layer, epoch), and everything a generation reads is in the state dict: an
interrupted run resumes exactly. A step only averages, copies and multiplies, so it can be captured.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unflip.methods.base import BinaryWeight, InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import ApproxSign, ClippedFilterMeanSign
from unflip.methods.registry import register
from unflip.ste import sign

GRADIENT_SHARE = 0.01  # the weight of one step in the running average ḡ
MOST_PATTERNS = 1000  # of a filter; each takes a byte per weight


class GeneticSign(ClippedFilterMeanSign):
    """Bi-Real Net's weights, with a genetic step before an epoch that flips some of their signs."""

    gradient: Tensor  # ḡ
    latent: Tensor  # W after the last step
    population: Tensor  # (P, filters, weights of a filter) of ±1; 0 before the first generation
    flips: Tensor  # −1 where the champion flips a sign, until the next step has flipped the weight itself
    bred: Tensor  # 1 + the epoch of the last generation

    def __init__(self, config: GBCN, layer: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.salt = zlib.crc32(getattr(layer, "path", "").encode())
        weight = layer.weight
        assert isinstance(weight, Tensor)
        latent, bits = weight.detach(), {"dtype": torch.int8, "device": weight.device}
        shape = (config.population, len(weight), weight[0].numel())
        self.register_buffer("gradient", torch.zeros_like(latent))
        self.register_buffer("latent", torch.zeros_like(latent))
        self.register_buffer("population", torch.zeros(shape, **bits))  # type: ignore[call-overload]
        self.register_buffer("flips", torch.ones(weight.shape, **bits))  # type: ignore[call-overload]
        self.register_buffer("bred", torch.zeros((), dtype=torch.int64, device=weight.device))

    def code(self, weight: Tensor) -> BinaryWeight:
        plain = super().code(weight)
        return BinaryWeight(plain.signs * self.flips, plain.scales)

    def surrogate(self, weight: Tensor) -> Tensor:
        return super().surrogate(weight) * self.flips

    @torch.no_grad()
    def latent_replaced(self, weight: Tensor) -> None:
        for buffer in (self.gradient, self.latent, self.population, self.bred):
            buffer.zero_()
        self.flips.fill_(1)

    @torch.no_grad()
    def after_step(self, weight: Tensor) -> None:
        if weight.grad is not None:
            self.gradient.lerp_(weight.grad * self.flips, GRADIENT_SHARE)
        weight.mul_(self.flips)
        self.flips.fill_(1)
        self.latent.copy_(weight)

    def start_epoch(self, epoch: int, epochs: int) -> None:
        if epoch == 0 or int(self.bred) == epoch + 1:  # resumed in the middle of an epoch
            return
        generator = torch.Generator().manual_seed(self._stream(epoch))
        self._generation(self.config.mutation * (1 - epoch / epochs), generator)
        self.bred.fill_(epoch + 1)

    def _stream(self, epoch: int) -> int:
        return (self.config.seed << 48) ^ (epoch << 32) ^ self.salt

    @torch.no_grad()
    def _generation(self, mutation: float, generator: torch.Generator) -> None:
        learned, worth = sign(self.latent).flatten(1), self._worth()
        before = torch.where(self.population == 0, learned, self.population)
        children = _children(before, mutation, generator)
        pool = _balanced(torch.cat([before, children]), learned, generator)
        pool = torch.cat([learned[None], pool])
        fitness = (pool * worth).sum(2)
        best = fitness.argsort(dim=0, descending=True, stable=True)[: len(before)]
        survivors = pool.gather(0, best[:, :, None].expand_as(before))
        self.population.copy_(survivors)
        self.flips.copy_((survivors[0] * learned).view_as(self.flips))

    def _worth(self) -> Tensor:
        """How much a +1 at each place adds to the fitness of a pattern."""
        parts = [self.latent.flatten(1).float(), self.gradient.flatten(1).float()]
        sizes = [p.abs().mean().clamp_min(torch.finfo(p.dtype).tiny) for p in parts]
        return parts[0] / sizes[0] - self.config.pressure * parts[1] / sizes[1]


def _draw(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform on [0, 1), drawn on the CPU so that every device gets the same numbers."""
    return torch.rand(shape, generator=generator).to(like.device)


def _children(patterns: Tensor, mutation: float, generator: torch.Generator) -> Tensor:
    """As many children as patterns, by uniform crossover of two parents and mutation, per filter."""
    count, filters, _ = patterns.shape
    parents = (_draw((2, count, filters), patterns, generator) * count).long()
    first, second = (patterns.gather(0, p[:, :, None].expand_as(patterns)) for p in parents)
    from_first = _draw(patterns.shape, patterns, generator) < 0.5
    mutated = _draw(patterns.shape, patterns, generator) < mutation
    children = torch.where(from_first, first, second)
    return torch.where(mutated, -children, children)


def _balanced(patterns: Tensor, learned: Tensor, generator: torch.Generator) -> Tensor:
    """The same number of +1 per filter as in ``learned``: the highest of (sign + random number) are +1."""
    score = patterns + _draw(patterns.shape, patterns, generator)
    rank = score.argsort(dim=2, descending=True, stable=True).argsort(2)
    wanted = (learned > 0).sum(1)[:, None]
    return torch.where(rank < wanted, 1.0, -1.0)


@register("gbcn")
@dataclass(frozen=True)
class GBCN(Method):
    """Per-filter scale times sign; a balanced genetic algorithm flips signs between epochs."""

    population: int = 8
    mutation: float = 0.01
    pressure: float = 1.0  # κ
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.population <= MOST_PATTERNS:
            raise ValueError(
                f"gbcn: population={self.population} should be from 2 to {MOST_PATTERNS}"
            )
        if not 0 <= self.mutation <= 1:
            raise ValueError(f"gbcn: mutation={self.mutation} should be a probability, 0 to 1")
        if not self.pressure >= 0:
            raise ValueError(f"gbcn: pressure={self.pressure} should be >= 0")
        if not 0 <= self.seed < 2**15:
            raise ValueError(f"gbcn: seed={self.seed} should be from 0 to {2**15 - 1}")

    @property
    def unfit_for_lns(self) -> str | None:
        return (
            "its genetic algorithm flips signs of W by their gradient, and with a mapping network the signs "
            "and their gradient are not those of W"
        )

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return GeneticSign(self, layer)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return ApproxSign()
