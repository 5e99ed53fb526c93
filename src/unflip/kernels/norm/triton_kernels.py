"""The Triton kernels of PReLU, BatchNorm and shortcut: two forward, two backward. ``operator.py`` launches them.

Forward, one pass over y sums for mean and variance, a second one writes the output. Backward, with g the gradient of
out, n = 1[u ≤ 0] and r = 1 / √(var z + ε) (the other names are those of ``operator.py``), one pass over g and y adds up
to eight sums over the pixels of a channel,

    S₁ = Σ g     S₂ = Σ g · ẑ     S₃ = Σ n · u · g     S₄ = Σ n · u     S₅ = Σ n · u · ẑ
                                  S₆ = Σ n · g         S₇ = Σ n         S₈ = Σ n · ẑ

from which the gradients of the small tensors follow (Σ ∂z is 0),

    ∂β = S₁     ∂γ = S₂     ∂a = Σ n · u · ∂z      = γ · r · (S₃ − S₄ · S₁ / M − S₅ · S₂ / M)
                            ∂b = (a − 1) Σ n · ∂z  = γ · r · (S₆ − S₇ · S₁ / M − S₈ · S₂ / M) · (a − 1)

A second pass writes ∂y = s · (a where n, else 1) · ∂z with ∂z = γ · r · (g − S₁ / M − ẑ · S₂ / M). ∂t is g itself.

Sums are float32. The moments are those of z − k, where k is BatchNorm's running mean and so near the mean: the variance
is never a small difference of large numbers. Each program of the first pass leaves a partial sum. Each program of the
second pass adds all of them, in the same order: there are no atomics, and the same bits every time.
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
def _activation(y, scale, shift, slope, HAS_SHIFT: tl.constexpr, HAS_SLOPE: tl.constexpr):
    """u and z."""
    u = y.to(tl.float32) * scale[None, :]
    if HAS_SHIFT:
        u += shift[None, :]
    if HAS_SLOPE:
        return u, tl.where(u > 0.0, u, u * slope[None, :])
    return u, u


@jit
def _values(pointer, c, known, GIVEN: tl.constexpr):
    """One value per channel, or zeros if none are given."""
    if GIVEN:
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
    """The channels of a program, which of them exist, and their values."""
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
def moments_kernel(
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
    STAGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Partial sums (program, 2, C) of z − near and of its square, each over ``share`` pixels."""
    program = tl.program_id(0)
    c, known, scale, shift, slope = _channels(
        scale_ptr, shift_ptr, slope_ptr, C, HAS_SHIFT, HAS_SLOPE, BLOCK_C
    )
    near = tl.load(near_ptr + c, mask=known, other=0.0)
    last = tl.minimum(program * share + share, pixels)
    first = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in tl.range(program * share, last, BLOCK_P, num_stages=STAGES):
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
def output_kernel(
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
    STAGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The output. The first program also writes the mean and variance of each channel, (2, C)."""
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
    for tile in tl.range(0, TILES, num_stages=STAGES):
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
def sums_kernel(
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
    STAGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Partial sums (program, COUNT, C): S₁ and S₂; with slopes up to S₅; with a shift up to S₈."""
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
    for start in tl.range(program * share, last, BLOCK_P, num_stages=STAGES):
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
def input_gradient_kernel(
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
    STAGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The gradient of y. The first program also writes the gradients of γ, β, slopes and shift, (4, C)."""
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
    for tile in tl.range(0, TILES, num_stages=STAGES):
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
