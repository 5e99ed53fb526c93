"""BBG: Balanced Binary Neural Networks with Gated Residual.

Shen et al., ICASSP 2020, arXiv:1909.12117.

Weights     Ŵ = W − mean(W) for each filter, so that a filter has about as many +1 as −1;
            Q = α · sign(Ŵ), α = mean|Ŵ| over the layer
            ∂L/∂Ŵ = ∂L/∂Q (α is not differentiated), ∂L/∂W = ∂L/∂Ŵ − its mean over the filter
Inputs      B = sign(x), ∂L/∂x = ∂L/∂B · 1[|x| ≤ 1]
Shortcut    out + g_c · x in place of out + x, with a learned gate g_c for each channel, 1 at the start

The gate takes the place of every :class:`unflip.layers.Carry`, the point where a residual network's shortcut
joins. With g = 1 the network is what it was without, so a float twin's weights keep their meaning; gates are
part of the method's own state, under ``adapted``.

Differences from the authors' code: none was released. Abstract and summaries of the paper give the centring, the
scale of the layer and the gate for each channel; that gates start at 1, that α is of Ŵ rather than of W, the
gradient of the inputs, and that the gradient of the weights is not clipped are our reading of it. The paper adds a
gated shortcut to networks that have none (VGG); here only shortcuts that are there get a gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unflip.methods.base import BinaryWeight, InputBinarizer, Method, WeightBinarizer, register
from unflip.methods.binarynet import HardTanhSign
from unflip.ste import sign


def centred(weight: Tensor) -> Tensor:
    """Each filter less its mean; a filter of one weight stays as it is, or it would vanish."""
    if weight[0].numel() == 1:
        return weight
    return weight - weight.mean(tuple(range(1, weight.dim())), keepdim=True)


class BalancedSign(WeightBinarizer):
    def code(self, weight: Tensor) -> BinaryWeight:
        balanced = centred(weight)
        scale = balanced.abs().mean().view(1, *[1] * weight.dim())
        return BinaryWeight(sign(balanced)[None], scale)

    def surrogate(self, weight: Tensor) -> Tensor:
        return centred(weight)


class Gate(nn.Module):
    """g · x, a value of g for each channel."""

    def __init__(self, channels: int, start: float, like: Tensor) -> None:
        super().__init__()
        values = torch.full((channels, 1, 1), start, dtype=like.dtype, device=like.device)
        self.adapted = nn.ParameterDict({"gate": nn.Parameter(values)})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.adapted["gate"].to(x.dtype)  # under autocast x stays in half


@register("bbg")
@dataclass(frozen=True)
class BBG(Method):
    """Zero-mean filters, layer-wise scale times sign; shortcuts with a learned gate a channel."""

    gate_start: float = 1.0

    @property
    def family(self) -> str:
        """Where gates start shapes the training alone."""
        return self.name

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return BalancedSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return HardTanhSign()

    def adapt(self, model: nn.Module) -> None:
        from unflip.layers import Carry  # layers imports the methods

        like = next(model.parameters())
        for module in list(model.modules()):
            for name, child in list(module._modules.items()):
                if isinstance(child, Carry):
                    setattr(module, name, Gate(child.channels, self.gate_start, like))
