"""A binary convolution for training: sign, convolution and straight-through gradient in three kernels.

At 16 to 64 channels a convolution library spends little of its time on multiplying. Around each convolution, the sign
and the mask of its gradient are extra passes over memory. Here a convolution is a matrix product whose left side is
never stored: a program gathers it, tap by tap, and takes the sign on the way.

    forward           y      =  B(x) ⋆ signs
    input gradient    grad_x = (grad_y ⋆ᵀ signs) · 1[|x| ≤ 1]
    sign gradient     grad_s =  B(x)ᵀ · grad_y

Products of float16 are accumulated in float32, and the output has a type that holds the sums exactly
(``cover.product_type``), so it does not depend on the order of the sum. Our kernels have no atomics: for a given choice
of blocks, gradients have the same bits every time; those of cuDNN may differ in the last ones. The blocks are tuned at
the first call for every shape and process. That call must not be inside the capture of a CUDA graph.

This file holds the operators as torch knows them and the choice of kernels; ``cover.py`` says which layers are covered.
Large layers are left to cuDNN (``library.py``). The Triton kernels (``triton_kernels.py``) cover every supported layer.
For 3×3 taps of stride 1 and 16, 32 or 64 channels there are CUDA C++ kernels as well (``cuda_kernels.py``). If ``cuda``
is true, both are timed and the faster one is used.
``networks`` is the number of networks that train side by side on the device (``tuning.py``).

A NaN becomes +1 or −1 by its sign bit (0 for ``inputs="01"``) and passes no gradient. A diverging network shows in its
loss, not in the output of this convolution.

Methods with another gradient, or with ternary inputs, binarize the input themselves: with ``inputs="given"`` the
values are used as they are, and their gradient is not masked. ``stem_conv.py`` passes real values of fewer than 16
channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from unflip.kernels import tuning
from unflip.kernels.sign_conv import cuda_kernels, library, triton_launch
from unflip.kernels.sign_conv.cover import INPUTS, obstacle, product_type, single
from unflip.kernels.sign_conv.triton_launch import MOST_PARTIAL, empty_partial, output_size, size
from unflip.kernels.tuning import available, cdiv, filling, runs_on


def sign_conv2d(
    x: Tensor,
    signs: Tensor,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    inputs: Literal["pm1", "01", "given"] = "pm1",
    *,
    networks: int = 1,
    cuda: bool = False,
) -> Tensor:
    """``conv2d(B(x), signs)``. B(x) is sign(x) with sign(0) = +1; with ``inputs="01"`` it is 1[x > 1/2]; with
    ``inputs="given"`` it is x itself, which must consist of −1, 0 and +1 (not checked).

    ``x`` is float16 (N, C, H, W), real-valued, best in channels_last. ``signs`` is (O, C, kh, kw), exactly ±1
    (not checked), best in float32 and channels_last. The result is channels_last and exact: it consists of integers,
    in float16 or float32 (``cover.product_type``). The gradient of x is 1[|x| ≤ 1] (or 1[0 ≤ x ≤ 1], or 1) times that
    of B(x), in float16. The gradient of the signs has their dtype. Gradients of gradients are not defined.
    """
    problem = obstacle(x.shape, signs.shape, stride, padding)
    if problem is not None:
        raise ValueError(f"sign_conv2d: {problem}")
    if x.dtype != torch.float16:
        raise TypeError(f"sign_conv2d: the input is {x.dtype}; it should be torch.float16")
    if inputs not in INPUTS:
        raise ValueError(f"sign_conv2d: inputs={inputs!r} is not one of {', '.join(INPUTS)}")
    return _convolve(x, signs, stride, padding, INPUTS.index(inputs), networks, cuda)


def convolve_given(
    x: Tensor,
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    networks: int,
) -> Tensor:
    """``conv2d(x, weight)`` of real values, rounded to float16, for layers without a ``cover.misfit``."""
    return _convolve(x, weight, stride, padding, INPUTS.index("given"), networks, cuda=False)


def _convolve(
    x: Tensor,
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    kind: int,
    networks: int,
    cuda: bool,
) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    stride, padding = single(stride), single(padding)
    return forward(x, weight, halves(weight), stride, padding, kind, networks, cuda)


def halves(weight: Tensor) -> Tensor:
    """The weight in float16, for the kernels to multiply with; the gradient belongs to the weight itself.

    Outside the operators, so that the compiler can convert in the kernel that computes the signs.
    """
    return weight.detach().to(torch.float16).contiguous(memory_format=torch.channels_last)


def tuned() -> dict[str, dict[tuple[Any, ...], str]]:
    """The blocks that tuning chose: kernel -> (networks, shape) -> configuration."""
    kernels = {
        "fprop": triton_launch.FPROP,
        "dgrad": triton_launch.DGRAD,
        "wgrad": triton_launch.WGRAD,
    }
    rows = {key: f"{rows} rows" if rows else "Triton" for key, rows in tuning.chosen_rows.items()}
    return {**{name: kernel.chosen() for name, kernel in kernels.items()}, "CUDA C++": rows}


# ------------------------------------------------------------------------------------- torch operators


def _check(x: Tensor, *others: Tensor) -> None:
    if not available() or not runs_on(x.device):
        raise RuntimeError(
            f"sign_conv2d needs Triton and a CUDA device; the input is on {x.device}"
        )
    for tensor in (x, *others):
        if tensor.dtype != torch.float16 or tensor.device != x.device:
            raise TypeError(
                f"sign_conv2d: a tensor is {tensor.dtype} on {tensor.device}; "
                f"it should be torch.float16 on {x.device}"
            )
        if not tensor.is_contiguous(memory_format=torch.channels_last):
            raise ValueError("sign_conv2d: a tensor is not in channels_last memory format")


def product_shape(
    x: Tensor, weight_shape: Sequence[int], stride: int, padding: int
) -> tuple[int, ...]:
    o, _, kh, kw = weight_shape
    return x.shape[0], o, *output_size(size(x), (kh, kw), stride, padding)


def empty_product(
    x: Tensor, weight_shape: Sequence[int], stride: int, padding: int, kind: int
) -> Tensor:
    return torch.empty(
        product_shape(x, weight_shape, stride, padding),
        dtype=product_type(weight_shape, kind),
        device=x.device,
        memory_format=torch.channels_last,
    )


def _key(what: str, x: Tensor, outputs: int, kind: int, networks: int) -> tuning.Key:
    return what, *x.shape, outputs, kind, x.device.index, networks


def _has_cuda(weight_shape: Sequence[int], stride: int, padding: int, *tensors: Tensor) -> bool:
    return cuda_kernels.covers(weight_shape, stride, padding) and cuda_kernels.reads(*tensors)


@torch.library.custom_op("unflip::sign_conv2d", mutates_args=())
def forward(
    x: Tensor,
    signs: Tensor,
    halves: Tensor,
    stride: int,
    padding: int,
    kind: int,
    networks: int,
    cuda: bool,
) -> Tensor:
    """``halves`` are the signs to multiply with; ``signs`` only receives the gradient."""
    _check(x, halves)
    shape = product_shape(x, halves.shape, stride, padding)
    in_half = product_type(halves.shape, kind) == torch.float16
    if in_half and library.is_large(shape, halves.shape):
        return library.fprop(x, halves, stride, padding, kind)
    y = empty_product(x, halves.shape, stride, padding, kind)
    by_triton = partial(triton_launch.fprop, x, halves, y, stride, padding, kind, networks)
    if not cuda or not _has_cuda(halves.shape, stride, padding, x, halves, y):
        by_triton()
        return y
    with torch.cuda.device_of(x):
        tuning.by_the_faster(
            _key("fprop", x, halves.shape[0], kind, networks),
            cuda_kernels.choices(x.shape[2]),
            partial(cuda_kernels.fprop, x, halves, y, kind),
            by_triton,
        )
    return y


@forward.register_fake
def _(
    x: Tensor, signs: Tensor, halves: Tensor, stride: int, padding: int, kind: int, *_: object
) -> Tensor:
    return empty_product(x, halves.shape, stride, padding, kind)


@torch.library.custom_op("unflip::sign_conv2d_dgrad", mutates_args=())
def input_gradient(
    grad: Tensor,
    x: Tensor,
    halves: Tensor,
    stride: int,
    padding: int,
    kind: int,
    networks: int,
    cuda: bool,
    plus: Tensor | None = None,
) -> Tensor:
    """The gradient of x, straight through the sign and clipped, plus ``plus``: its gradient from elsewhere."""
    others = [] if plus is None else [plus]
    _check(x, grad, halves, *others)
    if library.is_large(grad.shape, halves.shape):
        return library.dgrad(grad, x, halves, plus, stride, padding, kind)
    out = torch.empty_like(x, memory_format=torch.channels_last)
    by_triton = partial(
        triton_launch.dgrad, grad, x, halves, plus, out, stride, padding, kind, networks
    )
    if not cuda or not _has_cuda(halves.shape, stride, padding, grad, x, halves, out, *others):
        by_triton()
        return out
    with torch.cuda.device_of(x):
        tuning.by_the_faster(
            _key("dgrad", x, halves.shape[0], kind, networks),
            cuda_kernels.choices(x.shape[2]),
            partial(cuda_kernels.dgrad, grad, x, halves, plus, out, kind),
            by_triton,
        )
    return out


@input_gradient.register_fake
def _(grad: Tensor, x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


@torch.library.custom_op("unflip::sign_conv2d_wgrad", mutates_args=())
def _wgrad(
    grad: Tensor,
    x: Tensor,
    kh: int,
    kw: int,
    stride: int,
    padding: int,
    kind: int,
    networks: int,
    cuda: bool,
) -> Tensor:
    """Partial sums (chunks, O, kh, kw, C) in float32; their sum over chunks is the signs' gradient."""
    _check(x, grad)
    by_triton = partial(triton_launch.wgrad, grad, x, kh, kw, stride, padding, kind, networks)
    o, (_, c, h, w) = grad.shape[1], x.shape
    if library.is_large(grad.shape, (o, c, kh, kw)):
        return library.wgrad(grad, x, kh, kw, stride, padding, kind)[None]
    if not cuda or c != o or not _has_cuda((o, c, kh, kw), stride, padding, x, grad):
        return by_triton()
    by_cuda = partial(_wgrad_by_cuda, grad, x, kind, networks)
    with torch.cuda.device_of(x):
        rows = tuning.rows_for(
            _key("wgrad", x, o, kind, networks),
            cuda_kernels.strip_choices(c, h, w),
            lambda rows: by_cuda(rows).sum(0),  # timed with the sum: fewer chunks are added faster
            lambda: by_triton().sum(0),
        )
        return by_cuda(rows) if rows else by_triton()


def _wgrad_by_cuda(grad: Tensor, x: Tensor, kind: int, networks: int, rows: int) -> Tensor:
    out = empty_partial(x, grad, 3, 3, _strip_chunks(x, kind, networks, rows))
    cuda_kernels.wgrad(grad, x, out, kind, rows)
    return out


def _strip_chunks(x: Tensor, kind: int, networks: int, rows: int) -> int:
    """As :func:`triton_launch.chunks`, for strips: one block per chunk and tile, two blocks per processor."""
    images, c, h, w = x.shape
    plan = cuda_kernels.strips(images, c, h, w, kind, rows)
    wanted = cdiv(filling(x, 2, networks), plan.tiles)
    wanted = max(1, min(wanted, MOST_PARTIAL // (9 * c * c)))
    return cdiv(plan.number, cdiv(plan.number, wanted))  # even shares


@_wgrad.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    kh: int,
    kw: int,
    stride: int,
    padding: int,
    kind: int,
    networks: int,
    cuda: bool,
) -> Tensor:
    # The kernel is already chosen: both were timed when the layers were checked, before anything is compiled.
    c, o = x.shape[1], grad.shape[1]
    rows = tuning.chosen_rows.get(_key("wgrad", x, o, kind, networks), 0) if cuda else 0
    if library.is_large(grad.shape, (o, c, kh, kw)):
        chunks = 1
    elif rows and (kh, kw, stride, padding) == (3, 3, 1, 1):
        chunks = _strip_chunks(x, kind, networks, rows)
    else:
        chunks = triton_launch.chunks(x, size(grad), c * kh * kw, o, networks)
    return empty_partial(x, grad, kh, kw, chunks)


def sign_gradient(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    stride: int,
    padding: int,
    kind: int,
    networks: int,
    cuda: bool,
) -> Tensor:
    """The gradient of signs of that shape and dtype.

    The partial sums are added outside the operator, where the compiler can fuse the sum with the next operations.
    """
    partial = _wgrad(grad, x, shape[2], shape[3], stride, padding, kind, networks, cuda)
    return partial.sum(0).permute(0, 3, 1, 2).to(dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, signs, halves, *ctx.options = inputs  # stride, padding, kind, networks, cuda
    ctx.signs_dtype = signs.dtype
    ctx.save_for_backward(x, halves)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, halves = ctx.saved_tensors
    grad = grad.to(torch.float16).contiguous(memory_format=torch.channels_last)
    grad_x = grad_signs = None
    if ctx.needs_input_grad[0]:
        grad_x = input_gradient(grad, x, halves, *ctx.options)
    if ctx.needs_input_grad[1]:
        grad_signs = sign_gradient(grad, x, halves.shape, ctx.signs_dtype, *ctx.options)
    return grad_x, grad_signs, *[None] * 6


forward.register_autograd(_backward, setup_context=_save)
