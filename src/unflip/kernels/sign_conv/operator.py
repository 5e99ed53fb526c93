"""A binary convolution for training: sign, convolution and straight-through gradient in three kernels.

At 16 to 64 channels a convolution library spends most of its time on anything but multiplying, and around
each convolution the sign and the mask of its gradient are passes of their own over memory. Here a convolution is
a matrix product whose left side is never stored: a program gathers it, tap by tap, and takes the sign on the way.

    forward           y      =  B(x) ⋆ signs
    input gradient    grad_x = (grad_y ⋆ᵀ signs) · 1[|x| ≤ 1]
    sign gradient     grad_s =  B(x)ᵀ · grad_y

Products of float16 are accumulated in float32. A sum of up to 2048 values of −1, 0 and +1 is exact in float16,
so the output does not depend on the order of the sum; more terms are refused. There are no atomics: for a given
choice of blocks, gradients are the same bits every time. The blocks are tuned at the first call for every shape and
process, which must not be inside the capture of a CUDA graph.

This file is the operator: what it covers, what torch knows of it, and which kernels compute it. Those in Triton
(``sign_conv_triton``) cover all of it. For 3×3 taps of stride 1 and 16, 32 or 64 channels, all three also exist in
CUDA C++ (``sign_conv_cuda``). Where they can be compiled, they are timed with the blocks, and the faster of both is
used (``tuning``).

A NaN becomes +1 or −1 by its sign bit (0 for ``inputs="01"``) and passes no gradient: a diverging network shows in its
loss, not in the output of this convolution.

Methods with another gradient, or with ternary inputs, binarize on their own: with ``inputs="given"`` the values are
taken as they are, and their gradient is not masked. ``stem_conv`` gives real values, with fewer than 16 channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from unflip.kernels import tuning
from unflip.kernels.sign_conv import cuda_kernels as sign_conv_cuda
from unflip.kernels.sign_conv import triton_kernels as sign_conv_triton
from unflip.kernels.sign_conv.triton_kernels import (
    MOST_PARTIAL,
    dgrad_by_triton,
    empty_partial,
    fprop_by_triton,
    output_size,
    size,
    wgrad_by_triton,
)
from unflip.kernels.tuning import INTERPRETED, available, cdiv, filling

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = None

__all__ = ["available", "sign_conv2d", "supports"]

MOST_TERMS = 2048  # every integer up to this is a float16; the next one is not
MOST_ELEMENTS = 2**31 - 2**20  # offsets are int32, and the last block reaches past the end
INPUTS = ("pm1", "01", "given")  # kernels know them by their numbers


def supports(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> bool:
    """Whether the kernels cover this layer. Arguments as of ``F.conv2d``; padding is with zeros."""
    return _obstacle(x_shape, weight_shape, stride, padding, dilation, groups) is None


def sign_conv2d(
    x: Tensor,
    signs: Tensor,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    inputs: Literal["pm1", "01", "given"] = "pm1",
) -> Tensor:
    """``conv2d(B(x), signs)`` with B(x) = sign(x), or 1[x > 1/2] with ``inputs="01"``, or x itself, which has to be
    −1, 0 and +1 then (not checked), with ``inputs="given"``; sign(0) = +1.

    ``x`` is float16 (N, C, H, W), real-valued, best in channels_last; ``signs`` is (O, C, kh, kw), exactly ±1
    (not checked), best in float32 and channels_last. The result is float16 and channels_last: whole numbers,
    exact. The gradient of x is 1[|x| ≤ 1] (or 1[0 ≤ x ≤ 1], or 1) times that of B(x), in float16; the gradient of the
    signs has their dtype, so that in float32 it cannot overflow. Gradients of gradients are not defined.
    """
    problem = _obstacle(x.shape, signs.shape, stride, padding)
    if problem is not None:
        raise ValueError(f"sign_conv2d: {problem}")
    if x.dtype != torch.float16:
        raise TypeError(f"sign_conv2d: the input is {x.dtype}, which should be torch.float16")
    if inputs not in INPUTS:
        raise ValueError(f"sign_conv2d: inputs={inputs!r} is not one of {', '.join(INPUTS)}")
    return _convolve(x, signs, stride, padding, INPUTS.index(inputs))


def convolve_given(
    x: Tensor, weight: Tensor, stride: int | Sequence[int], padding: int | Sequence[int]
) -> Tensor:
    """``conv2d(x, weight)`` of float16 ``x`` for what is no :func:`misfit`, rounded: neither has to be ±1."""
    return _convolve(x, weight, stride, padding, INPUTS.index("given"))


def _convolve(
    x: Tensor,
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    kind: int,
) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    return forward(x, weight, halves(weight), _single(stride), _single(padding), kind)


def halves(weight: Tensor) -> Tensor:
    """What the kernels multiply with; the gradient goes to the weight itself. Out here, the compiler can make them in
    the kernel that computes the signs."""
    return weight.detach().to(torch.float16).contiguous(memory_format=torch.channels_last)


def share_device(networks: int) -> None:
    """So many networks are going to be trained at the same time.

    What is fastest alone, in many short programs, is not what does most when others fill the gaps. What was tuned for
    another number is forgotten, and so is compiled code, which knows how many partial sums there were.
    """
    if networks == tuning.side_by_side:
        return
    tuning.side_by_side = networks
    tuning.chosen_rows.clear()
    if triton is not None and not INTERPRETED:
        for kernel in sign_conv_triton.KERNELS.values():
            kernel.cache.clear()
    torch.compiler.reset()


def tuned() -> dict[str, dict[tuple[Any, ...], str]]:
    """The blocks that tuning chose: kernel -> shape -> configuration."""
    if triton is None or INTERPRETED:
        return {}
    blocks = {
        name: {tuple(key): str(config) for key, config in kernel.cache.items()}
        for name, kernel in sign_conv_triton.KERNELS.items()
    }
    rows = {key: f"{rows} rows" if rows else "Triton" for key, rows in tuning.chosen_rows.items()}
    return {**blocks, "CUDA C++": rows}


def _obstacle(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> str | None:
    """Why the kernels do not cover a binary layer, or None."""
    problem = misfit(x_shape, weight_shape, stride, padding, dilation, groups)
    if problem is not None:
        return problem
    o, c, kh, kw = weight_shape
    if c % 16 or o % 16:
        return f"{c} and {o} channels are not both multiples of 16"
    if c * kh * kw > MOST_TERMS:
        return f"{c * kh * kw} terms a sum; float16 is exact to {MOST_TERMS}"
    return None


def misfit(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> str | None:
    """Why the kernels cover no such layer, whatever its values, or None."""
    if len(x_shape) != 4 or len(weight_shape) != 4:
        return "input and weight should have four dimensions"
    if groups != 1 or _single(dilation) != 1:
        return "groups and dilation are not supported"
    if _single(stride) < 1 or _single(padding) < 0:
        return f"stride {stride} or padding {padding} is not one number for both directions"
    (n, c, h, w), (o, weight_c, kh, kw) = x_shape, weight_shape
    if weight_c != c:
        return f"the input has {c} channels, the weight {weight_c}"
    if min(n, c, o, h, w, kh, kw) < 1:
        return "nothing to compute"
    ho, wo = output_size((h, w), (kh, kw), _single(stride), _single(padding))
    if min(ho, wo) < 1:
        return f"a {kh}×{kw} kernel is larger than the padded {h}×{w} input"
    if max(n * h * w * c, n * ho * wo * o) > MOST_ELEMENTS:
        return "too many elements for 32-bit offsets"
    return None


def _single(value: int | Sequence[int] | str) -> int:
    """The one number behind 2 or (2, 2); −1 where there is none."""
    if isinstance(value, int):
        return value
    if isinstance(value, str) or len(set(value)) != 1:
        return -1
    return value[0]


# ------------------------------------------------------------------------------------- torch operators


def _check(x: Tensor, *others: Tensor) -> None:
    if not available() or not (INTERPRETED or x.is_cuda):
        raise RuntimeError(
            f"sign_conv2d needs Triton and a CUDA device; the input is on {x.device}"
        )
    for tensor in (x, *others):
        if tensor.dtype != torch.float16 or tensor.device != x.device:
            raise TypeError(
                f"sign_conv2d: a tensor of {tensor.dtype} on {tensor.device}, "
                f"which should be torch.float16 on {x.device}"
            )
        if not tensor.is_contiguous(memory_format=torch.channels_last):
            raise ValueError("sign_conv2d: a tensor is not in channels_last memory format")


def _empty_output(x: Tensor, weight_shape: Sequence[int], stride: int, padding: int) -> Tensor:
    o, _, kh, kw = weight_shape
    ho, wo = output_size((x.shape[2], x.shape[3]), (kh, kw), stride, padding)
    return torch.empty(
        (x.shape[0], o, ho, wo),
        dtype=torch.float16,
        device=x.device,
        memory_format=torch.channels_last,
    )


def _key(what: str, x: Tensor, outputs: int, kind: int) -> tuple[Any, ...]:
    return what, *x.shape, outputs, kind, x.device.index


def _has_cuda(weight_shape: Sequence[int], stride: int, padding: int, *tensors: Tensor) -> bool:
    return sign_conv_cuda.covers(weight_shape, stride, padding) and sign_conv_cuda.reads(*tensors)


@torch.library.custom_op("unflip::sign_conv2d", mutates_args=())
def forward(
    x: Tensor, signs: Tensor, halves: Tensor, stride: int, padding: int, kind: int
) -> Tensor:
    """``halves`` are the signs to multiply with; ``signs`` only receives the gradient."""
    _check(x, halves)
    y = _empty_output(x, halves.shape, stride, padding)
    by_triton = partial(fprop_by_triton, x, halves, y, stride, padding, kind)
    if not _has_cuda(halves.shape, stride, padding, x, halves, y):
        by_triton()
        return y
    with torch.cuda.device_of(x):
        tuning.by_the_faster(
            _key("fprop", x, halves.shape[0], kind),
            x.shape[2],
            partial(sign_conv_cuda.fprop, x, halves, y, kind),
            by_triton,
        )
    return y


@forward.register_fake
def _(x: Tensor, signs: Tensor, halves: Tensor, stride: int, padding: int, kind: int) -> Tensor:
    return _empty_output(x, halves.shape, stride, padding)


@torch.library.custom_op("unflip::sign_conv2d_dgrad", mutates_args=())
def input_gradient(
    grad: Tensor,
    x: Tensor,
    halves: Tensor,
    stride: int,
    padding: int,
    kind: int,
    plus: Tensor | None = None,
) -> Tensor:
    """The gradient of x, straight through the sign and clipped; and ``plus``, which it has from elsewhere."""
    others = [] if plus is None else [plus]
    _check(x, grad, halves, *others)
    out = torch.empty_like(x, memory_format=torch.channels_last)
    by_triton = partial(dgrad_by_triton, grad, x, halves, plus, out, stride, padding, kind)
    if not _has_cuda(halves.shape, stride, padding, grad, x, halves, out, *others):
        by_triton()
        return out
    with torch.cuda.device_of(x):
        tuning.by_the_faster(
            _key("dgrad", x, halves.shape[0], kind),
            x.shape[2],
            partial(sign_conv_cuda.dgrad, grad, x, halves, plus, out, kind),
            by_triton,
        )
    return out


@input_gradient.register_fake
def _(grad: Tensor, x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


@torch.library.custom_op("unflip::sign_conv2d_wgrad", mutates_args=())
def _wgrad(
    grad: Tensor, x: Tensor, kh: int, kw: int, stride: int, padding: int, kind: int
) -> Tensor:
    """Partial sums (chunks, O, kh, kw, C) in float32; their sum over chunks is the signs' gradient."""
    _check(x, grad)
    by_triton = partial(wgrad_by_triton, grad, x, kh, kw, stride, padding, kind)
    o, (_, c, h, w) = grad.shape[1], x.shape
    if c != o or not _has_cuda((o, c, kh, kw), stride, padding, x, grad):
        return by_triton()
    by_cuda = partial(_wgrad_by_cuda, grad, x, kind)
    with torch.cuda.device_of(x):
        rows = tuning.rows_for(
            _key("wgrad", x, o, kind),
            sign_conv_cuda.strip_choices(c, h, w),
            lambda rows: by_cuda(rows).sum(0),  # fewer chunks are added faster
            lambda: by_triton().sum(0),
        )
        return by_cuda(rows) if rows else by_triton()


def _wgrad_by_cuda(grad: Tensor, x: Tensor, kind: int, rows: int) -> Tensor:
    out = empty_partial(x, grad, 3, 3, _strip_chunks(x, kind, rows))
    sign_conv_cuda.wgrad(grad, x, out, kind, rows)
    return out


def _strip_chunks(x: Tensor, kind: int, rows: int) -> int:
    """As :func:`sign_conv_triton.chunks`, of strips: a block for each chunk and tile, two for each processor."""
    images, c, h, w = x.shape
    plan = sign_conv_cuda.strips(images, c, h, w, kind, rows)
    wanted = cdiv(filling(x, 2), plan.tiles)
    wanted = max(1, min(wanted, MOST_PARTIAL // (9 * c * c)))
    return cdiv(plan.number, cdiv(plan.number, wanted))  # even shares


@_wgrad.register_fake
def _(grad: Tensor, x: Tensor, kh: int, kw: int, stride: int, padding: int, kind: int) -> Tensor:
    # Which kernel it will be is known: it was timed when the layers were compared, before anything is compiled.
    c, o = x.shape[1], grad.shape[1]
    rows = tuning.chosen_rows.get(_key("wgrad", x, o, kind), 0) if sign_conv_cuda.enabled() else 0
    if rows and (kh, kw, stride, padding) == (3, 3, 1, 1):
        chunks = _strip_chunks(x, kind, rows)
    else:
        chunks = sign_conv_triton.chunks(x, size(grad), c * kh * kw, o)
    return empty_partial(x, grad, kh, kw, chunks)


def sign_gradient(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    stride: int,
    padding: int,
    kind: int,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of signs of that shape. Partial sums are added out here, where the compiler can go on with them."""
    partial = _wgrad(grad, x, shape[2], shape[3], stride, padding, kind)
    return partial.sum(0).permute(0, 3, 1, 2).to(dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, signs, halves, ctx.stride, ctx.padding, ctx.kind = inputs
    ctx.signs_dtype = signs.dtype
    ctx.save_for_backward(x, halves)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, halves = ctx.saved_tensors
    grad = grad.to(torch.float16).contiguous(memory_format=torch.channels_last)
    grad_x = grad_signs = None
    if ctx.needs_input_grad[0]:
        grad_x = input_gradient(grad, x, halves, ctx.stride, ctx.padding, ctx.kind)
    if ctx.needs_input_grad[1]:
        grad_signs = sign_gradient(
            grad, x, halves.shape, ctx.stride, ctx.padding, ctx.kind, ctx.signs_dtype
        )
    return grad_x, grad_signs, None, None, None, None


forward.register_autograd(_backward, setup_context=_save)
