"""TBN: Convolutional Neural Network with Ternary Inputs and Binary Weights.

Wan et al., ECCV 2018.

Weights     Q = α · sign(W), α = ‖W‖₁ / n for each filter of n weights
            ∂L/∂W = ∂L/∂Q                          (α is not differentiated)
Inputs      B = +1 for x ≥ δ, −1 for x ≤ −δ, 0 between;  δ = 0.4 · mean|x|, and no scale
            ∂L/∂x = ∂L/∂B · 1[|x| ≤ 1]             (δ is not differentiated)

A ternary input takes two bit planes and is counted as 2 bits.

Differences from the authors' code: the mean is over one sample (channels and pixels; a linear layer's features), both
in training and in evaluation. Their code uses the mean over the batch in training and a running average in evaluation:
there the result for a sample depends on the others in its batch, and the trained network differs slightly from the
deployed one. Their default share, 0.5, belongs to TBNv2, which also has a scale of inputs, 2δ, and another gradient.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unflip.methods.base import InputBinarizer, InputCode, Method, WeightBinarizer
from unflip.methods.pieces import FilterMeanSign, sample_dims
from unflip.methods.registry import register
from unflip.ste import straight_through
from unflip.vectorized import clip


class Ternary(InputBinarizer):
    bits = 2

    def __init__(self, share: float, sample: tuple[int, ...]) -> None:
        super().__init__()
        self.share = share
        self.sample = sample  # the dimensions of one sample

    def forward(self, x: Tensor) -> Tensor:
        delta = self.share * x.abs().mean(self.sample, keepdim=True)
        ternary = (x >= delta).to(x.dtype) - (x <= -delta).to(x.dtype)
        return straight_through(ternary, clip(x, -1, 1))

    def code(self) -> InputCode:
        steps = torch.tensor([[-self.share], [self.share]])
        return InputCode(steps, (1.0, 2.0), -1.0, (True, False), "levels", relative=True)


@register("tbn")
@dataclass(frozen=True)
class TBN(Method):
    """Per-filter scale times sign; inputs −1, 0 or +1."""

    threshold: float = 0.4  # a multiple of the sample's mean |x|

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.threshold) and self.threshold > 0):
            raise ValueError(f"tbn: threshold={self.threshold} should be a finite number > 0")

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return FilterMeanSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return Ternary(self.threshold, sample_dims(layer))
