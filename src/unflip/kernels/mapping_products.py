"""LNS's mapping networks f(W) of 3×3 layers: each convolution as matrix products on tensor cores.

For 512 channels f multiplies 87 billion pairs per step. In float32, which has no tensor cores, the mappings of
ResNet-18 would take several times as long as the network itself. Float32 factors are split into two halves,

    x = (hi + lo) / s,   hi = half(s · x),   lo = half(s · x − hi),   s a power of two

and the product of two such numbers is taken as hi · hi′ + lo · hi′ + hi · lo′. Its relative error is about 2⁻²¹, close
to float32: the bits of training must be those that are frozen later. In a matrix product that is one sum three times as
long, of (hi, lo, hi) with (hi′, hi′, lo′). Gradients take hi · hi′ alone, whose factors are as precise as TF32's. All
products are accumulated in float32.

The filters of a layer are a batch of 3×3 images, stored as (column, layer, row, filter, channel). Layers of one shape
are computed together, each product of matrices for all of them. The factors of a product are halves, written by
``halves_kernel`` with the three columns of a pixel's row side by side, so a column and its neighbors are a part of one
matrix:

    forward           y[j, i]      = Σ_d  x[i + d, columns around j] · w[d, their taps]ᵀ              d = −1, 0, 1
    input gradient    grad_x[j, i] = Σ_d  grad_y[i + d, columns around j] · flipped w[d, their taps]
    weight gradient   grad_w[d, taps] = Σ_ij  grad_y[j, i]ᵀ · x[i + d, columns around j]

No product takes a row or a column of the padding: of 9 · 9 pairs of pixel and tap, 7 · 7 are left.
"""

# Triton reads the annotations of kernels and does not know Any, so pointers and numbers have none.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip.kernels.mapping_conv.operator import is_plain
from unflip.kernels.tuning import cdiv, jit, power
from unflip.methods.mapping_network import FilterNorm, MappingNetwork

try:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    tl = None

ROWS = 8  # rows of one program
LARGEST = 1024.0  # of the scaled values: float16 reaches 65,504
SAME, BESIDE, FLIPPED = range(3)  # the order of rows
HI, LEFT, RIGHT = range(3)  # the parts of a row: hi; hi, lo, hi; hi, hi, lo

# For each column of an image: it and its neighbors (first, end), and the taps that they meet.
NEIGHBORS = ((slice(0, 2), slice(1, 3)), (slice(0, 3), slice(0, 3)), (slice(1, 3), slice(0, 2)))
# For each row of taps: the rows of images that have a row there, and those rows.
SHIFTS = ((slice(1, 3), slice(0, 2)), (slice(0, 3), slice(0, 3)), (slice(0, 2), slice(1, 3)))
MIDDLE_FIRST = (1, 0, 2)  # the middle one covers all; the others are added to it


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
    h = F.relu(_normalize([n.norm1 for n in nets], _convolve([n.conv1 for n in nets], x)))
    h = F.relu(_normalize([n.norm2 for n in nets], _convolve([n.conv2 for n in nets], h)))
    biases = torch.stack([n.conv3.bias for n in nets if n.conv3.bias is not None])
    predicted = _convolve([n.conv3 for n in nets], h) + biases[:, None, None]
    parts = predicted.permute(1, 3, 4, 2, 0).unbind()
    return [n.finish(q, w) for n, q, w in zip(nets, parts, weights, strict=True)]


def _normalize(norms: Sequence[FilterNorm], x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, dim=(0, 2, 3), keepdim=True, correction=0)
    scale = torch.stack([n.weight for n in norms])[:, None, None]
    shift = torch.stack([n.bias for n in norms])[:, None, None]
    return (x - mean) * torch.rsqrt(var + 1e-5) * scale + shift


def _convolve(convolutions: Sequence[nn.Conv2d], x: Tensor) -> Tensor:
    """(3, layers, 3, filters, in) with weights (out, in, 3, 3) -> (3, layers, 3, filters, out)."""
    taps = [c.weight.permute(0, 2, 3, 1).contiguous() for c in convolutions]
    of_x, of_taps = _scales(x), torch.cat([_scales(t[:, None]) for t in taps])
    # Scaled back outside the operator, where the compiler fuses it with the next operations.
    return _forward(x.contiguous(), taps, of_x, of_taps) / _per_layer(of_x * of_taps)


@torch.no_grad()
def _scales(x: Tensor) -> Tensor:
    """The power of two that brings the largest value of a layer to at most LARGEST."""
    largest = x.detach().abs().amax((0, 2, 3, 4)).clamp(1e-30, 1e30)
    return torch.exp2(torch.floor(torch.log2(LARGEST / largest)))


def _per_layer(values: Tensor) -> Tensor:
    return values[:, None, None, None]


# ---------------------------------------------------------------------------------------------- halves


def _halves(x: Tensor, scales: Tensor, order: int, parts: int, out: Tensor | None = None) -> Tensor:
    """Halves of the rows of x, in another order. A row has the channels of one pixel or tap, in one part or in three.

    x is (layers, pixels, channels), and for BESIDE (columns, layers, pixels, channels).
    """
    layers, channels = x.shape[-3], x.shape[-1]
    pixels = x.numel() // channels // layers
    wide = channels if parts == HI else 3 * channels
    if out is None:
        out = torch.empty(layers, pixels, wide, dtype=torch.float16, device=x.device)
    block = power(channels, 1024)
    with torch.cuda.device_of(x):
        halves_kernel[(cdiv(pixels, ROWS), cdiv(channels, block), layers)](
            x, scales, out, pixels, layers, channels, order, parts, ROWS, block
        )
    return out


@jit
def halves_kernel(
    x_ptr,
    scales_ptr,
    out_ptr,
    pixels,
    layers,
    C: tl.constexpr,
    ORDER: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows of one layer. The result has them in the order of x (ORDER 0); from (column, pixel) as (pixel, column)
    (1); or from (filter, tap) as (tap from last to first, filter) (2)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(2).to(tl.int64)
    here = (row < pixels)[:, None] & (c < C)[None, :]
    if ORDER == 1:
        third = pixels // 3
        source = (row // third * layers + layer) * third + row % third
        row = row % third * 3 + row // third
    else:
        source = layer * pixels + row
        if ORDER == 2:
            row = (8 - row % 9) * (pixels // 9) + row // 9
    x = tl.load(x_ptr + source.to(tl.int64)[:, None] * C + c[None, :], mask=here, other=0.0)
    x = x * tl.load(scales_ptr + layer)
    hi = x.to(tl.float16)
    if PARTS == 0:
        to = out_ptr + (layer * pixels + row)[:, None] * C + c[None, :]
        tl.store(to, hi, mask=here)
    else:
        to = out_ptr + (layer * pixels + row)[:, None] * (3 * C) + c[None, :]
        lo = (x - hi.to(tl.float32)).to(tl.float16)
        tl.store(to, hi, mask=here)
        tl.store(to + C, lo if PARTS == 1 else hi, mask=here)
        tl.store(to + 2 * C, hi if PARTS == 1 else lo, mask=here)


def _of_taps(taps: Sequence[Tensor], scales: Tensor, order: int, parts: int) -> Tensor:
    """Halves of each layer's taps (out, 3, 3, in), one layer after the other."""
    count, channels = taps[0].numel() // taps[0].shape[-1], taps[0].shape[-1]
    wide = channels if parts == HI else 3 * channels
    out = taps[0].new_empty(len(taps), count, wide, dtype=torch.float16)
    for i, tap in enumerate(taps):
        _halves(tap.view(1, count, channels), scales[i : i + 1], order, parts, out[i : i + 1])
    return out


# -------------------------------------------------------------------------------------------- products


def _set_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """The products of matrices of halves, in float32."""
    if a.is_cuda:
        torch.bmm(a, b, out_dtype=torch.float32, out=total)
    else:
        total.copy_(a.float() @ b.float())


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.is_cuda:
        torch.baddbmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a.float() @ b.float()


def _times(part: slice, size: int) -> slice:
    """The same part of rows or columns that are ``size`` long."""
    return slice(part.start * size, part.stop * size)


def _sum_over_taps(x: Tensor, taps: Tensor) -> Tensor:
    """x: (layers, rows and filters, columns and channels); taps: (layers, 3, columns and channels, out).

    The result is (columns, layers, rows and filters, out).
    """
    layers, pixels, wide = x.shape
    out = x.new_empty(3, layers, pixels, taps.shape[-1], dtype=torch.float32)
    for column, (near, met) in enumerate(NEIGHBORS):
        around, factors = x[..., _times(near, wide // 3)], taps[:, :, _times(met, wide // 3)]
        for d in MIDDLE_FIRST:
            to, of = (_times(rows, pixels // 3) for rows in SHIFTS[d])
            put = _set_product if d == 1 else _add_product
            put(out[column][:, to], around[:, of], factors[:, d])
    return out


# ------------------------------------------------------------------------------------- torch operators


@torch.library.custom_op("unflip::mapping_product", mutates_args=())
def _forward(x: Tensor, taps: list[Tensor], x_scales: Tensor, taps_scales: Tensor) -> Tensor:
    """The convolution of the scaled values."""
    _, layers, _, n, channels = x.shape
    out = taps[0].shape[0]
    pixels = _halves(x.view(3, layers, 3 * n, channels), x_scales, BESIDE, LEFT)
    factors = _of_taps(taps, taps_scales, SAME, RIGHT).view(layers, out, 3, 9 * channels)
    total = _sum_over_taps(pixels.view(layers, 3 * n, 9 * channels), factors.permute(0, 2, 3, 1))
    return total.view(3, layers, 3, n, out)


@_forward.register_fake
def _(x: Tensor, taps: list[Tensor], *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], taps[0].shape[0])


@torch.library.custom_op("unflip::mapping_product_dgrad", mutates_args=())
def _input_gradient(
    grad: Tensor, taps: list[Tensor], grad_scales: Tensor, taps_scales: Tensor
) -> Tensor:
    """Of the scaled gradient and taps."""
    _, layers, _, n, out = grad.shape
    channels = taps[0].shape[-1]
    pixels = _halves(grad.view(3, layers, 3 * n, out), grad_scales, BESIDE, HI)
    flipped = _of_taps(taps, taps_scales, FLIPPED, HI).view(layers, 3, 3 * out, channels)
    total = _sum_over_taps(pixels.view(layers, 3 * n, 3 * out), flipped)
    return total.view(3, layers, 3, n, channels)


@_input_gradient.register_fake
def _(grad: Tensor, taps: list[Tensor], *_: object) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], taps[0].shape[-1])


@torch.library.custom_op("unflip::mapping_product_wgrad", mutates_args=())
def _weight_gradient(grad: Tensor, x: Tensor, grad_scales: Tensor, x_scales: Tensor) -> Tensor:
    """Of the scaled gradient and input: (layers, out, 3, 3, in)."""
    _, layers, _, n, out = grad.shape
    channels = x.shape[-1]
    pixels = _halves(x.view(3, layers, 3 * n, channels), x_scales, BESIDE, HI)
    pixels = pixels.view(layers, 3 * n, 3 * channels)
    scales = grad_scales.repeat(3)
    grads = _halves(grad.view(3 * layers, 3 * n, out), scales, SAME, HI)
    grads = grads.view(3, layers, 3 * n, out).transpose(-1, -2)
    total = grad.new_empty(layers, out, 3, 3 * channels)
    for d, (to, of) in enumerate(SHIFTS):
        for column in MIDDLE_FIRST:
            near, met = (_times(part, channels) for part in NEIGHBORS[column])
            put = _set_product if column == 1 else _add_product
            a, b = grads[column][..., _times(to, n)], pixels[:, _times(of, n), near]
            put(total[:, :, d, met], a, b)
    return total.view(layers, out, 3, 3, channels)


@_weight_gradient.register_fake
def _(grad: Tensor, x: Tensor, *_: object) -> Tensor:
    return grad.new_empty(grad.shape[1], grad.shape[-1], 3, 3, x.shape[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, taps, x_scales, taps_scales = inputs
    ctx.save_for_backward(x, x_scales, taps_scales, *taps)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, x_scales, taps_scales, *taps = ctx.saved_tensors
    grad = grad.contiguous()
    scales = _scales(grad)
    of_x: Tensor | None = None
    of_taps: list[Tensor | None] = [None] * len(taps)
    if ctx.needs_input_grad[0]:
        of_x = _input_gradient(grad, taps, scales, taps_scales) * _per_layer(x_scales / scales)
    if any(ctx.needs_input_grad[1]):
        gradient = _weight_gradient(grad, x, scales, x_scales)
        of_taps = list((gradient * _per_layer(taps_scales / scales)[..., None]).unbind())
    return of_x, of_taps, None, None


_forward.register_autograd(_backward, setup_context=_save)
