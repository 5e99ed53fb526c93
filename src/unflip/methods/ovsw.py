"""OvSW: Overcoming Silent Weights for Accurate Binary Neural Networks.

Xiang et al., ECCV 2024, arXiv:2407.05257. The gradient of a binary weight does not depend on the size of its latent
weight, so more than half of the signs never change in training. OvSW scales gradients with the size of the weights, and
decays the weights whose signs do not change.

Weights     Q = α · sign(W), α = mean |Ŵ| per filter, Ŵ = (W − mean(W)) / √(var(W) + 10⁻⁵), not differentiated
            ∂L/∂W = α · ∂L/∂Q
Scaling     before each step, for each filter's gradient g and weights w:  g ← g · max(1, δ‖w‖₂ / ‖g‖₂)
            (adaptive gradient scaling: ‖g‖ is at least δ‖w‖)
Decay       then g ← g + σ · 1[S < ε] · w for each weight; after the step S ← m S + (1 − m) · 1[its sign changed]
            (silence awareness decaying: S is an average of flips, 0 at the start, so all weights are silent at first)
Inputs      B = sign(x)
            ∂L/∂x = ∂L/∂B · max(0, 2 − 2|x / s|) / s, s = √(var(x) + 10⁻⁵) over one sample, not differentiated
            (in evaluation mode, where gradients are not used, s = 1)

δ = 0.04 and σ = 9·10⁻⁴ are those of the released script for ResNet-20 on CIFAR-10; m = 0.999 and ε = 10⁻⁴ are the
defaults of the released code. Both changes of the gradient are made by ``unflip.before_step``. A loop that does not
call it trains plain signs, and a warning says so.

Uncertain: we could read the paper's abstract and the released code, not the paper's equations. The formulas above are
those of the code (JingyangXiang/OvSW), without its option of a learned α.

Differences from the authors' code: var(x) divides by n, not by n − 1. sign(0) is +1, theirs 0, so that a weight that
reaches 0 counts as flipped there. A filter of one weight has α = |W|, because its deviation from its mean is 0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unflip.methods.base import BinaryWeight, InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import (
    MAPPING_DECIDES_SIGNS,
    at_least_float32,
    centered,
    filter_mean,
    sample_dims,
    warn_of_missing_hook,
)
from unflip.methods.recu import ScaledApproxSign
from unflip.methods.registry import register
from unflip.ste import sign

EPSILON = 1e-5
MIN_GRADIENT, MIN_WEIGHT = 1e-6, 1e-3  # least norms of a filter's gradient and weights


class SilenceAwareSign(WeightBinarizer):
    """α · sign(W); changes the gradient of W before each step and counts flips after it."""

    flips: Tensor  # S

    def __init__(
        self, weight: Tensor, delta: float, sigma: float, momentum: float, threshold: float
    ) -> None:
        super().__init__()
        self.delta, self.sigma = delta, sigma
        self.momentum, self.threshold = momentum, threshold
        self.register_buffer("flips", torch.zeros_like(weight, requires_grad=False))
        self.signs_before: Tensor | None = None  # during a step only

    def code(self, weight: Tensor) -> BinaryWeight:
        wide = at_least_float32(weight.detach())
        if weight[0].numel() > 1:
            balanced = centered(wide)
            variance = balanced.var(tuple(range(1, weight.dim())), keepdim=True)
            wide = balanced / torch.sqrt(variance + EPSILON)
        return BinaryWeight(sign(weight)[None], filter_mean(wide).to(weight.dtype))

    def surrogate(self, weight: Tensor) -> Tensor:
        return self.code(weight).scales[0] * weight

    @torch.no_grad()
    def before_step(self, weight: Tensor) -> None:
        self.signs_before = sign(weight)
        if weight.grad is None:
            return
        size = filter_norm(weight).clamp_min(MIN_WEIGHT)
        slope = filter_norm(weight.grad).clamp_min(MIN_GRADIENT)
        weight.grad.mul_((self.delta * size / slope).clamp_min(1))
        silent = self.flips < self.threshold
        weight.grad.add_(self.sigma * silent * weight)

    @torch.no_grad()
    def after_step(self, weight: Tensor) -> None:
        if self.signs_before is None:
            warn_of_missing_hook(self, "gradients are not scaled and silent weights not decayed")
            return
        flipped = (sign(weight) != self.signs_before).to(self.flips.dtype)
        self.flips.lerp_(flipped, 1 - self.momentum)
        self.signs_before = None


def filter_norm(values: Tensor) -> Tensor:
    """‖·‖₂ of each filter, in a shape that broadcasts over the weight."""
    norms = at_least_float32(values).flatten(1).norm(dim=1)
    return norms.view(-1, *[1] * (values.dim() - 1))


class DeviationScaledSign(ScaledApproxSign):
    """sign(x); its gradient is that of the approximate sign of x / s, with s taken as constant."""

    def scaled(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        variance = wide.detach().var(self.sample, correction=0, keepdim=True)
        return (wide / torch.sqrt(variance + EPSILON)).to(x.dtype)


@register("ovsw")
@dataclass(frozen=True)
class OvSW(Method):
    """Gradients scaled to the size of each filter; weights whose signs stay the same are decayed."""

    delta: float = 0.04
    sigma: float = 9e-4
    momentum: float = 0.999
    threshold: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("delta", "sigma", "threshold"):
            value = getattr(self, option)
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"ovsw: {option}={value} should be finite and >= 0; {option}=0 turns its part off"
                )
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"ovsw: momentum={self.momentum} should be the weight of earlier flips, 0 <= momentum < 1"
            )

    @property
    def family(self) -> str:
        """All options affect training only."""
        return self.name

    @property
    def unfit_for_lns(self) -> str | None:
        return MAPPING_DECIDES_SIGNS

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        assert isinstance(layer.weight, Tensor)
        options = self.delta, self.sigma, self.momentum, self.threshold
        return SilenceAwareSign(layer.weight, *options)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return DeviationScaledSign(sample_dims(layer))
