"""BiPer: Binary Neural Networks using a Periodic Function.

Vargas et al., CVPR 2024, arXiv:2404.01278. A square wave takes the place of sign: along the axis of a latent weight the
binary weight changes again and again, so that every latent weight is near a change. The wave's gradient is that of the
sine with the same period.

Weights     Q = α · sign(sin(ω W)), α learned, one per filter
            ∂L/∂W = ∂L/∂Q · α ω cos(ω W),  ∂L/∂α = Σ ∂L/∂Q · sign(sin(ω W))
            weights="sine": Q = α · sin(ω W), the first of the paper's two steps, with the ordinary gradient.
            The second step starts from its run; ``load_twin`` copies α too
Loss        τ · mean(sin²(ω W)) per layer, added to the task's loss (none if τ = 0)
Inputs      B = sign(x)
            ∂L/∂x̂ = ∂L/∂B · max(0, 2 − 2|x̂|), x̂ = x / √(var(x) + 10⁻⁵) over one sample's values, and from x̂ to x
            through var                                                                       (as ReCU)

ω = 20, as in the authors' commands for CIFAR-10 and ImageNet. α starts at 1/2; theirs is drawn from [0, 1).

Uncertain: whether the paper has the loss term. The released code (edmav4/BiPer) adds it in both steps on CIFAR-10, with
τ = 0.037 and 0.0468 for ResNet-18, and has τ = 0 in the second step on ImageNet. So τ is 0 unless it is given.

Differences from the authors' code: var(x) divides by n, not by n − 1. sign(0) is +1, theirs 0.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unflip.methods.base import BinaryWeight, InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import at_least_float32, sample_dims
from unflip.methods.recu import ScaledApproxSign
from unflip.methods.registry import register
from unflip.ste import sign


class SquareWave(WeightBinarizer):
    """α · sign(sin(ω W)), with the gradient of α · sin(ω W) for W."""

    carried = ("alpha",)

    def __init__(self, weight: Tensor, frequency: float, tau: float) -> None:
        super().__init__()
        self.frequency, self.tau = frequency, tau
        self.alpha = nn.Parameter(weight.new_full((len(weight), *[1] * (weight.dim() - 1)), 0.5))

    def wave(self, weight: Tensor) -> Tensor:
        """sin(ω W), at least in float32: in half precision ω W is too coarse."""
        return torch.sin(self.frequency * at_least_float32(weight))

    def code(self, weight: Tensor) -> BinaryWeight:
        return BinaryWeight(sign(self.wave(weight)).to(weight.dtype)[None], self.alpha[None])

    def surrogate(self, weight: Tensor) -> Tensor:
        wave = self.wave(weight).to(weight.dtype)
        # the first term has the gradient of α, the second that of W
        return self.alpha * sign(wave).detach() + self.alpha.detach() * wave

    def auxiliary_loss(self, weight: Tensor) -> Tensor | None:
        return self.tau * self.wave(weight).square().mean() if self.tau else None


class SineWave(SquareWave):
    """α · sin(ω W): weights of the first step, which are not binary."""

    binary = False

    def code(self, weight: Tensor) -> BinaryWeight:
        raise ValueError(f"{self.title}: with weights='sine' they are float, so they have no signs")

    def forward(self, weight: Tensor) -> Tensor:
        return self.alpha * self.wave(weight).to(weight.dtype)


@register("biper")
@dataclass(frozen=True)
class BiPer(Method):
    """Sign of a sine of the latent weight, with the gradient of the sine; a learned scale per filter."""

    frequency: float = 20.0
    tau: float = 0.0
    weights: Literal["binary", "sine"] = "binary"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.frequency < math.inf:
            raise ValueError(
                f"biper: frequency={self.frequency} should be finite and > 0, as the paper's 20"
            )
        if not 0 <= self.tau < math.inf:
            raise ValueError(
                f"biper: tau={self.tau} should be finite and >= 0; tau=0 leaves the loss term out"
            )

    @property
    def family(self) -> str:
        """τ affects training only."""
        changed = [
            f"{name}={getattr(self, name)}"
            for name in ("frequency", "weights")
            if getattr(self, name) != getattr(type(self), name)
        ]
        return f"{self.name}({', '.join(changed)})" if changed else self.name

    @property
    def unfit_for_lns(self) -> str | None:
        return "its binary weights are signs of sin(ωW), which a mapping network would have to predict instead of W's"

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        assert isinstance(layer.weight, Tensor)
        kind = SquareWave if self.weights == "binary" else SineWave
        return kind(layer.weight, self.frequency, self.tau)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return ScaledApproxSign(sample_dims(layer))
