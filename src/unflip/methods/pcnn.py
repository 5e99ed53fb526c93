"""PCNN: Projection Convolutional Neural Networks for 1-bit CNNs via Discrete Back Propagation.

Gu et al., AAAI 2019, arXiv:1811.12755.

C are the latent weights of a layer. P is a learned projection matrix of the kernel's size, the same for all channels
and filters (the paper's W, duplicated along the channels). ∘ is the element-wise product.

Weights     Ĉ = a · sign(mean(P) · C), the projection of mean(P) · C onto {−a, a}, a = mean|C| over the layer
            ∂L/∂C = ∂L/∂Ĉ ∘ P ∘ 1[|P ∘ C| ≤ 1],  ∂L/∂P = Σ over channels and filters of ∂L/∂Ĉ ∘ C ∘ 1[|P ∘ C| ≤ 1]
Loss        L_P = λ/2 · ‖Ĉ − P ∘ (C + η δ)‖², summed over the layer's weights, with δ = ∂L/∂Ĉ of the cross entropy
            ∂L_P/∂C = λ (P ∘ (C + η δ) − Ĉ) ∘ P,  ∂L_P/∂P = λ Σ (P ∘ (C + η δ) − Ĉ) ∘ (C + η δ)
Inputs      B = sign(x), ∂L/∂x = ∂L/∂B · 1[|x| ≤ 1]

δ is known only in the backward pass. All but one of the terms with δ in L_P's gradients are linear in δ:
λ η (P² ∘ δ) for C and λ η Σ (2 P ∘ C − Ĉ) ∘ δ for P. They are computed in the backward pass, as part of the surrogate's
gradient, and the auxiliary loss is L_P with δ = 0. So each step uses its own δ, without a second pass.

The forward pass uses the mean of P and the backward pass P itself, as the paper does "in the implementation".

Differences from the authors' code: they published only a test of a trained network. The term λ η² P ∘ δ² of ∂L_P/∂P is
left out. λ = 1e-4 is theirs. We found no value of η (at such a λ it hardly matters) and no first value of P, which is
1 here. With J > 1 projections they concatenate the kernels over the channels of a network J times as wide, which is
not a binarization of the given network. Only J = 1, their ImageNet result, is supported.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from unflip.methods.base import BinaryWeight, InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import ClippedSign, at_least_float32, layer_mean
from unflip.methods.registry import register
from unflip.ste import sign


class Projection(WeightBinarizer):
    def __init__(self, weight: Tensor, strength: float, step: float) -> None:
        super().__init__()
        self.strength = strength  # λ
        self.step = step  # η
        self.matrix = nn.Parameter(weight.new_ones((1, 1, *weight.shape[2:])))

    def code(self, weight: Tensor) -> BinaryWeight:
        return BinaryWeight(sign(self.matrix.detach().mean() * weight)[None], layer_mean(weight))

    def surrogate(self, weight: Tensor) -> Tensor:
        projected = self.matrix * weight
        binary = self.code(weight).dense().detach()
        discrete = self.matrix * (projected - binary)  # by C: P²; by P: 2 P ∘ C − Ĉ
        return projected.clamp(-1, 1) + self.strength * self.step * discrete

    def auxiliary_loss(self, weight: Tensor) -> Tensor | None:
        error = self.matrix * weight - self.code(weight).dense().detach()
        return self.strength / 2 * at_least_float32(error).square().sum()


@register("pcnn")
@dataclass(frozen=True)
class PCNN(Method):
    """Layer-wise mean times sign; a learned projection matrix shapes gradients and a loss."""

    strength: float = 1e-4  # λ, the weight of the projection loss
    step: float = 0.1  # η, the step of the discrete weights in that loss
    projections: int = 1  # J

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("strength", "step"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(
                    f"pcnn: {name}={getattr(self, name)} should be a finite number >= 0"
                )
        if self.projections != 1:
            raise ValueError(
                f"pcnn: projections={self.projections} would need a network {self.projections} times as wide; "
                "use projections=1"
            )

    @property
    def unfit_for_lns(self) -> str | None:
        return (
            "its matrix and loss change the gradient of a sign that LNS replaces; "
            "use base={'name': 'dorefa', 'inputs': 'pm1'}, which is the same without them"
        )

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        assert isinstance(layer.weight, Tensor)
        return Projection(layer.weight, self.strength, self.step)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return ClippedSign()
