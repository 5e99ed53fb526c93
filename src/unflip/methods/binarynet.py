"""BinaryNet: Binarized Neural Networks.

Courbariaux et al., 2016, arXiv:1602.02830; Hubara et al., NeurIPS 2016.

Weights     Q = sign(W), no scale
            ∂L/∂W = ∂L/∂Q; after each step W is clipped to [−1, 1]
Inputs      B = sign(x)
            ∂L/∂x = ∂L/∂B · 1[|x| ≤ 1]

Differences from the authors' code: none known for the deterministic sign. The stochastic sign of the
inputs, which they use in some runs, is not implemented.
"""

from dataclasses import dataclass

from torch import nn

from unflip.methods.base import InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import ClippedSign, PlainSign
from unflip.methods.registry import register


@register("binarynet")
@dataclass(frozen=True)
class BinaryNet(Method):
    """Plain sign of weights and inputs, latent weights clipped to [−1, 1]."""

    @property
    def binary_downsample(self) -> bool:
        return True

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return PlainSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return ClippedSign()
