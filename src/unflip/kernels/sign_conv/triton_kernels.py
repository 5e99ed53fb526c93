"""The Triton kernels of the binary convolution. ``triton_launch.py`` tunes and launches them.

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

    fprop    y      =  B(x) ⋆ signs                    one row per output pixel, summed over (kh, kw, c)
    dgrad    grad_x = (grad_y ⋆ᵀ signs) · 1[|x| ≤ 1]   one row per input pixel, summed over (kh, kw, o)
    wgrad    grad_s =  B(x)ᵀ · grad_y                  summed over pixels: one partial sum per chunk of pixels

With stride s the input pixels form s² classes by (row mod s, column mod s). Each class meets only every s-th tap. The
classes are the third axis of the grid.

The sign is taken from the bits, two values at a time: x + 0 is never −0, and its sign bit is put on the float16
1.0 (0x3C00), or on 0.0 in the padding.
"""

# Triton reads the annotations of kernels and does not know Any, so pointers and numbers have none.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from unflip.kernels.tuning import jit

try:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    tl = None


@jit
def _binary(x, inside, KIND: tl.constexpr):
    """B(x), and 0 outside the image, where x has been read as 0. KIND: an index of ``cover.INPUTS``."""
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
    """Offsets from (top, left) of the values k = step · BLOCK_K ... of output pixels, and whether they are inside."""
    lane = tl.arange(0, BLOCK_K)
    if C % BLOCK_K == 0:  # all of one tap: one check per row
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


@jit
def fprop_kernel(
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
    if UNROLL:  # loads the next values while these are multiplied
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
    tl.store(y_ptr + row[:, None] * O + o[None, :], total.to(y_ptr.dtype.element_ty), mask=known)


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
    """One step of the sum over k = (a, b, o). The taps are first_kh + a · STRIDE and first_kw + b · STRIDE."""
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
        if STRIDE > 1:  # some classes have one tap less
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


@jit
def dgrad_kernel(
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
    """BLOCK_P input pixels of one class × BLOCK_C input channels; ``pixels`` is the size of the largest class."""
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
    # (oh, ow): the output pixel that the first tap of the class leads to
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
    if UNROLL:  # loads the next values while these are multiplied
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


@jit
def wgrad_kernel(
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

    A chunk consists of some positions of BLOCK_P pixels in some images. The inner loop runs over the images, so that
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
        begin = tl.minimum(first, images - 1)  # with more chunks than images, some have no step
        x_at = x_ptr + begin * (H * W * C) + x_at
        g_at = g_ptr + begin * (HO * WO * O) + g_at
        if AHEAD:
            x = tl.load(x_at, mask=inside, other=0.0)
            g = tl.load(g_at, mask=known, other=0.0)
            for n in tl.range(first + 1, last + 1, num_stages=1):
                x_at += tl.where(n < last, H * W * C, 0)  # the last step loads its own values again
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
