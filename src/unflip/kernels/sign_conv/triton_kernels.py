"""The Triton kernels of ``sign_conv``, their blocks, and how they are launched.

A convolution is a matrix product whose left side is never stored: a program gathers it, tap by tap, and takes the sign
on the way.

                      k = (kh, kw, c)                          O
                    ┌─────┬─────┬─ ─ ─┬─────┐               ┌─────┐
     x  (NHWC)      │tap 0│tap 1│     │tap 8│               │     │           O
    ┌─────────┐     ├─────┼─────┼─ ─ ─┼─────┤               │signs│        ┌─────┐
    │ · · ·   │ ──▶ │ ±1     ±1         0   │   BLOCK_P  ×  │     │   =    │  y  │
    │ ·[p]·   │     │     (0: zero padding) │   pixels      │     │        └─────┘
    │ · · ·   │     └─────┴─────┴─ ─ ─┴─────┘               └─────┘
    └─────────┘     a tap: C halves, adjacent in memory

    fprop    y      =  B(x) ⋆ signs                    a row an output pixel, a sum over (kh, kw, c)
    dgrad    grad_x = (grad_y ⋆ᵀ signs) · 1[|x| ≤ 1]   a row an input pixel, a sum over (kh, kw, o)
    wgrad    grad_s =  B(x)ᵀ · grad_y                  a sum over pixels: chunks, added afterwards

With a stride s the input pixels fall into s² classes by (row mod s, column mod s), each of which meets only every s-th
tap: the third axis of the grid.

The sign is taken from the bits, two values at a time: x + 0 is never −0, and its sign bit is put on the float16
1.0 (0x3C00), or on 0.0 in the padding.

The operator can be read without them: ``sign_conv`` says what is covered and why, and checks the tensors before a
launch.
"""

# Triton reads the annotations of kernels, and knows no Any: pointers and numbers go without.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unflip.kernels import tuning
from unflip.kernels.tuning import cdiv, filling, jit, power, tuned

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = tl = None

MOST_PARTIAL = 2**20  # floats of partial sums (4 MB)


# -------------------------------------------------------------------------------------------- blocks

# A step of the sum takes GROUP · PART values, PART being the largest power of two that divides the channels, up
# to 64, or 16 where that is less. UNROLL: straight code that loads one step ahead, which goes through the cache
# near the processor; otherwise a loop with num_stages − 1 copies to shared memory in flight, which does not.
PIXEL_BLOCKS = [
    # BLOCK_P, GROUP, UNROLL, num_warps, num_stages
    (128, 1, True, 4, 1),
    (64, 1, True, 2, 1),
    (64, 1, True, 4, 1),
    (256, 1, True, 8, 1),
    (64, 4, True, 4, 1),
    (64, 1, False, 4, 4),
    (128, 2, False, 4, 3),
    (32, 1, False, 2, 4),
    (32, 2, False, 4, 3),
]
# BLOCK_P pixels a step, GROUP · PART values of (kh, kw, c) a program. AHEAD: a loop that loads one step ahead.
CHUNK_BLOCKS = [
    # BLOCK_P, GROUP, AHEAD, num_warps, num_stages
    (64, 4, True, 4, 1),
    (64, 2, True, 4, 1),
    (128, 2, True, 4, 1),
    (64, 1, True, 2, 1),
    (64, 1, False, 4, 4),
    (64, 2, False, 4, 3),
    (128, 2, False, 4, 3),
]
SHAPE = ["H", "W", "C", "O", "KH", "KW", "STRIDE", "PADDING"]


def _pixel_blocks(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Leave out blocks far from right: too few or too many programs, too much in registers or code."""
    if "BLOCK_O" in kwargs:
        columns, channels, skipped = kwargs["BLOCK_O"], kwargs["C"], 1
    else:
        columns, channels, skipped = kwargs["BLOCK_C"], kwargs["O"], kwargs["STRIDE"]
    terms = channels * cdiv(kwargs["KH"], skipped) * cdiv(kwargs["KW"], skipped)

    def fits(config: Any) -> bool:
        block, unroll = config.kwargs["BLOCK_P"], config.kwargs["UNROLL"]
        step = config.kwargs["GROUP"] * kwargs["PART"]
        if unroll and cdiv(terms, step) > 18:
            return False
        programs = cdiv(kwargs["pixels"], block)
        right_number = (programs >= 48 or block == 32) and (programs <= 2048 or block >= 128)
        limit = (1024 if unroll else 2048) * config.num_warps
        return right_number and block * max(step, columns) <= limit

    return [config for config in configs if fits(config)] or configs[5:6]


def _chunk_blocks(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    columns, pixels = kwargs["BLOCK_O"], kwargs["HO"] * kwargs["WO"]

    def fits(config: Any) -> bool:
        block, values = config.kwargs["BLOCK_P"], config.kwargs["GROUP"] * kwargs["PART"]
        registers = (values * columns + (values + columns) * block) // (32 * config.num_warps)
        return registers <= 170 and block <= max(64, pixels)

    return [config for config in configs if fits(config)] or configs[4:5]


def _pixel_configs() -> list[Any]:
    if triton is None:
        return []
    return [
        triton.Config(
            {"BLOCK_P": pixels, "GROUP": group, "UNROLL": unroll},
            num_warps=warps,
            num_stages=stages,
        )
        for pixels, group, unroll, warps, stages in PIXEL_BLOCKS
    ]


def _chunk_configs() -> list[Any]:
    if triton is None:
        return []
    return [
        triton.Config(
            {"BLOCK_P": pixels, "GROUP": group, "AHEAD": ahead},
            num_warps=warps,
            num_stages=stages,
        )
        for pixels, group, ahead, warps, stages in CHUNK_BLOCKS
    ]


# ------------------------------------------------------------------------------------------- kernels


@jit
def _binary(x, inside, KIND: tl.constexpr):
    """B(x), and 0 outside the image, where x has been read as 0. KIND: an index of ``sign_conv.INPUTS``."""
    if KIND == 2:
        return x
    if KIND == 1:  # above 1/2 the next float16 is 1/2 + 1/2048
        zero = tl.zeros((1, 1), tl.float16)
        return tl.minimum(tl.maximum(x * 2048.0 - 1024.0, zero), zero + 1.0)
    bits = (x + 0.0).to(tl.int16, bitcast=True)
    one = tl.where(inside, 0x3C00, 0).to(tl.int16)
    return ((bits & -0x8000) | one).to(tl.float16, bitcast=True)


@jit
def _passes(x, KIND: tl.constexpr):
    """Where the straight-through gradient is 1."""
    if KIND == 1:
        return (x >= 0.0) & (x <= 1.0)
    return tl.abs(x) <= 1.0


@jit
def _taps(
    top,
    left,
    exists,
    step,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Where the values k = step · BLOCK_K ... of output pixels lie: offset from (top, left), inside or not."""
    lane = tl.arange(0, BLOCK_K)
    if C % BLOCK_K == 0:  # all of one tap: one check a row
        tap = step // (C // BLOCK_K)
        ih = top + tap // KW
        iw = left + tap % KW
        inside = exists & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
        first = (tap // KW * W + tap % KW) * C + step % (C // BLOCK_K) * BLOCK_K
        return lane[None, :] + first, inside[:, None]
    else:
        k = step * BLOCK_K + lane
        tap = k // C
        ih = top[:, None] + (tap // KW)[None, :]
        iw = left[:, None] + (tap % KW)[None, :]
        inside = exists[:, None] & (k < KH * KW * C)[None, :]
        inside = inside & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
        return ((tap // KW * W + tap % KW) * C + k % C)[None, :], inside


@jit
def _fprop_load(
    x_at,
    top,
    left,
    exists,
    s_at,
    o,
    step,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    offset, inside = _taps(top, left, exists, step, H, W, C, KH, KW, BLOCK_K)
    x = tl.load(x_at[:, None] + offset, mask=inside, other=0.0)
    k = step * BLOCK_K + tl.arange(0, BLOCK_K)
    known = (k < KH * KW * C)[:, None] & (o < O)[None, :]
    signs = tl.load(s_at[None, :] + k[:, None], mask=known, other=0.0)
    return x, inside, signs


@tuned(_pixel_configs(), ["pixels", *SHAPE], _pixel_blocks)
@jit
def _fprop_kernel(
    x_ptr,
    s_ptr,
    y_ptr,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """BLOCK_P output pixels × BLOCK_O output channels."""
    K: tl.constexpr = KH * KW * C
    BLOCK_K: tl.constexpr = GROUP * PART
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    exists = row < pixels
    top = row // WO % HO * STRIDE - PADDING
    left = row % WO * STRIDE - PADDING
    x_at = x_ptr + ((row // (WO * HO) * H + top) * W + left) * C
    s_at = s_ptr + o * K
    total = tl.zeros((BLOCK_P, BLOCK_O), tl.float32)
    if UNROLL:  # the next values are on their way while these are multiplied
        x, inside, signs = _fprop_load(
            x_at, top, left, exists, s_at, o, 0, H, W, C, O, KH, KW, BLOCK_K
        )
        for step in tl.static_range(1, STEPS):
            next_x, next_inside, next_signs = _fprop_load(
                x_at, top, left, exists, s_at, o, step, H, W, C, O, KH, KW, BLOCK_K
            )
            total = tl.dot(_binary(x, inside, KIND), signs, total)
            x = next_x
            inside = next_inside
            signs = next_signs
        total = tl.dot(_binary(x, inside, KIND), signs, total)
    else:
        for step in tl.range(STEPS):
            x, inside, signs = _fprop_load(
                x_at, top, left, exists, s_at, o, step, H, W, C, O, KH, KW, BLOCK_K
            )
            total = tl.dot(_binary(x, inside, KIND), signs, total)
    known = exists[:, None] & (o < O)[None, :]
    tl.store(y_ptr + row[:, None] * O + o[None, :], total.to(tl.float16), mask=known)


@jit
def _dgrad_load(
    g_at,
    oh,
    ow,
    s_ptr,
    c,
    first_kh,
    first_kw,
    step,
    HO: tl.constexpr,
    WO: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One step of the sum over k = (a, b, o), the taps being first_kh + a · STRIDE, first_kw + b · STRIDE."""
    TAPS_W: tl.constexpr = (KW + STRIDE - 1) // STRIDE
    lane = tl.arange(0, BLOCK_K)
    if O % BLOCK_K == 0:  # all of one tap
        tap = step // (O // BLOCK_K)
        a = tap // TAPS_W
        b = tap % TAPS_W
        kh = first_kh + a * STRIDE
        kw = first_kw + b * STRIDE
        rows = HO
        columns = C
        if STRIDE > 1:  # a class may have a tap less
            used = (kh < KH) & (kw < KW)
            rows = tl.where(used, HO, -KH)
            columns = tl.where(used, C, 0)
        inside = (oh >= a) & (oh - a < rows) & (ow >= b) & (ow - b < WO)
        known = (c < columns)[None, :]
        first = step % (O // BLOCK_K) * BLOCK_K
        offset = lane + (first - (a * WO + b) * O)
        g = tl.load(g_at[:, None] + offset[None, :], mask=inside[:, None], other=0.0)
        s_at = (first + lane) * (KH * KW * C) + (kh * KW + kw) * C
    else:
        k = step * BLOCK_K + lane
        tap = k // O
        a = tap // TAPS_W
        b = tap % TAPS_W
        kh = first_kh + a * STRIDE
        kw = first_kw + b * STRIDE
        used = (kh < KH) & (kw < KW)
        inside = (oh[:, None] >= a[None, :]) & (oh[:, None] - a[None, :] < HO) & used[None, :]
        inside = inside & (ow[:, None] >= b[None, :]) & (ow[:, None] - b[None, :] < WO)
        offset = k % O - (a * WO + b) * O
        g = tl.load(g_at[:, None] + offset[None, :], mask=inside, other=0.0)
        s_at = k % O * (KH * KW * C) + (kh * KW + kw) * C
        known = used[:, None] & (c < C)[None, :]
    signs = tl.load(s_ptr + s_at[:, None] + c[None, :], mask=known, other=0.0)
    return g, signs


@tuned(_pixel_configs(), ["pixels", *SHAPE], _pixel_blocks)
@jit
def _dgrad_kernel(
    g_ptr,
    x_ptr,
    s_ptr,
    plus_ptr,
    out_ptr,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """BLOCK_P input pixels of one class × BLOCK_C input channels; ``pixels`` is the most a class has."""
    BLOCK_K: tl.constexpr = GROUP * PART
    TAPS_H: tl.constexpr = (KH + STRIDE - 1) // STRIDE
    TAPS_W: tl.constexpr = (KW + STRIDE - 1) // STRIDE
    STEPS: tl.constexpr = (TAPS_H * TAPS_W * O + BLOCK_K - 1) // BLOCK_K
    CLASS_H: tl.constexpr = (H + STRIDE - 1) // STRIDE
    CLASS_W: tl.constexpr = (W + STRIDE - 1) // STRIDE
    row = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = row // (CLASS_W * CLASS_H)
    i = row // CLASS_W % CLASS_H
    j = row % CLASS_W
    # (oh, ow): the output pixel that the class's first tap leads to
    if STRIDE == 1:
        ih = i
        iw = j
        first_kh = 0
        first_kw = 0
        oh = i + PADDING
        ow = j + PADDING
    else:
        class_h = tl.program_id(2) // STRIDE
        class_w = tl.program_id(2) % STRIDE
        ih = i * STRIDE + class_h
        iw = j * STRIDE + class_w
        first_kh = (class_h + PADDING) % STRIDE
        first_kw = (class_w + PADDING) % STRIDE
        oh = i + (class_h + PADDING) // STRIDE
        ow = j + (class_w + PADDING) // STRIDE
    known = ((row < pixels) & (ih < H) & (iw < W))[:, None] & (c < C)[None, :]
    at = (((n * H + ih) * W + iw) * C)[:, None] + c[None, :]
    if KIND != 2:
        x = tl.load(x_ptr + at, mask=known, other=0.0)
    if ADDS:
        plus = tl.load(plus_ptr + at, mask=known, other=0.0)
    oh = tl.where(row < pixels, oh, -1)  # past the end, no tap leads inside
    g_at = g_ptr + ((n * HO + oh) * WO + ow) * O
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    if UNROLL:  # the next values are on their way while these are multiplied
        g, signs = _dgrad_load(
            g_at, oh, ow, s_ptr, c, first_kh, first_kw, 0, HO, WO, C, O, KH, KW, STRIDE, BLOCK_K
        )
        for step in tl.static_range(1, STEPS):
            next_g, next_signs = _dgrad_load(
                g_at, oh, ow, s_ptr, c, first_kh, first_kw, step,
                HO, WO, C, O, KH, KW, STRIDE, BLOCK_K,
            )  # fmt: skip
            total = tl.dot(g, signs, total)
            g = next_g
            signs = next_signs
        total = tl.dot(g, signs, total)
    else:
        for step in tl.range(STEPS):
            g, signs = _dgrad_load(
                g_at, oh, ow, s_ptr, c, first_kh, first_kw, step,
                HO, WO, C, O, KH, KW, STRIDE, BLOCK_K,
            )  # fmt: skip
            total = tl.dot(g, signs, total)
    if KIND != 2:
        total = tl.where(_passes(x, KIND), total, 0.0)
    if ADDS:
        total += plus.to(tl.float32)
    tl.store(out_ptr + at, total.to(tl.float16), mask=known)


@tuned(_chunk_configs(), ["images", *SHAPE], _chunk_blocks)
@jit
def _wgrad_kernel(
    g_ptr,
    x_ptr,
    out_ptr,
    images,
    H: tl.constexpr,
    W: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The sum over one chunk, for GROUP · PART values of (kh, kw, c) × BLOCK_O output channels.

    A chunk is some positions of BLOCK_P pixels in some images. The inner loop goes through the images, so that
    all offsets and masks stay the same.
    """
    K: tl.constexpr = KH * KW * C
    BLOCK_K: tl.constexpr = GROUP * PART
    POSITIONS: tl.constexpr = (HO * WO + BLOCK_P - 1) // BLOCK_P
    chunk = tl.program_id(0)
    splits = tl.minimum(tl.num_programs(0), POSITIONS)
    per_group = tl.cdiv(images, tl.num_programs(0) // splits)
    first = chunk // splits * per_group
    last = tl.minimum(first + per_group, images)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
    total = tl.zeros((BLOCK_K, BLOCK_O), tl.float32)
    for position in tl.range(chunk % splits, POSITIONS, splits, num_stages=1):
        pixel = position * BLOCK_P + tl.arange(0, BLOCK_P)
        exists = pixel < HO * WO
        top = pixel // WO * STRIDE - PADDING
        left = pixel % WO * STRIDE - PADDING
        offset, inside = _taps(top, left, exists, tl.program_id(1), H, W, C, KH, KW, BLOCK_K)
        x_at = ((top * W + left) * C)[:, None] + offset
        g_at = (pixel * O)[:, None] + o[None, :]
        known = exists[:, None] & (o < O)[None, :]
        begin = tl.minimum(first, images - 1)  # more chunks than images: one without a step
        x_at = x_ptr + begin * (H * W * C) + x_at
        g_at = g_ptr + begin * (HO * WO * O) + g_at
        if AHEAD:
            x = tl.load(x_at, mask=inside, other=0.0)
            g = tl.load(g_at, mask=known, other=0.0)
            for n in tl.range(first + 1, last + 1, num_stages=1):
                x_at += tl.where(n < last, H * W * C, 0)  # the last step loads what it has again
                g_at += tl.where(n < last, HO * WO * O, 0)
                next_x = tl.load(x_at, mask=inside, other=0.0)
                next_g = tl.load(g_at, mask=known, other=0.0)
                total = tl.dot(tl.trans(_binary(x, inside, KIND)), g, total)
                x = next_x
                g = next_g
        else:
            for _ in tl.range(first, last):
                x = tl.load(x_at, mask=inside, other=0.0)
                g = tl.load(g_at, mask=known, other=0.0)
                total = tl.dot(tl.trans(_binary(x, inside, KIND)), g, total)
                x_at += H * W * C
                g_at += HO * WO * O
    at = (chunk * O + o)[None, :] * K + k[:, None]
    tl.store(out_ptr + at, total, mask=(k < K)[:, None] & (o < O)[None, :])


KERNELS = {"fprop": _fprop_kernel, "dgrad": _dgrad_kernel, "wgrad": _wgrad_kernel}


# ----------------------------------------------------------------------------------------- launchers


def fprop_by_triton(
    x: Tensor, halves: Tensor, y: Tensor, stride: int, padding: int, kind: int
) -> None:
    o = halves.shape[0]
    pixels = y.shape[0] * y.shape[2] * y.shape[3]
    block_o = power(o, 128)
    with torch.cuda.device_of(x):
        _fprop_kernel[lambda meta: (cdiv(pixels, meta["BLOCK_P"]), cdiv(o, block_o))](
            x_ptr=x,
            s_ptr=halves,
            y_ptr=y,
            pixels=pixels,
            **_geometry(x, halves.shape, stride, padding, kind),
            PART=_part(x.shape[1]),
            BLOCK_O=block_o,
        )


def dgrad_by_triton(
    grad: Tensor,
    x: Tensor,
    halves: Tensor,
    plus: Tensor | None,
    out: Tensor,
    stride: int,
    padding: int,
    kind: int,
) -> None:
    n, c, h, w = x.shape
    pixels = n * cdiv(h, stride) * cdiv(w, stride)
    block_c = power(c, 128)
    with torch.cuda.device_of(x):
        _dgrad_kernel[
            lambda meta: (cdiv(pixels, meta["BLOCK_P"]), cdiv(c, block_c), stride * stride)
        ](
            g_ptr=grad,
            x_ptr=x,
            s_ptr=halves,
            plus_ptr=x if plus is None else plus,
            out_ptr=out,
            pixels=pixels,
            **_geometry(x, halves.shape, stride, padding, kind),
            PART=_part(halves.shape[0]),
            BLOCK_C=block_c,
            ADDS=plus is not None,
        )


def wgrad_by_triton(
    grad: Tensor, x: Tensor, kh: int, kw: int, stride: int, padding: int, kind: int
) -> Tensor:
    c, o = x.shape[1], grad.shape[1]
    out = empty_partial(x, grad, kh, kw, chunks(x, size(grad), c * kh * kw, o))
    block_o, part = power(o, 128), _part(c)
    with torch.cuda.device_of(x):
        _wgrad_kernel[
            lambda meta: (
                out.shape[0],
                cdiv(c * kh * kw, part * meta["GROUP"]),
                cdiv(o, block_o),
            )
        ](
            g_ptr=grad,
            x_ptr=x,
            out_ptr=out,
            images=x.shape[0],
            **_geometry(x, (o, c, kh, kw), stride, padding, kind),
            PART=part,
            BLOCK_O=block_o,
        )
    return out


def _part(channels: int) -> int:
    """The largest power of two that divides ``channels``, up to 64; 16 where that is less, to be a product's side."""
    return min(64, max(16, channels & -channels))


def chunks(x: Tensor, size: tuple[int, int], terms: int, outputs: int) -> int:
    """How many partial sums the sign gradient has: enough programs to fill the device, no more."""
    programs = cdiv(terms, 64) * cdiv(outputs, power(outputs, 128))
    wanted = cdiv(filling(x, tuning.PROGRAMS_PER_SM), programs)
    wanted = min(wanted, MOST_PARTIAL // (terms * outputs))
    images, positions = x.shape[0], cdiv(size[0] * size[1], 64)
    splits = cdiv(positions, cdiv(positions, max(1, wanted)))  # even shares
    return splits * cdiv(images, cdiv(images, max(1, wanted // splits)))


def _geometry(
    x: Tensor, weight_shape: Sequence[int], stride: int, padding: int, kind: int
) -> dict[str, Any]:
    o, c, kh, kw = weight_shape
    h, w = x.shape[2:]
    ho, wo = output_size((h, w), (kh, kw), stride, padding)
    return {
        "H": h,
        "W": w,
        "HO": ho,
        "WO": wo,
        "C": c,
        "O": o,
        "KH": kh,
        "KW": kw,
        "STRIDE": stride,
        "PADDING": padding,
        "KIND": kind,
    }


def output_size(
    size: tuple[int, int], kernel: tuple[int, int], stride: int, padding: int
) -> tuple[int, int]:
    height, width = (
        (length + 2 * padding - taps) // stride + 1
        for length, taps in zip(size, kernel, strict=True)
    )
    return height, width


def size(images: Tensor) -> tuple[int, int]:
    return images.shape[2], images.shape[3]


def empty_partial(x: Tensor, grad: Tensor, kh: int, kw: int, chunks: int) -> Tensor:
    c, o = x.shape[1], grad.shape[1]
    return torch.empty((chunks, o, kh, kw, c), dtype=torch.float32, device=x.device)
