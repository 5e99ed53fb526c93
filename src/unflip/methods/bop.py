"""Bop: Latent Weights Do Not Exist, Rethinking Binarized Neural Network Optimization.

Helwegen et al., NeurIPS 2019, arXiv:1906.02107.

There are no latent weights: the weight parameter itself holds ±1, and a special optimizer decides when a weight flips.
All other parameters keep the recipe's optimizer.

Weights     Q = W, no scale; ∂L/∂W = ∂L/∂Q
Step        m ← (1 − γ) m + γ ∂L/∂W;  w ← −w where |m| > τ and sign(m) = sign(w), which is w·m > τ
Inputs      B = sign(x), ∂L/∂x = ∂L/∂B · 1[|x| ≤ 1]             (as BinaryNet)

γ is the learning rate of the optimizer and follows the recipe's schedule; τ is constant. The defaults are those of the
released code for the paper's CIFAR-10 result: γ = 1e-4, τ = 1e-8. There γ falls to a tenth every 100 of 500 epochs,
with batches of 50 and Adam at 0.01 for all other parameters.

The weights become ±1 when the optimizer is created. Until then they are the network's first weights (torch's initial
ones, or those of a trained network) and stand for their signs: loading and saving float weights does not change them.

Differences from the authors' code: in theirs a weight with w·m exactly τ becomes +1; here it is unchanged. Their first
and last layer are binary too; here the network decides that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unflip.methods.base import InputBinarizer, Method, WeightBinarizer, can_be_read
from unflip.methods.pieces import ClippedSign, PlainSign
from unflip.methods.registry import register
from unflip.ste import sign

# why it is unfit for LNS
NO_LATENT_WEIGHTS = "it has no latent weights, which a mapping network needs as its input"


class Bop(Optimizer):
    """Flips ±1 weights where the average of their gradients exceeds a threshold; ``lr`` is γ."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-4, threshold: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "peak_lr": lr, "threshold": threshold})
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    self.state[weight] = {"average": torch.zeros_like(weight)}
                    weight.copy_(sign(weight))
                if (
                    group["params"] and group["params"][0].is_cuda
                ):  # a captured graph reads a tensor
                    group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, weight.grad, group)
        return loss

    def update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """One step for one tensor, in place; the host reads nothing from the device."""
        average, gamma = self.state[weight]["average"], group["lr"]
        average.mul_(1 - gamma).add_(grad * gamma)
        flip_above(weight, average, group["threshold"])


def flip_above(weight: Tensor, signal: Tensor, threshold: float) -> None:
    """w ← −w where w · signal > threshold, in place."""
    bits = sign(weight)  # ±1 already, unless other weights were loaded after the last step
    weight.copy_(torch.where(bits * signal > threshold, -bits, bits))


class FlippedSign(PlainSign):
    """Signs that Bop flips; clipping to [−1, 1] does not change ±1."""

    looked_at = False  # one check is enough: Bop makes every weight ±1 when it is created

    @torch.no_grad()
    def after_step(self, weight: Tensor) -> None:
        if can_be_read(weight) and not self.looked_at:
            self.looked_at = True
            _warn_of_latent(weight, self.made_by)
        super().after_step(weight)


def _warn_of_latent(weight: Tensor, method: str) -> None:
    if not (weight.abs() == 1).all():
        warnings.warn(
            f"{method}: after a step a binary layer has weights that are not ±1. Another optimizer trains them as "
            "latent weights, which is the method binarynet. Give the weights of binary layers to "
            f"unflip.methods.get({method!r}).latent_optimizer(weights) and all other parameters to your own optimizer "
            "(docs/training.md).",
            stacklevel=5,  # the caller of unflip.after_step
        )


@register("bop")
@dataclass(frozen=True)
class BopMethod(Method):
    """No latent weights: ±1 weights flip where the average of their gradients exceeds a threshold."""

    gamma: float = 1e-4
    threshold: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gamma <= 1:
            raise ValueError(f"{self.name}: gamma={self.gamma} should be a rate, 0 < gamma <= 1")
        if not self.threshold >= 0:
            raise ValueError(f"{self.name}: threshold={self.threshold} should be >= 0")

    @property
    def family(self) -> str:
        """All options affect training only."""
        return self.name

    @property
    def unfit_for_lns(self) -> str | None:
        return NO_LATENT_WEIGHTS

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return FlippedSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return ClippedSign()

    def latent_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer | None:
        return Bop(parameters, self.gamma, self.threshold)
