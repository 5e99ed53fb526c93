"""BinaryNet: Binarized Neural Networks.

Courbariaux et al., 2016, arXiv:1602.02830; Hubara et al., NeurIPS 2016.

Weights     Q = sign(W), no scale
            ∂L/∂W = ∂L/∂Q; after each step W is clipped to [−1, 1]
Inputs      B = sign(x)
            ∂L/∂x = ∂L/∂B · 1[|x| ≤ 1]

Differences from the authors' code: none known for the deterministic sign. Their stochastic sign of the
inputs, which they use in some runs, is left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unflip.methods.base import (
    BinaryWeight,
    InputBinarizer,
    InputCode,
    Method,
    WeightBinarizer,
    register,
    sign_code,
)
from unflip.ste import sign, straight_through


class PlainSign(WeightBinarizer):
    def code(self, weight: Tensor) -> BinaryWeight:
        return BinaryWeight(sign(weight)[None], weight.new_ones([1] * (weight.dim() + 1)))

    def surrogate(self, weight: Tensor) -> Tensor:
        return weight

    @torch.no_grad()
    def after_step(self, weight: Tensor) -> None:
        weight.clamp_(-1, 1)


class HardTanhSign(InputBinarizer):
    fused_as = "pm1"

    def forward(self, x: Tensor) -> Tensor:
        return straight_through(sign(x), x.clamp(-1, 1))

    def code(self) -> InputCode:
        return sign_code()


@register("binarynet")
@dataclass(frozen=True)
class BinaryNet(Method):
    """Plain sign of weights and inputs, latent weights clipped to [−1, 1]."""

    @property
    def binary_downsample(self) -> bool:
        return True

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return PlainSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return HardTanhSign()
