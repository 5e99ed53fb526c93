"""BinaryConnect: Training Deep Neural Networks with Binary Weights during Propagations.

Courbariaux, Bengio, David, NeurIPS 2015, arXiv:1511.00363.

Weights     Q = sign(W), no scale                                        (deterministic, the default)
            Q = +1 with probability p = clip((W + 1) / 2, 0, 1), else −1  (stochastic=True; while training)
            ∂L/∂W = ∂L/∂Q in both; after each step W is clipped to [−1, 1]
Inputs      stay float

The stochastic sign is right on average: E[Q] = clip(W, −1, 1). It is drawn anew at every forward pass in
training mode; evaluation, freezing and LNS's labels use sign(W).

Differences from the authors' code: after training with the stochastic sign they test with the float weights W
themselves, which is no binary network; here sign(W) is tested and shipped in both cases. Their code can also
binarize to ±H with H from Glorot's initialisation, and multiplies the learning rate of W by 1/H; here H = 1 as in
the paper's formulas, and the rate is the recipe's ``latent_lr``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unflip.methods.base import (
    BinaryWeight,
    FloatInput,
    InputBinarizer,
    Method,
    WeightBinarizer,
    register,
)
from unflip.ste import sign, straight_through


class ClippedSign(WeightBinarizer):
    def __init__(self, stochastic: bool) -> None:
        super().__init__()
        self.stochastic = stochastic

    def code(self, weight: Tensor) -> BinaryWeight:
        return BinaryWeight(sign(weight)[None], weight.new_ones([1] * (weight.dim() + 1)))

    def surrogate(self, weight: Tensor) -> Tensor:
        return weight

    def forward(self, weight: Tensor) -> Tensor:
        if not (self.stochastic and self.training):
            return super().forward(weight)
        probability = ((weight.detach() + 1) / 2).clamp(0, 1)
        # rand is in [0, 1): at p = 0 it is never below p, at p = 1 always. NaN stays NaN.
        drawn = -sign(torch.rand_like(probability) - probability)
        return straight_through(drawn, self.surrogate(weight))

    @torch.no_grad()
    def after_step(self, weight: Tensor) -> None:
        weight.clamp_(-1, 1)

    def extra_repr(self) -> str:
        return f"stochastic={self.stochastic}"


@register("binaryconnect")
@dataclass(frozen=True)
class BinaryConnect(Method):
    """Plain sign of the weights, deterministic or drawn at random; inputs stay float."""

    stochastic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.stochastic, bool):
            raise ValueError(
                f"binaryconnect: stochastic={self.stochastic!r} should be true or false"
            )

    @property
    def family(self) -> str:
        """How the sign is drawn shapes the training alone."""
        return self.name

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return ClippedSign(self.stochastic)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return FloatInput()
