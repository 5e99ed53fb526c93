"""ReCU: Reviving the Dead Weights in Binary Neural Networks.

Xu et al., ICCV 2021, arXiv:2103.12369. Weights in the tails of their distribution hardly ever change their sign;
a rectified clamp unit moves them to where they can.

Weights     Ŵ = 2√2 · (W − mean(W)) / √(var(W) + 10⁻⁵) per filter
            R = clip(Ŵ, −Q_τ, Q_τ), Q_τ = −E|Ŵ| · ln(2 − 2τ): the τ-quantile of a Laplace distribution whose mean
            |Ŵ| is that of the layer (not differentiated)
            Q = α · sign(R) = α · sign(W − mean(W)), α learned, one per filter
            ∂L/∂Ŵ = ∂L/∂Q · α · 1[|Ŵ| ≤ Q_τ], and from Ŵ to W through mean and var;  ∂L/∂α = Σ ∂L/∂Q · sign(R)
            τ = τ_min + (τ_max − τ_min) · (e^(i/N) − 1) / (e − 1) in epoch i = 0 .. N − 1, from 0.85 towards 0.99
Inputs      B = sign(x)
            ∂L/∂x̂ = ∂L/∂B · max(0, 2 − 2|x̂|), x̂ = x / √(var(x) + 10⁻⁵) over one sample's values, and from x̂ to x
            through var. (In evaluation mode, where gradients are not used, x̂ = x.)

Differences from the authors' code: α starts at 1/2 for every filter; theirs is drawn from [0, 1) (the BatchNorm after
the layer cancels it). var(x) divides by n, not by n − 1. A filter of one weight is unchanged, because its deviation
from its mean would be 0. sign(0) is +1, theirs 0. Their code multiplies the output of the convolution by α, which is
the same. The clamp keeps every sign, so ``code`` does not depend on τ.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unflip.methods.base import BinaryWeight, InputBinarizer, InputCode, Method, WeightBinarizer
from unflip.methods.pieces import (
    at_least_float32,
    centered,
    parabolic_sign,
    sample_dims,
    sign_code,
)
from unflip.methods.registry import register
from unflip.ste import sign, straight_through

EPSILON = 1e-5


class RectifiedSign(WeightBinarizer):
    tau: Tensor

    def __init__(self, tau_min: float, tau_max: float, weight: Tensor) -> None:
        super().__init__()
        self.tau_min, self.tau_max = tau_min, tau_max
        self.alpha = nn.Parameter(weight.new_full((len(weight), *[1] * (weight.dim() - 1)), 0.5))
        self.hold("tau", tau_min, weight)

    def standardized(self, weight: Tensor) -> Tensor:
        if weight[0].numel() == 1:
            return weight
        balanced = centered(weight)
        variance = balanced.var(tuple(range(1, weight.dim())), keepdim=True)
        return balanced / torch.sqrt(variance + EPSILON) * (2 * math.sqrt(2))

    def code(self, weight: Tensor) -> BinaryWeight:
        return BinaryWeight(sign(self.standardized(weight))[None], self.alpha[None])

    def surrogate(self, weight: Tensor) -> Tensor:
        standard = self.standardized(weight)
        quantile = -(standard.abs().mean() * torch.log(2 - 2 * self.tau)).detach()
        rectified = torch.clamp(standard, -quantile, quantile)
        # the first term has the gradient of α, the second that of W
        return self.alpha * sign(standard).detach() + self.alpha.detach() * rectified

    def start_epoch(self, epoch: int, epochs: int) -> None:
        progress = math.expm1(epoch / epochs) / (math.e - 1)
        self.set_number("tau", self.tau_min + (self.tau_max - self.tau_min) * progress)


class ScaledApproxSign(InputBinarizer):
    def __init__(self, sample: tuple[int, ...]) -> None:
        super().__init__()
        self.sample = sample  # the dimensions of one sample

    def forward(self, x: Tensor) -> Tensor:
        return straight_through(sign(x), parabolic_sign(self.scaled(x) if self.training else x))

    def scaled(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        variance = wide.var(self.sample, correction=0, keepdim=True)
        return (wide / torch.sqrt(variance + EPSILON)).to(x.dtype)

    def code(self) -> InputCode:
        return sign_code()


@register("recu")
@dataclass(frozen=True)
class ReCU(Method):
    """Standardized weights clamped to a quantile that widens per epoch; a learned scale per filter."""

    tau_min: float = 0.85
    tau_max: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.5 < self.tau_min <= self.tau_max < 1:
            raise ValueError(
                f"recu: tau_min={self.tau_min} and tau_max={self.tau_max} should be quantiles of the upper half, "
                "0.5 < tau_min <= tau_max < 1"
            )

    @property
    def family(self) -> str:
        """The schedule affects training only."""
        return self.name

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        assert isinstance(layer.weight, Tensor)
        return RectifiedSign(self.tau_min, self.tau_max, layer.weight)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return ScaledApproxSign(sample_dims(layer))
