"""A binary convolution for training: sign, convolution and straight-through gradient in three kernels.

At 16 to 64 channels a convolution library spends most of its time on anything but multiplying, and around
each convolution the sign and the mask of its gradient are passes of their own over memory. Here a convolution is
a matrix product whose left side is never stored: a program gathers it, tap by tap, and takes the sign on the way.

                      k = (kh, kw, c)                          O
                    ┌─────┬─────┬─ ─ ─┬─────┐               ┌─────┐
     x  (NHWC)      │tap 0│tap 1│     │tap 8│               │     │           O
    ┌─────────┐     ├─────┼─────┼─ ─ ─┼─────┤               │signs│        ┌─────┐
    │ · · ·   │ ──▶ │ ±1     ±1         0   │   BLOCK_P  ×  │     │   =    │  y  │
    │ ·[p]·   │     │     (0: zero padding) │   pixels      │     │        └─────┘
    │ · · ·   │     └─────┴─────┴─ ─ ─┴─────┘               └─────┘
    └─────────┘     a tap: C halves, adjacent in memory

    forward           y      =  B(x) ⋆ signs                    a row an output pixel, a sum over (kh, kw, c)
    input gradient    grad_x = (grad_y ⋆ᵀ signs) · 1[|x| ≤ 1]   a row an input pixel, a sum over (kh, kw, o)
    sign gradient     grad_s =  B(x)ᵀ · grad_y                  a sum over pixels: chunks, added afterwards

Products of float16 are accumulated in float32. A sum of up to 2048 values of −1, 0 and +1 is exact in float16,
so the output does not depend on the order of the sum; more terms are refused. With a stride s the input pixels
fall into s² classes by (row mod s, column mod s), each of which meets only every s-th tap: the third axis of
the grid. There are no atomics: for a given choice of blocks, gradients are the same bits every time. The blocks
are tuned at the first call for every shape and process, which must not be inside the capture of a CUDA graph.

For 3×3 taps of stride 1 and 16, 32 or 64 channels, all three also exist in CUDA C++ (``sign_conv_cuda``). Where
they can be compiled, they are timed with the blocks, and the faster of both is used.

The sign is taken from the bits, two values at a time: x + 0 is never −0, and its sign bit is put on the float16
1.0 (0x3C00), or on 0.0 in the padding. A NaN becomes +1 or −1 by its sign bit (0 for ``inputs="01"``) and passes
no gradient: a diverging network shows in its loss, not in the output of this convolution.

Methods with another gradient, or with ternary inputs, binarize on their own: with ``inputs="given"`` the values are
taken as they are, and their gradient is not masked. ``stem_conv`` gives real values, with fewer than 16 channels.
"""

# Triton reads the annotations of kernels, and knows no Any: pointers and numbers go without.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from unflip.train import sign_conv_cuda

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = tl = None

MOST_TERMS = 2048  # every integer up to this is a float16; the next one is not
MOST_ELEMENTS = 2**31 - 2**20  # offsets are int32, and the last block reaches past the end
PROGRAMS_PER_SM = 4  # of the sign gradient: more of them are shorter, but leave more partial sums
MOST_PARTIAL = 2**20  # floats of partial sums (4 MB)
INPUTS = ("pm1", "01", "given")  # kernels know them by their numbers
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# Networks that are trained at the same time: :func:`share_device`.
side_by_side = 1


def available() -> bool:
    """Whether the kernels can run here: Triton and a CUDA device, or Triton's interpreter."""
    return triton is not None and (INTERPRETED or torch.cuda.is_available())


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
    global side_by_side
    if networks == side_by_side:
        return
    side_by_side = networks
    _chosen_rows.clear()
    if triton is not None and not INTERPRETED:
        for kernel in (_fprop_kernel, _dgrad_kernel, _wgrad_kernel):
            kernel.cache.clear()
    torch.compiler.reset()


def tuned() -> dict[str, dict[tuple[Any, ...], str]]:
    """The blocks that tuning chose: kernel -> shape -> configuration."""
    if triton is None or INTERPRETED:
        return {}
    kernels = {"fprop": _fprop_kernel, "dgrad": _dgrad_kernel, "wgrad": _wgrad_kernel}
    blocks = {
        name: {tuple(key): str(config) for key, config in kernel.cache.items()}
        for name, kernel in kernels.items()
    }
    rows = {key: f"{rows} rows" if rows else "Triton" for key, rows in _chosen_rows.items()}
    return {**blocks, "CUDA C++": rows}


def choices() -> str:
    """What was chosen here and is in no graph: how many networks train, and which kernels add up the sign gradient."""
    rows = sorted((key, rows) for key, rows in _chosen_rows.items() if key[0] == "wgrad")
    return f"{side_by_side} {rows if sign_conv_cuda.enabled() else 'Triton'}"


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
    ho, wo = _output_size((h, w), (kh, kw), _single(stride), _single(padding))
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


def _output_size(
    size: tuple[int, int], kernel: tuple[int, int], stride: int, padding: int
) -> tuple[int, int]:
    height, width = (
        (length + 2 * padding - taps) // stride + 1
        for length, taps in zip(size, kernel, strict=True)
    )
    return height, width


# ------------------------------------------------------------------------------------------- kernels


def _jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


# A step of the sum takes GROUP · PART values, PART being the largest power of two that divides the channels, up
# to 64, or 16 where that is less. UNROLL: straight code that loads one step ahead, which goes through the cache
# near the processor; otherwise a loop with num_stages − 1 copies to shared memory in flight, which does not.
PIXEL_BLOCKS = [
    # BLOCK_P, GROUP, UNROLL, num_warps, num_stages
    (128, 1, True, 4, 1),
    (64, 1, True, 2, 1),
    (64, 1, True, 4, 1),
    (256, 1, True, 8, 1),
    (64, 4, True, 4, 1),
    (64, 1, False, 4, 4),
    (128, 2, False, 4, 3),
    (32, 1, False, 2, 4),
    (32, 2, False, 4, 3),
]
# BLOCK_P pixels a step, GROUP · PART values of (kh, kw, c) a program. AHEAD: a loop that loads one step ahead.
CHUNK_BLOCKS = [
    # BLOCK_P, GROUP, AHEAD, num_warps, num_stages
    (64, 4, True, 4, 1),
    (64, 2, True, 4, 1),
    (128, 2, True, 4, 1),
    (64, 1, True, 2, 1),
    (64, 1, False, 4, 4),
    (64, 2, False, 4, 3),
    (128, 2, False, 4, 3),
]
SHAPE = ["H", "W", "C", "O", "KH", "KW", "STRIDE", "PADDING"]


def _time(call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    """Milliseconds a call, with as many at once as networks train side by side. The device sleeps while calls queue
    up, or launching is what would be timed."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    branches = [torch.cuda.Stream() for _ in range(min(side_by_side, 8))]
    calls = 10 if len(branches) == 1 else 4
    times = []
    for _ in range(5):
        torch.cuda._sleep(1_000_000 * (1 + len(branches)))
        start.record()
        for branch in branches:
            branch.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(branch):
                for _ in range(calls):
                    call()
        for branch in branches:
            torch.cuda.current_stream().wait_stream(branch)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / (calls * len(branches)))
    return [min(times)] * len(quantiles)  # others on this GPU make it longer, never shorter


def _pixel_blocks(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Leave out blocks far from right: too few or too many programs, too much in registers or code."""
    if "BLOCK_O" in kwargs:
        columns, channels, skipped = kwargs["BLOCK_O"], kwargs["C"], 1
    else:
        columns, channels, skipped = kwargs["BLOCK_C"], kwargs["O"], kwargs["STRIDE"]
    terms = channels * cdiv(kwargs["KH"], skipped) * cdiv(kwargs["KW"], skipped)

    def fits(config: Any) -> bool:
        block, unroll = config.kwargs["BLOCK_P"], config.kwargs["UNROLL"]
        step = config.kwargs["GROUP"] * kwargs["PART"]
        if unroll and cdiv(terms, step) > 18:
            return False
        programs = cdiv(kwargs["pixels"], block)
        right_number = (programs >= 48 or block == 32) and (programs <= 2048 or block >= 128)
        limit = (1024 if unroll else 2048) * config.num_warps
        return right_number and block * max(step, columns) <= limit

    return [config for config in configs if fits(config)] or configs[5:6]


def _chunk_blocks(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    columns, pixels = kwargs["BLOCK_O"], kwargs["HO"] * kwargs["WO"]

    def fits(config: Any) -> bool:
        block, values = config.kwargs["BLOCK_P"], config.kwargs["GROUP"] * kwargs["PART"]
        registers = (values * columns + (values + columns) * block) // (32 * config.num_warps)
        return registers <= 170 and block <= max(64, pixels)

    return [config for config in configs if fits(config)] or configs[4:5]


def _tuned(configs: list[Any], key: list[str], prune: Any) -> Callable[[Any], Any]:
    if triton is None:
        return lambda kernel: kernel
    return triton.autotune(
        configs=configs[:1] if INTERPRETED else configs,  # the interpreter cannot tune
        key=key,
        prune_configs_by={"early_config_prune": prune},
        do_bench=_time,
    )


def _pixel_configs() -> list[Any]:
    if triton is None:
        return []
    return [
        triton.Config(
            {"BLOCK_P": pixels, "GROUP": group, "UNROLL": unroll},
            num_warps=warps,
            num_stages=stages,
        )
        for pixels, group, unroll, warps, stages in PIXEL_BLOCKS
    ]


def _chunk_configs() -> list[Any]:
    if triton is None:
        return []
    return [
        triton.Config(
            {"BLOCK_P": pixels, "GROUP": group, "AHEAD": ahead},
            num_warps=warps,
            num_stages=stages,
        )
        for pixels, group, ahead, warps, stages in CHUNK_BLOCKS
    ]


@_jit
def _binary(x, inside, KIND: tl.constexpr):
    """B(x), and 0 outside the image, where x has been read as 0. KIND: an index of INPUTS."""
    if KIND == 2:
        return x
    if KIND == 1:  # above 1/2 the next float16 is 1/2 + 1/2048
        zero = tl.zeros((1, 1), tl.float16)
        return tl.minimum(tl.maximum(x * 2048.0 - 1024.0, zero), zero + 1.0)
    bits = (x + 0.0).to(tl.int16, bitcast=True)
    one = tl.where(inside, 0x3C00, 0).to(tl.int16)
    return ((bits & -0x8000) | one).to(tl.float16, bitcast=True)


@_jit
def _passes(x, KIND: tl.constexpr):
    """Where the straight-through gradient is 1."""
    if KIND == 1:
        return (x >= 0.0) & (x <= 1.0)
    return tl.abs(x) <= 1.0


@_jit
def _taps(
    top,
    left,
    exists,
    step,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Where the values k = step · BLOCK_K ... of output pixels lie: offset from (top, left), inside or not."""
    lane = tl.arange(0, BLOCK_K)
    if C % BLOCK_K == 0:  # all of one tap: one check a row
        tap = step // (C // BLOCK_K)
        ih = top + tap // KW
        iw = left + tap % KW
        inside = exists & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
        first = (tap // KW * W + tap % KW) * C + step % (C // BLOCK_K) * BLOCK_K
        return lane[None, :] + first, inside[:, None]
    else:
        k = step * BLOCK_K + lane
        tap = k // C
        ih = top[:, None] + (tap // KW)[None, :]
        iw = left[:, None] + (tap % KW)[None, :]
        inside = exists[:, None] & (k < KH * KW * C)[None, :]
        inside = inside & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
        return ((tap // KW * W + tap % KW) * C + k % C)[None, :], inside


@_jit
def _fprop_load(
    x_at,
    top,
    left,
    exists,
    s_at,
    o,
    step,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    offset, inside = _taps(top, left, exists, step, H, W, C, KH, KW, BLOCK_K)
    x = tl.load(x_at[:, None] + offset, mask=inside, other=0.0)
    k = step * BLOCK_K + tl.arange(0, BLOCK_K)
    known = (k < KH * KW * C)[:, None] & (o < O)[None, :]
    signs = tl.load(s_at[None, :] + k[:, None], mask=known, other=0.0)
    return x, inside, signs


@_tuned(_pixel_configs(), ["pixels", *SHAPE], _pixel_blocks)
@_jit
def _fprop_kernel(
    x_ptr,
    s_ptr,
    y_ptr,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """BLOCK_P output pixels × BLOCK_O output channels."""
    K: tl.constexpr = KH * KW * C
    BLOCK_K: tl.constexpr = GROUP * PART
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    exists = row < pixels
    top = row // WO % HO * STRIDE - PADDING
    left = row % WO * STRIDE - PADDING
    x_at = x_ptr + ((row // (WO * HO) * H + top) * W + left) * C
    s_at = s_ptr + o * K
    total = tl.zeros((BLOCK_P, BLOCK_O), tl.float32)
    if UNROLL:  # the next values are on their way while these are multiplied
        x, inside, signs = _fprop_load(
            x_at, top, left, exists, s_at, o, 0, H, W, C, O, KH, KW, BLOCK_K
        )
        for step in tl.static_range(1, STEPS):
            next_x, next_inside, next_signs = _fprop_load(
                x_at, top, left, exists, s_at, o, step, H, W, C, O, KH, KW, BLOCK_K
            )
            total = tl.dot(_binary(x, inside, KIND), signs, total)
            x = next_x
            inside = next_inside
            signs = next_signs
        total = tl.dot(_binary(x, inside, KIND), signs, total)
    else:
        for step in tl.range(STEPS):
            x, inside, signs = _fprop_load(
                x_at, top, left, exists, s_at, o, step, H, W, C, O, KH, KW, BLOCK_K
            )
            total = tl.dot(_binary(x, inside, KIND), signs, total)
    known = exists[:, None] & (o < O)[None, :]
    tl.store(y_ptr + row[:, None] * O + o[None, :], total.to(tl.float16), mask=known)


@_jit
def _dgrad_load(
    g_at,
    oh,
    ow,
    s_ptr,
    c,
    first_kh,
    first_kw,
    step,
    HO: tl.constexpr,
    WO: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One step of the sum over k = (a, b, o), the taps being first_kh + a · STRIDE, first_kw + b · STRIDE."""
    TAPS_W: tl.constexpr = (KW + STRIDE - 1) // STRIDE
    lane = tl.arange(0, BLOCK_K)
    if O % BLOCK_K == 0:  # all of one tap
        tap = step // (O // BLOCK_K)
        a = tap // TAPS_W
        b = tap % TAPS_W
        kh = first_kh + a * STRIDE
        kw = first_kw + b * STRIDE
        rows = HO
        columns = C
        if STRIDE > 1:  # a class may have a tap less
            used = (kh < KH) & (kw < KW)
            rows = tl.where(used, HO, -KH)
            columns = tl.where(used, C, 0)
        inside = (oh >= a) & (oh - a < rows) & (ow >= b) & (ow - b < WO)
        known = (c < columns)[None, :]
        first = step % (O // BLOCK_K) * BLOCK_K
        offset = lane + (first - (a * WO + b) * O)
        g = tl.load(g_at[:, None] + offset[None, :], mask=inside[:, None], other=0.0)
        s_at = (first + lane) * (KH * KW * C) + (kh * KW + kw) * C
    else:
        k = step * BLOCK_K + lane
        tap = k // O
        a = tap // TAPS_W
        b = tap % TAPS_W
        kh = first_kh + a * STRIDE
        kw = first_kw + b * STRIDE
        used = (kh < KH) & (kw < KW)
        inside = (oh[:, None] >= a[None, :]) & (oh[:, None] - a[None, :] < HO) & used[None, :]
        inside = inside & (ow[:, None] >= b[None, :]) & (ow[:, None] - b[None, :] < WO)
        offset = k % O - (a * WO + b) * O
        g = tl.load(g_at[:, None] + offset[None, :], mask=inside, other=0.0)
        s_at = k % O * (KH * KW * C) + (kh * KW + kw) * C
        known = used[:, None] & (c < C)[None, :]
    signs = tl.load(s_ptr + s_at[:, None] + c[None, :], mask=known, other=0.0)
    return g, signs


@_tuned(_pixel_configs(), ["pixels", *SHAPE], _pixel_blocks)
@_jit
def _dgrad_kernel(
    g_ptr,
    x_ptr,
    s_ptr,
    plus_ptr,
    out_ptr,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """BLOCK_P input pixels of one class × BLOCK_C input channels; ``pixels`` is the most a class has."""
    BLOCK_K: tl.constexpr = GROUP * PART
    TAPS_H: tl.constexpr = (KH + STRIDE - 1) // STRIDE
    TAPS_W: tl.constexpr = (KW + STRIDE - 1) // STRIDE
    STEPS: tl.constexpr = (TAPS_H * TAPS_W * O + BLOCK_K - 1) // BLOCK_K
    CLASS_H: tl.constexpr = (H + STRIDE - 1) // STRIDE
    CLASS_W: tl.constexpr = (W + STRIDE - 1) // STRIDE
    row = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = row // (CLASS_W * CLASS_H)
    i = row // CLASS_W % CLASS_H
    j = row % CLASS_W
    # (oh, ow): the output pixel that the class's first tap leads to
    if STRIDE == 1:
        ih = i
        iw = j
        first_kh = 0
        first_kw = 0
        oh = i + PADDING
        ow = j + PADDING
    else:
        class_h = tl.program_id(2) // STRIDE
        class_w = tl.program_id(2) % STRIDE
        ih = i * STRIDE + class_h
        iw = j * STRIDE + class_w
        first_kh = (class_h + PADDING) % STRIDE
        first_kw = (class_w + PADDING) % STRIDE
        oh = i + (class_h + PADDING) // STRIDE
        ow = j + (class_w + PADDING) // STRIDE
    known = ((row < pixels) & (ih < H) & (iw < W))[:, None] & (c < C)[None, :]
    at = (((n * H + ih) * W + iw) * C)[:, None] + c[None, :]
    if KIND != 2:
        x = tl.load(x_ptr + at, mask=known, other=0.0)
    if ADDS:
        plus = tl.load(plus_ptr + at, mask=known, other=0.0)
    oh = tl.where(row < pixels, oh, -1)  # past the end, no tap leads inside
    g_at = g_ptr + ((n * HO + oh) * WO + ow) * O
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    if UNROLL:  # the next values are on their way while these are multiplied
        g, signs = _dgrad_load(
            g_at, oh, ow, s_ptr, c, first_kh, first_kw, 0, HO, WO, C, O, KH, KW, STRIDE, BLOCK_K
        )
        for step in tl.static_range(1, STEPS):
            next_g, next_signs = _dgrad_load(
                g_at, oh, ow, s_ptr, c, first_kh, first_kw, step,
                HO, WO, C, O, KH, KW, STRIDE, BLOCK_K,
            )  # fmt: skip
            total = tl.dot(g, signs, total)
            g = next_g
            signs = next_signs
        total = tl.dot(g, signs, total)
    else:
        for step in tl.range(STEPS):
            g, signs = _dgrad_load(
                g_at, oh, ow, s_ptr, c, first_kh, first_kw, step,
                HO, WO, C, O, KH, KW, STRIDE, BLOCK_K,
            )  # fmt: skip
            total = tl.dot(g, signs, total)
    if KIND != 2:
        total = tl.where(_passes(x, KIND), total, 0.0)
    if ADDS:
        total += plus.to(tl.float32)
    tl.store(out_ptr + at, total.to(tl.float16), mask=known)


@_tuned(_chunk_configs(), ["images", *SHAPE], _chunk_blocks)
@_jit
def _wgrad_kernel(
    g_ptr,
    x_ptr,
    out_ptr,
    images,
    H: tl.constexpr,
    W: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The sum over one chunk, for GROUP · PART values of (kh, kw, c) × BLOCK_O output channels.

    A chunk is some positions of BLOCK_P pixels in some images. The inner loop goes through the images, so that
    all offsets and masks stay the same.
    """
    K: tl.constexpr = KH * KW * C
    BLOCK_K: tl.constexpr = GROUP * PART
    POSITIONS: tl.constexpr = (HO * WO + BLOCK_P - 1) // BLOCK_P
    chunk = tl.program_id(0)
    splits = tl.minimum(tl.num_programs(0), POSITIONS)
    per_group = tl.cdiv(images, tl.num_programs(0) // splits)
    first = chunk // splits * per_group
    last = tl.minimum(first + per_group, images)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
    total = tl.zeros((BLOCK_K, BLOCK_O), tl.float32)
    for position in tl.range(chunk % splits, POSITIONS, splits, num_stages=1):
        pixel = position * BLOCK_P + tl.arange(0, BLOCK_P)
        exists = pixel < HO * WO
        top = pixel // WO * STRIDE - PADDING
        left = pixel % WO * STRIDE - PADDING
        offset, inside = _taps(top, left, exists, tl.program_id(1), H, W, C, KH, KW, BLOCK_K)
        x_at = ((top * W + left) * C)[:, None] + offset
        g_at = (pixel * O)[:, None] + o[None, :]
        known = exists[:, None] & (o < O)[None, :]
        begin = tl.minimum(first, images - 1)  # more chunks than images: one without a step
        x_at = x_ptr + begin * (H * W * C) + x_at
        g_at = g_ptr + begin * (HO * WO * O) + g_at
        if AHEAD:
            x = tl.load(x_at, mask=inside, other=0.0)
            g = tl.load(g_at, mask=known, other=0.0)
            for n in tl.range(first + 1, last + 1, num_stages=1):
                x_at += tl.where(n < last, H * W * C, 0)  # the last step loads what it has again
                g_at += tl.where(n < last, HO * WO * O, 0)
                next_x = tl.load(x_at, mask=inside, other=0.0)
                next_g = tl.load(g_at, mask=known, other=0.0)
                total = tl.dot(tl.trans(_binary(x, inside, KIND)), g, total)
                x = next_x
                g = next_g
        else:
            for _ in tl.range(first, last):
                x = tl.load(x_at, mask=inside, other=0.0)
                g = tl.load(g_at, mask=known, other=0.0)
                total = tl.dot(tl.trans(_binary(x, inside, KIND)), g, total)
                x_at += H * W * C
                g_at += HO * WO * O
    at = (chunk * O + o)[None, :] * K + k[:, None]
    tl.store(out_ptr + at, total, mask=(k < K)[:, None] & (o < O)[None, :])


# ------------------------------------------------------------------------------------- torch operators


def power(count: int, most: int) -> int:
    """The smallest power of two that covers ``count``, between 16 and ``most``."""
    return min(most, max(16, 1 << (count - 1).bit_length()))


def _part(channels: int) -> int:
    """The largest power of two that divides ``channels``, up to 64; 16 where that is less, to be a product's side."""
    return min(64, max(16, channels & -channels))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _chunks(x: Tensor, size: tuple[int, int], terms: int, outputs: int) -> int:
    """How many partial sums the sign gradient has: enough programs to fill the device, no more."""
    programs = cdiv(terms, 64) * cdiv(outputs, power(outputs, 128))
    wanted = cdiv(filling(x, PROGRAMS_PER_SM), programs)
    wanted = min(wanted, MOST_PARTIAL // (terms * outputs))
    images, positions = x.shape[0], cdiv(size[0] * size[1], 64)
    splits = cdiv(positions, cdiv(positions, max(1, wanted)))  # even shares
    return splits * cdiv(images, cdiv(images, max(1, wanted // splits)))


def filling(x: Tensor, per_processor: int) -> int:
    """How many programs fill the device, or this network's part of it: others do the rest."""
    return cdiv(per_processor * _processors(x), min(side_by_side, PROGRAMS_PER_SM))


def _processors(x: Tensor) -> int:
    if x.device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(x.device).multi_processor_count


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


def _geometry(
    x: Tensor, weight_shape: Sequence[int], stride: int, padding: int, kind: int
) -> dict[str, Any]:
    o, c, kh, kw = weight_shape
    h, w = x.shape[2:]
    ho, wo = _output_size((h, w), (kh, kw), stride, padding)
    return {
        "H": h,
        "W": w,
        "HO": ho,
        "WO": wo,
        "C": c,
        "O": o,
        "KH": kh,
        "KW": kw,
        "STRIDE": stride,
        "PADDING": padding,
        "KIND": kind,
    }


def _empty_output(x: Tensor, weight_shape: Sequence[int], stride: int, padding: int) -> Tensor:
    o, _, kh, kw = weight_shape
    ho, wo = _output_size((x.shape[2], x.shape[3]), (kh, kw), stride, padding)
    return torch.empty(
        (x.shape[0], o, ho, wo),
        dtype=torch.float16,
        device=x.device,
        memory_format=torch.channels_last,
    )


def _empty_partial(x: Tensor, grad: Tensor, kh: int, kw: int, chunks: int) -> Tensor:
    c, o = x.shape[1], grad.shape[1]
    return torch.empty((chunks, o, kh, kw, c), dtype=torch.float32, device=x.device)


# The number of rows with which the CUDA C++ kernel is faster than Triton's, or 0, by what, shape and kind.
_chosen_rows: dict[tuple[Any, ...], int] = {}


def _key(what: str, x: Tensor, outputs: int, kind: int) -> tuple[Any, ...]:
    return what, *x.shape, outputs, kind, x.device.index


def _rows(
    key: tuple[Any, ...],
    choices: Sequence[int],
    by_cuda: Callable[[int], object],
    by_triton: Callable[[], object],
) -> int:
    """With which number of rows the CUDA C++ kernel is faster for ``key``, or 0. The first call times both."""
    if key not in _chosen_rows and not torch.cuda.is_current_stream_capturing():
        times = _times(choices, by_cuda, by_triton)
        stable = key[0] == "wgrad"  # whose choice compiled code depends on
        _chosen_rows[key] = _clearly_fastest(times) if stable else min(times, key=times.__getitem__)
    return _chosen_rows.get(key, 0) if sign_conv_cuda.enabled() else 0


def _times(
    choices: Sequence[int], by_cuda: Callable[[int], object], by_triton: Callable[[], object]
) -> dict[int, float]:
    """Milliseconds by the number of rows; 0 rows is Triton, and nothing else where that is all there is."""
    if not sign_conv_cuda.enabled() or not choices:
        return {0: 0.0}
    try:
        times = {rows: _time(partial(by_cuda, rows), [0.5])[0] for rows in choices}
    except Exception as error:
        sign_conv_cuda.switch_off(f"they failed: {str(error).strip() or type(error).__name__}")
        return {0: 0.0}
    return {**times, 0: _time(by_triton, [0.5])[0]}


def _clearly_fastest(times: dict[int, float]) -> int:
    """The first choice that no other beats by a tenth: what noise decides would be compiled anew each time."""
    least = min(times.values())
    return next(rows for rows, time in times.items() if time <= least / 0.9)


def _by_the_faster(
    key: tuple[Any, ...],
    height: int,
    by_cuda: Callable[[int], object],
    by_triton: Callable[[], object],
) -> None:
    rows = _rows(key, sign_conv_cuda.choices(height), by_cuda, by_triton)
    if rows:
        by_cuda(rows)
    else:
        by_triton()


def _has_cuda(weight_shape: Sequence[int], stride: int, padding: int, *tensors: Tensor) -> bool:
    return sign_conv_cuda.covers(weight_shape, stride, padding) and sign_conv_cuda.reads(*tensors)


@torch.library.custom_op("unflip::sign_conv2d", mutates_args=())
def forward(
    x: Tensor, signs: Tensor, halves: Tensor, stride: int, padding: int, kind: int
) -> Tensor:
    """``halves`` are the signs to multiply with; ``signs`` only receives the gradient."""
    _check(x, halves)
    y = _empty_output(x, halves.shape, stride, padding)
    by_triton = partial(_fprop_by_triton, x, halves, y, stride, padding, kind)
    if not _has_cuda(halves.shape, stride, padding, x, halves, y):
        by_triton()
        return y
    with torch.cuda.device_of(x):
        _by_the_faster(
            _key("fprop", x, halves.shape[0], kind),
            x.shape[2],
            partial(sign_conv_cuda.fprop, x, halves, y, kind),
            by_triton,
        )
    return y


def _fprop_by_triton(
    x: Tensor, halves: Tensor, y: Tensor, stride: int, padding: int, kind: int
) -> None:
    o = halves.shape[0]
    pixels = y.shape[0] * y.shape[2] * y.shape[3]
    block_o = power(o, 128)
    with torch.cuda.device_of(x):
        _fprop_kernel[lambda meta: (cdiv(pixels, meta["BLOCK_P"]), cdiv(o, block_o))](
            x_ptr=x,
            s_ptr=halves,
            y_ptr=y,
            pixels=pixels,
            **_geometry(x, halves.shape, stride, padding, kind),
            PART=_part(x.shape[1]),
            BLOCK_O=block_o,
        )


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
    by_triton = partial(_dgrad_by_triton, grad, x, halves, plus, out, stride, padding, kind)
    if not _has_cuda(halves.shape, stride, padding, grad, x, halves, out, *others):
        by_triton()
        return out
    with torch.cuda.device_of(x):
        _by_the_faster(
            _key("dgrad", x, halves.shape[0], kind),
            x.shape[2],
            partial(sign_conv_cuda.dgrad, grad, x, halves, plus, out, kind),
            by_triton,
        )
    return out


def _dgrad_by_triton(
    grad: Tensor,
    x: Tensor,
    halves: Tensor,
    plus: Tensor | None,
    out: Tensor,
    stride: int,
    padding: int,
    kind: int,
) -> None:
    n, c, h, w = x.shape
    pixels = n * cdiv(h, stride) * cdiv(w, stride)
    block_c = power(c, 128)
    with torch.cuda.device_of(x):
        _dgrad_kernel[
            lambda meta: (cdiv(pixels, meta["BLOCK_P"]), cdiv(c, block_c), stride * stride)
        ](
            g_ptr=grad,
            x_ptr=x,
            s_ptr=halves,
            plus_ptr=x if plus is None else plus,
            out_ptr=out,
            pixels=pixels,
            **_geometry(x, halves.shape, stride, padding, kind),
            PART=_part(halves.shape[0]),
            BLOCK_C=block_c,
            ADDS=plus is not None,
        )


@input_gradient.register_fake
def _(grad: Tensor, x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


@torch.library.custom_op("unflip::sign_conv2d_wgrad", mutates_args=())
def _wgrad(
    grad: Tensor, x: Tensor, kh: int, kw: int, stride: int, padding: int, kind: int
) -> Tensor:
    """Partial sums (chunks, O, kh, kw, C) in float32; their sum over chunks is the signs' gradient."""
    _check(x, grad)
    by_triton = partial(_wgrad_by_triton, grad, x, kh, kw, stride, padding, kind)
    o, (_, c, h, w) = grad.shape[1], x.shape
    if c != o or not _has_cuda((o, c, kh, kw), stride, padding, x, grad):
        return by_triton()
    by_cuda = partial(_wgrad_by_cuda, grad, x, kind)
    with torch.cuda.device_of(x):
        rows = _rows(
            _key("wgrad", x, o, kind),
            sign_conv_cuda.strip_choices(c, h, w),
            lambda rows: by_cuda(rows).sum(0),  # fewer chunks are added faster
            lambda: by_triton().sum(0),
        )
        return by_cuda(rows) if rows else by_triton()


def _wgrad_by_cuda(grad: Tensor, x: Tensor, kind: int, rows: int) -> Tensor:
    out = _empty_partial(x, grad, 3, 3, _strip_chunks(x, kind, rows))
    sign_conv_cuda.wgrad(grad, x, out, kind, rows)
    return out


def _strip_chunks(x: Tensor, kind: int, rows: int) -> int:
    """As :func:`_chunks`, of strips: a block for each chunk and tile, two for each processor."""
    images, c, h, w = x.shape
    plan = sign_conv_cuda.strips(images, c, h, w, kind, rows)
    wanted = cdiv(filling(x, 2), plan.tiles)
    wanted = max(1, min(wanted, MOST_PARTIAL // (9 * c * c)))
    return cdiv(plan.number, cdiv(plan.number, wanted))  # even shares


def _wgrad_by_triton(
    grad: Tensor, x: Tensor, kh: int, kw: int, stride: int, padding: int, kind: int
) -> Tensor:
    c, o = x.shape[1], grad.shape[1]
    out = _empty_partial(x, grad, kh, kw, _chunks(x, _size(grad), c * kh * kw, o))
    block_o, part = power(o, 128), _part(c)
    with torch.cuda.device_of(x):
        _wgrad_kernel[
            lambda meta: (
                out.shape[0],
                cdiv(c * kh * kw, part * meta["GROUP"]),
                cdiv(o, block_o),
            )
        ](
            g_ptr=grad,
            x_ptr=x,
            out_ptr=out,
            images=x.shape[0],
            **_geometry(x, (o, c, kh, kw), stride, padding, kind),
            PART=part,
            BLOCK_O=block_o,
        )
    return out


def _size(images: Tensor) -> tuple[int, int]:
    return images.shape[2], images.shape[3]


@_wgrad.register_fake
def _(grad: Tensor, x: Tensor, kh: int, kw: int, stride: int, padding: int, kind: int) -> Tensor:
    # Which kernel it will be is known: it was timed when the layers were compared, before anything is compiled.
    c, o = x.shape[1], grad.shape[1]
    rows = _chosen_rows.get(_key("wgrad", x, o, kind), 0) if sign_conv_cuda.enabled() else 0
    if rows and (kh, kw, stride, padding) == (3, 3, 1, 1):
        chunks = _strip_chunks(x, kind, rows)
    else:
        chunks = _chunks(x, _size(grad), c * kh * kw, o)
    return _empty_partial(x, grad, kh, kw, chunks)


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
