"""LNS's mapping networks f(W) of all 3×3 layers at once: eleven kernels a step, whatever the number of layers.

The filters of a layer are a batch of 3×3 images: a convolution of f is a matrix product of a few hundred rows, too
small for a GPU, and a network has three for each layer. Here one launch takes the layers of every shape. A table
says where each layer's numbers begin, and a program looks up which layer and which block of it are its own:

    latent ─conv1─▶ y1 ─norm, ReLU─▶ h1 ─conv2─▶ y2 ─norm, ReLU─▶ h2 ─conv3─▶ q̂          forward: 5 launches
      grad ◀─dgrad1─ ◀──norm'── ◀─dgrad2─ ◀──norm'── ◀─dgrad3─ grad q̂                    backward: 5, and
      one launch for the gradients of all weights and biases, in the memory layout of the (channels_last) weights

A block of a convolution is BLOCK_F filters at one position of the 3×3 image: all of its rows see the same taps, and
those that lie in the padding are left out of the sum (32 of 81). The left side is never stored.

Forward products are three TF32 products each, close to float32: the bits of training are those that are frozen
later. Gradients are plain TF32. The statistics over filters are exact to rounding: for every 16 filters the mean and
the sum of squares about that mean, merged by Chan's formula in a fixed order. There are no atomics: for a given
choice of blocks, everything is the same bits every time. Blocks are tuned at the first call for every set of shapes,
which must not be inside the capture of a CUDA graph. A NaN stays a NaN.

Layout of the flat tensors, layer after layer in each part:

    latent, q̂        (filters, 3, 3, c)
    parameters       conv1 (2c, 3, 3, c), conv2 (2c, 3, 3, 2c), conv3 (c, 3, 3, 2c), the norms' weight and bias
                     (2c each, twice), conv3's bias (c)
    saved            y1, h1, y2, h2 (filters, 3, 3, 2c); mean and 1/σ of norm1, of norm2 (2c each)
"""

# Triton reads the annotations of kernels, and knows no Any: pointers and numbers go without.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unflip.kernels import tuning
from unflip.kernels.tuning import INTERPRETED, available, cdiv, jit
from unflip.methods.mapping_network import MappingNetwork

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = tl = None

MOST_CHANNELS = 128  # from there on a layer's products fill the device by themselves
MOST_ELEMENTS = 2**31 - 2**20  # offsets are int32
PART = 16  # filters in one partial sum; BLOCK_F is a multiple of it

__all__ = ["available", "predict_fused", "supports"]


def supports(mapping: MappingNetwork, weight: Tensor) -> bool:
    """Whether the kernels cover f of this layer."""
    filters, channels = weight.shape[:2]
    return (
        tuple(weight.shape[2:]) == (3, 3)
        and mapping.chunks == 1
        and mapping.norm1.measuring
        and "mean" not in mapping.norm1._buffers  # statistics over filters alone
        and mapping.conv1.out_channels == 2 * channels
        and channels <= MOST_CHANNELS
        and filters * channels * 9 <= 2**24
        and all(t.dtype == torch.float32 for t in (weight, mapping.conv1.weight))
        and (INTERPRETED or weight.device.type == "cuda")
    )


def predict_fused(
    mappings: Sequence[MappingNetwork], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """f(W) of several 3×3 layers of any shapes, each of which :func:`supports` covers."""
    # The longest sums first: the last programs to start are then short ones.
    order = sorted(range(len(weights)), key=lambda i: -weights[i].shape[1])
    nets, latents = [mappings[i] for i in order], [weights[i] for i in order]
    filters, channels = [w.shape[0] for w in latents], [w.shape[1] for w in latents]
    q, _ = _forward(_pack([_flat(w) for w in latents]), _parameters(nets), filters, channels)
    predictions: list[Tensor] = list(weights)
    for i, part, net in zip(order, q.split([w.numel() for w in latents]), nets, strict=True):
        weight = weights[i]
        o, c = weight.shape[:2]
        predicted = part.view(o, 3, 3, c).permute(0, 3, 1, 2)
        if net.residual:
            size = weight.detach().abs().mean()
            predicted = predicted + weight / size.clamp_min(torch.finfo(weight.dtype).tiny)
        predictions[i] = predicted
    return tuple(predictions)


def _flat(weight: Tensor) -> Tensor:
    """In the order of channels_last, where that costs nothing for a weight that is in it."""
    return weight.permute(0, 2, 3, 1).reshape(-1)


def _parameters(nets: Sequence[MappingNetwork]) -> Tensor:
    """One copy of all parameters. The gradient of each is then a part of one tensor, with nothing to copy."""
    convolutions = [[n.conv1 for n in nets], [n.conv2 for n in nets], [n.conv3 for n in nets]]
    parts = [_flat(conv.weight) for kind in convolutions for conv in kind]
    for kind in ([n.norm1 for n in nets], [n.norm2 for n in nets]):
        parts += [norm.weight for norm in kind]
        parts += [norm.bias for norm in kind]
    return _pack([*parts, *[_bias(n.conv3) for n in nets]])


def _bias(convolution: nn.Conv2d) -> Tensor:
    assert convolution.bias is not None
    return convolution.bias


def tuned() -> dict[str, dict[tuple[Any, ...], str]]:
    """The blocks that tuning chose: kernel -> key -> configuration."""
    if triton is None or INTERPRETED:
        return {}
    return {
        name: {tuple(key): str(config) for key, config in kernel.cache.items()}
        for name, kernel in (("convolution", _conv_kernel), ("wgrad", _wgrad_kernel))
    }


# ------------------------------------------------------------------------------------------- kernels

CONV_BLOCKS = [
    # BLOCK_F, BLOCK_N, BLOCK_K, num_warps, num_stages
    (64, 32, 32, 4, 3),
    (32, 32, 32, 4, 4),
    (32, 32, 64, 2, 3),
    (64, 64, 32, 4, 3),
    (16, 64, 64, 4, 3),
    (32, 64, 32, 4, 3),
    (32, 64, 64, 8, 3),
]
WGRAD_BLOCKS = [
    # BLOCK_R, BLOCK_O, BLOCK_I, num_warps, num_stages
    (32, 64, 32, 4, 3),
    (32, 32, 32, 2, 4),
    (64, 32, 32, 4, 3),
    (32, 64, 64, 4, 3),
    (64, 32, 32, 4, 1),
    (32, 64, 64, 4, 1),
]


def _configs(names: tuple[str, str, str], blocks: Sequence[tuple[int, ...]]) -> list[Any]:
    if triton is None:
        return []
    return [
        triton.Config(dict(zip(names, sizes, strict=True)), num_warps=warps, num_stages=stages)
        for *sizes, warps, stages in blocks
    ]


def _conv_configs() -> list[Any]:
    return _configs(("BLOCK_F", "BLOCK_N", "BLOCK_K"), CONV_BLOCKS)


def _wgrad_configs() -> list[Any]:
    return _configs(("BLOCK_R", "BLOCK_O", "BLOCK_I"), WGRAD_BLOCKS)


@jit
def _shapes(table_ptr, layers, LAYERS: tl.constexpr):
    """Filters and channels of every layer; zero after the last."""
    at = table_ptr + tl.arange(0, LAYERS) * 6
    exists = tl.arange(0, LAYERS) < layers
    return tl.load(at, mask=exists, other=0), tl.load(at + 1, mask=exists, other=0)


@jit
def _locate(counts, number):
    """The layer of a program, and the program's number in it, if the layers have ``counts`` programs each."""
    before = tl.cumsum(counts, 0) <= number
    layer = tl.sum(before.to(tl.int32), 0)
    return layer, number - tl.sum(tl.where(before, counts, 0), 0)


@jit
def _layer(table_ptr, layer, ALIGNED: tl.constexpr):
    """A row of the table: filters, channels, and where activations, weights, norms and partial sums begin."""
    at = table_ptr + layer * 6
    filters = tl.load(at)
    channels = tl.load(at + 1)
    activations = tl.load(at + 2)
    squares = tl.load(at + 3)
    norms = tl.load(at + 4)
    partials = tl.load(at + 5)
    if ALIGNED:  # lets loads be of 16 bytes
        channels = tl.multiple_of(channels, 16)
        activations = tl.multiple_of(activations, 16)
        squares = tl.multiple_of(squares, 16)
        norms = tl.multiple_of(norms, 16)
        partials = tl.multiple_of(partials, 16)
    return filters, channels, activations, squares, norms, partials


@tuning.tuned(_conv_configs(), ["layers", "activations", "IN", "OUT", "TRANSPOSED"], None)
@jit
def _conv_kernel(
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

    TRANSPOSED: the gradient of the input, where the input is the output's gradient. THEN
      "bias"        is added,
      "statistics"  (mean, squares about it) of every 16 filters are stored too,
      "relu"        the gradient goes through ReLU, and the two sums that the norm's gradient needs are stored.
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
        neighbour = step // chunks
        i = top + neighbour // width
        j = left + neighbour % width
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
def _norm_kernel(
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
    """h = ReLU of the normalised y, for BLOCK_R pixels × BLOCK_N channels; merges the partial statistics first."""
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
    tl.store(h_ptr + at, tl.where(h < 0.0, 0.0, h), mask=known)  # not maximum: a NaN stays
    if tile // n_blocks == 0:
        tl.store(mean_ptr + 2 * norms + n, mean, mask=n < N)
        tl.store(rstd_ptr + 2 * norms + n, rstd, mask=n < N)


@jit
def _norm_backward_kernel(
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
    """In place: the gradient of the normalised values becomes that of y; also those of scale and shift.

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
    """BLOCK_O × BLOCK_I of one tap of one convolution's gradient: the sum over all pixels the tap sees."""
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
        tap = (tile // o_blocks + 4) % 9  # the middle first: it sees all pixels
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


@tuning.tuned(_wgrad_configs(), ["layers", "activations"], None)
@jit
def _wgrad_kernel(
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


# ------------------------------------------------------------------------------------- torch operators


@dataclass(frozen=True)
class _Plan:
    """Sizes of the flat tensors, and where each layer begins in them."""

    filters: tuple[int, ...]
    channels: tuple[int, ...]
    table: Tensor  # filters, channels, and the four sums below over the layers before

    @property
    def activations(self) -> int:
        return _activations(self.filters, self.channels)

    @property
    def squares(self) -> int:
        return sum(c * c for c in self.channels)

    @property
    def norms(self) -> int:
        return sum(self.channels)

    @property
    def partials(self) -> int:
        return self._count(lambda f, c: 9 * cdiv(f, PART) * c)

    @property
    def shared(self) -> dict[str, Any]:
        """What every kernel is given."""
        layers = len(self.filters)
        return {
            "table_ptr": self.table,
            "layers": layers,
            "ALIGNED": all(c % 16 == 0 for c in self.channels),
            "LAYERS": 1 << (layers - 1).bit_length(),
        }

    def programs(self, row_block: int, columns: int, column_block: int) -> int:
        """Of a norm: 9 · filters pixels × columns · c channels in blocks."""
        return self._count(lambda f, c: cdiv(9 * f, row_block) * cdiv(columns * c, column_block))

    def conv_programs(self, f_block: int, columns: int, column_block: int) -> int:
        """Of a convolution: filters at nine positions × columns · c channels in blocks."""
        return self._count(lambda f, c: 9 * cdiv(f, f_block) * cdiv(columns * c, column_block))

    def wgrad_programs(self, o_block: int, i_block: int) -> int:
        """Of conv2's gradient, the largest of the three."""
        return self._count(lambda f, c: 9 * cdiv(2 * c, o_block) * cdiv(2 * c, i_block))

    def _count(self, each: Callable[[int, int], int]) -> int:
        return sum(each(f, c) for f, c in zip(self.filters, self.channels, strict=True))

    def weights(self, parameters: Tensor) -> list[Tensor]:
        """The three convolutions' part of the parameters (or of their gradient)."""
        return list(parameters[: 72 * self.squares].split([n * self.squares for n in (18, 36, 18)]))

    def vectors(self, parameters: Tensor) -> list[Tensor]:
        """Weight and bias of norm1, of norm2, and conv3's bias."""
        return list(
            parameters[72 * self.squares :].split([n * self.norms for n in (2, 2, 2, 2, 1)])
        )

    def values(self, saved: Tensor) -> list[Tensor]:
        """y1, h1, y2, h2."""
        return list(saved[: 8 * self.activations].chunk(4))

    def statistics(self, saved: Tensor) -> list[Tensor]:
        """Mean and 1/σ of norm1, of norm2."""
        return list(saved[8 * self.activations :].chunk(4))


def _activations(filters: Sequence[int], channels: Sequence[int]) -> int:
    return sum(9 * f * c for f, c in zip(filters, channels, strict=True))


@functools.lru_cache(maxsize=64)
def _plan(filters: tuple[int, ...], channels: tuple[int, ...], device: torch.device) -> _Plan:
    """Kept: a table that is copied to the device in every call could not be in a CUDA graph."""
    rows, sums = [], [0, 0, 0, 0]
    for f, c in zip(filters, channels, strict=True):
        rows.append([f, c, *sums])
        sizes = (9 * f * c, c * c, c, 9 * cdiv(f, PART) * c)
        sums = [a + b for a, b in zip(sums, sizes, strict=True)]
    if max(2 * sums[0], 72 * sums[1], 2 * sums[3]) > MOST_ELEMENTS:
        raise ValueError("mapping: too many elements for 32-bit offsets")
    return _Plan(filters, channels, torch.tensor(rows, dtype=torch.int32, device=device))


def _check(*tensors: Tensor) -> None:
    device = tensors[0].device
    if not available() or not (INTERPRETED or device.type == "cuda"):
        raise RuntimeError(f"mapping needs Triton and a CUDA device; the weights are on {device}")
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.device != device:
            raise TypeError(
                f"mapping: a tensor of {tensor.dtype} on {tensor.device}, "
                f"which should be torch.float32 on {device}"
            )
        if not tensor.is_contiguous():
            raise ValueError("mapping: a tensor is not contiguous")


def _convolve(
    plan: _Plan,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    multiples: tuple[int, int],
    *,
    transposed: bool = False,
    then: str = "",
    pointers: dict[str, Tensor] | None = None,
) -> None:
    names = ("bias_ptr", "y_ptr", "h_ptr", "mean_ptr", "rstd_ptr", "first_ptr", "second_ptr")
    _conv_kernel[
        lambda meta: (plan.conv_programs(meta["BLOCK_F"], multiples[1], meta["BLOCK_N"]),)
    ](
        x_ptr=x,
        w_ptr=weight,
        out_ptr=out,
        **{name: (pointers or {}).get(name, x) for name in names},
        **plan.shared,
        activations=plan.activations,
        IN=multiples[0],
        OUT=multiples[1],
        TRANSPOSED=transposed,
        THEN=then,
        PRECISION="tf32" if transposed else "tf32x3",
    )


NORM_BLOCKS = {"BLOCK_R": 32, "BLOCK_N": 32, "BLOCK_P": 16}


def _normalize(
    plan: _Plan,
    y: Tensor,
    h: Tensor,
    scale: Tensor,
    shift: Tensor,
    statistics: Sequence[Tensor],
    partial: Sequence[Tensor],
) -> None:
    _norm_kernel[(plan.programs(NORM_BLOCKS["BLOCK_R"], 2, NORM_BLOCKS["BLOCK_N"]),)](
        y_ptr=y,
        h_ptr=h,
        scale_ptr=scale,
        shift_ptr=shift,
        mean_ptr=statistics[0],
        rstd_ptr=statistics[1],
        first_ptr=partial[0],
        second_ptr=partial[1],
        **plan.shared,
        **NORM_BLOCKS,
    )


def _normalize_backward(
    plan: _Plan,
    grad: Tensor,
    y: Tensor,
    scale: Tensor,
    grads: Sequence[Tensor],
    statistics: Sequence[Tensor],
    partial: Sequence[Tensor],
) -> None:
    _norm_backward_kernel[(plan.programs(NORM_BLOCKS["BLOCK_R"], 2, NORM_BLOCKS["BLOCK_N"]),)](
        grad_ptr=grad,
        y_ptr=y,
        scale_ptr=scale,
        grad_scale_ptr=grads[0],
        grad_shift_ptr=grads[1],
        mean_ptr=statistics[0],
        rstd_ptr=statistics[1],
        first_ptr=partial[0],
        second_ptr=partial[1],
        **plan.shared,
        **NORM_BLOCKS,
    )


def _empty_outputs(
    latent: Tensor, filters: Sequence[int], channels: Sequence[int]
) -> tuple[Tensor, Tensor]:
    size = 8 * _activations(filters, channels) + 8 * sum(channels)
    return torch.empty_like(latent), latent.new_empty(size)


@torch.library.custom_op("unflip::pack", mutates_args=())
def _pack(parts: list[Tensor]) -> Tensor:
    """torch.cat, which inductor would turn into a kernel for every eight parts. Torch's takes 128 at once."""
    return torch.cat(parts)


@_pack.register_fake
def _(parts: list[Tensor]) -> Tensor:
    return parts[0].new_empty(sum(part.numel() for part in parts))


def _save_sizes(ctx: Any, inputs: tuple[list[Tensor]], output: Tensor) -> None:
    ctx.sizes = [part.numel() for part in inputs[0]]


def _unpack(ctx: Any, grad: Tensor) -> list[Tensor]:
    return list(grad.split(ctx.sizes))


_pack.register_autograd(_unpack, setup_context=_save_sizes)


@torch.library.custom_op("unflip::mapping", mutates_args=())
def _forward(
    latent: Tensor, parameters: Tensor, filters: list[int], channels: list[int]
) -> tuple[Tensor, Tensor]:
    """q̂, and what the gradient needs. Layouts as above."""
    _check(latent, parameters)
    plan = _plan(tuple(filters), tuple(channels), latent.device)
    q, saved = _empty_outputs(latent, filters, channels)
    w1, w2, w3 = plan.weights(parameters)
    scale1, shift1, scale2, shift2, bias = plan.vectors(parameters)
    y1, h1, y2, h2 = plan.values(saved)
    statistics = plan.statistics(saved)
    partial = latent.new_empty(4 * plan.partials).chunk(2)
    sums = {"first_ptr": partial[0], "second_ptr": partial[1]}
    with torch.cuda.device_of(latent):
        _convolve(plan, latent, w1, y1, (1, 2), then="statistics", pointers=sums)
        _normalize(plan, y1, h1, scale1, shift1, statistics[:2], partial)
        _convolve(plan, h1, w2, y2, (2, 2), then="statistics", pointers=sums)
        _normalize(plan, y2, h2, scale2, shift2, statistics[2:], partial)
        _convolve(plan, h2, w3, q, (2, 1), then="bias", pointers={"bias_ptr": bias})
    return q, saved


@_forward.register_fake
def _(
    latent: Tensor, parameters: Tensor, filters: list[int], channels: list[int]
) -> tuple[Tensor, Tensor]:
    return _empty_outputs(latent, filters, channels)


@torch.library.custom_op("unflip::mapping_backward", mutates_args=())
def _gradients(
    grad: Tensor,
    latent: Tensor,
    parameters: Tensor,
    saved: Tensor,
    filters: list[int],
    channels: list[int],
) -> tuple[Tensor, Tensor]:
    """The gradients of the latent weights and of the parameters."""
    _check(grad, latent, parameters, saved)
    plan = _plan(tuple(filters), tuple(channels), latent.device)
    grad_latent, grad_parameters = torch.empty_like(latent), torch.empty_like(parameters)
    w1, w2, w3 = plan.weights(parameters)
    scale1, _, scale2, _, _ = plan.vectors(parameters)
    *norm_grads, grad_bias = plan.vectors(grad_parameters)
    y1, h1, y2, h2 = plan.values(saved)
    statistics = plan.statistics(saved)
    g1, g2 = latent.new_empty(4 * plan.activations).chunk(2)
    partial = latent.new_empty(4 * plan.partials).chunk(2)
    with torch.cuda.device_of(latent):
        for x, weight, out, multiples, y, h, scale, norm in (
            (grad, w3, g2, (1, 2), y2, h2, scale2, 2),
            (g2, w2, g1, (2, 2), y1, h1, scale1, 0),
        ):
            pointers = {
                "y_ptr": y,
                "h_ptr": h,
                "mean_ptr": statistics[norm],
                "rstd_ptr": statistics[norm + 1],
                "first_ptr": partial[0],
                "second_ptr": partial[1],
            }
            _convolve(
                plan, x, weight, out, multiples, transposed=True, then="relu", pointers=pointers
            )
            two = slice(norm, norm + 2)
            _normalize_backward(plan, out, y, scale, norm_grads[two], statistics[two], partial)
        _convolve(plan, g1, w1, grad_latent, (2, 1), transposed=True)
        out1, out2, out3 = plan.weights(grad_parameters)
        _wgrad_kernel[lambda meta: (plan.wgrad_programs(meta["BLOCK_O"], meta["BLOCK_I"]), 3)](
            x1_ptr=latent,
            x2_ptr=h1,
            x3_ptr=h2,
            g1_ptr=g1,
            g2_ptr=g2,
            g3_ptr=grad,
            out1_ptr=out1,
            out2_ptr=out2,
            out3_ptr=out3,
            bias_ptr=grad_bias,
            **plan.shared,
            activations=plan.activations,
        )
    return grad_latent, grad_parameters


@_gradients.register_fake
def _(grad: Tensor, latent: Tensor, parameters: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(latent), torch.empty_like(parameters)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    latent, parameters, ctx.filters, ctx.channels = inputs
    ctx.save_for_backward(latent, parameters, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    grads = _gradients(grad.contiguous(), *ctx.saved_tensors, ctx.filters, ctx.channels)
    return (*grads, None, None)


_forward.register_autograd(_backward, setup_context=_save)
