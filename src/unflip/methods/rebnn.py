"""ReBNN: Resilient Binary Neural Network.

Xu et al., AAAI 2023, arXiv:2302.00956. A latent weight near 0 oscillates: step after step its sign changes and changes
back. ReBNN learns the scale, and pulls latent weights to their binary values, more strongly where more signs change.

Weights     Q = |α| · b, b = sign(W), α learned, one per filter; it starts at mean |W|
            ∂L/∂W = |α| · ∂L/∂Q · 1[|W| ≤ 1] + γ · (W − |α| b)
            ∂L/∂|α| = Σ ∂L/∂Q · b − γ · Σ (W − |α| b) · b
            The terms with γ are the gradient of ½ γ ‖W − |α| b‖², which is not part of the loss that is printed
Balance     γ, one per filter, from the step before: the share of its weights whose sign that step changed, times the
            largest |∂L/∂Q| of that step. It starts at 0 (equation 3.150 of a book, see below)
Inputs      RSign, and RPReLU in place of every nn.PReLU: ReActNet's, with learned shifts (``reactnet``)

The terms with γ are added by ``unflip.before_step``. A loop that does not call it has γ = 0, and a warning says so.
The paper trains in two steps, as ReActNet does; the first step is ``reactnet`` with weights="float".

Uncertain: we could read the paper's abstract, not its equations. Those above are of a book by the same group, in its
section 3.9, "ReBNN: Resilient Binary Neural Network" (we take it to be Zhang et al., Binary Neural Networks, CRC
Press). There ∂/∂α of the second term is printed without its minus sign. Neither source says where α starts; the
released code draws it at random.

Differences from the authors' code (SteveTsui/ReBNN): in theirs γ comes from the gradient of the same step, and bounds
at 10⁻⁵ and 2·10⁻⁴ are applied in an order that always gives 2·10⁻⁴. The gradient has no factor 1[|W| ≤ 1], the binary
values are ±0.02 |α|, and ∂L/∂α multiplies with W, not with b. Here the largest |∂L/∂Q| is taken over weights with
|W| ≤ 1, the ones that have a gradient. sign(0) is +1, theirs 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unflip.methods.base import BinaryWeight, InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import (
    MAPPING_DECIDES_SIGNS,
    at_least_float32,
    filter_mean,
    replace_prelus,
    warn_of_missing_hook,
)
from unflip.methods.reactnet import RPReLU, RSign
from unflip.methods.registry import register
from unflip.ste import sign


class ResilientSign(WeightBinarizer):
    """|α| · sign(W); adds the gradient of the weighted reconstruction loss before each step."""

    carried = ("alpha",)
    gamma: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.alpha = nn.Parameter(filter_mean(weight.detach())[0].clone())
        self.register_buffer("gamma", torch.zeros_like(self.alpha, requires_grad=False))
        # during a step only: the signs before it, and the largest |∂L/∂Q| of each filter
        self.before: tuple[Tensor, Tensor] | None = None

    def code(self, weight: Tensor) -> BinaryWeight:
        return BinaryWeight(sign(weight)[None], self.alpha.abs()[None])

    def surrogate(self, weight: Tensor) -> Tensor:
        scale = self.alpha.abs()
        # the first term has the gradient of α, the second that of W
        return scale * sign(weight).detach() + scale.detach() * weight.clamp(-1, 1)

    @torch.no_grad()
    def latent_replaced(self, weight: Tensor) -> None:
        self.alpha.copy_(filter_mean(weight)[0])

    @torch.no_grad()
    def before_step(self, weight: Tensor) -> None:
        signs, scale = sign(weight), self.alpha.abs()
        if weight.grad is None or self.alpha.grad is None:
            self.before = signs, torch.zeros_like(scale)
            return
        wide = at_least_float32(scale)
        steepest = at_least_float32(weight.grad).flatten(1).abs().amax(1).view_as(wide)
        self.before = signs, steepest / wide.clamp_min(torch.finfo(wide.dtype).tiny)
        residual = weight - scale * signs
        weight.grad.add_(self.gamma * residual)
        pull = (residual * signs).flatten(1).sum(1).view_as(scale)
        self.alpha.grad.sub_(self.gamma * pull * torch.sign(self.alpha))

    @torch.no_grad()
    def after_step(self, weight: Tensor) -> None:
        if self.before is None:
            warn_of_missing_hook(self, "nothing keeps signs from oscillating")
            return
        signs, steepest = self.before
        changed = (sign(weight) != signs).to(steepest.dtype).flatten(1).mean(1)
        self.gamma.copy_(changed.view_as(steepest) * steepest)
        self.before = None


@register("rebnn")
@dataclass(frozen=True)
class ReBNN(Method):
    """A learned scale, and a pull towards the binary weights that grows with the share of changed signs."""

    @property
    def unfit_for_lns(self) -> str | None:
        return MAPPING_DECIDES_SIGNS

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        assert isinstance(layer.weight, Tensor)
        return ResilientSign(layer.weight)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return RSign(layer)

    def adapt(self, model: nn.Module) -> None:
        replace_prelus(model, RPReLU)
