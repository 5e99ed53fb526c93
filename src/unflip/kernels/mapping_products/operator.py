"""LNS's mapping networks f(W) of 3×3 layers: each convolution as matrix products on tensor cores.

For 512 channels f multiplies 87 billion pairs per step. In float32, which has no tensor cores, the mappings of
ResNet-18 would take several times as long as the network itself. Float32 factors are split into two halves,

    x = (hi + lo) / s,   hi = half(s · x),   lo = half(s · x − hi),   s a power of two

and the product of two such numbers is taken as hi · hi′ + lo · hi′ + hi · lo′. Its relative error is about 2⁻²¹, close
to float32: the bits of training must be those that are frozen later. In a matrix product that is one sum three times as
long, of (hi, lo, hi) with (hi′, hi′, lo′). Gradients take hi · hi′ alone, whose factors are as precise as TF32's. All
products are accumulated in float32.

The filters of a layer are a batch of 3×3 images, stored as (column, layer, row, filter, channel). Layers of one shape
are computed together, each product of matrices for all of them. The factors of a product are halves with the three
columns of a pixel's row side by side, so a column and its neighbors are a part of one matrix:

    forward           y[j, i]      = Σ_d  x[i + d, columns around j] · w[d, their taps]ᵀ              d = −1, 0, 1
    input gradient    grad_x[j, i] = Σ_d  grad_y[i + d, columns around j] · flipped w[d, their taps]
    weight gradient   grad_w[d, taps] = Σ_ij  grad_y[j, i]ᵀ · x[i + d, columns around j]

No product takes a row or a column of the padding: of 9 · 9 pairs of pixel and tap, 7 · 7 are left.

Between two products, hidden values go from the sums y to halves of ReLU(norm(y)) in one step, and back in another. The
scales s follow from bounds, without a look at the values: a normalized value is at most √pixels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unflip.kernels.mapping_conv.operator import is_plain
from unflip.kernels.mapping_products.products import sum_over_taps, weight_products
from unflip.kernels.mapping_products.triton_kernels import (
    finish_moments_kernel,
    finish_sums_kernel,
    halves_kernel,
    hidden_backward_kernel,
    moments_kernel,
    sums_kernel,
)
from unflip.kernels.tuning import cdiv, power
from unflip.methods.mapping_network import MappingNetwork

ROWS = 8  # of one program that makes halves
SPLITS, SUM_ROWS, SUM_BLOCK = (
    16,
    32,
    64,
)  # parts of a layer's pixels in sums over them; the block of a program
LARGEST = 2.0**15  # of the scaled values: float16 reaches twice that
MOST_SCALE = 2.0**60  # so that products of scales stay finite
SAME, BESIDE, FLIPPED = range(3)  # the order of rows
HI, LEFT, RIGHT = range(3)  # the parts of a row: hi; hi, lo, hi; hi, hi, lo


def supports(mapping: MappingNetwork, weight: Tensor) -> bool:
    """Whether these products cover f of this layer. For layers of few channels ``mapping_conv`` is faster."""
    return is_plain(mapping, weight) and weight.shape[1] % 16 == 0


def predict_by_products(
    mappings: Sequence[MappingNetwork], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """f(W) of layers that :func:`supports` covers."""
    shapes: dict[torch.Size, list[int]] = defaultdict(list)
    for i, weight in enumerate(weights):
        shapes[weight.shape].append(i)
    found: dict[int, Tensor] = {}
    for together in shapes.values():
        predictions = _predict([mappings[i] for i in together], [weights[i] for i in together])
        found.update(zip(together, predictions, strict=True))
    return tuple(found[i] for i in range(len(weights)))


def _predict(nets: Sequence[MappingNetwork], weights: Sequence[Tensor]) -> list[Tensor]:
    """Of layers of one shape."""
    x = torch.stack([w.permute(3, 2, 0, 1) for w in weights], dim=1)
    norms = torch.stack(
        [
            torch.stack([getattr(norm, name) for norm in of])
            for of in ([n.norm1 for n in nets], [n.norm2 for n in nets])
            for name in ("weight", "bias")
        ]
    )
    taps = [_taps(n.conv1) for n in nets] + [_taps(n.conv2) for n in nets]
    taps += [_taps(n.conv3) for n in nets]
    scales = _scales(x, norms)
    taps_scales = _power(_largest([t.detach() for t in taps])).view(3, -1)
    sums, *_ = _forward(x.contiguous(), taps, norms, scales, taps_scales)
    biases = torch.stack([n.conv3.bias for n in nets if n.conv3.bias is not None])
    predicted = sums / _per_layer(scales[2] * taps_scales[2]) + biases[:, None, None]
    parts = predicted.permute(1, 3, 4, 2, 0).unbind()
    return [n.finish(q, w) for n, q, w in zip(nets, parts, weights, strict=True)]


def _taps(convolution: nn.Conv2d) -> Tensor:
    """(out, 3, 3, in); this copies nothing if the weight is channels_last."""
    return convolution.weight.permute(0, 2, 3, 1).contiguous()


@torch.no_grad()
def _scales(x: Tensor, norms: Tensor) -> Tensor:
    """Of the inputs of the three convolutions, for each layer: x is known, a normalized value is at most √pixels."""
    pixels = x.numel() // x.shape[1] // x.shape[-1]
    scale1, shift1, scale2, shift2 = norms.detach().abs().unbind()
    bounds = [
        x.detach().abs().amax((0, 2, 3, 4)),
        (scale1 * math.sqrt(pixels) + shift1).amax(1),
        (scale2 * math.sqrt(pixels) + shift2).amax(1),
    ]
    return _power(torch.stack(bounds))


def _power(largest: Tensor) -> Tensor:
    """The power of two that brings ``largest`` to at most LARGEST."""
    least = LARGEST / MOST_SCALE
    return torch.exp2(torch.floor(torch.log2(LARGEST / largest.clamp(least, 1e30))))


def _per_layer(values: Tensor) -> Tensor:
    return values[:, None, None, None]


# ---------------------------------------------------------------------------------------------- halves


def _halves(
    x: Tensor,
    scales: Tensor,
    order: int,
    parts: int,
    hidden: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Halves of the rows of x, in another order. A row has the channels of one pixel or tap, in one part or in three.

    x is (layers, pixels, channels), and for BESIDE (columns, layers, pixels, channels). ``hidden``: statistics and
    norms, if x is normalized and passes the ReLU first.
    """
    layers, channels = x.shape[-3], x.shape[-1]
    pixels = x.numel() // channels // layers
    if out is None:
        wide = channels if parts == HI else 3 * channels
        out = torch.empty(layers, pixels, wide, dtype=torch.float16, device=x.device)
    block = power(channels, 1024)
    statistics, norms = hidden or (x, x)
    grid = (cdiv(pixels, ROWS), cdiv(channels, block), layers)
    counts = (pixels, layers, channels)
    halves_kernel[grid](
        x, scales, statistics, norms, out, *counts, order, parts, hidden is not None, ROWS, block
    )
    return out


def _of_taps(taps: Sequence[Tensor], scales: Tensor, order: int, parts: int) -> Tensor:
    """Halves of each layer's taps (out, 3, 3, in), one layer after the other."""
    count, channels = taps[0].numel() // taps[0].shape[-1], taps[0].shape[-1]
    wide = channels if parts == HI else 3 * channels
    out = taps[0].new_empty(len(taps), count, wide, dtype=torch.float16)
    for i, tap in enumerate(taps):
        x = tap.view(1, count, channels)
        _halves(x, scales[i : i + 1], order, parts, out=out[i : i + 1])
    return out


# ---------------------------------------------------------------------------------------- hidden values


def _statistics(y: Tensor, product: Tensor) -> Tensor:
    """Of each layer and channel: the mean of y, and the factor that makes y − mean normal. y is scaled by product."""
    _, layers, rows, channels = y.shape
    partial = y.new_empty(layers, SPLITS, 2, channels)
    found = y.new_empty(2, layers, channels)
    blocks, counts = cdiv(channels, SUM_BLOCK), (3 * rows, layers, channels, SPLITS)
    moments_kernel[(blocks, SPLITS, layers)](y, partial, *counts, SUM_ROWS, SUM_BLOCK)
    finish_moments_kernel[(blocks, layers)](partial, product, found, *counts, SUM_BLOCK)
    return found


def _hidden_backward(
    grad: Tensor, y: Tensor, statistics: Tensor, norms: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From the gradient of the hidden values to halves of that of y, beside each other and in the same order, and of
    the hidden values; also the scales of the first two, and the gradients of the norms."""
    _, layers, rows, channels = y.shape
    pixels = 3 * rows
    partial = y.new_empty(layers, SPLITS, 3, channels)
    grads, means = y.new_empty(2, layers, channels), y.new_empty(3, layers, channels)
    blocks, counts = cdiv(channels, SUM_BLOCK), (pixels, layers, channels)
    sums_kernel[(blocks, SPLITS, layers)](
        grad, y, statistics, norms, partial, *counts, SPLITS, SUM_ROWS, SUM_BLOCK
    )
    finish_sums_kernel[(blocks, layers)](
        partial, statistics, norms, grads, means, *counts, SPLITS, SUM_BLOCK
    )
    beside, same, hidden = (
        y.new_empty(layers, pixels, channels, dtype=torch.float16) for _ in range(3)
    )
    grad_scales = y.new_empty(layers)
    block = power(channels, 1024)
    hidden_backward_kernel[(cdiv(pixels, ROWS), cdiv(channels, block), layers)](
        *(grad, y, statistics, norms, means, scales, grad_scales, beside, same, hidden),
        *(*counts, ROWS, block, power(channels, 2**20)),
    )
    return beside, same.view_as(y), hidden, grad_scales, grads


# ------------------------------------------------------------------------------------- torch operators


def _product(halves: Tensor, taps: Sequence[Tensor], scales: Tensor) -> Tensor:
    """The convolution of inputs (layers, pixels, their parts) that are already halves."""
    layers, out, channels = len(taps), taps[0].shape[0], taps[0].shape[-1]
    factors = _of_taps(taps, scales, SAME, RIGHT).view(layers, out, 3, 9 * channels)
    return sum_over_taps(halves.view(layers, -1, 9 * channels), factors.permute(0, 2, 3, 1))


def _product_backward(halves: Tensor, taps: Sequence[Tensor], scales: Tensor) -> Tensor:
    """The gradient of the inputs, from halves of that of the sums."""
    layers, out, channels = len(taps), taps[0].shape[0], taps[0].shape[-1]
    flipped = _of_taps(taps, scales, FLIPPED, HI).view(layers, 3, 3 * out, channels)
    return sum_over_taps(halves.view(layers, -1, 3 * out), flipped)


def _by_convolution(taps: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    layers = len(taps) // 3
    return taps[:layers], taps[layers : 2 * layers], taps[2 * layers :]


@torch.library.custom_op("unflip::largest", mutates_args=())
def _largest(parts: list[Tensor]) -> Tensor:
    """The largest |value| of each part. As an operator, because the compiler would make two kernels per part."""
    return torch.stack(torch._foreach_norm(parts, math.inf))


@_largest.register_fake
def _(parts: list[Tensor]) -> Tensor:
    return parts[0].new_empty(len(parts))


@torch.library.custom_op("unflip::mapping_products", mutates_args=())
def _forward(
    x: Tensor, taps: list[Tensor], norms: Tensor, scales: Tensor, taps_scales: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums of f's third convolution; then what the gradient needs: statistics, and the sums of the first two.

    The sums of a convolution are in units of 1 / (scales · taps_scales).
    """
    _, layers, rows, filters, channels = x.shape
    products = scales * taps_scales
    taps1, taps2, taps3 = _by_convolution(taps)
    with torch.cuda.device_of(x):
        h0 = _halves(x.view(3, layers, rows * filters, channels), scales[0], BESIDE, LEFT)
        y1 = _product(h0, taps1, taps_scales[0])
        statistics1 = _statistics(y1, products[0])
        h1 = _halves(y1, scales[1], BESIDE, LEFT, (statistics1, norms[:2]))
        y2 = _product(h1, taps2, taps_scales[1])
        statistics2 = _statistics(y2, products[1])
        h2 = _halves(y2, scales[2], BESIDE, LEFT, (statistics2, norms[2:]))
        sums = _product(h2, taps3, taps_scales[2]).view_as(x)
    return sums, torch.stack([statistics1, statistics2]), y1, y2


@_forward.register_fake
def _(x: Tensor, taps: list[Tensor], norms: Tensor, *others: object) -> tuple[Tensor, ...]:
    _, layers, rows, filters, _ = x.shape
    channels = norms.shape[-1]
    y1, y2 = (x.new_empty(3, layers, rows * filters, channels) for _ in range(2))
    return torch.empty_like(x), x.new_empty(2, 2, layers, channels), y1, y2


@torch.library.custom_op("unflip::mapping_products_backward", mutates_args=())
def _gradients(
    grad: Tensor,
    scale: Tensor,
    x: Tensor,
    taps: list[Tensor],
    norms: Tensor,
    scales: Tensor,
    taps_scales: Tensor,
    statistics: Tensor,
    y1: Tensor,
    y2: Tensor,
    needs_x: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, of the taps of each convolution and of the norms, each in its own unit; and the scales with
    which the gradients of the three convolutions' sums became halves. ``scale`` is the last of these."""
    _, layers, rows, filters, channels = x.shape
    pixels = rows * filters
    taps1, taps2, taps3 = _by_convolution(taps)
    with torch.cuda.device_of(x):
        grad = grad.view(3, layers, pixels, channels)
        g3 = _halves(grad.view(3 * layers, pixels, channels), scale.repeat(3), SAME, HI)
        back = _product_backward(_halves(grad, scale, BESIDE, HI), taps3, taps_scales[2])
        beside, g2, h2, scale2, norm2 = _hidden_backward(
            back, y2, statistics[1], norms[2:], scales[2]
        )
        of_taps3 = weight_products(g3.view_as(grad), h2.view(layers, pixels, -1))
        back = _product_backward(beside, taps2, taps_scales[1])
        beside, g1, h1, scale1, norm1 = _hidden_backward(
            back, y1, statistics[0], norms[:2], scales[1]
        )
        of_taps2 = weight_products(g2, h1.view(layers, pixels, -1))
        h0 = _halves(x.view(3, layers, pixels, channels), scales[0], BESIDE, HI)
        of_taps1 = weight_products(g1, h0.view(layers, pixels, -1))
        of_x = x.new_empty(0)
        if needs_x:
            of_x = _product_backward(beside, taps1, taps_scales[0]).view_as(x)
    of_norms = torch.cat([norm1, norm2])
    return of_x, of_taps1, of_taps2, of_taps3, of_norms, torch.stack([scale1, scale2, scale])


@_gradients.register_fake
def _(
    grad: Tensor, scale: Tensor, x: Tensor, taps: list[Tensor], norms: Tensor, *others: object
) -> tuple[Tensor, ...]:
    layers = x.shape[1]
    of_taps = [x.new_empty(layers, *taps[i * layers].shape) for i in range(3)]
    of_x = torch.empty_like(x) if others[-1] else x.new_empty(0)
    return of_x, *of_taps, torch.empty_like(norms), x.new_empty(3, layers)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, taps, *others = inputs  # norms, scales, taps_scales
    ctx.save_for_backward(x, *others, *output[1:], *taps)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    """With the units: a sum of products of halves is in 1 / (scale of one · scale of the other)."""
    x, norms, scales, taps_scales, statistics, y1, y2, *taps = ctx.saved_tensors
    grad = grad.contiguous()
    last = _power(grad.abs().amax((0, 2, 3, 4)))
    of_x, *of_taps, of_norms, grad_scales = _gradients(
        *(grad, last, x, taps, norms, scales, taps_scales, statistics, y1, y2),
        ctx.needs_input_grad[0],
    )
    unit3 = 1 / grad_scales[2]
    unit2 = scales[2] * unit3 / grad_scales[1]
    unit1 = scales[1] * unit2 / grad_scales[0]
    units = torch.stack([unit1, unit2, unit3]) * taps_scales
    each = [
        gradient * _per_layer(unit)[..., None]
        for gradient, unit in zip(of_taps, units, strict=True)
    ]
    of_hidden = torch.stack([scales[1] * unit2, scales[2] * unit3]).repeat_interleave(2, 0)
    return (
        of_x * _per_layer(scales[0] * unit1) if ctx.needs_input_grad[0] else None,
        [tap for gradient in each for tap in gradient.unbind()],
        of_norms * of_hidden[..., None],
        None,
        None,
    )


_forward.register_autograd(_backward, setup_context=_save)
