"""The Triton kernels of LNS's mapping networks. ``operator.py`` tunes and launches them, ``plan.py`` makes the table.

A block of a convolution is BLOCK_F filters at one position of the 3×3 image: all of its rows meet the same taps, and
taps in the padding are left out of the sum (32 of 81). The left side of the product is never stored.
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
def _shapes(table_ptr, layers, LAYERS: tl.constexpr):
    """Filters and channels of every layer; zeros after the last layer."""
    at = table_ptr + tl.arange(0, LAYERS) * 6
    exists = tl.arange(0, LAYERS) < layers
    return tl.load(at, mask=exists, other=0), tl.load(at + 1, mask=exists, other=0)


@jit
def _locate(counts, number):
    """The layer of a program, and the program's number in that layer. ``counts``: the programs of each layer."""
    before = tl.cumsum(counts, 0) <= number
    layer = tl.sum(before.to(tl.int32), 0)
    return layer, number - tl.sum(tl.where(before, counts, 0), 0)


@jit
def _layer(table_ptr, layer, ALIGNED: tl.constexpr):
    """A row of the table: filters, channels, and the offsets of activations, weights, norms and partial sums."""
    at = table_ptr + layer * 6
    filters = tl.load(at)
    channels = tl.load(at + 1)
    activations = tl.load(at + 2)
    squares = tl.load(at + 3)
    norms = tl.load(at + 4)
    partials = tl.load(at + 5)
    if ALIGNED:  # then loads can have 16 bytes
        channels = tl.multiple_of(channels, 16)
        activations = tl.multiple_of(activations, 16)
        squares = tl.multiple_of(squares, 16)
        norms = tl.multiple_of(norms, 16)
        partials = tl.multiple_of(partials, 16)
    return filters, channels, activations, squares, norms, partials


@jit
def conv_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    bias_ptr,
    y_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    first_ptr,
    second_ptr,
    table_ptr,
    layers,
    activations,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    THEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_F filters at one position × BLOCK_N of the OUT · c output channels, from IN · c input channels.

    TRANSPOSED: x is the gradient of the output, and the result is the gradient of the input. THEN:
      "bias"        adds the bias,
      "statistics"  also stores the mean of every 16 filters and their squares about it,
      "relu"        masks the gradient by ReLU, and stores the two sums that the norm's gradient needs.
    """
    PARTS: tl.constexpr = BLOCK_F // 16
    all_filters, all_channels = _shapes(table_ptr, layers, LAYERS)
    counts = 9 * tl.cdiv(all_filters, BLOCK_F) * tl.cdiv(all_channels * OUT, BLOCK_N)
    layer, tile = _locate(counts, tl.program_id(0))
    filters, channels, begin, squares, norms, partials = _layer(table_ptr, layer, ALIGNED)
    K = channels * IN
    N = channels * OUT
    n_blocks = tl.cdiv(N, BLOCK_N)
    f_blocks = tl.cdiv(filters, BLOCK_F)
    n = tile % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tile // n_blocks
    first_f = tile % f_blocks * BLOCK_F
    f = first_f + tl.arange(0, BLOCK_F)
    position = (tile // f_blocks + 4) % 9  # the middle first: it has the longest sum
    row = position // 3
    column = position % 3
    top = tl.maximum(row - 1, 0)
    left = tl.maximum(column - 1, 0)
    height = tl.minimum(row + 1, 2) - top + 1
    width = tl.minimum(column + 1, 2) - left + 1
    chunks = tl.cdiv(K, BLOCK_K)

    x_at = x_ptr + begin * IN + f * 9 * K
    w_ptr += squares * (9 * IN * OUT)
    total = tl.zeros((BLOCK_F, BLOCK_N), tl.float32)
    for step in tl.range(height * width * chunks):
        neighbor = step // chunks
        i = top + neighbor // width
        j = left + neighbor % width
        k = step % chunks * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_at[:, None] + ((i * 3 + j) * K + k)[None, :],
            mask=(f < filters)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        if TRANSPOSED:  # of (K, 3, 3, N)
            tap = (row - i + 1) * 3 + column - j + 1
            w_at = (k * 9 * N)[:, None] + (tap * N + n)[None, :]
        else:  # of (N, 3, 3, K)
            tap = (i - row + 1) * 3 + j - column + 1
            w_at = (tap * K + k)[:, None] + (n * 9 * K)[None, :]
        w = tl.load(w_ptr + w_at, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)

    known = (f < filters)[:, None] & (n < N)[None, :]
    at = begin * OUT + ((f * 9 + position) * N)[:, None] + n[None, :]
    if THEN == "bias":
        total += tl.load(bias_ptr + norms + n, mask=n < N, other=0.0)[None, :]
    if THEN == "relu":
        total = tl.where(tl.load(h_ptr + at, mask=known, other=0.0) > 0.0, total, 0.0)
    tl.store(out_ptr + at, total, mask=known)

    if THEN == "statistics" or THEN == "relu":
        part = first_f // 16 + tl.arange(0, PARTS)
        parts = tl.cdiv(filters, 16)
        part_at = partials * OUT + ((position * parts + part) * N)[:, None] + n[None, :]
        part_known = (part < parts)[:, None] & (n < N)[None, :]
        if THEN == "statistics":
            each = part[:, None] * 16 + tl.arange(0, 16)[None, :]
            inside = (each < filters)[:, :, None]
            values = tl.reshape(total, (PARTS, 16, BLOCK_N))
            size = tl.minimum(tl.maximum(filters - part * 16, 1), 16).to(tl.float32)
            first = tl.sum(tl.where(inside, values, 0.0), 1) / size[:, None]
            away = tl.where(inside, values - first[:, None, :], 0.0)
            second = tl.sum(away * away, 1)
        else:
            mean = tl.load(mean_ptr + norms * OUT + n, mask=n < N, other=0.0)
            rstd = tl.load(rstd_ptr + norms * OUT + n, mask=n < N, other=0.0)
            y = tl.load(y_ptr + at, mask=known, other=0.0)
            normal = (y - mean[None, :]) * rstd[None, :]
            first = tl.sum(tl.reshape(total, (PARTS, 16, BLOCK_N)), 1)
            second = tl.sum(tl.reshape(total * normal, (PARTS, 16, BLOCK_N)), 1)
        tl.store(first_ptr + part_at, first, mask=part_known)
        tl.store(second_ptr + part_at, second, mask=part_known)


@jit
def norm_kernel(
    y_ptr,
    h_ptr,
    scale_ptr,
    shift_ptr,
    mean_ptr,
    rstd_ptr,
    first_ptr,
    second_ptr,
    table_ptr,
    layers,
    ALIGNED: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """h = ReLU of the normalized y, for BLOCK_R pixels × BLOCK_N channels; merges the partial statistics first."""
    all_filters, all_channels = _shapes(table_ptr, layers, LAYERS)
    counts = tl.cdiv(9 * all_filters, BLOCK_R) * tl.cdiv(2 * all_channels, BLOCK_N)
    layer, tile = _locate(counts, tl.program_id(0))
    filters, channels, begin, _, norms, partials = _layer(table_ptr, layer, ALIGNED)
    N = 2 * channels
    n_blocks = tl.cdiv(N, BLOCK_N)
    n = tile % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tile // n_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    parts = tl.cdiv(filters, 16)
    first_ptr += 2 * partials
    second_ptr += 2 * partials

    mean = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(0, 9 * parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        size = tl.minimum(filters - part % parts * 16, 16).to(tl.float32)
        known = (part < 9 * parts)[:, None] & (n < N)[None, :]
        first = tl.load(first_ptr + (part * N)[:, None] + n[None, :], mask=known, other=0.0)
        mean += tl.sum(first * size[:, None], 0)
    mean = mean / (9 * filters).to(tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(0, 9 * parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        size = tl.minimum(filters - part % parts * 16, 16).to(tl.float32)
        known = (part < 9 * parts)[:, None] & (n < N)[None, :]
        first = tl.load(first_ptr + (part * N)[:, None] + n[None, :], mask=known, other=0.0)
        second = tl.load(second_ptr + (part * N)[:, None] + n[None, :], mask=known, other=0.0)
        away = tl.where(known, first - mean[None, :], 0.0)
        squares += tl.sum(second + away * away * size[:, None], 0)
    rstd = tl.rsqrt(squares / (9 * filters).to(tl.float32) + 1e-5)

    scale = tl.load(scale_ptr + 2 * norms + n, mask=n < N, other=0.0)
    shift = tl.load(shift_ptr + 2 * norms + n, mask=n < N, other=0.0)
    at = 2 * begin + (r * N)[:, None] + n[None, :]
    known = (r < 9 * filters)[:, None] & (n < N)[None, :]
    y = tl.load(y_ptr + at, mask=known, other=0.0)
    h = (y - mean[None, :]) * rstd[None, :] * scale[None, :] + shift[None, :]
    tl.store(h_ptr + at, tl.where(h < 0.0, 0.0, h), mask=known)  # maximum would lose a NaN
    if tile // n_blocks == 0:
        tl.store(mean_ptr + 2 * norms + n, mean, mask=n < N)
        tl.store(rstd_ptr + 2 * norms + n, rstd, mask=n < N)


@jit
def norm_backward_kernel(
    grad_ptr,
    y_ptr,
    scale_ptr,
    grad_scale_ptr,
    grad_shift_ptr,
    mean_ptr,
    rstd_ptr,
    first_ptr,
    second_ptr,
    table_ptr,
    layers,
    ALIGNED: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """In place: the gradient of the normalized values becomes that of y. Also the gradients of scale and shift.

    With ŷ = (y − mean)/σ and N values:  γ/σ · (g − Σg/N − ŷ Σgŷ/N).
    """
    all_filters, all_channels = _shapes(table_ptr, layers, LAYERS)
    counts = tl.cdiv(9 * all_filters, BLOCK_R) * tl.cdiv(2 * all_channels, BLOCK_N)
    layer, tile = _locate(counts, tl.program_id(0))
    filters, channels, begin, _, norms, partials = _layer(table_ptr, layer, ALIGNED)
    N = 2 * channels
    n_blocks = tl.cdiv(N, BLOCK_N)
    n = tile % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tile // n_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    parts = 9 * tl.cdiv(filters, 16)

    first = tl.zeros((BLOCK_N,), tl.float32)
    second = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(0, parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        known = (part < parts)[:, None] & (n < N)[None, :]
        at = 2 * partials + (part * N)[:, None] + n[None, :]
        first += tl.sum(tl.load(first_ptr + at, mask=known, other=0.0), 0)
        second += tl.sum(tl.load(second_ptr + at, mask=known, other=0.0), 0)
    if tile // n_blocks == 0:
        tl.store(grad_shift_ptr + 2 * norms + n, first, mask=n < N)
        tl.store(grad_scale_ptr + 2 * norms + n, second, mask=n < N)

    scale = tl.load(scale_ptr + 2 * norms + n, mask=n < N, other=0.0)
    mean = tl.load(mean_ptr + 2 * norms + n, mask=n < N, other=0.0)
    rstd = tl.load(rstd_ptr + 2 * norms + n, mask=n < N, other=0.0)
    size = (9 * filters).to(tl.float32)
    first = first / size
    second = second / size
    at = 2 * begin + (r * N)[:, None] + n[None, :]
    known = (r < 9 * filters)[:, None] & (n < N)[None, :]
    grad = tl.load(grad_ptr + at, mask=known, other=0.0)
    normal = (tl.load(y_ptr + at, mask=known, other=0.0) - mean[None, :]) * rstd[None, :]
    grad = (grad - first[None, :] - normal * second[None, :]) * (rstd * scale)[None, :]
    tl.store(grad_ptr + at, grad, mask=known)


@jit
def _wgrad_block(
    x_ptr,
    g_ptr,
    out_ptr,
    bias_ptr,
    table_ptr,
    layers,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    ALIGNED: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """BLOCK_O × BLOCK_I of one tap of one convolution's gradient: a sum over all pixels the tap meets."""
    _all_filters, all_channels = _shapes(table_ptr, layers, LAYERS)
    counts = 9 * tl.cdiv(all_channels * OUT, BLOCK_O) * tl.cdiv(all_channels * IN, BLOCK_I)
    if tl.program_id(0) < tl.sum(counts, 0):
        layer, tile = _locate(counts, tl.program_id(0))
        filters, channels, begin, squares, norms, _ = _layer(table_ptr, layer, ALIGNED)
        CI = channels * IN
        CO = channels * OUT
        i_blocks = tl.cdiv(CI, BLOCK_I)
        i_block = tile % i_blocks
        ci = i_block * BLOCK_I + tl.arange(0, BLOCK_I)
        tile = tile // i_blocks
        o_blocks = tl.cdiv(CO, BLOCK_O)
        o = tile % o_blocks * BLOCK_O + tl.arange(0, BLOCK_O)
        tap = (tile // o_blocks + 4) % 9  # the middle first: it meets all pixels
        down = tap // 3 - 1
        right = tap % 3 - 1
        top = tl.maximum(-down, 0)
        left = tl.maximum(-right, 0)
        width = 3 - tl.abs(right)
        pixels = (3 - tl.abs(down)) * width * filters
        x_ptr += begin * IN
        g_ptr += begin * OUT

        total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
        for start in tl.range(0, pixels, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            place = r // filters
            pixel = r % filters * 9 + (top + place // width) * 3 + left + place % width
            g = tl.load(
                g_ptr + (pixel * CO)[:, None] + o[None, :],
                mask=(r < pixels)[:, None] & (o < CO)[None, :],
                other=0.0,
            )
            x = tl.load(
                x_ptr + ((pixel + down * 3 + right) * CI)[:, None] + ci[None, :],
                mask=(r < pixels)[:, None] & (ci < CI)[None, :],
                other=0.0,
            )
            total = tl.dot(tl.trans(g), x, total, input_precision="tf32")
        at = squares * (9 * IN * OUT) + ((o * 9 + tap) * CI)[:, None] + ci[None, :]
        tl.store(out_ptr + at, total, mask=(o < CO)[:, None] & (ci < CI)[None, :])

        if BIAS:  # noqa: SIM102
            if (tap == 4) & (i_block == 0):
                sums = tl.zeros((BLOCK_O,), tl.float32)
                for start in tl.range(0, pixels, BLOCK_R):
                    r = start + tl.arange(0, BLOCK_R)
                    g = tl.load(
                        g_ptr + (r * CO)[:, None] + o[None, :],
                        mask=(r < pixels)[:, None] & (o < CO)[None, :],
                        other=0.0,
                    )
                    sums += tl.sum(g, 0)
                tl.store(bias_ptr + norms + o, sums, mask=o < CO)


@jit
def wgrad_kernel(
    x1_ptr,
    x2_ptr,
    x3_ptr,
    g1_ptr,
    g2_ptr,
    g3_ptr,
    out1_ptr,
    out2_ptr,
    out3_ptr,
    bias_ptr,
    table_ptr,
    layers,
    activations,
    ALIGNED: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """The gradients of all weights and of conv3's bias. The second axis of the grid is the convolution."""
    if tl.program_id(1) == 0:
        _wgrad_block(
            x2_ptr, g2_ptr, out2_ptr, bias_ptr, table_ptr, layers,
            2, 2, False, ALIGNED, LAYERS, BLOCK_R, BLOCK_O, BLOCK_I,
        )  # fmt: skip
    elif tl.program_id(1) == 1:
        _wgrad_block(
            x3_ptr, g3_ptr, out3_ptr, bias_ptr, table_ptr, layers,
            2, 1, True, ALIGNED, LAYERS, BLOCK_R, BLOCK_O, BLOCK_I,
        )  # fmt: skip
    else:
        _wgrad_block(
            x1_ptr, g1_ptr, out1_ptr, bias_ptr, table_ptr, layers,
            1, 2, False, ALIGNED, LAYERS, BLOCK_R, BLOCK_O, BLOCK_I,
        )  # fmt: skip
