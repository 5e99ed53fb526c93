"""Resizing, reshaping, slicing, padding and concatenation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unflip.packing.convert import Converter, Ref
from unflip.packing.ops.registry import dims_of, handles


@handles("upsample_nearest2d", "_upsample_nearest_exact2d")
def upsample(c: Converter, out: Tensor, x: Ref, size: Any, *factors: Any, **named: Any) -> Ref:
    _check_factors(c, x, out, factors, named)
    inside, outside = x.tensor.shape[2:], out.shape[2:]
    if any(o % i for i, o in zip(inside, outside, strict=True)):
        raise c.refuse(
            f"upsampling {tuple(inside)} to {tuple(outside)} pixels is not supported; "
            "the output size must be a multiple of the input size"
        )
    factor = [o // i for i, o in zip(inside, outside, strict=True)]
    return c.emit("upsample", [x], out, factor=factor)


@handles("upsample_bilinear2d")
def resize(
    c: Converter, out: Tensor, x: Ref, size: Any, align_corners: bool, *factors: Any, **named: Any
) -> Ref:
    if not align_corners:
        _check_factors(c, x, out, factors, named)
    if out.shape == x.tensor.shape:
        return c.map(x, out)
    return c.emit("resize", [x], out, size=list(out.shape[2:]), align_corners=bool(align_corners))


def _check_factors(c: Converter, x: Ref, out: Tensor, *given: Any) -> None:
    """The file stores sizes. A factor whose size is rounded would give different positions of the pixels."""
    leaves = torch.utils._pytree.tree_leaves(given)  # one list, or two numbers
    factors = [factor for factor in leaves if factor is not None]
    for factor, i, o in zip(factors, x.tensor.shape[2:], out.shape[2:], strict=False):
        if not math.isclose(i * factor, o, rel_tol=1e-9):
            raise c.refuse(
                f"scale_factor={factor:g} makes {o} of {i} pixels instead of {i * factor:g}; use a factor that gives a "
                "whole number, size=... or recompute_scale_factor=True"
            )


@handles(
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_lanczos2d_aa",
    "upsample_linear1d",
    "upsample_trilinear3d",
    "upsample_nearest1d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact3d",
)
def other_upsample(c: Converter, out: Tensor, x: Ref, *rest: Any, **named: Any) -> Ref:
    raise c.refuse(
        "only images can be resized, with mode='bilinear' or 'nearest' and without antialias"
    )


@handles("pixel_shuffle")
def pixel_shuffle(c: Converter, out: Tensor, x: Ref, factor: int) -> Ref:
    c.shape(out)  # refuses five dims
    return c.emit("pixel_shuffle", [x], out, factor=[int(factor)] * 2)


@handles("channel_shuffle")
def channel_shuffle(c: Converter, out: Tensor, x: Ref, groups: int) -> Ref:
    return c.emit("channel_shuffle", [x], out, groups=int(groups))


@handles("view", "reshape", "_unsafe_view", "flatten", "squeeze", "unsqueeze", "unflatten")
def reshape(c: Converter, out: Tensor, x: Ref, *rest: Any, **named: Any) -> Ref:
    if len(out) != c.batch:
        raise c.refuse(
            f"it reshapes a batch of {c.batch} to {tuple(out.shape)}, which mixes the images of the batch; "
            "keep the batch as the first dim"
        )
    before = c.shape(x.tensor)
    after = (*out.shape[1:], 1, 1)
    if before == after[:3] and all(size == 1 for size in after[3:]):
        return c.alias(x, out)
    if after == (before[0] * before[1] * before[2], *[1] * (len(after) - 1)):
        return c.emit("flatten", [x], out)
    hint = " (nn.ChannelShuffle and nn.PixelShuffle mix channels)" if out.dim() > 4 else ""
    raise c.refuse(
        f"it reshapes {tuple(x.tensor.shape)} to {tuple(out.shape)}; only flattening an image to a vector can be "
        f"packed{hint}"
    )


@handles("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
def constant_like(c: Converter, out: Tensor, x: Ref, *rest: Any, **named: Any) -> Tensor:
    """A constant, for which x only says the shape and type."""
    for value in rest:
        c.constant(value, "value")
    return out


@handles("expand", "expand_as")
def expand(c: Converter, out: Tensor, x: Any, *rest: Any, **named: Any) -> Any:
    """A constant stays one if it takes the shape of an image."""
    if isinstance(x, Ref) and out.shape != x.tensor.shape:
        raise c.refuse(
            f"it broadcasts {tuple(x.tensor.shape)} to {tuple(out.shape)}; only constants can be broadcast (leave "
            "expand out: x * y broadcasts y itself)"
        )
    return c.alias(x, out) if isinstance(x, Ref) else out


@handles("slice")
def slice_(
    c: Converter,
    out: Tensor,
    x: Ref,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Ref:
    if out.shape == x.tensor.shape:
        return c.alias(x, out)
    [dim] = dims_of(x, [dim])
    if dim == 0 or out.numel() == 0:
        raise c.refuse(
            "it slices the batch; only channels, height and width can be sliced"
            if dim == 0
            else "its result is empty; a slice must have at least one element"
        )
    first, size = int(start or 0), x.tensor.shape[dim]
    return _sliced(c, x, out, dim, max(0, first + size if first < 0 else first), int(step))


def _sliced(c: Converter, x: Ref, out: Tensor, dim: int, first: int, step: int) -> Ref:
    """A slice of a slice becomes one slice of the first input."""
    base, start, steps = x.value, [0, 0, 0], [1, 1, 1]
    if x.value and c.ops[x.value - 1].kind == "slice":
        inner = c.ops[x.value - 1]
        base, start, steps = (
            inner.inputs[0],
            list(inner.fields["start"]),
            list(inner.fields["step"]),
        )
    start[dim - 1] += first * steps[dim - 1]
    steps[dim - 1] *= step
    stop = [s + (n - 1) * k + 1 for s, n, k in zip(start, c.shape(out), steps, strict=True)]
    return c.emit("slice", [Ref(base, out)], out, start=start, stop=stop, step=steps)


@handles("narrow")
def narrow(c: Converter, out: Tensor, x: Ref, dim: int, start: int, length: int) -> Ref:
    return slice_(c, out, x, dim, start, start + length)


@handles("chunk", "split", "split_with_sizes")
def split(c: Converter, out: Any, x: Ref, sizes: Any, dim: int = 0) -> list[Ref]:
    parts, at = [], 0
    [dim] = dims_of(x, [dim])
    for part in out:
        ref = slice_(c, part, x, dim, at, at + part.shape[dim])
        parts.append(c.stamped(ref, part))
        at += part.shape[dim]
    return parts


@handles("pad", "constant_pad_nd")
def pad(
    c: Converter,
    out: Tensor,
    x: Ref,
    sides: Any,
    mode: Any = "constant",
    value: float | None = None,
) -> Ref:
    if not isinstance(mode, str):
        mode, value = "constant", mode  # the argument of constant_pad_nd is the value
    if mode != "constant" or value not in (None, 0):
        what = f"mode={mode!r}" if mode != "constant" else f"value={value}"
        raise c.refuse(f"{what} is not supported; the runtime pads with zeros only")
    dims = x.tensor.dim()
    before, after = [0, 0, 0], [0, 0, 0]
    for place_, (low, high) in enumerate(zip(sides[::2], sides[1::2], strict=True)):
        dim = dims - 1 - place_
        if low < 0 or high < 0 or (dim == 0 and (low or high)):
            raise c.refuse(
                f"padding {list(sides)} is not supported; only channels, height and width can be padded, by 0 or more"
            )
        if dim:
            before[dim - 1], after[dim - 1] = int(low), int(high)
    return c.emit("pad", [x], out, before=before, after=after)


@handles("cat", "concat", "concatenate")
def cat(c: Converter, out: Tensor, parts: list[Any], dim: int = 0) -> Ref:
    if dim % out.dim() != 1:
        raise c.refuse(
            f"dim={dim} is not supported; only a concatenation of channels, dim 1, can be packed"
        )
    # torch leaves out empty vectors: torch.tensor([]), from which a loop may start
    parts = [part for part in parts if not isinstance(part, Tensor) or part.shape != (0,)]
    whole = list(parts)
    zeros = [0, 0]
    for side, end in ((0, 0), (1, -1)):
        while whole and isinstance(whole[end], Tensor) and not whole[end].any():
            zeros[side] += whole.pop(end).shape[1]
    if not whole or any(not isinstance(part, Ref) for part in whole):
        raise c.refuse("one of its parts is a constant; only constants of zeros can be packed")
    if len(parts) == 1:
        return c.map(whole[0], out)
    if len(whole) == len(parts):
        return c.emit("concat", whole, out)
    channels, height, width = c.shape(out)
    inner = whole[0]
    if len(whole) > 1:
        inner = c.emit("concat", whole, (channels - sum(zeros), height, width))
    return c.emit("pad", [inner], out, before=[zeros[0], 0, 0], after=[zeros[1], 0, 0])
