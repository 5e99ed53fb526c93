"""Bi-half: Equal Bits, Enforcing Equally Distributed Binary Network Weights.

Li, Pintea, van Gemert, AAAI 2022, arXiv:2112.03406. A filter has the most information if half of its weights are +1.
Optimal transport of the latent weights to that distribution is a ranking: the larger half becomes +1.

Weights     Q = s · b, b_i = −1 for the ⌊n/2⌋ smallest of the n weights of a filter, +1 for the others
            s = 1/√n, constant; ∂L/∂W = ∂L/∂Q
Inputs      B = sign(x), ∂L/∂x = ∂L/∂B · 1[|x| ≤ 1]

A weight changes its sign if its rank crosses the middle, so a sign also depends on the other weights of the filter.

Differences from the authors' code (liyunqianggyn/Equal-Bits-BNN): its constant s has another factor, which a BatchNorm
after the layer cancels. Equal weights are ranked in their order, which is arbitrary there. A filter of one weight keeps
its sign; there it is always +1. The gradient of an input is 0 at |x| = 1 there. Its pruned form (−1, 0, +1) and bit
ratios other than one half are not implemented.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unflip.methods.base import BinaryWeight, InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import ClippedSign
from unflip.methods.registry import register
from unflip.ste import sign


class UpperHalf(WeightBinarizer):
    """+1 for the larger half of each filter, −1 for the smaller, with the identity as gradient."""

    def code(self, weight: Tensor) -> BinaryWeight:
        n = weight[0].numel()
        scale = weight.new_full([1] * (weight.dim() + 1), 1 / math.sqrt(n))
        return BinaryWeight(self.halves(weight)[None], scale)

    def halves(self, weight: Tensor) -> Tensor:
        n = weight[0].numel()
        if n == 1:
            return sign(weight)
        ranks = (
            weight.detach().flatten(1).argsort(dim=1, stable=True).argsort(dim=1).view_as(weight)
        )
        return torch.where(weight.isnan(), weight.detach(), sign((ranks - n // 2).to(weight.dtype)))

    def surrogate(self, weight: Tensor) -> Tensor:
        return weight


@register("bihalf")
@dataclass(frozen=True)
class BiHalf(Method):
    """Half of each filter's weights are +1: the larger ones."""

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return UpperHalf()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return ClippedSign()
