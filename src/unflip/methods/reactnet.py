"""ReActNet: Towards Precise Binary Neural Network with Generalized Activation Functions.

Liu et al., ECCV 2020, arXiv:2003.03488.

Weights     Q = α · sign(W), α = ‖W‖₁ / n per filter, not differentiated
            ∂L/∂W = ∂L/∂Q · 1[|W| ≤ 1]                              (as Bi-Real Net)
            weights="dorefa": one α per layer and ∂L/∂W = ∂L/∂Q, so that a latent weight beyond ±1 still moves
            weights="float": Q = W, the first of the paper's two steps. The second step starts from its run
Inputs      RSign: B = sign(x + b_c) with a learned shift b_c per channel
            ∂L/∂x = ∂L/∂B · max(0, 2 − 2|x + b|), ∂L/∂b_c = the same, summed over the channel
            gradient="clipped": 1[|x + b| ≤ 1] instead
Activation  RPReLU: y = PReLU_β(x + γ_c) + ζ_c with learned shifts γ, ζ and slope β per channel.
            It replaces every nn.PReLU of the network and keeps its slopes

All shifts start at 0, where RSign is sign and RPReLU is PReLU: a float twin's weights keep their meaning. The shifts
are state of the method, under ``input_binarizer.shift`` and ``adapted``; slopes belong to the network.

Differences from the authors' code: the shifts have the same signs as in their code (the paper subtracts α and γ). Their
RPReLU comes after the addition of a shortcut; ours stands where the network has its PReLU, which is the same place in
``resnet18(variant="reactnet")``. If it is directly before BatchNorm (``resnet20``,
``resnet18(variant="bireal-prelu")``), BatchNorm cancels ζ and ζ learns nothing. A network without PReLU gets no RPReLU.
The distributional loss against a float teacher is ``distill`` in a recipe, not part of the method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unflip.methods.base import (
    FloatWeight,
    InputBinarizer,
    InputCode,
    Method,
    WeightBinarizer,
)
from unflip.methods.pieces import (
    ClippedFilterMeanSign,
    LayerMeanSign,
    parabolic_sign,
    replace_prelus,
    sign_code,
)
from unflip.methods.registry import register
from unflip.ste import clipped_sign, sign, straight_through
from unflip.vectorized import prelu

Gradient = Literal["approximate", "clipped"]


class RSign(InputBinarizer):
    """sign(x + b), with the approximate-sign gradient or the clipped one; one b per input channel."""

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
        if self.clipped:
            return clipped_sign(shifted)
        return straight_through(sign(shifted), parabolic_sign(shifted))

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
        self.weight = slopes  # the same parameter: hooks and optimizers that hold it stay valid
        self.adapted = Shifts(slopes)
        self.train(prelu.training)

    def forward(self, x: Tensor) -> Tensor:
        view = (-1, *[1] * (x.dim() - 2))  # channels are dimension 1, as for nn.PReLU
        before, after = (
            shift.view(view).to(x.dtype)  # under autocast x stays in half precision
            for shift in (self.adapted.before, self.adapted.after)
        )
        return prelu(x + before, self.weight) + after


@register("reactnet")
@dataclass(frozen=True)
class ReActNet(Method):
    """Per-filter scale times sign; learned shifts before the sign of inputs and around PReLU."""

    weights: Literal["bireal", "dorefa", "float"] = "bireal"
    gradient: Gradient = "approximate"

    @property
    def unfit_for_lns(self) -> str | None:
        return "weights='float' leaves no signs to correct" if self.weights == "float" else None

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        kinds = {"bireal": ClippedFilterMeanSign, "dorefa": LayerMeanSign, "float": FloatWeight}
        return kinds[self.weights]()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return RSign(layer, self.gradient)

    def adapt(self, model: nn.Module) -> None:
        replace_prelus(model, RPReLU)
