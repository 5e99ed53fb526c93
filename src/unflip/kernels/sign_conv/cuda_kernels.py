"""The kernels of ``sign_conv.cu`` and ``sign_conv_wgrad.cu``: which layers they cover, and how they are launched.

They compute the same as the kernels of ``triton_kernels.py``, for the most frequent layers of networks with 16 to 64
channels. Triton's kernels are used where these cannot be compiled, fail, or are not faster.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unflip.kernels import nvrtc

HERE = Path(__file__).parent
CHANNELS = (16, 32, 64)
GROUP = 16  # output channels of a warp
# Rows that a warp walks down. More rows repeat less work; fewer rows let more warps share it.
ROWS = (4, 8, 16, 32)

STRIP_ROWS = (16, 8, 4, 2, 1)  # of the sign gradient: fewer rows leave room for more blocks
STRIP_WARPS = 4
TILE = 32  # channels of a block, in and out
PIECE = 16  # bytes of shared memory: 8 channels of a pixel
TWO_STRIPS = 73 * 1024  # bytes; a multiprocessor has room for three times as many


def allowed() -> bool:
    """UNFLIP_NVRTC=0 turns these kernels off, for systems where NVRTC causes trouble."""
    return os.environ.get("UNFLIP_NVRTC", "1") != "0"


def covers(weight_shape: Sequence[int], stride: int, padding: int) -> bool:
    o, c, *taps = weight_shape
    return taps == [3, 3] and (stride, padding) == (1, 1) and c in CHANNELS and o in CHANNELS


def reads(*tensors: Tensor) -> bool:
    """Whether the kernels can read the tensors: they must be on a CUDA device and aligned."""
    return all(tensor.is_cuda and tensor.data_ptr() % 16 == 0 for tensor in tensors)


def choices(height: int) -> list[int]:
    """Numbers of rows that are worth timing."""
    fewer = [rows for rows in ROWS if rows < height]
    return [*fewer, height] if height <= ROWS[-1] else fewer


def fprop(x: Tensor, signs: Tensor, y: Tensor, kind: int, rows: int) -> None:
    """``y`` = conv2d(B(x), signs). All are float16 and channels_last; ``kind`` is an index of ``cover.INPUTS``."""
    _launch(x, signs, x, x, y, kind, rows, gradient=0)


def dgrad(
    grad: Tensor,
    x: Tensor,
    signs: Tensor,
    plus: Tensor | None,
    out: Tensor,
    kind: int,
    rows: int,
) -> None:
    """``out`` = the gradient of x for the output's gradient ``grad``, plus ``plus`` if that is given."""
    if plus is None:
        _launch(grad, signs, x, x, out, kind, rows, gradient=1)
    else:
        _launch(grad, signs, x, plus, out, kind, rows, gradient=2)


def _launch(
    source: Tensor,
    signs: Tensor,
    x: Tensor,
    plus: Tensor,
    result: Tensor,
    kind: int,
    rows: int,
    gradient: int,
) -> None:
    images, k, h, w = source.shape
    n = result.shape[1]
    blocks, threads, shared_bytes = geometry(images, h, w, k, n, rows, gradient)
    with torch.cuda.device_of(source):
        kernel = nvrtc.compiled(
            HERE / "sign_conv.cu",
            "convolve",
            source.device.index,
            shared_bytes,
            H=h,
            W=w,
            K=k,
            N=n,
            KIND=kind,
            GRADIENT=gradient,
        )
        kernel(
            grid=(blocks, 1, 1),
            block=(threads, 1, 1),
            args=[source, signs, x, plus, result, images, rows],
            shared_mem=shared_bytes,
        )


def geometry(
    images: int, h: int, w: int, k: int, n: int, rows: int, gradient: int
) -> tuple[int, int, int]:
    """Blocks, threads per block, and bytes of shared memory per block, as ``sign_conv.cu`` expects them."""
    warps = 8 if k == 64 else 4
    pieces = -(-images * w // 16) * -(-h // rows)
    blocks = -(-pieces // (warps // (n // GROUP)))
    adjacent = 4 if k == 16 else 8
    if gradient:
        sign_rows, row_pieces, shift_every, shift_pieces = k, 9 * n // 8, adjacent, 2
    else:
        sign_rows, row_pieces, shift_every, shift_pieces = n, 9 * k // 8, 2, adjacent // 2
    shared = 16 * (sign_rows * row_pieces + sign_rows // shift_every * shift_pieces)
    return blocks, 32 * warps, shared


# --------------------------------------------------------------------------------------- sign gradient


@dataclass(frozen=True)
class Strips:
    """How the kernel of the sign gradient is compiled and launched: ``grid=(chunks, tiles, 1)``."""

    constants: dict[str, int]
    tiles: int
    threads: int
    shared_bytes: int
    number: int  # of strips; each chunk takes some of them


def strips(images: int, c: int, h: int, w: int, kind: int, rows: int) -> Strips:
    """The launch for strips of ``rows`` rows. Images of up to 8 columns are taken in pairs."""
    tile = min(c, TILE)
    warps_of_a_sum = STRIP_WARPS // (tile // 16) ** 2
    scratch = STRIP_WARPS * 9 * 4 * 32 * 8 if warps_of_a_sum > 1 else 0
    shared_bytes = max(_two_strips(tile, h, w, rows), scratch)
    constants = {"C": c, "H": h, "W": w, "KIND": kind, "ROWS": rows, "WARPS": STRIP_WARPS}
    constants |= {"O_TILE": tile, "C_TILE": tile, "SHARED_BYTES": shared_bytes}
    number = -(-images // (2 if w <= 8 else 1)) * -(-h // min(rows, h))
    return Strips(constants, (c // tile) ** 2, 32 * STRIP_WARPS, shared_bytes, number)


def _two_strips(tile: int, h: int, w: int, rows: int) -> int:
    """Bytes of x with its border and of g, for a strip and the next one."""
    images, columns = (2, 8) if w <= 8 else (1, -(-w // 16) * 16)
    rows = min(rows, h)
    x_rows = rows if rows == h else rows + 2
    pieces = tile // 8
    x = _plane(images * x_rows * (columns + 2), pieces)
    return 2 * pieces * (x + _plane(images * rows * columns, pieces))


def _plane(pixels: int, pieces: int) -> int:
    """Bytes of 8 channels of the pixels, padded so that a pixel's pieces fall into different banks."""
    return (pixels + (8 // pieces - pixels) % 8) * PIECE


def strip_choices(c: int, h: int, w: int) -> list[int]:
    """Numbers of rows that are worth timing: the two largest that fit."""
    tile = min(c, TILE)
    return [rows for rows in STRIP_ROWS if _two_strips(tile, h, w, rows) <= TWO_STRIPS][:2]


def wgrad(grad: Tensor, x: Tensor, partial: Tensor, kind: int, rows: int) -> None:
    """``partial`` (chunks, C, 3, 3, C) = partial sums; their sum over chunks is the gradient of the signs."""
    images, c, h, w = x.shape
    plan = strips(images, c, h, w, kind, rows)
    with torch.cuda.device_of(x):
        kernel = nvrtc.compiled(
            HERE / "sign_conv_wgrad.cu",
            "sign_conv_wgrad",
            x.device.index,
            plan.shared_bytes,
            **plan.constants,
        )
        kernel(
            grid=(partial.shape[0], plan.tiles, 1),
            block=(plan.threads, 1, 1),
            args=[grad, x, partial, images],
            shared_mem=plan.shared_bytes,
        )
