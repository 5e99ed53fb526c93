"""DSQ: Differentiable Soft Quantization: Bridging Full-Precision and Low-Bit Neural Networks.

Gong et al., ICCV 2019, arXiv:1908.05033, at 1 bit: one interval [l, u] of width Δ = u − l with midpoint m = (l + u)/2.

Soft step   φ(x) = s·tanh(k·(clip(x, l, u) − m)), s = 1 / (1 − α), k = ln(2/α − 1) / Δ: φ(l) = −1, φ(u) = 1
            α = 1 − tanh(kΔ/2) in (0, 1) is the temperature: for α → 0, φ is the step itself
Weights     V = W / E, E = mean|W| of the layer (not differentiated);  Q = E · Δ/2 · sign(φ(V))
            ∂L/∂V = ∂L/∂Q · E · Δ/2 · φ'(V), so that ∂L/∂W = ∂L/∂Q · Δ/2 · φ'(V), φ'(x) = s·k·(1 − tanh²(k·(x − m)))
            in [l, u] and 0 outside; l, u and α are learned by the derivatives of φ, l and u also by that of Δ/2
Inputs      B = sign(φ(x)), ∂L/∂x = ∂L/∂B · φ'(x); their own l, u and α are learned by the derivatives of φ

It is computed with z = (clip(x, l, u) − m) / (Δ/2): φ = tanh(z·artanh(1 − α)) / (1 − α).

We know of no code by the authors for 1 bit; this follows the paper's formulas. Our choices:
- The paper's levels at 1 bit are l and u, i.e. m ± Δ/2. The constant m is left out, so that weights are a scale times
  a sign. The inputs' Δ/2 is left out too: the learned scale of the weights includes it.
- The weights' range is in units of mean|W|: one learning rate suits every layer, and weights taken from another
  network need no calibration. It starts as [−2.5, 2.5], the range of inputs as [−1, 1].
- α starts at 0.2 and is clipped to [0.001, 0.9] in use; Δ is at least 0.2 in use. The gradient passes through both
  clips, so the next step can undo a step that went too far. The recipe's weight decay pulls α towards 0.
l, u and α are parameters of the model; there is no schedule.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unflip.methods.base import BinaryWeight, InputBinarizer, InputCode, Method, WeightBinarizer
from unflip.methods.pieces import layer_mean, sign_code
from unflip.methods.registry import register
from unflip.ste import sign, straight_through
from unflip.vectorized import clip

ALPHA_RANGE = (0.001, 0.9)
SMALLEST_WIDTH = 0.2


class SoftStep(nn.Module):
    """The learned range [lower, upper] and temperature α of φ."""

    def __init__(self, bound: float, alpha: float, like: Tensor) -> None:
        super().__init__()
        self.lower = nn.Parameter(like.new_full((), -bound))
        self.upper = nn.Parameter(like.new_full((), bound))
        self.alpha = nn.Parameter(like.new_full((), alpha))

    @property
    def middle(self) -> Tensor:
        return (self.lower + self.upper) / 2

    @property
    def half_width(self) -> Tensor:
        width = self.upper - self.lower
        return straight_through(width.clamp_min(SMALLEST_WIDTH), width) / 2

    def forward(self, x: Tensor) -> Tensor:
        """φ(x)."""
        alpha = straight_through(self.alpha.clamp(*ALPHA_RANGE), self.alpha)
        z = clip((x - self.middle) / self.half_width, -1, 1)
        return torch.tanh(z * torch.atanh(1 - alpha)) / (1 - alpha)


class SoftStepWeights(WeightBinarizer):
    def __init__(self, step: SoftStep) -> None:
        super().__init__()
        self.step = step

    def unit(self, weight: Tensor) -> Tensor:
        """E, or 1 if all weights are 0."""
        mean = layer_mean(weight.detach())[0]
        return mean.masked_fill(mean == 0, 1)

    def code(self, weight: Tensor) -> BinaryWeight:
        unit = self.unit(weight)
        scale = unit * self.step.half_width
        return BinaryWeight(sign(weight / unit - self.step.middle)[None], scale[None])

    def surrogate(self, weight: Tensor) -> Tensor:
        unit, half_width = self.unit(weight), self.step.half_width
        signs = sign(weight / unit - self.step.middle).detach()
        # the first term has the gradient of Δ/2, the second those of W, l, u and α
        return unit * (half_width * signs + half_width.detach() * self.step(weight / unit))


class SoftStepInputs(InputBinarizer):
    def __init__(self, step: SoftStep) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        # The gradients of l, u and α are sums over all of x, for which half precision is too coarse.
        x = x.to(torch.promote_types(x.dtype, self.step.lower.dtype))
        return straight_through(sign(x - self.step.middle), self.step(x))

    def code(self) -> InputCode:
        return sign_code(self.step.middle.view(1, 1))


@register("dsq")
@dataclass(frozen=True)
class DSQ(Method):
    """Sign with the gradient of a tanh whose range and temperature are learned per layer."""

    alpha: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = ALPHA_RANGE
        if not low <= self.alpha <= high:
            raise ValueError(f"dsq: alpha={self.alpha} should be in [{low}, {high}]")

    @property
    def family(self) -> str:
        """α is only the first value of a parameter."""
        return self.name

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        assert isinstance(layer.weight, Tensor)
        return SoftStepWeights(SoftStep(2.5, self.alpha, layer.weight))

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        assert isinstance(layer.weight, Tensor)
        return SoftStepInputs(SoftStep(1.0, self.alpha, layer.weight))
