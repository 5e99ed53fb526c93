"""Sign and the straight-through gradient, in the one form that works in every torch we support.

Under ``torch.compile`` in torch 2.11 a custom ``autograd.Function`` silently lost its gradient: the binary weights
then never flip while the loss still falls. ``hard.detach() + (soft - soft.detach())`` is correct eager, compiled and
exported, and its value is exactly ``hard`` because x - x = 0.

``torch.where`` and the backward passes of ``clamp`` and PReLU are not vectorized on a CPU, and took two thirds of the
time of training there. This file avoids the first two, with the same values and gradients; ``kernels/prelu.py`` the
third.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def sign(x: Tensor) -> Tensor:
    """+1 where x >= 0 (so sign(0) = sign(-0) = +1), -1 where x < 0; NaN stays NaN. It has no gradient.

    ``torch.sign`` gives 0 at 0, and ``where(x >= 0, 1, -1)`` turns a NaN into a valid bit.
    """
    x = x.detach()
    if _eager_on_cpu(x):  # threshold(x, t, v) is v where x <= t, otherwise x, also for NaN
        y = F.threshold(-x, 0.0, -1.0)  # -1 where x >= 0, |x| elsewhere
        return F.threshold(y.neg_(), 0.0, -1.0, inplace=True)
    one = torch.ones_like(x)
    return torch.where(x >= 0, one, torch.where(x < 0, -one, x))


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """``x.clamp(low, high)``: its gradient is 1 from ``low`` to ``high``, both included, and 0 outside.

    Where x is NaN, so is the value. The gradient there is 0 or 1, depending on the device.
    """
    if _eager_on_cpu(x) and x.requires_grad and torch.is_grad_enabled():
        return _Clip.apply(x, low, high)
    return x.clamp(low, high)


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The value of ``hard`` with the gradient of ``soft``; both have the same shape.

    ``soft`` must be finite: inf - inf is NaN.
    """
    return hard.detach() + (soft - soft.detach())


class _Clip(torch.autograd.Function):
    """clamp, with the gradient of hardtanh, which leaves out both ends: so it gets the next floats beyond them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ends = torch.tensor([low, high], dtype=x.dtype)
        ctx.beyond = torch.nextafter(ends, ends.new_tensor([-math.inf, math.inf])).tolist()
        ctx.save_for_backward(x)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(grad, x, *ctx.beyond), None, None


def _eager_on_cpu(x: Tensor) -> bool:
    """Whether the forms for a CPU apply: not while tracing, compiling or exporting, nor under torch.func."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )
