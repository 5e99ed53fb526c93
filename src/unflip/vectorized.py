"""Operations whose gradients torch does not vectorize on a CPU, with the same values and gradients, but faster.

Together with ``torch.where`` (see ``ste.sign``) they took half of the time of training a binary ResNet-20 there.
On other devices, and in compiled or exported code, these are torch's own operations.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad


def eager_on_cpu(x: Tensor) -> bool:
    """Whether the forms for a CPU apply: not while torch traces, compiles or exports, nor under torch.func."""
    return (
        isinstance(x, Tensor)  # torch.fx traces with other objects
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch._C._get_tracing_state()
        and forward_ad._current_level < 0  # no forward-mode gradients
        and not torch._C._are_functorch_transforms_active()
    )


def differentiated_on_cpu(x: Tensor) -> bool:
    return eager_on_cpu(x) and x.requires_grad and torch.is_grad_enabled()


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """``x.clamp(low, high)``: its gradient is 1 from ``low`` to ``high``, both included, and 0 outside.

    Where x is NaN, so is the value. The gradient there is 0 or 1, depending on the device.
    """
    if differentiated_on_cpu(x):
        return _Clip.apply(x, low, high)
    return x.clamp(low, high)


def clip_gradient(grad: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """``grad`` where low <= x <= high, otherwise 0, for finite ends.

    By the gradient of hardtanh, which leaves out both ends. So its ends are the floats beyond these.
    """
    # By numpy, because torch's FakeTensorMode hides the values of tensors.
    kind = np.float32 if x.dtype == torch.float32 else np.float64
    below = float(np.nextafter(kind(low), kind(-math.inf)))
    above = float(np.nextafter(kind(high), kind(math.inf)))
    # Where torch flushes denormal numbers, the float next to 0 is 0.
    tiny = torch.finfo(x.dtype).tiny
    below = low - tiny if below == low else below
    above = high + tiny if above == high else above
    return torch.ops.aten.hardtanh_backward(grad, x, below, above)


def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """``F.prelu(x, slope)``: x where x > 0, otherwise slope · x, with one slope per channel or one for all.

    Where values or gradients are infinite, gradients may be NaN instead of infinite.
    """
    if differentiated_on_cpu(x) and x.dim() > 1:
        return _PReLU.apply(x, slope)
    return F.prelu(x, slope)


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.ends = low, high
        ctx.save_for_backward(x)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return clip_gradient(grad, x, *ctx.ends), None, None


class _PReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(x, slope)
        return F.prelu(x, slope)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, slope = ctx.saved_tensors
        above = torch.ops.aten.threshold_backward(grad, x, 0)  # grad where x > 0, otherwise 0
        below = grad - above
        others = [d for d in range(x.dim()) if d != 1 or slope.numel() == 1]
        of_slope = (below * x).sum(others).view_as(slope)
        return torch.addcmul(above, below, slope.view(-1, *[1] * (x.dim() - 2))), of_slope
