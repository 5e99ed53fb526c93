"""Normalizations."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from unflip.packing.convert import Converter, Ref, numbers
from unflip.packing.file import Array
from unflip.packing.ir import affine, finite
from unflip.packing.ops.registry import handles


@handles("batch_norm")
def batch_norm(
    c: Converter,
    out: Tensor,
    x: Ref,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool = False,
) -> Ref:
    if training or mean is None:
        raise c.refuse(
            "it uses the mean and variance of the batch; only running statistics can be packed"
        )
    with np.errstate(all="ignore"):
        scale = 1 / np.sqrt(numbers(var) + eps)
        scale = scale if weight is None else scale * numbers(weight)
        shift = -numbers(mean) * scale
        shift = shift if bias is None else shift + numbers(bias)
    if not finite(scale, shift):
        raise c.refuse(
            "its parameters or statistics contain NaN, infinity, numbers too large, or a negative variance"
        )
    return c.map(x, out, affine(scale, shift))


@handles("group_norm")
def group_norm(
    c: Converter,
    out: Tensor,
    x: Ref,
    groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Ref:
    return _normalized(c, out, x, groups, weight, bias, eps)


@handles("instance_norm")
def instance_norm(
    c: Converter,
    out: Tensor,
    x: Ref,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn: bool = False,
) -> Ref:
    if not use_input_stats:
        return batch_norm(c, out, x, weight, bias, mean, var, False, momentum, eps)
    return _normalized(c, out, x, x.tensor.shape[1], weight, bias, eps)


@handles("layer_norm")
def layer_norm(
    c: Converter,
    out: Tensor,
    x: Ref,
    shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Ref:
    if list(shape) != list(x.tensor.shape[1:]):
        raise c.refuse(
            f"a norm over the last dims {list(shape)} of {tuple(x.tensor.shape)} is not supported; "
            "only a norm over all dims but the batch can be packed"
        )
    return _normalized(c, out, x, 1, weight, bias, eps)


def _normalized(
    c: Converter, out: Tensor, x: Ref, groups: int, weight: Any, bias: Any, eps: float
) -> Ref:
    """Normalize groups of channels, then apply the learned scale and shift per channel."""
    if eps <= 0:
        raise c.refuse(f"eps={eps} is not supported; eps must be above 0")
    plain = c.emit("normalize", [x], out, groups=int(groups), epsilon=float(eps))
    if weight is None and bias is None:
        return plain
    return c.map(plain, out, affine(_learned(c, x, weight), _learned(c, x, bias)))


def _learned(c: Converter, x: Ref, vector: Any) -> Array | None:
    """A vector (C) is per channel. LayerNorm's parameters of a whole sample, (C, H, W), keep their shape."""
    if vector is None:
        return None
    vector = c.constant(vector, "weight or bias")
    along = vector.reshape(-1, *[1] * (x.tensor.dim() - 2)) if vector.dim() == 1 else vector
    return c.vector(along, x)
