"""BWN, Binary-Weight-Networks: the weights-only half of XNOR-Net.

Rastegari et al., ECCV 2016, arXiv:1603.05279, section 3.1.

Weights     Q = α · sign(W), α = ‖W‖₁ / n for each filter of n weights
            ∂L/∂W_i = ∂L/∂Q_i · (1/n + α · 1[|W_i| ≤ 1])
Inputs      stay float

Differences from the authors' code: none known.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from unflip.methods.base import FloatInput, InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import FilterMeanSign
from unflip.methods.registry import register


class BWNSign(FilterMeanSign):
    """FilterMeanSign with the paper's gradient, 1/n + α · 1[|W| ≤ 1]."""

    def surrogate(self, weight: Tensor) -> Tensor:
        n = weight[0].numel()
        alpha = self.code(weight).scales[0].detach()
        return weight / n + alpha * weight.clamp(-1, 1)


@register("bwn")
@dataclass(frozen=True)
class BWN(Method):
    """Per-filter scale times sign; inputs stay float."""

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return BWNSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return FloatInput()
