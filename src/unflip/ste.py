"""Sign and the straight-through gradient, in the one form that works in every torch we support.

Under ``torch.compile`` in torch 2.11 a custom ``autograd.Function`` silently lost its gradient: the binary weights
then never flip while the loss still falls. ``hard.detach() + (soft - soft.detach())`` is correct eager, compiled and
exported, and its value is exactly ``hard`` because x - x = 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unflip.vectorized import clip_gradient, differentiated_on_cpu, eager_on_cpu


def sign(x: Tensor) -> Tensor:
    """+1 where x >= 0 (so sign(0) = sign(-0) = +1), -1 where x < 0; NaN stays NaN. It has no gradient.

    ``torch.sign`` gives 0 at 0, and ``where(x >= 0, 1, -1)`` turns a NaN into a valid bit.
    """
    x = x.detach()
    if eager_on_cpu(x):
        # where is slow there. threshold(x, t, v) is v where x <= t, otherwise x, also for NaN
        y = F.threshold(-x, 0.0, -1.0)  # -1 where x >= 0, |x| elsewhere
        return F.threshold(y.neg_(), 0.0, -1.0, inplace=True)
    one = torch.ones_like(x)
    return torch.where(x >= 0, one, torch.where(x < 0, -one, x))


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The value of ``hard`` with the gradient of ``soft``; both have the same shape.

    ``soft`` must be finite: inf - inf is NaN.
    """
    return hard.detach() + (soft - soft.detach())


def clipped_sign(x: Tensor) -> Tensor:
    """sign(x) with the gradient of ``x.clamp(-1, 1)``. On a CPU this is one function, which reads x less often."""
    if differentiated_on_cpu(x):
        return _ClippedSign.apply(x)
    return straight_through(sign(x), x.clamp(-1, 1))


class _ClippedSign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return sign(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return clip_gradient(grad, x, -1, 1)
