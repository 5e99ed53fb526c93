"""HWGQ: Deep Learning with Low Precision by Half-wave Gaussian Quantization.

Cai et al., CVPR 2017, arXiv:1702.00953.

Weights     Q = α · sign(W), α = ‖W‖₁ / n for each filter of n weights (BWN's)
            ∂L/∂W = ∂L/∂Q                          (α is not differentiated)
Inputs      a 2-bit quantizer of ReLU(x), fitted to the positive half of a unit Gaussian: x follows BatchNorm
            B = 0 for x ≤ 0; Δ for 0 < x ≤ 3Δ/2; 2Δ for 3Δ/2 < x ≤ 5Δ/2; 3Δ above;  Δ = 0.538
            ∂L/∂x = ∂L/∂B · 1[0 < x ≤ 3Δ]          (backward="clipped": clipped ReLU)
  or        ∂L/∂x = ∂L/∂B · 1 for 0 < x ≤ 3Δ, 1 / (x − 3Δ + 1) above   (backward="log": log-tailed ReLU)

Δ is the uniform step with the least mean squared error on that half. With thresholds at Δ/2, 3Δ/2, 5Δ/2,
as rounding would place them, it would be 0.65.

Differences from the authors' code: "positive" begins at 2⁻²⁴, the smallest positive float16, so that a smaller value
counts as 0 in every precision. Their layers have BatchNorm directly before the quantizer and no ReLU; a ReLU between
them changes nothing. The log-tailed ReLU is in the paper, not in the code. Their ResNet-18 has binary down-sampling
convolutions (``downsample="binary"``); the default here is float ones, which the LNS paper counts.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unflip.methods.base import InputBinarizer, InputCode, Method, WeightBinarizer
from unflip.methods.pieces import FilterMeanSign
from unflip.methods.registry import register
from unflip.ste import straight_through

STEP = 0.538
LARGEST = 3 * STEP
LEAST_POSITIVE = 2.0**-24


class HalfWave(InputBinarizer):
    bits = 2
    unit = False

    def __init__(self, backward: Literal["clipped", "log"]) -> None:
        super().__init__()
        self.log_tail = backward == "log"

    def forward(self, x: Tensor) -> Tensor:
        steps = (x >= LEAST_POSITIVE).to(x.dtype)
        steps = steps + (x > 1.5 * STEP) + (x > 2.5 * STEP)
        soft = x.relu().clamp(max=LARGEST)  # relu: its derivative at 0 is 0
        if self.log_tail:
            soft = soft + torch.log1p((x - LARGEST).relu())
        return straight_through(STEP * steps, soft)

    def code(self) -> InputCode:
        steps = torch.tensor([[LEAST_POSITIVE], [1.5 * STEP], [2.5 * STEP]])
        return InputCode(steps, (STEP, 2 * STEP), 0.0, (False, True, True), "levels")


@register("hwgq")
@dataclass(frozen=True)
class HWGQ(Method):
    """Per-filter scale times sign; 2-bit inputs, a quantized ReLU."""

    backward: Literal["clipped", "log"] = "clipped"

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return FilterMeanSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return HalfWave(self.backward)
