"""IR-Net: Forward and Backward Information Retention for Accurate Binary Neural Networks.

Qin et al., CVPR 2020, arXiv:1909.10788. Its network (hardtanh, a shortcut round every convolution) is
``resnet20(order="conv-bn-hardtanh", shortcut="conv")``.

Weights     Ŵ = (W − mean(W)) / std(W) for each filter    (balanced: signs of the largest entropy; standardised)
            Q = 2^s · sign(Ŵ), s = round(log₂ mean|Ŵ|) for each filter (a shift; not differentiated)
            ∂L/∂Ŵ = ∂L/∂Q · 2^s · g(Ŵ), and from Ŵ to W through mean and std
Inputs      B = sign(x)
            ∂L/∂x = ∂L/∂B · g(x) · 1[|x| ≤ 1]             (the second factor is the hardtanh before each layer)
Estimator   g(x) = k·t·(1 − tanh²(t·x)), k = max(1/t, 1): the derivative of k·tanh(t·x)
            t = t_min · (t_max / t_min)^(i/N) in epoch i = 0 .. N − 1, from 10⁻³ towards 10
            For small t it is the identity's (g = 1), for large t it closes in on sign's.

k·t = max(1, t), which is how it is computed: 1/t = 1000 would leave float16's range on the way.

Differences from the authors' code: 1[|x| ≤ 1] is not in their estimator but in their network, where a hardtanh stands
before every binary convolution. There it changes nothing; in a network without it, the early g = 1 at every x makes
gradients explode. t_min and t_max are those of their CIFAR-10 trainer, whose schedule also never reaches t_max: the
last epoch has i = N − 1. A filter of one weight has no spread, and one of equal weights has std 0 (theirs: NaN): the
former is taken as it is, the latter centred only. sign(0) is +1, theirs 0. ``code`` does not depend on the schedule.
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
    register,
    sign_code,
)
from unflip.ste import sign, straight_through


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


class BalancedSign(WeightBinarizer):
    def __init__(self, decay: ErrorDecay) -> None:
        super().__init__()
        self.decay = decay

    def standardised(self, weight: Tensor) -> Tensor:
        if weight[0].numel() == 1:
            return weight
        filters = tuple(range(1, weight.dim()))
        centred = weight - weight.mean(filters, keepdim=True)
        std = centred.std(filters, keepdim=True)
        return centred / std.masked_fill(std == 0, 1)

    def code(self, weight: Tensor) -> BinaryWeight:
        balanced = self.standardised(weight)
        size = balanced.abs().flatten(1).mean(1).view(1, -1, *[1] * (weight.dim() - 1))
        # A filter of zeros: log₂ 0 = −∞, and its scale is 0.
        return BinaryWeight(sign(balanced)[None], torch.exp2(torch.round(torch.log2(size))))

    def surrogate(self, weight: Tensor) -> Tensor:
        balanced = self.standardised(weight)
        scale = self.code(weight).scales[0]
        return (scale * self.decay(balanced)).detach() * balanced

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.decay.start_epoch(epoch, epochs)


class DecayingSign(InputBinarizer):
    def __init__(self, decay: ErrorDecay) -> None:
        super().__init__()
        self.decay = decay

    def forward(self, x: Tensor) -> Tensor:
        clipped = x.clamp(-1, 1)
        return straight_through(sign(x), self.decay(clipped).detach() * clipped)

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.decay.start_epoch(epoch, epochs)

    def code(self) -> InputCode:
        return sign_code()


@register("irnet")
@dataclass(frozen=True)
class IRNet(Method):
    """Signs of balanced, standardised filters, power-of-two scale; a gradient that sharpens by epoch."""

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
        """The schedule shapes the training alone."""
        return self.name

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return BalancedSign(self._decay(layer))

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return DecayingSign(self._decay(layer))

    def _decay(self, layer: nn.Module) -> ErrorDecay:
        assert isinstance(layer.weight, Tensor)
        return ErrorDecay(self.t_min, self.t_max, layer.weight)
