"""BinaryConnect: Training Deep Neural Networks with Binary Weights during Propagations.

Courbariaux, Bengio, David, NeurIPS 2015, arXiv:1511.00363.

Weights     Q = sign(W), no scale                                        (deterministic, the default)
            Q = +1 with probability p = clip((W + 1) / 2, 0, 1), else −1  (stochastic=True; while training)
            ∂L/∂W = ∂L/∂Q in both; after each step W is clipped to [−1, 1]
Inputs      stay float

The stochastic sign is correct on average: E[Q] = clip(W, −1, 1). It is drawn again in every forward pass in training
mode; evaluation, freezing and LNS's labels use sign(W).

Differences from the authors' code: after training with the stochastic sign they test with the float weights W
themselves, which is not a binary network. Here sign(W) is tested and deployed in both cases. Their code can also
binarize to ±H with H from Glorot's initialization, and multiplies the learning rate of W by 1/H. Here H = 1 as in the
paper's formulas, and the rate is the recipe's ``latent_lr``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unflip.methods.base import FloatInput, InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import PlainSign
from unflip.methods.registry import register
from unflip.ste import sign, straight_through


class StochasticSign(PlainSign):
    """Signs drawn at random in training mode; the plain sign otherwise."""

    def forward(self, weight: Tensor) -> Tensor:
        if not self.training:
            return super().forward(weight)
        probability = ((weight.detach() + 1) / 2).clamp(0, 1)
        # rand is in [0, 1): it is never below p = 0 and always below p = 1. NaN stays NaN.
        drawn = -sign(torch.rand_like(probability) - probability)
        return straight_through(drawn, self.surrogate(weight))


@register("binaryconnect")
@dataclass(frozen=True)
class BinaryConnect(Method):
    """Plain sign of the weights, deterministic or drawn at random; inputs stay float."""

    stochastic: bool = False

    @property
    def family(self) -> str:
        """How the sign is drawn affects training only."""
        return self.name

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return StochasticSign() if self.stochastic else PlainSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return FloatInput()
