"""ReSTE: Estimator Meets Equilibrium Perspective: A Rectified Straight Through Estimator for BNN Training.

Wu et al., ICCV 2023, arXiv:2308.06689. A power function approximates sign: for o = 1 it is the identity (the
plain straight-through estimator, stable), for o → ∞ it is sign itself (no estimating error). o grows per epoch.

Weights     Q = E · sign(W), E = mean|W| over the whole layer
            ∂L/∂W = E · ∂L/∂Q · g(W) + ∂L/∂E · sign(W) / n, ∂L/∂E = Σ ∂L/∂Q · sign(W): E is differentiated
Inputs      B = sign(x)
            ∂L/∂x = ∂L/∂B · g(x)
Estimator   f(x) = sign(x)·|x|^(1/o). Its derivative has a pole at 0, which is replaced, and is set to 0 beyond t:
            g(x) = f(m) / m = m^((1−o)/o)      |x| ≤ m = 0.1    (the slope of the chord from 0 to m)
                   (1/o)·|x|^((1−o)/o)         m < |x| ≤ t = 1.5
                   0                           |x| > t
            o = 1 + (o_end − 1)·(1 − cos(π/2 · i/N)) in epoch i = 0 .. N − 1, from 1 towards o_end = 3

Differences from the authors' code: none known. (In theirs too, g jumps by the factor o at |x| = m. sign(0) is +1,
theirs 0.) ``code`` does not depend on the schedule.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unflip.methods.base import (
    BinaryWeight,
    InputBinarizer,
    InputCode,
    Method,
    Numbers,
    WeightBinarizer,
)
from unflip.methods.pieces import layer_mean, sign_code
from unflip.methods.registry import register
from unflip.ste import sign, straight_through


class PowerEstimator(Numbers):
    """g, with the exponent o by epoch."""

    o: Tensor

    def __init__(self, o_end: float, t: float, m: float, like: Tensor) -> None:
        super().__init__()
        self.o_end, self.t, self.m = o_end, t, m
        self.hold("o", 1.0, like)

    def start_epoch(self, epoch: int, epochs: int) -> None:
        progress = 1 - math.cos(math.pi / 2 * epoch / epochs)
        self.set_number("o", 1 + (self.o_end - 1) * progress)

    def forward(self, x: Tensor) -> Tensor:
        size, power = x.abs(), (1 - self.o) / self.o
        slope = size.clamp(self.m, self.t) ** power  # clamped: no pole, no overflow
        slope = torch.where(size <= self.m, slope, slope / self.o)
        return slope.masked_fill(size > self.t, 0)


class PowerSignWeights(WeightBinarizer):
    def __init__(self, estimator: PowerEstimator) -> None:
        super().__init__()
        self.estimator = estimator

    def code(self, weight: Tensor) -> BinaryWeight:
        return BinaryWeight(sign(weight)[None], layer_mean(weight))

    def surrogate(self, weight: Tensor) -> Tensor:
        scale = layer_mean(weight)[0]
        through_sign = (scale * self.estimator(weight)).detach() * weight
        return through_sign + scale * sign(weight).detach()

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.estimator.start_epoch(epoch, epochs)


class PowerSignInputs(InputBinarizer):
    def __init__(self, estimator: PowerEstimator) -> None:
        super().__init__()
        self.estimator = estimator

    def forward(self, x: Tensor) -> Tensor:
        # Beyond t the estimator is 0. Without the clamp, 0 · ∞ would be NaN.
        limit = self.estimator.t
        return straight_through(sign(x), self.estimator(x).detach() * x.clamp(-limit, limit))

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.estimator.start_epoch(epoch, epochs)

    def code(self) -> InputCode:
        return sign_code()


@register("reste")
@dataclass(frozen=True)
class ReSTE(Method):
    """Layer-wise mean times sign, with the gradient of a power function whose exponent grows per epoch."""

    o_end: float = 3.0
    t: float = 1.5
    m: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.o_end < math.inf:
            raise ValueError(f"reste: o_end={self.o_end} should be finite and >= 1")
        if not 0 < self.m < self.t < math.inf:
            raise ValueError(f"reste: m={self.m} and t={self.t} should be finite, 0 < m < t")

    @property
    def family(self) -> str:
        """The estimator affects training only."""
        return self.name

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return PowerSignWeights(self._estimator(layer))

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return PowerSignInputs(self._estimator(layer))

    def _estimator(self, layer: nn.Module) -> PowerEstimator:
        assert isinstance(layer.weight, Tensor)
        return PowerEstimator(self.o_end, self.t, self.m, layer.weight)
