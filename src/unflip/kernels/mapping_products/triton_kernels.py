"""What happens between the matrix products of ``operator.py``: values become halves, hidden values are normalized.

Values are (column, layer, pixel, channel), a pixel being a row and a filter. Halves are (layer, pixel, column, channel)
with ORDER BESIDE, and as values otherwise. A program has some rows of channels of one layer.
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
def power_of_two(largest):
    """The power of two that brings ``largest`` below 2^15, half of what float16 reaches; at most 2^60."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(268 - exponent, 1), 187)
    return (exponent << 23).to(tl.float32, bitcast=True)


@jit
def normal_values(x, statistics_ptr, norms_ptr, at, known, size):
    """ŷ = (y − mean) / deviation, and what its scale and shift make of it: the input of the ReLU."""
    mean = tl.load(statistics_ptr + at, mask=known, other=0.0)
    factor = tl.load(statistics_ptr + size + at, mask=known, other=0.0)
    scale = tl.load(norms_ptr + at, mask=known, other=0.0)
    shift = tl.load(norms_ptr + size + at, mask=known, other=0.0)
    normal = (x - mean[None, :]) * factor[None, :]
    return normal, normal * scale[None, :] + shift[None, :], (scale * factor)[None, :]


@jit
def halves_kernel(
    x_ptr,
    scales_ptr,
    statistics_ptr,
    norms_ptr,
    out_ptr,
    pixels,
    layers,
    C: tl.constexpr,
    ORDER: tl.constexpr,
    PARTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Halves of scaled values, in another order, as one part (hi) or three (hi, lo, hi or hi, hi, lo).

    ORDER 0: as they are; 1: from (column, layer, pixel) to (layer, pixel, column); 2: from (filter, tap) to (tap from
    last to first, filter). HIDDEN: the values are normalized first, and pass the ReLU.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(2).to(tl.int64)
    known = c < C
    here = (row < pixels)[:, None] & known[None, :]
    if ORDER == 1:
        third = pixels // 3
        source = (row // third * layers + layer) * third + row % third
        row = row % third * 3 + row // third
    else:
        source = layer * pixels + row
        if ORDER == 2:
            row = (8 - row % 9) * (pixels // 9) + row // 9
    x = tl.load(x_ptr + source.to(tl.int64)[:, None] * C + c[None, :], mask=here, other=0.0)
    if HIDDEN:
        _, x, _ = normal_values(x, statistics_ptr, norms_ptr, layer * C + c, known, layers * C)
        x = tl.where(x < 0, 0.0, x)  # a NaN stays a NaN
    x = x * tl.load(scales_ptr + layer)
    hi = x.to(tl.float16)
    if PARTS == 0:
        tl.store(out_ptr + (layer * pixels + row)[:, None] * C + c[None, :], hi, mask=here)
    else:
        to = out_ptr + (layer * pixels + row)[:, None] * (3 * C) + c[None, :]
        lo = (x - hi.to(tl.float32)).to(tl.float16)
        tl.store(to, hi, mask=here)
        tl.store(to + C, lo if PARTS == 1 else hi, mask=here)
        tl.store(to + 2 * C, hi if PARTS == 1 else lo, mask=here)


@jit
def moments_kernel(
    y_ptr,
    partial_ptr,
    pixels,
    layers,
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mean and sum of squares about it of each channel, over one of SPLITS parts of a layer's pixels; merged by Chan's
    formula."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    split, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    third, per = pixels // 3, (pixels + SPLITS - 1) // SPLITS
    end = tl.minimum(split * per + per, pixels)
    count = 0.0
    mean = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(split * per, end, ROWS):
        row = start + tl.arange(0, ROWS)
        here = (row < end)[:, None] & (c < C)[None, :]
        source = (row // third * layers + layer) * third + row % third
        y = tl.load(y_ptr + source.to(tl.int64)[:, None] * C + c[None, :], mask=here, other=0.0)
        some = tl.minimum(end - start, ROWS).to(tl.float32)
        here_mean = tl.sum(y, 0) / some
        off = tl.where(here, y - here_mean[None, :], 0.0)
        delta, total = here_mean - mean, count + some
        mean += delta * (some / total)
        squares += tl.sum(off * off, 0) + delta * delta * (count * some / total)
        count = total
    to = partial_ptr + (layer * SPLITS + split) * (2 * C) + c
    tl.store(to, mean, mask=c < C)
    tl.store(to + C, squares, mask=c < C)


@jit
def finish_moments_kernel(
    partial_ptr,
    product_ptr,
    statistics_ptr,
    pixels,
    layers,
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts together: the mean of y, which is scaled by ``product``, and the factor that makes y − mean normal."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(1).to(tl.int64)
    known = c < C
    per = (pixels + SPLITS - 1) // SPLITS
    count = 0.0
    mean = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for split in range(0, (pixels + per - 1) // per):
        of = partial_ptr + (layer * SPLITS + split) * (2 * C) + c
        some = tl.minimum(pixels - split * per, per).to(tl.float32)
        delta, total = tl.load(of, mask=known, other=0.0) - mean, count + some
        mean += delta * (some / total)
        squares += tl.load(of + C, mask=known, other=0.0)
        squares += delta * delta * (count * some / total)
        count = total
    unit = 1 / tl.load(product_ptr + layer)
    deviation = tl.sqrt(squares / count * unit * unit + 1e-5)
    tl.store(statistics_ptr + layer * C + c, mean, mask=known)
    tl.store(statistics_ptr + (layers + layer) * C + c, unit / deviation, mask=known)


@jit
def sums_kernel(
    grad_ptr,
    y_ptr,
    statistics_ptr,
    norms_ptr,
    partial_ptr,
    pixels,
    layers,
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of the gradient g behind the ReLU: Σ g, Σ g ŷ and the largest |g| of each channel, over a part of the pixels."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    split, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    known = c < C
    third, per = pixels // 3, (pixels + SPLITS - 1) // SPLITS
    end = tl.minimum(split * per + per, pixels)
    of_g = tl.zeros([BLOCK], tl.float32)
    of_both = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(split * per, end, ROWS):
        row = start + tl.arange(0, ROWS)
        here = (row < end)[:, None] & known[None, :]
        source = (row // third * layers + layer) * third + row % third
        at = source.to(tl.int64)[:, None] * C + c[None, :]
        y = tl.load(y_ptr + at, mask=here, other=0.0)
        normal, z, _ = normal_values(y, statistics_ptr, norms_ptr, layer * C + c, known, layers * C)
        g = tl.load(grad_ptr + at, mask=here, other=0.0)
        g = tl.where(z > 0, g, 0.0)
        of_g += tl.sum(g, 0)
        of_both += tl.sum(g * normal, 0)
        largest = tl.maximum(largest, tl.max(tl.abs(g), 0))
    to = partial_ptr + (layer * SPLITS + split) * (3 * C) + c
    tl.store(to, of_g, mask=known)
    tl.store(to + C, of_both, mask=known)
    tl.store(to + 2 * C, largest, mask=known)


@jit
def finish_sums_kernel(
    partial_ptr,
    statistics_ptr,
    norms_ptr,
    grads_ptr,
    means_ptr,
    pixels,
    layers,
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts together. ``grads``: of scale and shift. ``means``: of g and of g ŷ, and a bound of the gradient of y.

    The gradient of y is (g − mean g − ŷ mean g ŷ) · scale / deviation. No mean is larger than the largest |g|, and no ŷ
    larger than the root of the number of pixels.
    """
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(1).to(tl.int64)
    known = c < C
    of_g = tl.zeros([BLOCK], tl.float32)
    of_both = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.float32)
    for split in range(0, SPLITS):
        of = partial_ptr + (layer * SPLITS + split) * (3 * C) + c
        of_g += tl.load(of, mask=known, other=0.0)
        of_both += tl.load(of + C, mask=known, other=0.0)
        largest = tl.maximum(largest, tl.load(of + 2 * C, mask=known, other=0.0))
    size, at = layers * C, layer * C + c
    tl.store(grads_ptr + at, of_both, mask=known)
    tl.store(grads_ptr + size + at, of_g, mask=known)
    tl.store(means_ptr + at, of_g / pixels, mask=known)
    tl.store(means_ptr + size + at, of_both / pixels, mask=known)
    factor = tl.load(statistics_ptr + size + at, mask=known, other=0.0)
    factor *= tl.load(norms_ptr + at, mask=known, other=0.0)
    root = tl.sqrt(pixels.to(tl.float32))
    tl.store(means_ptr + 2 * size + at, tl.abs(factor) * largest * (2 + root), mask=known)


@jit
def hidden_backward_kernel(
    grad_ptr,
    y_ptr,
    statistics_ptr,
    norms_ptr,
    means_ptr,
    hidden_scales_ptr,
    grad_scales_ptr,
    beside_ptr,
    same_ptr,
    hidden_ptr,
    pixels,
    layers,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL: tl.constexpr,
):
    """Halves of the gradient of y, in two orders, and of the hidden values, beside each other. Stores the scales of the
    gradient: its bound is known."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(2).to(tl.int64)
    size, at = layers * C, layer * C + c
    every = tl.arange(0, ALL)
    bounds = tl.load(means_ptr + 2 * size + layer * C + every, mask=every < C, other=0.0)
    scale = power_of_two(tl.max(bounds, 0))
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    tl.store(grad_scales_ptr + layer, scale, mask=first)
    known = c < C
    here = (row < pixels)[:, None] & known[None, :]
    third = pixels // 3
    source = ((row // third * layers + layer) * third + row % third).to(tl.int64)[:, None] * C
    y = tl.load(y_ptr + source + c[None, :], mask=here, other=0.0)
    normal, z, factor = normal_values(y, statistics_ptr, norms_ptr, at, known, size)
    g = tl.load(grad_ptr + source + c[None, :], mask=here, other=0.0)
    g = tl.where(z > 0, g, 0.0)
    g -= tl.load(means_ptr + at, mask=known, other=0.0)[None, :]
    g -= normal * tl.load(means_ptr + size + at, mask=known, other=0.0)[None, :]
    g = (g * factor * scale).to(tl.float16)
    beside = (layer * pixels + row % third * 3 + row // third)[:, None] * C + c[None, :]
    tl.store(beside_ptr + beside, g, mask=here)
    tl.store(same_ptr + source + c[None, :], g, mask=here)
    hidden = tl.where(z < 0, 0.0, z) * tl.load(hidden_scales_ptr + layer)
    tl.store(hidden_ptr + beside, hidden.to(tl.float16), mask=here)
