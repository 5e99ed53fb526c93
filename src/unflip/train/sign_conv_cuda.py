"""The kernels of ``sign_conv.cu``: which layers they cover, how they are launched, and which rows are best.

They do what the Triton kernels of ``sign_conv`` do, for the layers that networks of 16 to 64 channels mostly have.
Where they cannot be compiled, fail, or are not faster, those are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from unflip.train import nvrtc

FILE = "sign_conv.cu"
CHANNELS = (16, 32, 64)
GROUP = 16  # output channels of a warp
ROWS = (
    4,
    8,
    16,
    32,
)  # that a warp walks down: with more, it repeats less; with fewer, more warps share the work

_enabled = True


def enabled() -> bool:
    return _enabled


def switch_off(why: str) -> None:
    """Not to be used any more in this process."""
    global _enabled
    if _enabled:
        _enabled = False
        warnings.warn(f"training without our CUDA C++ kernels, because {why}", stacklevel=2)


def covers(weight_shape: Sequence[int], stride: int, padding: int) -> bool:
    o, c, *taps = weight_shape
    return taps == [3, 3] and (stride, padding) == (1, 1) and c in CHANNELS and o in CHANNELS


def reads(*tensors: Tensor) -> bool:
    """Whether tensors are where the kernels can read them: on a device, and aligned."""
    return all(tensor.is_cuda and tensor.data_ptr() % 16 == 0 for tensor in tensors)


def choices(height: int) -> list[int]:
    """Numbers of rows that are worth a try."""
    fewer = [rows for rows in ROWS if rows < height]
    return [*fewer, height] if height <= ROWS[-1] else fewer


def fprop(x: Tensor, signs: Tensor, y: Tensor, kind: int, rows: int) -> None:
    """``y`` = conv2d(B(x), signs). All are float16 and channels_last; ``kind`` is an index of ``sign_conv.INPUTS``."""
    _launch(x, signs, x, y, kind, rows, gradient=0)


def dgrad(grad: Tensor, x: Tensor, signs: Tensor, out: Tensor, kind: int, rows: int) -> None:
    """``out`` = the gradient of x, for ``grad`` of the output."""
    _launch(grad, signs, x, out, kind, rows, gradient=1)


def _launch(
    source: Tensor, signs: Tensor, x: Tensor, result: Tensor, kind: int, rows: int, gradient: int
) -> None:
    images, k, h, w = source.shape
    n = result.shape[1]
    blocks, threads, shared_bytes = geometry(images, h, w, k, n, rows, gradient)
    with torch.cuda.device_of(source):
        kernel = nvrtc.compiled(
            FILE,
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
            args=[source, signs, x, result, images, rows],
            shared_mem=shared_bytes,
        )


def geometry(
    images: int, h: int, w: int, k: int, n: int, rows: int, gradient: int
) -> tuple[int, int, int]:
    """Blocks, threads of a block and its bytes of shared memory: as in the file."""
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
