"""Bi-Real Net: Enhancing the Performance of 1-bit CNNs with Improved Representational Capability.

Liu et al., ECCV 2018, arXiv:1808.00278. Its identity shortcut round every binary convolution is part of
the network, not of the method: ``resnet18(variant="bireal")``, ``resnet20(shortcut="conv")``.

Weights     Q = α · sign(W), α = ‖W‖₁ / n for each filter (magnitude-aware, not differentiated)
            ∂L/∂W = ∂L/∂Q · 1[|W| ≤ 1]
Inputs      B = sign(x)
            ∂L/∂x = ∂L/∂B · max(0, 2 − 2|x|)          (derivative of the approximate sign)

Differences from the authors' code: none known. (The paper's text has α in the gradient of W as well;
the released code, followed here, does not.)
"""

from dataclasses import dataclass

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


class MagnitudeAwareSign(WeightBinarizer):
    def code(self, weight: Tensor) -> BinaryWeight:
        alpha = weight.abs().flatten(1).mean(1).view(1, -1, *[1] * (weight.dim() - 1))
        return BinaryWeight(sign(weight)[None], alpha)

    def surrogate(self, weight: Tensor) -> Tensor:
        return weight.clamp(-1, 1)


class ApproxSign(InputBinarizer):
    def forward(self, x: Tensor) -> Tensor:
        c = x.clamp(-1, 1)
        # 2x + x² below zero, 2x − x² above: its derivative is 2 − 2|x| on [−1, 1], 0 outside
        return straight_through(sign(x), 2 * c - c * c.abs())

    def code(self) -> InputCode:
        return sign_code()


@register("bireal")
@dataclass(frozen=True)
class BiReal(Method):
    """Per-filter scale times sign; sign of inputs with the approximate-sign gradient."""

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return MagnitudeAwareSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return ApproxSign()
