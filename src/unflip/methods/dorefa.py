"""DoReFa-Net: Training Low Bitwidth Convolutional Neural Networks with Low Bitwidth Gradients.

Zhou et al., 2016, arXiv:1606.06160. The baseline of the LNS paper.

Weights     Q = E(|W|) · sign(W), the mean over the whole layer
            ∂L/∂W = ∂L/∂Q                                  (identity; E is not differentiated)
Inputs      B = round(n · clip(x, 0, 1)) / n, n = 2^k − 1  (k = 1: {0, 1}, AND and POPCOUNT)
            ∂L/∂x = ∂L/∂B · 1[0 ≤ x ≤ 1]
  or, with inputs="pm1" (as the LNS paper writes its inputs),
            B = sign(x), ∂L/∂x = ∂L/∂B · 1[|x| ≤ 1]        (XNOR and POPCOUNT)

Differences from the authors' code: gradients are not quantized (the paper's G = 32).
Rounding is to even, as in theirs: round(1/2) = 0.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unflip.methods.base import InputBinarizer, InputCode, Method, WeightBinarizer
from unflip.methods.pieces import ClippedSign, LayerMeanSign, check_whole, least_float
from unflip.methods.registry import register
from unflip.ste import straight_through
from unflip.vectorized import clip


class UnitInterval(InputBinarizer):
    """x clipped to [0, 1] and rounded to 2^bits levels."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.unit = bits == 1
        self.fused_as = "01" if bits == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        n = 2**self.bits - 1
        clipped = clip(x, 0, 1)
        return straight_through(torch.round(clipped * n) / n, clipped)

    def code(self) -> InputCode:
        n = 2**self.bits - 1
        below = torch.arange(n)[:, None]  # step j leads from j / n to (j + 1) / n
        steps = least_float(lambda x: torch.round(x.clamp(0, 1) * n) > below, below)
        scales = tuple(2**p / n for p in range(self.bits))
        return InputCode(steps, scales, 0.0, (False,) * n, "levels")


@register("dorefa")
@dataclass(frozen=True)
class DoReFa(Method):
    """Layer-wise mean times sign; inputs {0, 1} as published, or ±1."""

    inputs: Literal["01", "pm1"] = "01"
    input_bits: int = 1

    def __post_init__(self) -> None:
        check_whole(self.name, "input_bits", self.input_bits, 1, 8)
        super().__post_init__()
        if self.inputs == "pm1" and self.input_bits != 1:
            raise ValueError(
                f"dorefa: input_bits={self.input_bits} needs inputs='01', because inputs='pm1' has one bit"
            )

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return LayerMeanSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return ClippedSign() if self.inputs == "pm1" else UnitInterval(self.input_bits)
