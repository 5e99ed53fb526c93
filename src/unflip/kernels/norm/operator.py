"""PReLU, BatchNorm and shortcut of a binary convolution in training: two kernels forward, two backward.

The operations after a binary convolution read and write far more memory than the convolution itself. A compiler that
gets them one by one needs a third pass backward, for the gradient of the slopes, and reads the terms of the shortcut's
gradient again in each. The operator below is written out by hand. It takes the convolution's integers y (M pixels of C
channels, NHWC), the scale s of their filters (a constant here), slopes a, BatchNorm's γ and β, and the shortcut t. A
learned shift b before the PReLU is ReActNet's:

    u = s · y + b     z = u where u > 0, else a · u     ẑ = (z − mean z) / √(var z + ε)     out = γ · ẑ + β + t

The gradients are in ``triton_kernels.py``. If the shortcut is the convolution's own input x, both are one operator: ∂x
is then a sum of two gradients, that of the shortcut and that of the convolution, and one kernel computes the second
and adds the first.

``networks`` and ``cuda`` are those of ``sign_conv/operator.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unflip.kernels.norm.triton_kernels import (
    input_gradient_kernel,
    moments_kernel,
    output_kernel,
    sums_kernel,
)
from unflip.kernels.sign_conv import operator as sign_conv
from unflip.kernels.sign_conv.cover import MOST_ELEMENTS
from unflip.kernels.tuning import cdiv, filling, power

TILE = 4096  # values of one step of a program
WARPS = 8
SUMS_SHARE = 2  # the sums take many registers: with smaller programs, more of them fit
STAGES = 3  # tiles that a program loads ahead
MOST_TILES = 32
LEAST = 4 * TILE  # values per program of the first pass: more programs leave more partial sums
# (with slopes, with a shift before them) -> number of sums
SUMS = {(False, False): 2, (True, False): 5, (True, True): 8}


def normalize(
    y: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    slope: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    shortcut: Tensor | None,
    near: Tensor,
    eps: float,
    networks: int = 1,
) -> tuple[Tensor, Tensor]:
    """``BatchNorm(PReLU(scale · y + shift)) + shortcut``, and the batch's mean and (biased) variance (2, C).

    ``y`` (float16 or float32) and ``shortcut`` (float16) are (N, C, H, W), best in channels_last. The output is
    float16, the rest is float32.
    ``scale``, ``shift`` and ``slope`` have one value, or one per channel; ``near`` is a guess of the means. There is no
    PReLU if ``slope`` is None, and no shift if ``shift`` is. All tensors have gradients except ``scale``, ``near`` and
    the moments.
    """
    problem = _obstacle(y, scale, shift, slope, shortcut)
    if problem is not None:
        raise ValueError(f"normalize: {problem}")
    y = y.contiguous(memory_format=torch.channels_last)
    if shortcut is not None:
        shortcut = shortcut.contiguous(memory_format=torch.channels_last)
    values = by_channel(y.shape[1], scale, shift, slope)
    out, moments = _forward(y, *values, gamma, beta, shortcut, near.detach(), eps, networks)
    return out, moments


def by_channel(
    c: int, scale: Tensor, *others: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One value per channel. A single value is repeated: a few bytes, and its gradient is their sum."""
    scales = scale.detach().float().flatten().expand(c).contiguous()
    shift, slope = (None if v is None else v.float().expand(c).contiguous() for v in others)
    return scales, shift, slope


def supports(
    y: Tensor, scale: Tensor, shift: Tensor | None, slope: Tensor | None, shortcut: Tensor | None
) -> bool:
    """Whether the kernels cover these tensors."""
    return _obstacle(y, scale, shift, slope, shortcut) is None


def _obstacle(
    y: Tensor, scale: Tensor, shift: Tensor | None, slope: Tensor | None, shortcut: Tensor | None
) -> str | None:
    if y.dim() != 4 or y.numel() == 0:
        return f"the input has shape {tuple(y.shape)}; it should be (N, C, H, W)"
    if shortcut is not None and shortcut.shape != y.shape:
        return f"the shortcut has shape {tuple(shortcut.shape)}, the input {tuple(y.shape)}"
    if y.dtype not in (torch.float16, torch.float32):
        return f"the input is {y.dtype}; it should be torch.float16 or torch.float32"
    if shortcut is not None and shortcut.dtype != torch.float16:
        return f"the shortcut is {shortcut.dtype}; it should be torch.float16"
    c = y.shape[1]
    if c % 16:
        return f"{c} channels are not a multiple of 16"
    if y.numel() > MOST_ELEMENTS:
        return "too many elements for 32-bit offsets"
    for name, tensor in (("scale", scale), ("shift", shift), ("slope", slope)):
        if tensor is not None and tensor.numel() not in (1, c):
            return f"{name} has {tensor.numel()} values for {c} channels"
    if slope is None and shift is not None:
        return "a shift without slopes has no effect: BatchNorm subtracts it again"
    return None


# ------------------------------------------------------------------------------------- torch operators


class _Plan:
    """How the work of one call is divided into programs."""

    def __init__(self, y: Tensor, networks: int) -> None:
        n, c, h, w = y.shape
        self.pixels = n * h * w
        self.block_c = power(c, 64)
        self.block_p = TILE // self.block_c
        self.columns = cdiv(c, self.block_c)
        full = filling(y, 4, networks)
        wanted = max(1, min(cdiv(full, self.columns), y.numel() // LEAST))
        tiles = cdiv(self.pixels, self.block_p)
        self.share = cdiv(tiles, min(wanted, tiles)) * self.block_p
        self.programs = cdiv(self.pixels, self.share)
        self.block = 1 << (self.programs - 1).bit_length()
        # Each program of the second pass adds two partial sums of all programs. That should be a quarter of its other
        # reads and writes (three halves per value), as long as enough programs remain.
        sums, tile = 8 * self.programs * self.block_c, 6 * TILE
        left = tiles * self.columns // full
        self.tiles = max(1, min(MOST_TILES, cdiv(4 * sums, tile), left))
        self.blocks = {
            "C": c,
            "BLOCK_P": self.block_p,
            "BLOCK_C": self.block_c,
            "STAGES": STAGES,
            "num_warps": WARPS,
        }
        self.smaller = {"BLOCK_P": self.block_p // SUMS_SHARE, "num_warps": WARPS // SUMS_SHARE}

    @property
    def first_pass(self) -> tuple[int, int]:
        return self.programs, self.columns

    @property
    def second_pass(self) -> tuple[int, int]:
        return cdiv(self.pixels, self.block_p * self.tiles), self.columns


def _pointers(scale: Tensor, *values: Tensor | None) -> tuple[Tensor, ...]:
    """A kernel needs a pointer for tensors that are not given, too."""
    return tuple(scale if value is None else value for value in values)


def _given(shift: Tensor | None, slope: Tensor | None) -> dict[str, Any]:
    return {"HAS_SHIFT": shift is not None, "HAS_SLOPE": slope is not None}


@torch.library.custom_op("unflip::normalize", mutates_args=())
def _forward(
    y: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    slope: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    shortcut: Tensor | None,
    near: Tensor,
    eps: float,
    networks: int,
) -> tuple[Tensor, Tensor]:
    """The output, and the moments (2, C)."""
    plan = _Plan(y, networks)
    values, blocks = (scale, *_pointers(scale, shift, slope)), plan.blocks | _given(shift, slope)
    out = _halves_like(y)
    moments = torch.empty(2, y.shape[1], device=y.device)
    partial = torch.empty(plan.programs, 2, y.shape[1], device=y.device)
    with torch.cuda.device_of(y):
        moments_kernel[plan.first_pass](
            y, *values, near, partial, plan.pixels, plan.share, **blocks
        )
        output_kernel[plan.second_pass](
            y,
            *values,
            near,
            gamma,
            beta,
            y if shortcut is None else shortcut,
            partial,
            out,
            moments,
            plan.pixels,
            eps,
            HAS_SHORTCUT=shortcut is not None,
            PROGRAMS=plan.programs,
            BLOCK=plan.block,
            TILES=plan.tiles,
            **blocks,
        )
    return out, moments


def _halves_like(y: Tensor) -> Tensor:
    return torch.empty_like(y, dtype=torch.float16, memory_format=torch.channels_last)


@_forward.register_fake
def _(y: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = _halves_like(y)
    return out, y.new_empty(2, y.shape[1], dtype=torch.float32)


@torch.library.custom_op("unflip::normalize_backward", mutates_args=())
def _gradients(
    grad: Tensor,
    y: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    slope: Tensor | None,
    gamma: Tensor,
    moments: Tensor,
    eps: float,
    networks: int,
) -> tuple[Tensor, Tensor]:
    """The gradient of y, and those of γ, β, slopes and shift (4, C), zero for tensors that are not given."""
    plan = _Plan(y, networks)
    values, blocks = (scale, *_pointers(scale, shift, slope)), plan.blocks | _given(shift, slope)
    count = SUMS[slope is not None, shift is not None]
    out = _halves_like(y)
    small = torch.empty(4, y.shape[1], device=y.device)
    partial = torch.empty(plan.programs, count, y.shape[1], device=y.device)
    with torch.cuda.device_of(y):
        sums_kernel[plan.first_pass](
            grad,
            y,
            *values,
            moments,
            partial,
            plan.pixels,
            plan.share,
            eps,
            COUNT=count,
            **blocks | plan.smaller,
        )
        input_gradient_kernel[plan.second_pass](
            grad,
            y,
            *values,
            gamma,
            moments,
            partial,
            out,
            small,
            plan.pixels,
            eps,
            COUNT=count,
            PROGRAMS=plan.programs,
            BLOCK=plan.block,
            TILES=plan.tiles,
            **blocks,
        )
    return out, small


@_gradients.register_fake
def _(grad: Tensor, y: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = _halves_like(y)
    return out, y.new_empty(4, y.shape[1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, scale, shift, slope, gamma, _, shortcut, _, ctx.eps, ctx.networks = inputs
    ctx.has_shortcut = shortcut is not None
    ctx.set_materialize_grads(False)  # the moments have no gradient
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(y, scale, shift, slope, gamma, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grad = grad.to(torch.float16).contiguous(memory_format=torch.channels_last)
    of_y, small = _gradients(grad, *ctx.saved_tensors, ctx.eps, ctx.networks)
    of_shift, of_slope = _if_given(ctx.saved_tensors[2:4], small)
    of_shortcut = grad if ctx.has_shortcut else None
    of_y = of_y.to(ctx.saved_tensors[0].dtype)
    return of_y, None, of_shift, of_slope, small[0], small[1], of_shortcut, None, None, None


def _if_given(given: Sequence[Tensor | None], small: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of shift and slopes, if those were given."""
    return tuple(
        g if v is not None else None for v, g in zip(given, (small[3], small[2]), strict=True)
    )


_forward.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("unflip::convolve_and_normalize", mutates_args=())
def both(
    x: Tensor,
    signs: Tensor,
    halves: Tensor,
    padding: int,
    kind: int,
    scale: Tensor,
    shift: Tensor | None,
    slope: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    near: Tensor,
    eps: float,
    networks: int,
    cuda: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, moments, and the product y, which the gradient needs."""
    y = sign_conv.forward(x, signs, halves, 1, padding, kind, networks, cuda)
    out, moments = _forward(y, scale, shift, slope, gamma, beta, x, near, eps, networks)
    return out, moments, y


@both.register_fake
def _(
    x: Tensor, signs: Tensor, halves: Tensor, padding: int, kind: int, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.channels_last)
    y = sign_conv.empty_product(x, halves.shape, 1, padding, kind)
    return out, x.new_empty(2, x.shape[1], dtype=torch.float32), y


def _save_both(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, signs, halves, padding, kind, scale, shift, slope, gamma, _, _, eps, networks, cuda = inputs
    ctx.convolution = 1, padding, kind, networks, cuda  # 1: the stride
    ctx.eps, ctx.networks = eps, networks
    ctx.signs_dtype = signs.dtype
    _, moments, y = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(moments, y)
    ctx.save_for_backward(x, halves, y, scale, shift, slope, gamma, moments)


def _backward_both(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, halves, *norm = ctx.saved_tensors
    grad = grad.to(torch.float16).contiguous(memory_format=torch.channels_last)
    of_y, small = _gradients(grad, *norm, ctx.eps, ctx.networks)
    of_x = sign_conv.input_gradient(of_y, x, halves, *ctx.convolution, grad)
    of_signs = sign_conv.sign_gradient(of_y, x, halves.shape, ctx.signs_dtype, *ctx.convolution)
    of_norm = *_if_given(norm[2:4], small), small[0], small[1], None, None, None, None
    return of_x, of_signs, None, None, None, None, *of_norm


both.register_autograd(_backward_both, setup_context=_save_both)
