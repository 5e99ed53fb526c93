"""LNS's mapping networks f(W) of 3×3 layers, one layer at a time: each convolution as matrix products on tensor cores.

For 512 channels f multiplies 87 billion pairs per step. In float32, which has no tensor cores, the mappings of
ResNet-18 would take several times as long as the network itself. Float32 factors are split into two halves,

    x = (hi + lo) / s,   hi = half(s · x),   lo = half(s · x − hi),   s a power of two

and the product of two such numbers is taken as hi · hi′ + lo · hi′ + hi · lo′. Its relative error is about 2⁻²¹, close
to float32: the bits of training must be those that are frozen later. In a matrix product that is one sum three times as
long, of (hi, lo, hi) with (hi′, hi′, lo′). Gradients take hi · hi′ alone, whose factors are as precise as TF32's. All
products are accumulated in float32.

The filters of a layer are a batch of 3×3 images, stored as (row, filter, column, channel). A convolution takes the
three columns around each value as patches, which ``rows_kernel`` writes, and adds one matrix product per row of taps. A
row of the padding has no product: 7 of 9 are left.

    forward           y[i]      = Σ_d  patches(x)[i + d] · w[d]ᵀ              d = −1, 0, 1
    input gradient    grad_x[i] = Σ_d  patches(grad_y)[i + d] · flipped w[d]
    weight gradient   grad_w[d] = Σ_i  grad_y[i]ᵀ · patches(x)[i + d]
"""

# Triton reads the annotations of kernels and does not know Any, so pointers and numbers have none.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unflip.kernels.mapping_conv.operator import is_plain
from unflip.kernels.tuning import cdiv, jit, power
from unflip.methods.mapping_network import FilterNorm, MappingNetwork

try:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    tl = None

ROWS = 8  # rows of one program
LARGEST = 1024.0  # of the scaled values: float16 reaches 65,504
SAME, PATCHES, FLIPPED = range(3)  # the order of rows
HI, LEFT, RIGHT = range(3)  # the parts of a row: hi; hi, lo, hi; hi, hi, lo


def supports(mapping: MappingNetwork, weight: Tensor) -> bool:
    """Whether these products cover f of this layer. For layers of few channels ``mapping_conv`` is faster."""
    return is_plain(mapping, weight) and weight.shape[1] % 16 == 0


def predict_by_products(
    mappings: Sequence[MappingNetwork], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """f(W) of layers that :func:`supports` covers."""
    return tuple(_predict(mapping, w) for mapping, w in zip(mappings, weights, strict=True))


def _predict(mapping: MappingNetwork, weight: Tensor) -> Tensor:
    x = weight.permute(2, 0, 3, 1).contiguous()
    h = F.relu(_normalize(mapping.norm1, _convolve(x, mapping.conv1.weight)))
    h = F.relu(_normalize(mapping.norm2, _convolve(h, mapping.conv2.weight)))
    assert mapping.conv3.bias is not None
    predicted = (_convolve(h, mapping.conv3.weight) + mapping.conv3.bias).permute(1, 3, 0, 2)
    return mapping.with_residual(predicted, weight)


def _normalize(norm: FilterNorm, x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, dim=(0, 1, 2), keepdim=True, correction=0)
    return (x - mean) * torch.rsqrt(var + 1e-5) * norm.weight + norm.bias


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """(3, filters, 3, in) with weights (out, in, 3, 3) -> (3, filters, 3, out)."""
    taps = weight.permute(0, 2, 3, 1).contiguous()
    scales = _scale(x), _scale(taps)
    # Scaled back outside the operator, where the compiler fuses it with the next operations.
    return _forward(x.contiguous(), taps, *scales) / (scales[0] * scales[1])


@torch.no_grad()
def _scale(x: Tensor) -> Tensor:
    """The power of two that brings the largest value to at most LARGEST."""
    return torch.exp2(torch.floor(torch.log2(LARGEST / x.detach().abs().amax().clamp(1e-30, 1e30))))


# --------------------------------------------------------------------------------------- halves in rows


def _rows(x: Tensor, scale: Tensor, order: int, parts: int) -> Tensor:
    """Halves of the rows of x, in another order or as patches. A row has the values of one pixel.

    HI gives one row each. LEFT and RIGHT give rows of nine: three rows of each part, one part after the other.
    """
    channels = x.shape[-1]
    pixels = x.numel() // channels
    rows = 3 * pixels if order == PATCHES else pixels
    wide = (rows, channels) if parts == HI else (rows // 3, 9 * channels)
    out = torch.empty(wide, dtype=torch.float16, device=x.device)
    block = power(channels, 1024)
    with torch.cuda.device_of(x):
        rows_kernel[(cdiv(rows, ROWS), cdiv(channels, block))](
            x, scale, out, pixels // 9, rows, channels, order, parts, ROWS, block
        )
    return out


@jit
def rows_kernel(
    x_ptr,
    scale_ptr,
    out_ptr,
    n,
    rows,
    C: tl.constexpr,
    ORDER: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows of the result: those of x (ORDER 0), left neighbor, itself and right neighbor of each (1), or those of
    (filter, tap) as (tap from last to first, filter) (2)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = row < rows
    if ORDER == 1:
        center = row // 3
        column = center % 3 + row % 3 - 1
        known = known & (column >= 0) & (column < 3)
        source = center // 3 * 3 + column
    elif ORDER == 2:
        source = row % n * 9 + 8 - row // n
    else:
        source = row
    here = known[:, None] & (c < C)[None, :]
    at = source.to(tl.int64)[:, None] * C + c[None, :]
    x = tl.load(x_ptr + at, mask=here, other=0.0) * tl.load(scale_ptr)
    hi = x.to(tl.float16)
    inside = (row < rows)[:, None] & (c < C)[None, :]
    if PARTS == 0:
        tl.store(out_ptr + row.to(tl.int64)[:, None] * C + c[None, :], hi, mask=inside)
    else:
        first = (row // 3).to(tl.int64) * (9 * C) + row % 3 * C
        to = out_ptr + first[:, None] + c[None, :]
        lo = (x - hi.to(tl.float32)).to(tl.float16)
        tl.store(to, hi, mask=inside)
        tl.store(to + 3 * C, lo if PARTS == 1 else hi, mask=inside)
        tl.store(to + 6 * C, hi if PARTS == 1 else lo, mask=inside)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of halves, in float32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a.float() @ b.float()


def _sum_over_rows(patches: Tensor, taps: Sequence[Tensor]) -> Tensor:
    """y[i] = Σ_d patches[i + d] · taps[d]. Patches and y have three rows i, one after the other."""
    above, here, below = taps
    total = _product(patches, here)
    third = len(total) // 3
    _add_product(total[third:], patches[: 2 * third], above)
    _add_product(total[: 2 * third], patches[third:], below)
    return total


# ------------------------------------------------------------------------------------- torch operators


@torch.library.custom_op("unflip::mapping_product", mutates_args=())
def _forward(x: Tensor, taps: Tensor, x_scale: Tensor, taps_scale: Tensor) -> Tensor:
    """The convolution of the scaled values."""
    n, channels, out = x.shape[1], x.shape[-1], taps.shape[0]
    patches = _rows(x, x_scale, PATCHES, LEFT)
    factors = _rows(taps, taps_scale, SAME, RIGHT).view(out, 3, 9 * channels).permute(1, 2, 0)
    return _sum_over_rows(patches, factors.unbind()).view(3, n, 3, out)


@_forward.register_fake
def _(x: Tensor, taps: Tensor, *_: object) -> Tensor:
    return x.new_empty(3, x.shape[1], 3, taps.shape[0])


@torch.library.custom_op("unflip::mapping_product_dgrad", mutates_args=())
def _input_gradient(grad: Tensor, taps: Tensor, grad_scale: Tensor, taps_scale: Tensor) -> Tensor:
    """Of the scaled gradient and taps."""
    n, out, channels = grad.shape[1], grad.shape[-1], taps.shape[-1]
    patches = _rows(grad, grad_scale, PATCHES, HI).view(9 * n, 3 * out)
    flipped = _rows(taps, taps_scale, FLIPPED, HI).view(3, 3 * out, channels)
    return _sum_over_rows(patches, flipped.unbind()).view(3, n, 3, channels)


@_input_gradient.register_fake
def _(grad: Tensor, taps: Tensor, *_: object) -> Tensor:
    return grad.new_empty(3, grad.shape[1], 3, taps.shape[-1])


@torch.library.custom_op("unflip::mapping_product_wgrad", mutates_args=())
def _weight_gradient(grad: Tensor, x: Tensor, grad_scale: Tensor, x_scale: Tensor) -> Tensor:
    """Of the scaled gradient and input."""
    n, out, channels = grad.shape[1], grad.shape[-1], x.shape[-1]
    patches = _rows(x, x_scale, PATCHES, HI).view(9 * n, 3 * channels)
    columns = _rows(grad, grad_scale, SAME, HI).t()
    third = 3 * n
    above = _product(columns[:, third:], patches[: 2 * third])
    here = _product(columns, patches)
    below = _product(columns[:, : 2 * third], patches[third:])
    return torch.stack([above, here, below], dim=1).view(out, 3, 3, channels)


@_weight_gradient.register_fake
def _(grad: Tensor, x: Tensor, *_: object) -> Tensor:
    return grad.new_empty(grad.shape[-1], 3, 3, x.shape[-1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, taps, x_scale, taps_scale = ctx.saved_tensors
    grad = grad.contiguous()
    scale = _scale(grad)
    of_x = of_taps = None
    if ctx.needs_input_grad[0]:
        of_x = _input_gradient(grad, taps, scale, taps_scale) * (x_scale / scale)
    if ctx.needs_input_grad[1]:
        of_taps = _weight_gradient(grad, x, scale, x_scale) * (taps_scale / scale)
    return of_x, of_taps, None, None


_forward.register_autograd(_backward, setup_context=_save)
