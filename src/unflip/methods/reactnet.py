"""ReActNet: Towards Precise Binary Neural Network with Generalized Activation Functions.

Liu et al., ECCV 2020, arXiv:2003.03488.

Weights     Q = α · sign(W), α = ‖W‖₁ / n for each filter, not differentiated
            ∂L/∂W = ∂L/∂Q · 1[|W| ≤ 1]                              (as Bi-Real Net)
            weights="dorefa": one α for the layer and ∂L/∂W = ∂L/∂Q, so that no latent weight that has grown
            beyond 1 stays there
Inputs      RSign: B = sign(x + b_c) with a learned shift b_c for each channel
            ∂L/∂x = ∂L/∂B · max(0, 2 − 2|x + b|), ∂L/∂b_c = Σ over the channel of the same
            gradient="clipped": 1[|x + b| ≤ 1] in its place
Activation  RPReLU: y = PReLU_β(x + γ_c) + ζ_c with learned shifts γ, ζ and slope β for each channel;
            it takes the place of every nn.PReLU of the network, whose slopes it keeps

All shifts start at 0, where RSign is sign and RPReLU is PReLU: a float twin's weights keep their meaning. The shifts
are part of the method's own state, under ``input_binarizer.shift`` and ``adapted``; slopes are the network's.

Differences from the authors' code: signs of the shifts are theirs (the paper subtracts α and γ). Their RPReLU comes
after the add of a shortcut; ours stands where the network has its PReLU. Where that is directly before BatchNorm
(``resnet20``, ``resnet18(variant="bireal-prelu")``), BatchNorm takes ζ away again and ζ learns nothing. A network
without PReLU gets no RPReLU. The distributional loss against a float teacher and the two-step schedule are
training recipes, not part of the method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unflip.methods.base import (
    InputBinarizer,
    InputCode,
    Method,
    WeightBinarizer,
    register,
    replace_prelus,
    sign_code,
)
from unflip.methods.bireal import MagnitudeAwareSign
from unflip.methods.dorefa import LayerMeanSign
from unflip.ste import sign, straight_through

Gradient = Literal["approximate", "clipped"]


class RSign(InputBinarizer):
    """sign(x + b), with the approximate-sign gradient or clipped; b has a value for each input channel."""

    def __init__(self, layer: nn.Module, gradient: Gradient = "approximate") -> None:
        super().__init__()
        self.clipped = gradient == "clipped"
        self.fused_as = "pm1" if self.clipped else None
        weight = layer.weight
        assert isinstance(weight, Tensor)
        if isinstance(layer, nn.Conv2d):
            shape: tuple[int, ...] = (layer.in_channels, 1, 1)
        else:
            shape = (weight.shape[1],)
        self.shift = nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))

    def shifted(self, x: Tensor) -> Tensor:
        return x + self.shift

    def forward(self, x: Tensor) -> Tensor:
        shifted = self.shifted(x)
        c = shifted.clamp(-1, 1)
        return straight_through(sign(shifted), c if self.clipped else 2 * c - c * c.abs())

    def code(self) -> InputCode:
        return sign_code(-self.shift.view(1, -1))


class Shifts(nn.Module):
    """RPReLU's γ and ζ."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.zeros_like(slopes))
        self.after = nn.Parameter(torch.zeros_like(slopes))


class RPReLU(nn.PReLU):
    """PReLU between two learned shifts; ``weight`` holds the slopes, as in nn.PReLU."""

    def __init__(self, prelu: nn.PReLU) -> None:
        slopes = prelu.weight
        super().__init__(prelu.num_parameters, device=slopes.device, dtype=slopes.dtype)
        self.weight = slopes  # the parameter itself: hooks and optimizers that know it stay right
        self.adapted = Shifts(slopes)
        self.train(prelu.training)

    def forward(self, x: Tensor) -> Tensor:
        view = (-1, *[1] * (x.dim() - 2))  # channels are dimension 1, as for nn.PReLU
        before, after = (
            shift.view(view).to(x.dtype)  # under autocast x stays in half
            for shift in (self.adapted.before, self.adapted.after)
        )
        return super().forward(x + before) + after


@register("reactnet")
@dataclass(frozen=True)
class ReActNet(Method):
    """Per-filter scale times sign; learned shifts before the sign of inputs and round PReLU."""

    weights: Literal["bireal", "dorefa"] = "bireal"
    gradient: Gradient = "approximate"

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return MagnitudeAwareSign() if self.weights == "bireal" else LayerMeanSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return RSign(layer, self.gradient)

    def adapt(self, model: nn.Module) -> None:
        replace_prelus(model, RPReLU)
