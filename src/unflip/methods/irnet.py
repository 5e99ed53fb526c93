"""IR-Net: Forward and Backward Information Retention for Accurate Binary Neural Networks.

Qin et al., CVPR 2020, arXiv:1909.10788. Its network (hardtanh, a shortcut around every convolution) is
``resnet20(order="conv-bn-hardtanh", shortcut="conv")``.

Weights     Ŵ = (W − mean(W)) / std(W) per filter         (balanced: signs of largest entropy; standardized)
            Q = 2^s · sign(Ŵ), s = round(log₂ mean|Ŵ|) per filter (a bit shift; not differentiated)
            ∂L/∂Ŵ = ∂L/∂Q · 2^s · g(Ŵ), and from Ŵ to W through mean and std
Inputs      B = sign(x)
            ∂L/∂x = ∂L/∂B · g(x) · 1[|x| ≤ 1]             (the second factor is the hardtanh before each layer)
Estimator   g(x) = k·t·(1 − tanh²(t·x)), k = max(1/t, 1): the derivative of k·tanh(t·x)
            t = t_min · (t_max / t_min)^(i/N) in epoch i = 0 .. N − 1, from 10⁻³ towards 10
            For small t it is the derivative of the identity (g = 1), for large t it approaches that of sign.

It is computed with k·t = max(1, t): with k = 1/t = 1000, intermediate values would overflow float16.

Differences from the authors' code: 1[|x| ≤ 1] is not in their estimator but in their network, where a hardtanh stands
before every binary convolution. There it changes nothing; in a network without hardtanh, the early g = 1 at every x
makes gradients explode. t_min and t_max are those of their CIFAR-10 trainer. Its schedule never reaches t_max either:
the last epoch has i = N − 1. A filter of one weight is unchanged. A filter of equal weights, whose std is 0, is only
centered (theirs: NaN). sign(0) is +1, theirs 0. ``code`` does not depend on the schedule.
"""

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
from unflip.methods.pieces import centered, filter_mean, sign_code
from unflip.methods.registry import register
from unflip.ste import sign, straight_through
from unflip.vectorized import clip


class ErrorDecay(Numbers):
    """g, and the temperature t of the epoch."""

    t: Tensor

    def __init__(self, t_min: float, t_max: float, like: Tensor) -> None:
        super().__init__()
        self.t_min, self.t_max = t_min, t_max
        self.hold("t", t_min, like)

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.set_number("t", self.t_min * (self.t_max / self.t_min) ** (epoch / epochs))

    def forward(self, x: Tensor) -> Tensor:
        return self.t.clamp_min(1) * (1 - torch.tanh(self.t * x) ** 2)


class StandardizedSign(WeightBinarizer):
    def __init__(self, decay: ErrorDecay) -> None:
        super().__init__()
        self.decay = decay

    def standardized(self, weight: Tensor) -> Tensor:
        if weight[0].numel() == 1:
            return weight
        balanced = centered(weight)
        std = balanced.std(tuple(range(1, weight.dim())), keepdim=True)
        return balanced / std.masked_fill(std == 0, 1)

    def code(self, weight: Tensor) -> BinaryWeight:
        balanced = self.standardized(weight)
        # For a filter of zeros log₂ 0 = −∞, and the scale is 0.
        scales = torch.exp2(torch.round(torch.log2(filter_mean(balanced))))
        return BinaryWeight(sign(balanced)[None], scales)

    def surrogate(self, weight: Tensor) -> Tensor:
        balanced = self.standardized(weight)
        scale = self.code(weight).scales[0]
        return (scale * self.decay(balanced)).detach() * balanced

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.decay.start_epoch(epoch, epochs)


class DecayingSign(InputBinarizer):
    def __init__(self, decay: ErrorDecay) -> None:
        super().__init__()
        self.decay = decay

    def forward(self, x: Tensor) -> Tensor:
        clipped = clip(x, -1, 1)
        return straight_through(sign(x), self.decay(clipped).detach() * clipped)

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.decay.start_epoch(epoch, epochs)

    def code(self) -> InputCode:
        return sign_code()


@register("irnet")
@dataclass(frozen=True)
class IRNet(Method):
    """Signs of balanced, standardized filters, power-of-two scale; the gradient sharpens per epoch."""

    t_min: float = 1e-3
    t_max: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.t_min <= self.t_max < float("inf"):
            raise ValueError(
                f"irnet: t_min={self.t_min} and t_max={self.t_max} should be finite, 0 < t_min <= t_max"
            )

    @property
    def family(self) -> str:
        """The schedule affects training only."""
        return self.name

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return StandardizedSign(self._decay(layer))

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return DecayingSign(self._decay(layer))

    def _decay(self, layer: nn.Module) -> ErrorDecay:
        assert isinstance(layer.weight, Tensor)
        return ErrorDecay(self.t_min, self.t_max, layer.weight)
