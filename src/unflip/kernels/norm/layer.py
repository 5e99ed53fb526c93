"""PReLU, BatchNorm and shortcut after a binary layer of a model, by the operators of ``operator.py``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from unflip import layers
from unflip.kernels.norm import operator
from unflip.kernels.sign_conv import cover
from unflip.kernels.sign_conv import operator as sign_conv
from unflip.methods.base import InputBinarizer, WeightBinarizer
from unflip.methods.reactnet import RPReLU


def allowed() -> bool:
    """UNFLIP_NORM=0 leaves these layers to the compiler."""
    return os.environ.get("UNFLIP_NORM", "1") != "0"


def fused_norm(
    conv: Any,
    activation: Any,
    norm: Any,
    x: Tensor,
    shortcut: Tensor | None,
    *,
    networks: int,
    cuda: bool,
) -> Tensor | None:
    """:func:`unflip.layers.normalized` by these kernels; None if they do not cover the modules."""
    known = _plain(activation, nn.PReLU, nn.Identity, RPReLU)
    if not (_takes_units(conv) and _normalizes(norm) and known and layers.in_half(x)):
        return None
    slope = None if isinstance(activation, nn.Identity) else activation.weight
    shifts = activation.adapted if isinstance(activation, RPReLU) else None
    before = None if shifts is None else shifts.before
    with torch.autocast(x.device.type, enabled=False):
        weight = conv.binary_weight()
        scale = layers.scale_of_units(conv, weight)
        if scale is None:
            return None
        # BatchNorm subtracts RPReLU's second shift again: it only appears in the running mean,
        near = norm.running_mean if shifts is None else norm.running_mean - shifts.after.detach()
        # and its gradient is 0. On several GPUs, DistributedDataParallel waits for it, so it must not be None.
        beta = norm.bias if shifts is None else norm.bias + 0.0 * shifts.after
        rest = scale, before, slope, norm.weight, beta
        one = shortcut is x and _has_kernels(conv, x)
        if one and operator.supports(x, scale, before, slope, x):
            last = near, norm.eps, networks, cuda
            out, moments = _convolve_and_normalize(conv, x, weight, rest, last)
        else:
            y = layers.product_of_units(conv, x, weight, scale)
            if not operator.supports(y, scale, before, slope, shortcut):
                return None
            out, moments = operator.normalize(y, *rest, shortcut, near, norm.eps, networks)
        mean = moments[0] if shifts is None else moments[0] + shifts.after.detach()
        _follow(norm, mean, moments[1], out.numel() // out.shape[1])
    return out


def _has_kernels(conv: Any, x: Tensor) -> bool:
    """Whether our kernels take sign and convolution in one, and the output has the input's shape."""
    binarizer, shapes = conv.input_binarizer, (x.shape, conv.weight.shape)
    return (
        binarizer.fused_as is not None
        and type(binarizer).shifted is InputBinarizer.shifted
        and conv.padding_mode == "zeros"
        and cover.supports(*shapes, conv.stride, conv.padding, conv.dilation, conv.groups)
        and conv.stride == (1, 1)
        and all(2 * p + 1 == k for p, k in zip(conv.padding, conv.kernel_size, strict=True))
        and x.dtype == torch.float16
    )


def _convolve_and_normalize(
    conv: Any, x: Tensor, weight: Tensor, rest: tuple[Any, ...], last: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """``rest`` and ``last`` are the arguments of the norm, as ``operator.both`` takes them."""
    x = x.contiguous(memory_format=torch.channels_last)
    scale, shift, slope, gamma, beta = rest
    signs = layers.units(weight, scale)
    kind = cover.INPUTS.index(conv.input_binarizer.fused_as)
    values = *operator.by_channel(x.shape[1], scale, shift, slope), gamma, beta, *last
    halves = sign_conv.halves(signs)
    out, moments, _ = operator.both(x, signs, halves, conv.padding[0], kind, *values)
    return out, moments


def _takes_units(conv: Any) -> bool:
    return (
        _plain(conv, layers.BinaryConv2d)
        and conv.bias is None
        and type(conv.input_binarizer).output_scale is InputBinarizer.output_scale
        and type(conv.weight_binarizer).gradient_branch is WeightBinarizer.gradient_branch
    )


def _normalizes(norm: Any) -> bool:
    return (
        _plain(norm, nn.BatchNorm2d)
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
    )


def _plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether the module is exactly of one of these classes, without hooks or a forward of its own."""
    changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return type(module) in kinds and not changed


def _follow(norm: Any, mean: Tensor, variance: Tensor, pixels: int) -> None:
    """Update the running mean and (unbiased) variance as BatchNorm does."""
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(variance * (pixels / max(1, pixels - 1)), norm.momentum)
