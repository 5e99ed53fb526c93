"""SURGE: Surrogate Gradient Adaptation in Binary Neural Networks.

Huang et al., ICML 2026, arXiv:2605.10989. Beside each binary layer stands a float layer of the same size with weights A
of its own. It adds nothing to the output, but its gradient to that of the input. That part is not cut off at |x| > 1.

Weights     Q = α · sign(W), α = mean |W| of each filter, not differentiated; ∂L/∂W = ∂L/∂Q
Inputs      B = sign(x)
Output      y = Q * B + (A * x − stop(A * x)): the value of the binary layer
Gradient    ∂L/∂x = g_b + λ g_a,  g_b = (Qᵀ * ∂L/∂y) · 1[|x| ≤ 1],  g_a = Aᵀ * ∂L/∂y
            λ = η ‖g_b‖ / (‖g_a‖ + 10⁻⁸), with norms over the whole batch
            ∂L/∂A is that of the float layer

``*`` is the layer's product, a convolution or a matrix. In evaluation and in a frozen network there is no branch.

Not verified: we had the abstract and notes of others on the paper, and found no code. From these come the output, both
parts of the gradient, λ and 10⁻⁸, and the gradients of the signs. Not known, so our choices: η = 0.1, that A starts as
a copy of W, the scale α, and that λ multiplies only the gradient of x (in the paper's formula it may also multiply that
of A).

A step costs about twice as much time, and the branch as much memory as the layer. With η = 1 the gradient can double
from layer to layer; in a trial with a ResNet-20 on digits, training diverged.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unflip.methods.base import InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import ClippedSign, FilterMeanSign, at_least_float32
from unflip.methods.registry import register

EPSILON = 1e-8


# An operator, because a compiled autograd.Function may lose its gradient (see ``ste.py``).
@torch.library.custom_op("unflip::two_paths", mutates_args=())
def two_paths(x: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """x for the binary layer and x for the branch; the gradient of the second is scaled to η times the norm of the
    first."""
    return x.clone(), x.clone()


@two_paths.register_fake
def _(x: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, float], output: Any) -> None:
    ctx.eta = inputs[1]


def _merge(ctx: Any, binary: Tensor, branch: Tensor) -> tuple[Tensor, None]:
    binary_wide, branch_wide = at_least_float32(binary), at_least_float32(branch)
    factor = ctx.eta * binary_wide.norm() / (branch_wide.norm() + EPSILON)
    return (binary_wide + factor * branch_wide).to(binary.dtype), None


two_paths.register_autograd(_merge, setup_context=_save)


class BranchedSign(FilterMeanSign):
    """α · sign(W), and the weights A of the float branch."""

    def __init__(self, weight: Tensor, eta: float) -> None:
        super().__init__()
        self.eta = eta
        self.branch = nn.Parameter(weight.detach().clone())

    @torch.no_grad()
    def latent_replaced(self, weight: Tensor) -> None:
        self.branch.copy_(weight)

    def gradient_branch(self, x: Tensor, layer: Any) -> tuple[Tensor, Tensor] | None:
        if not self.training or not torch.is_grad_enabled():
            return None
        x, beside = two_paths(x, self.eta)
        output = layer._multiply(beside, self.branch, None)
        return x, output - output.detach()


@register("surge")
@dataclass(frozen=True)
class Surge(Method):
    """Filter mean times sign, and a float branch that adds only a gradient."""

    eta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.eta < math.inf:
            raise ValueError(
                f"surge: eta={self.eta} should be finite and >= 0; it is the norm of the branch's gradient, relative "
                "to that of the binary layer"
            )

    @property
    def family(self) -> str:
        """η affects training only."""
        return self.name

    @property
    def unfit_for_lns(self) -> str | None:
        return "its branch stands beside weights that are signs of W, and in LNS a mapping network decides the signs"

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        assert isinstance(layer.weight, Tensor)
        return BranchedSign(layer.weight, self.eta)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return ClippedSign()
