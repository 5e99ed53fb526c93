"""BBG: Balanced Binary Neural Networks with Gated Residual.

Shen et al., ICASSP 2020, arXiv:1909.12117.

Weights     Ŵ = W − mean(W) per filter, so that a filter has about as many +1 as −1;
            Q = α · sign(Ŵ), α = mean|Ŵ| over the layer
            ∂L/∂Ŵ = ∂L/∂Q (α is not differentiated), ∂L/∂W = ∂L/∂Ŵ − its mean over the filter
Inputs      B = sign(x), ∂L/∂x = ∂L/∂B · 1[|x| ≤ 1]
Shortcut    out + g_c · x in place of out + x, with a learned gate g_c per channel that starts at 1

The gate replaces every :class:`~unflip.methods.Carry`, the point where the shortcut of a residual network joins. With
g = 1 the network computes the same as without gates, so a float twin's weights keep their meaning. Gates are state of
the method, under ``adapted``.

Differences from the authors' code: none was released. The abstract and summaries of the paper give the centering, the
scale per layer and the gate per channel. Our interpretation: gates start at 1, α is the mean of |Ŵ| rather than of
|W|, the gradient of the inputs, and that the gradient of the weights is not clipped. The paper adds a gated shortcut
to networks without shortcuts (VGG); here only existing shortcuts get a gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unflip.methods.base import BinaryWeight, InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import Carry, ClippedSign, centered, layer_mean
from unflip.methods.registry import register
from unflip.ste import sign


class CenteredSign(WeightBinarizer):
    def code(self, weight: Tensor) -> BinaryWeight:
        balanced = centered(weight)
        return BinaryWeight(sign(balanced)[None], layer_mean(balanced))

    def surrogate(self, weight: Tensor) -> Tensor:
        return centered(weight)


class Gate(nn.Module):
    """g · x, with one g per channel."""

    def __init__(self, channels: int, start: float, like: Tensor) -> None:
        super().__init__()
        values = torch.full((channels, 1, 1), start, dtype=like.dtype, device=like.device)
        self.adapted = nn.ParameterDict({"gate": nn.Parameter(values)})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.adapted["gate"].to(x.dtype)  # under autocast x stays in half precision


@register("bbg")
@dataclass(frozen=True)
class BBG(Method):
    """Zero-mean filters, layer-wise scale times sign; shortcuts with a learned gate per channel."""

    gate_start: float = 1.0

    @property
    def family(self) -> str:
        """The start of the gates affects training only."""
        return self.name

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return CenteredSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return ClippedSign()

    def adapt(self, model: nn.Module) -> None:
        like = next(model.parameters())
        for module in list(model.modules()):
            for name, child in list(module._modules.items()):
                if isinstance(child, Carry):
                    setattr(module, name, Gate(child.channels, self.gate_start, like))
