"""Bop2ndOrder: A Bop and Beyond, A Second Order Optimizer for Binarized Neural Networks.

Suarez-Ramirez et al., LatinX in AI workshop at CVPR 2021, arXiv:2104.05124. Bop compares an average of gradients with a
threshold. Here the average is first divided by the size of the gradients, as in Adam, so that one threshold fits all
layers.

Weights     Q = W, no scale; ∂L/∂W = ∂L/∂Q
Step        m ← (1 − γ) m + γ g, v ← (1 − σ) v + σ g² with g = ∂L/∂W, both 0 at the start
            w ← −w where w · m / (√v + 10⁻¹⁰) > τ
Inputs      B = sign(x), ∂L/∂x = ∂L/∂B · 1[|x| ≤ 1]             (as BinaryNet and Bop)

γ is the learning rate of the optimizer and follows the recipe's schedule; σ and τ are constant. The defaults are those
of the authors' ablations on CIFAR-10: γ = 10⁻⁷, σ = 10⁻³, τ = 10⁻⁶. In the first step m / √v is γ / √σ = 3·10⁻⁶ for
every weight, so that each weight whose sign is that of its gradient flips at once. Their best result there (91.9 %)
moves all three linearly over the training: γ from 10⁻² to 10⁻⁵, σ from 10⁻⁷ to 10⁻², τ from 10⁻⁵ to 10⁻⁸.

As for Bop, the weights become ±1 when the optimizer is created, and an ordinary optimizer would train ``binarynet``.

Uncertain: the formulas are those of the released code (CuauSuarez/Bop2ndOrder) and agree with the paper's abstract; we
could not read the paper's equations. The paper also has a version that corrects the bias of m and v, which is left out.

Differences from the authors' code: in theirs a weight with w · m / (√v + 10⁻¹⁰) exactly τ becomes +1; here it is
unchanged. Their first and last layer are binary too; here the network decides that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unflip.methods.bop import Bop, BopMethod, flip_above
from unflip.methods.registry import register

EPSILON = 1e-10


class Bop2(Bop):
    """Flips ±1 weights where the average of their gradients, in units of their size, exceeds a threshold."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-7,
        threshold: float = 1e-6,
        sigma: float = 1e-3,
    ) -> None:
        super().__init__(params, lr, threshold)
        self.defaults["sigma"] = sigma
        for group in self.param_groups:
            group["sigma"] = sigma
            for weight in group["params"]:
                self.state[weight]["square"] = torch.zeros_like(weight)

    def update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        average, square = state["average"], state["square"]
        average.add_((grad - average) * group["lr"])
        square.add_((grad.square() - square) * group["sigma"])
        flip_above(weight, average / (square.sqrt() + EPSILON), group["threshold"])


@register("bop2")
@dataclass(frozen=True)
class Bop2Method(BopMethod):
    """Bop with gradients in units of their size: ±1 weights flip where their average exceeds a threshold."""

    gamma: float = 1e-7
    threshold: float = 1e-6
    sigma: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.sigma <= 1:
            raise ValueError(f"{self.name}: sigma={self.sigma} should be a rate, 0 < sigma <= 1")

    def latent_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer | None:
        return Bop2(parameters, self.gamma, self.threshold, self.sigma)
