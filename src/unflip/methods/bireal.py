"""Bi-Real Net: Enhancing the Performance of 1-bit CNNs with Improved Representational Capability.

Liu et al., ECCV 2018, arXiv:1808.00278. Its identity shortcut around every binary convolution is part of
the network, not of the method: ``resnet18(variant="bireal")``, ``resnet20(shortcut="conv")``.

Weights     Q = α · sign(W), α = ‖W‖₁ / n per filter (magnitude-aware, not differentiated)
            ∂L/∂W = ∂L/∂Q · 1[|W| ≤ 1]
Inputs      B = sign(x)
            ∂L/∂x = ∂L/∂B · max(0, 2 − 2|x|)          (derivative of the approximate sign)

Differences from the authors' code: none known. (The paper's text has α in the gradient of W as well;
the released code, which we follow, does not.)
"""

from dataclasses import dataclass

from torch import nn

from unflip.methods.base import InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import ApproxSign, ClippedFilterMeanSign
from unflip.methods.registry import register


@register("bireal")
@dataclass(frozen=True)
class BiReal(Method):
    """Per-filter scale times sign; sign of inputs with the approximate-sign gradient."""

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return ClippedFilterMeanSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return ApproxSign()
