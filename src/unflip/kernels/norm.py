"""PReLU, BatchNorm and shortcut of a binary convolution in training: two kernels forward, two backward.

What follows a binary convolution reads and writes far more memory than the convolution itself. A compiler that is given
the operations one by one needs a third pass backward, for the slopes' gradient, and reads the terms of the shortcut's
gradient anew in each. All of it is written out here, for the convolution's whole numbers y (M pixels of C channels,
NHWC), the scale s of their filters (a constant here), slopes a, BatchNorm's γ and β, and the shortcut t. A learned
shift b before the PReLU is ReActNet's:

    u = s · y + b     z = u where u > 0, else a · u     ẑ = (z − mean z) / √(var z + ε)     out = γ · ẑ + β + t

Forward: one pass over y for mean and variance, one that writes the output. Backward, with g the gradient of out,
n = 1[u ≤ 0] and r = 1 / √(var z + ε), one pass over g and y for up to eight sums over a channel's pixels,

    S₁ = Σ g     S₂ = Σ g · ẑ     S₃ = Σ n · u · g     S₄ = Σ n · u     S₅ = Σ n · u · ẑ
                                  S₆ = Σ n · g         S₇ = Σ n         S₈ = Σ n · ẑ

which are all that the small gradients need (Σ ∂z is 0),

    ∂β = S₁     ∂γ = S₂     ∂a = Σ n · u · ∂z      = γ · r · (S₃ − S₄ · S₁ / M − S₅ · S₂ / M)
                            ∂b = (a − 1) Σ n · ∂z  = γ · r · (S₆ − S₇ · S₁ / M − S₈ · S₂ / M) · (a − 1)

and one that writes ∂y = s · (a where n, else 1) · ∂z with ∂z = γ · r · (g − S₁ / M − ẑ · S₂ / M). ∂t is g itself.

Where the shortcut is the convolution's own input x, both are one operator: ∂x is then a sum of two gradients, ∂t and
that of the convolution, and the kernel that computes the one adds the other.

Sums are float32, and of z − k for the moments: k is BatchNorm's running mean, near the mean, so that a variance is
never the small difference of large numbers. Each program of the first pass leaves a partial sum, each of the second
adds them up again, in the same order: there are no atomics, and the same bits every time.
"""

# Triton reads the annotations of kernels, and knows no Any: pointers and numbers go without.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unflip import layers
from unflip.kernels.sign_conv import operator as sign_conv
from unflip.kernels.sign_conv.operator import MOST_ELEMENTS
from unflip.kernels.tuning import cdiv, filling, jit, power
from unflip.methods.base import InputBinarizer
from unflip.methods.reactnet import RPReLU

try:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    tl = None

TILE = 4096  # values of one step of a program
WARPS = 8
SUMS_SHARE = 2  # many sums take many registers: smaller programs, of which more fit
LEAST = 4 * TILE  # values of a program of the first pass: more programs leave more partial sums
# With slopes, with a shift before them
SUMS = {(False, False): 2, (True, False): 5, (True, True): 8}


def normalise(
    y: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    slope: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    shortcut: Tensor | None,
    near: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """``BatchNorm(PReLU(scale · y + shift)) + shortcut``, and the batch's mean and (biased) variance (2, C).

    ``y`` and ``shortcut`` are float16 (N, C, H, W), best in channels_last, and so is the output; the rest is float32.
    ``scale``, ``shift`` and ``slope`` have one value, or one a channel; ``near`` is a guess of the means. No PReLU
    where ``slope`` is None, and no shift where that is. There are gradients of all but ``scale``, ``near`` and the
    moments.
    """
    problem = _obstacle(y, scale, shift, slope, shortcut)
    if problem is not None:
        raise ValueError(f"normalise: {problem}")
    y = y.contiguous(memory_format=torch.channels_last)
    if shortcut is not None:
        shortcut = shortcut.contiguous(memory_format=torch.channels_last)
    values = _by_channel(y.shape[1], scale, shift, slope)
    out, moments = _forward(y, *values, gamma, beta, shortcut, near.detach(), eps)
    return out, moments


def _by_channel(
    c: int, scale: Tensor, *others: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One value for all channels is as many equal ones: a few bytes, and its gradient is their sum."""
    scales = scale.detach().float().flatten().expand(c).contiguous()
    shift, slope = (None if v is None else v.float().expand(c).contiguous() for v in others)
    return scales, shift, slope


def supports(
    y: Tensor, scale: Tensor, shift: Tensor | None, slope: Tensor | None, shortcut: Tensor | None
) -> bool:
    """Whether the kernels cover this."""
    return _obstacle(y, scale, shift, slope, shortcut) is None


def _obstacle(
    y: Tensor, scale: Tensor, shift: Tensor | None, slope: Tensor | None, shortcut: Tensor | None
) -> str | None:
    if y.dim() != 4 or y.numel() == 0:
        return f"the input has shape {tuple(y.shape)}, which should be (N, C, H, W)"
    if shortcut is not None and shortcut.shape != y.shape:
        return f"the shortcut has shape {tuple(shortcut.shape)}, the input {tuple(y.shape)}"
    for tensor in (y, shortcut):
        if tensor is not None and tensor.dtype != torch.float16:
            return f"a tensor is {tensor.dtype}, which should be torch.float16"
    c = y.shape[1]
    if c % 16:
        return f"{c} channels are no multiple of 16"
    if y.numel() > MOST_ELEMENTS:
        return "too many elements for 32-bit offsets"
    for name, tensor in (("scale", scale), ("shift", shift), ("slope", slope)):
        if tensor is not None and tensor.numel() not in (1, c):
            return f"{name} has {tensor.numel()} values for {c} channels"
    if slope is None and shift is not None:
        return "a shift without slopes changes nothing that BatchNorm does not take away"
    return None


# ------------------------------------------------------------------------------------------- kernels


@jit
def _activation(y, scale, shift, slope, HAS_SHIFT: tl.constexpr, HAS_SLOPE: tl.constexpr):
    """u and z."""
    u = y.to(tl.float32) * scale[None, :]
    if HAS_SHIFT:
        u += shift[None, :]
    if HAS_SLOPE:
        return u, tl.where(u > 0.0, u, u * slope[None, :])
    return u, u


@jit
def _values(pointer, c, known, THERE: tl.constexpr):
    """One a channel, or zeros."""
    if THERE:
        return tl.load(pointer + c, mask=known, other=0.0)
    return tl.zeros_like(c).to(tl.float32)


@jit
def _channels(
    scale_ptr,
    shift_ptr,
    slope_ptr,
    C: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A program's channels, which of them there are, and their values."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = c < C
    scale = _values(scale_ptr, c, known, True)
    shift = _values(shift_ptr, c, known, HAS_SHIFT)
    slope = _values(slope_ptr, c, known, HAS_SLOPE)
    return c, known, scale, shift, slope


@jit
def _total(
    partial_ptr,
    which,
    c,
    known,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    C: tl.constexpr,
):
    """The sum over programs of one of their COUNT partial sums, for each channel c."""
    program = tl.arange(0, BLOCK)
    at = partial_ptr + (program[:, None] * COUNT + which) * C + c[None, :]
    return tl.sum(tl.load(at, mask=(program < PROGRAMS)[:, None] & known[None, :], other=0.0), 0)


@jit
def _moments_kernel(
    y_ptr,
    scale_ptr,
    shift_ptr,
    slope_ptr,
    near_ptr,
    partial_ptr,
    pixels,
    share,
    C: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Partial sums (program, 2, C) of z − near and of its square, over ``share`` pixels each."""
    program = tl.program_id(0)
    c, known, scale, shift, slope = _channels(
        scale_ptr, shift_ptr, slope_ptr, C, HAS_SHIFT, HAS_SLOPE, BLOCK_C
    )
    near = tl.load(near_ptr + c, mask=known, other=0.0)
    last = tl.minimum(program * share + share, pixels)
    first = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in tl.range(program * share, last, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        inside = (p < last)[:, None] & known[None, :]
        y = tl.load(y_ptr + p[:, None] * C + c[None, :], mask=inside, other=0.0)
        _, z = _activation(y, scale, shift, slope, HAS_SHIFT, HAS_SLOPE)
        off = tl.where(inside, z - near[None, :], 0.0)
        first += off
        second += off * off
    at = partial_ptr + program * 2 * C + c
    tl.store(at, tl.sum(first, 0), mask=known)
    tl.store(at + C, tl.sum(second, 0), mask=known)


@jit
def _output_kernel(
    y_ptr,
    scale_ptr,
    shift_ptr,
    slope_ptr,
    near_ptr,
    gamma_ptr,
    beta_ptr,
    shortcut_ptr,
    partial_ptr,
    out_ptr,
    moments_ptr,
    pixels,
    eps,
    C: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    HAS_SHORTCUT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0)
    c, known, scale, shift, slope = _channels(
        scale_ptr, shift_ptr, slope_ptr, C, HAS_SHIFT, HAS_SLOPE, BLOCK_C
    )
    off = _total(partial_ptr, 0, c, known, PROGRAMS, BLOCK, 2, C) / pixels
    square = _total(partial_ptr, 1, c, known, PROGRAMS, BLOCK, 2, C) / pixels
    mean = tl.load(near_ptr + c, mask=known, other=0.0) + off
    variance = tl.maximum(square - off * off, 0.0)
    if program == 0:
        tl.store(moments_ptr + c, mean, mask=known)
        tl.store(moments_ptr + C + c, variance, mask=known)
    factor = tl.load(gamma_ptr + c, mask=known, other=0.0) / tl.sqrt(variance + eps)
    constant = tl.load(beta_ptr + c, mask=known, other=0.0) - mean * factor
    for tile in tl.static_range(TILES):
        p = (program * TILES + tile) * BLOCK_P + tl.arange(0, BLOCK_P)
        inside = (p < pixels)[:, None] & known[None, :]
        at = p[:, None] * C + c[None, :]
        y = tl.load(y_ptr + at, mask=inside, other=0.0)
        _, z = _activation(y, scale, shift, slope, HAS_SHIFT, HAS_SLOPE)
        out = z * factor[None, :] + constant[None, :]
        if HAS_SHORTCUT:
            out += tl.load(shortcut_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, out.to(tl.float16), mask=inside)


@jit
def _sums_kernel(
    g_ptr,
    y_ptr,
    scale_ptr,
    shift_ptr,
    slope_ptr,
    moments_ptr,
    partial_ptr,
    pixels,
    share,
    eps,
    C: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Partial sums (program, COUNT, C) of S₁ and S₂, with slopes up to S₅, with a shift of all."""
    program = tl.program_id(0)
    c, known, scale, shift, slope = _channels(
        scale_ptr, shift_ptr, slope_ptr, C, HAS_SHIFT, HAS_SLOPE, BLOCK_C
    )
    mean = tl.load(moments_ptr + c, mask=known, other=0.0)
    r = 1.0 / tl.sqrt(tl.load(moments_ptr + C + c, mask=known, other=1.0) + eps)
    last = tl.minimum(program * share + share, pixels)
    s1 = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    s2 = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    s3 = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    s4 = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    s5 = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    s6 = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    s7 = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    s8 = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in tl.range(program * share, last, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        inside = (p < last)[:, None] & known[None, :]
        at = p[:, None] * C + c[None, :]
        y = tl.load(y_ptr + at, mask=inside, other=0.0)
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        u, z = _activation(y, scale, shift, slope, HAS_SHIFT, HAS_SLOPE)
        normal = (z - mean[None, :]) * r[None, :]
        s1 += g
        s2 += g * normal
        if HAS_SLOPE:
            negative = tl.where(inside, tl.minimum(u, 0.0), 0.0)
            s3 += negative * g
            s4 += negative
            s5 += negative * normal
        if HAS_SHIFT:
            n = tl.where(inside & (u <= 0.0), 1.0, 0.0)
            s6 += n * g
            s7 += n
            s8 += n * normal
    at_c = partial_ptr + program * COUNT * C + c
    tl.store(at_c, tl.sum(s1, 0), mask=known)
    tl.store(at_c + C, tl.sum(s2, 0), mask=known)
    if HAS_SLOPE:
        tl.store(at_c + 2 * C, tl.sum(s3, 0), mask=known)
        tl.store(at_c + 3 * C, tl.sum(s4, 0), mask=known)
        tl.store(at_c + 4 * C, tl.sum(s5, 0), mask=known)
    if HAS_SHIFT:
        tl.store(at_c + 5 * C, tl.sum(s6, 0), mask=known)
        tl.store(at_c + 6 * C, tl.sum(s7, 0), mask=known)
        tl.store(at_c + 7 * C, tl.sum(s8, 0), mask=known)


@jit
def _input_gradient_kernel(
    g_ptr,
    y_ptr,
    scale_ptr,
    shift_ptr,
    slope_ptr,
    gamma_ptr,
    moments_ptr,
    partial_ptr,
    out_ptr,
    small_ptr,
    pixels,
    eps,
    C: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The gradient of y; the first program also writes those of γ, β, slopes and shift, (4, C)."""
    program = tl.program_id(0)
    c, known, scale, shift, slope = _channels(
        scale_ptr, shift_ptr, slope_ptr, C, HAS_SHIFT, HAS_SLOPE, BLOCK_C
    )
    mean = tl.load(moments_ptr + c, mask=known, other=0.0)
    r = 1.0 / tl.sqrt(tl.load(moments_ptr + C + c, mask=known, other=1.0) + eps)
    factor = tl.load(gamma_ptr + c, mask=known, other=0.0) * r
    s1 = _total(partial_ptr, 0, c, known, PROGRAMS, BLOCK, COUNT, C)
    s2 = _total(partial_ptr, 1, c, known, PROGRAMS, BLOCK, COUNT, C)
    if program == 0:
        tl.store(small_ptr + c, s2, mask=known)
        tl.store(small_ptr + C + c, s1, mask=known)
        of_slope = tl.zeros_like(factor)
        if HAS_SLOPE:
            s3 = _total(partial_ptr, 2, c, known, PROGRAMS, BLOCK, COUNT, C)
            s4 = _total(partial_ptr, 3, c, known, PROGRAMS, BLOCK, COUNT, C)
            s5 = _total(partial_ptr, 4, c, known, PROGRAMS, BLOCK, COUNT, C)
            of_slope = factor * (s3 - (s4 * s1 + s5 * s2) / pixels)
        tl.store(small_ptr + 2 * C + c, of_slope, mask=known)
        of_shift = tl.zeros_like(factor)
        if HAS_SHIFT:
            s6 = _total(partial_ptr, 5, c, known, PROGRAMS, BLOCK, COUNT, C)
            s7 = _total(partial_ptr, 6, c, known, PROGRAMS, BLOCK, COUNT, C)
            s8 = _total(partial_ptr, 7, c, known, PROGRAMS, BLOCK, COUNT, C)
            of_shift = factor * (s6 - (s7 * s1 + s8 * s2) / pixels) * (slope - 1.0)
        tl.store(small_ptr + 3 * C + c, of_shift, mask=known)
    for tile in tl.static_range(TILES):
        p = (program * TILES + tile) * BLOCK_P + tl.arange(0, BLOCK_P)
        inside = (p < pixels)[:, None] & known[None, :]
        at = p[:, None] * C + c[None, :]
        y = tl.load(y_ptr + at, mask=inside, other=0.0)
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        u, z = _activation(y, scale, shift, slope, HAS_SHIFT, HAS_SLOPE)
        normal = (z - mean[None, :]) * r[None, :]
        of_z = factor[None, :] * (g - (s1[None, :] + normal * s2[None, :]) / pixels)
        of_y = of_z * scale[None, :]
        if HAS_SLOPE:
            of_y = tl.where(u > 0.0, of_y, of_y * slope[None, :])
        tl.store(out_ptr + at, of_y.to(tl.float16), mask=inside)


# ------------------------------------------------------------------------------------- torch operators


class _Plan:
    """How the work of one call is cut."""

    def __init__(self, y: Tensor) -> None:
        n, c, h, w = y.shape
        self.pixels = n * h * w
        self.block_c = power(c, 64)
        self.block_p = TILE // self.block_c
        self.columns = cdiv(c, self.block_c)
        wanted = max(1, min(cdiv(filling(y, 4), self.columns), y.numel() // LEAST))
        tiles = cdiv(self.pixels, self.block_p)
        self.share = cdiv(tiles, min(wanted, tiles)) * self.block_p
        self.programs = cdiv(self.pixels, self.share)
        self.block = 1 << (self.programs - 1).bit_length()
        # Each program of the second pass adds up two partial sums of all programs: that should be a quarter of what it
        # reads and writes else (three halves a value), if enough programs are left.
        sums, tile = 8 * self.programs * self.block_c, 6 * TILE
        left = tiles * self.columns // filling(y, 4)
        self.tiles = max(1, min(8, cdiv(4 * sums, tile), left))
        self.blocks = {"C": c, "BLOCK_P": self.block_p, "BLOCK_C": self.block_c, "num_warps": WARPS}
        self.smaller = {"BLOCK_P": self.block_p // SUMS_SHARE, "num_warps": WARPS // SUMS_SHARE}

    @property
    def first_pass(self) -> tuple[int, int]:
        return self.programs, self.columns

    @property
    def second_pass(self) -> tuple[int, int]:
        return cdiv(self.pixels, self.block_p * self.tiles), self.columns


def _pointers(scale: Tensor, *values: Tensor | None) -> tuple[Tensor, ...]:
    """A kernel wants a pointer for what is not there, too."""
    return tuple(scale if value is None else value for value in values)


def _given(shift: Tensor | None, slope: Tensor | None) -> dict[str, Any]:
    return {"HAS_SHIFT": shift is not None, "HAS_SLOPE": slope is not None}


@torch.library.custom_op("unflip::normalise", mutates_args=())
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
) -> tuple[Tensor, Tensor]:
    plan = _Plan(y)
    values, blocks = (scale, *_pointers(scale, shift, slope)), plan.blocks | _given(shift, slope)
    out = torch.empty_like(y, memory_format=torch.channels_last)
    moments = torch.empty(2, y.shape[1], device=y.device)
    partial = torch.empty(plan.programs, 2, y.shape[1], device=y.device)
    with torch.cuda.device_of(y):
        _moments_kernel[plan.first_pass](
            y, *values, near, partial, plan.pixels, plan.share, **blocks
        )
        _output_kernel[plan.second_pass](
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


@_forward.register_fake
def _(y: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(y, memory_format=torch.channels_last)
    return out, y.new_empty(2, y.shape[1], dtype=torch.float32)


@torch.library.custom_op("unflip::normalise_backward", mutates_args=())
def _gradients(
    grad: Tensor,
    y: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    slope: Tensor | None,
    gamma: Tensor,
    moments: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The gradient of y, and those of γ, β, slopes and shift (4, C), zero where there are none."""
    plan = _Plan(y)
    values, blocks = (scale, *_pointers(scale, shift, slope)), plan.blocks | _given(shift, slope)
    count = SUMS[slope is not None, shift is not None]
    out = torch.empty_like(y, memory_format=torch.channels_last)
    small = torch.empty(4, y.shape[1], device=y.device)
    partial = torch.empty(plan.programs, count, y.shape[1], device=y.device)
    with torch.cuda.device_of(y):
        _sums_kernel[plan.first_pass](
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
        _input_gradient_kernel[plan.second_pass](
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
    out = torch.empty_like(y, memory_format=torch.channels_last)
    return out, y.new_empty(4, y.shape[1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, scale, shift, slope, gamma, _, shortcut, _, ctx.eps = inputs
    ctx.has_shortcut = shortcut is not None
    ctx.set_materialize_grads(False)  # nothing comes for what is not differentiable
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(y, scale, shift, slope, gamma, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grad = grad.to(torch.float16).contiguous(memory_format=torch.channels_last)
    of_y, small = _gradients(grad, *ctx.saved_tensors, ctx.eps)
    of_shift, of_slope = _where_there(ctx.saved_tensors[2:4], small)
    of_shortcut = grad if ctx.has_shortcut else None
    return of_y, None, of_shift, of_slope, small[0], small[1], of_shortcut, None, None


def _where_there(given: Sequence[Tensor | None], small: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of shift and slopes, where those were given."""
    return tuple(
        g if v is not None else None for v, g in zip(given, (small[3], small[2]), strict=True)
    )


_forward.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("unflip::convolve_and_normalise", mutates_args=())
def _both(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, moments, and the product y, which the gradient needs."""
    y = sign_conv.forward(x, signs, halves, 1, padding, kind)
    out, moments = _forward(y, scale, shift, slope, gamma, beta, x, near, eps)
    return out, moments, y


@_both.register_fake
def _(x: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    out, y = (torch.empty_like(x, memory_format=torch.channels_last) for _ in range(2))
    return out, x.new_empty(2, x.shape[1], dtype=torch.float32), y


def _save_both(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, signs, halves, ctx.padding, ctx.kind, scale, shift, slope, gamma, _, _, ctx.eps = inputs
    ctx.signs_dtype = signs.dtype
    _, moments, y = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(moments, y)
    ctx.save_for_backward(x, halves, y, scale, shift, slope, gamma, moments)


def _backward_both(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, halves, *norm = ctx.saved_tensors
    grad = grad.to(torch.float16).contiguous(memory_format=torch.channels_last)
    of_y, small = _gradients(grad, *norm, ctx.eps)
    of_x = sign_conv.input_gradient(of_y, x, halves, 1, ctx.padding, ctx.kind, grad)
    of_signs = sign_conv.sign_gradient(
        of_y, x, halves.shape, 1, ctx.padding, ctx.kind, ctx.signs_dtype
    )
    of_norm = *_where_there(norm[2:4], small), small[0], small[1], None, None
    return of_x, of_signs, None, None, None, None, *of_norm


_both.register_autograd(_backward_both, setup_context=_save_both)


# ------------------------------------------------------------------------------------------ in a model


def enabled() -> bool:
    """UNFLIP_NORM=0 leaves these layers to the compiler."""
    return os.environ.get("UNFLIP_NORM", "1") != "0"


def normalised(
    conv: Any, activation: Any, norm: Any, x: Tensor, shortcut: Tensor | None
) -> Tensor | None:
    """:func:`unflip.layers.normalised` by these kernels; None where they do not cover it."""
    known = _plain(activation, nn.PReLU, nn.Identity, RPReLU)
    if not (_takes_units(conv) and _normalises(norm) and known and layers.in_half(x)):
        return None
    slope = None if isinstance(activation, nn.Identity) else activation.weight
    shifts = activation.adapted if isinstance(activation, RPReLU) else None
    before = None if shifts is None else shifts.before
    with torch.autocast(x.device.type, enabled=False):
        weight = conv.binary_weight()
        scale = layers.scale_of_units(conv, weight)
        if scale is None:
            return None
        # BatchNorm takes RPReLU's second shift away again: it is in the running mean alone
        near = norm.running_mean if shifts is None else norm.running_mean - shifts.after.detach()
        # and its gradient is 0, which is not the same as none to what waits for it on several GPUs
        beta = norm.bias if shifts is None else norm.bias + 0.0 * shifts.after
        rest = scale, before, slope, norm.weight, beta
        if shortcut is x and _has_kernels(conv, x) and supports(x, scale, before, slope, x):
            out, moments = _convolve_and_normalise(conv, x, weight, rest, near, norm.eps)
        else:
            y = layers.product_of_units(conv, x, weight, scale)
            if not supports(y, scale, before, slope, shortcut):
                return None
            out, moments = normalise(y, *rest, shortcut, near, norm.eps)
        mean = moments[0] if shifts is None else moments[0] + shifts.after.detach()
        _follow(norm, mean, moments[1], out.numel() // out.shape[1])
    return out


def _has_kernels(conv: Any, x: Tensor) -> bool:
    """Whether sign and convolution are one kernel of ours here, and the output has the input's shape."""
    binarizer, shapes = conv.input_binarizer, (x.shape, conv.weight.shape)
    return (
        binarizer.fused_as is not None
        and type(binarizer).shifted is InputBinarizer.shifted
        and conv.padding_mode == "zeros"
        and sign_conv.supports(*shapes, conv.stride, conv.padding, conv.dilation, conv.groups)
        and conv.stride == (1, 1)
        and all(2 * p + 1 == k for p, k in zip(conv.padding, conv.kernel_size, strict=True))
        and x.dtype == torch.float16
    )


def _convolve_and_normalise(
    conv: Any, x: Tensor, weight: Tensor, rest: tuple[Any, ...], near: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x = x.contiguous(memory_format=torch.channels_last)
    scale, shift, slope, gamma, beta = rest
    signs = layers.units(weight, scale)
    kind = sign_conv.INPUTS.index(conv.input_binarizer.fused_as)
    values = *_by_channel(x.shape[1], scale, shift, slope), gamma, beta, near, eps
    out, moments, _ = _both(x, signs, sign_conv.halves(signs), conv.padding[0], kind, *values)
    return out, moments


def _takes_units(conv: Any) -> bool:
    return (
        _plain(conv, layers.BinaryConv2d)
        and conv.bias is None
        and type(conv.input_binarizer).output_scale is InputBinarizer.output_scale
    )


def _normalises(norm: Any) -> bool:
    return (
        _plain(norm, nn.BatchNorm2d)
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
    )


def _plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether calling the module does what its class does, and nothing else."""
    changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return type(module) in kinds and not changed


def _follow(norm: Any, mean: Tensor, variance: Tensor, pixels: int) -> None:
    """Running mean and variance, as BatchNorm keeps them: of the unbiased variance."""
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(variance * (pixels / max(1, pixels - 1)), norm.momentum)
