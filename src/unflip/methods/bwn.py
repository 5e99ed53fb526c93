"""BWN, Binary-Weight-Networks: the weights-only half of XNOR-Net.

Rastegari et al., ECCV 2016, arXiv:1603.05279, section 3.1.

Weights     Q = α · sign(W), α = ‖W‖₁ / n for each filter of n weights
            ∂L/∂W_i = ∂L/∂Q_i · (1/n + α · 1[|W_i| ≤ 1])
Inputs      stay float

Differences from the authors' code (github.com/allenai/XNOR-Net, util.lua and train.lua), which are options here:

- ``gradient="released"``: the code multiplies the paper's gradient by n (1 − 1/c), where c is the number of input
  channels of a filter, and has |W_i| < 1 instead of ≤:  ∂L/∂W_i = ∂L/∂Q_i · n (1 − 1/c) (1/n + α · 1[|W_i| < 1]).
  With c = 1 the code's gradient is 0; here the factor (1 − 1/c) is then left out.
- ``centered=True``: before each forward pass, the code centers W over its input channels and clips it to [−1, 1]. Here
  that is done after each step. The paper does not mention it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unflip.methods.base import FloatInput, InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import FilterMeanSign
from unflip.methods.registry import register

Gradient = Literal["paper", "released"]


class BWNSign(FilterMeanSign):
    """FilterMeanSign with the gradient of the paper or of the released code."""

    def __init__(self, gradient: Gradient = "paper") -> None:
        super().__init__()
        self.gradient = gradient

    def surrogate(self, weight: Tensor) -> Tensor:
        n, channels = weight[0].numel(), weight.shape[1]
        alpha = self.code(weight).scales[0].detach()
        if self.gradient == "paper":
            return weight / n + alpha * weight.clamp(-1, 1)
        inside = (weight.detach().abs() < 1).to(weight.dtype)
        factor = n * (1 - 1 / channels) if channels > 1 else n
        return factor * (weight / n + alpha * inside * weight)


class CenteredBWNSign(BWNSign):
    """BWNSign with weights that are centered and clipped after each step."""

    @torch.no_grad()
    def after_step(self, weight: Tensor) -> None:
        if weight.shape[1] > 1:  # a single input channel would become 0
            weight.sub_(weight.mean(1, keepdim=True))
        weight.clamp_(-1, 1)


@register("bwn")
@dataclass(frozen=True)
class BWN(Method):
    """Per-filter scale times sign; inputs stay float."""

    gradient: Gradient = "paper"
    centered: bool = False

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return (CenteredBWNSign if self.centered else BWNSign)(self.gradient)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return FloatInput()
