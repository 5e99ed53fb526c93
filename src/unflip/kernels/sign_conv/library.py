"""Large binary convolutions by cuDNN, with the sign and the mask of its gradient as kernels of one pass each.

A large convolution spends its time on multiplying, and there cuDNN's kernels are twice as fast as ours: for 256 images
of ResNet-18 at 224 pixels on an H200, 75 to 135 µs a convolution instead of 160 to 270. That is worth two more passes
over the input.

The products have float16 factors and are accumulated in float32. cuDNN writes the sums in float16. A layer whose sums
float16 cannot hold is left to Triton's kernels (``cover.product_type``). The gradient of the signs is rounded to
float16 too, once, after the whole sum; like every gradient in half precision it overflows beyond 65,504.
"""

# Triton reads the annotations of kernels and does not know Any, so pointers and numbers have none.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unflip.kernels.sign_conv.triton_kernels import _binary, _passes
from unflip.kernels.tuning import cdiv, jit

try:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    tl = None

LARGE = (
    4e9  # operations of a convolution: from here on cuDNN was faster for every shape that was timed
)
BLOCK = 4096
GIVEN = 2  # the index of "given" in ``cover.INPUTS``


def is_large(out_shape: Sequence[int], weight_shape: Sequence[int]) -> bool:
    """Whether a convolution with this output is large. It depends on shapes alone: compiled code relies on it."""
    return 2 * math.prod(out_shape) * math.prod(weight_shape[1:]) >= LARGE


def fprop(x: Tensor, halves: Tensor, stride: int, padding: int, kind: int) -> Tensor:
    return torch.ops.aten.convolution(
        binary(x, kind), halves, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1
    )


def dgrad(
    grad: Tensor,
    x: Tensor,
    halves: Tensor,
    plus: Tensor | None,
    stride: int,
    padding: int,
    kind: int,
) -> Tensor:
    of_signs = _gradient(grad, x, halves, stride, padding, (True, False, False))
    out = of_signs.contiguous(memory_format=torch.channels_last)
    if kind != GIVEN or plus is not None:
        blocks = cdiv(out.numel(), BLOCK)
        with torch.cuda.device_of(x):
            mask_kernel[(blocks,)](
                out, x, x if plus is None else plus, out.numel(), kind, plus is not None, BLOCK
            )
    return out


def wgrad(
    grad: Tensor, x: Tensor, kh: int, kw: int, stride: int, padding: int, kind: int
) -> Tensor:
    """(O, kh, kw, C) in float32."""
    shape = grad.shape[1], x.shape[1], kh, kw
    like = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    sums = _gradient(grad, binary(x, kind), like, stride, padding, (False, True, False))
    return sums.permute(0, 2, 3, 1).float().contiguous()


def _gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    wanted: tuple[bool, bool, bool],
) -> Tensor:
    found = torch.ops.aten.convolution_backward(
        grad, x, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, list(wanted)
    )
    return found[wanted.index(True)]


def binary(x: Tensor, kind: int) -> Tensor:
    """B(x) in float16. ``x`` is channels_last."""
    if kind == GIVEN:
        return x
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):
        binary_kernel[(cdiv(x.numel(), BLOCK),)](x, out, x.numel(), kind, BLOCK)
    return out


@jit
def binary_kernel(x_ptr, out_ptr, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    known = at < count
    x = tl.load(x_ptr + at, mask=known, other=0.0)
    tl.store(out_ptr + at, _binary(x, known, KIND), mask=known)


@jit
def mask_kernel(
    g_ptr,
    x_ptr,
    plus_ptr,
    count,
    KIND: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """g, in place: straight through the sign, plus the gradient from elsewhere."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < count
    g = tl.load(g_ptr + at, mask=known, other=0.0).to(tl.float32)
    if KIND != 2:
        x = tl.load(x_ptr + at, mask=known, other=0.0)
        g = tl.where(_passes(x, KIND), g, 0.0)
    if ADDS:
        g += tl.load(plus_ptr + at, mask=known, other=0.0).to(tl.float32)
    tl.store(g_ptr + at, g.to(tl.float16), mask=known)
