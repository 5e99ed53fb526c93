"""The blocks of the Triton kernels of the binary convolution, and how the kernels are launched.

``operator.py`` checks the tensors before a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unflip.kernels import tuning
from unflip.kernels.sign_conv.triton_kernels import dgrad_kernel, fprop_kernel, wgrad_kernel
from unflip.kernels.tuning import Tuned, cdiv, filling, make_configs, power

MOST_PARTIAL = 2**20  # floats of partial sums (4 MB)


# -------------------------------------------------------------------------------------------- blocks

# A step of the sum takes GROUP · PART values. PART is the largest power of two that divides the channels, at least 16
# and at most 64. UNROLL: straight code that loads one step ahead, through the L1 cache. Otherwise a loop with
# num_stages − 1 copies to shared memory in flight, past the L1 cache.
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
# BLOCK_P pixels per step, GROUP · PART values of (kh, kw, c) per program. AHEAD: a loop that loads one step ahead.
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


def _pixel_blocks(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Leave out blocks that cannot be fast: too few or too many programs, too many registers, too much code."""
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


PIXEL_CONFIGS = make_configs(("BLOCK_P", "GROUP", "UNROLL"), PIXEL_BLOCKS)
CHUNK_CONFIGS = make_configs(("BLOCK_P", "GROUP", "AHEAD"), CHUNK_BLOCKS)
FPROP = Tuned(fprop_kernel, PIXEL_CONFIGS, ["pixels", *SHAPE], _pixel_blocks)
DGRAD = Tuned(dgrad_kernel, PIXEL_CONFIGS, ["pixels", *SHAPE], _pixel_blocks)
WGRAD = Tuned(wgrad_kernel, CHUNK_CONFIGS, ["images", *SHAPE], _chunk_blocks)


# ----------------------------------------------------------------------------------------- launchers


def fprop(
    x: Tensor, halves: Tensor, y: Tensor, stride: int, padding: int, kind: int, networks: int
) -> None:
    o = halves.shape[0]
    pixels = y.shape[0] * y.shape[2] * y.shape[3]
    block_o = power(o, 128)
    with torch.cuda.device_of(x):
        FPROP.beside(networks)[lambda meta: (cdiv(pixels, meta["BLOCK_P"]), cdiv(o, block_o))](
            x_ptr=x,
            s_ptr=halves,
            y_ptr=y,
            pixels=pixels,
            **_geometry(x, halves.shape, stride, padding, kind),
            PART=_part(x.shape[1]),
            BLOCK_O=block_o,
        )


def dgrad(
    grad: Tensor,
    x: Tensor,
    halves: Tensor,
    plus: Tensor | None,
    out: Tensor,
    stride: int,
    padding: int,
    kind: int,
    networks: int,
) -> None:
    n, c, h, w = x.shape
    pixels = n * cdiv(h, stride) * cdiv(w, stride)
    block_c = power(c, 128)
    with torch.cuda.device_of(x):
        DGRAD.beside(networks)[
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


def wgrad(
    grad: Tensor, x: Tensor, kh: int, kw: int, stride: int, padding: int, kind: int, networks: int
) -> Tensor:
    c, o = x.shape[1], grad.shape[1]
    out = empty_partial(x, grad, kh, kw, chunks(x, size(grad), c * kh * kw, o, networks))
    block_o, part = power(o, 128), _part(c)
    with torch.cuda.device_of(x):
        WGRAD.beside(networks)[
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


def _part(channels: int) -> int:
    """The largest power of two that divides ``channels``, at most 64 and at least 16, as ``tl.dot`` requires."""
    return min(64, max(16, channels & -channels))


def chunks(x: Tensor, size: tuple[int, int], terms: int, outputs: int, networks: int) -> int:
    """The number of partial sums of the sign gradient: just enough programs to fill this network's share."""
    programs = cdiv(terms, 64) * cdiv(outputs, power(outputs, 128))
    wanted = cdiv(filling(x, tuning.PROGRAMS_PER_SM, networks), programs)
    wanted = min(wanted, MOST_PARTIAL // (terms * outputs))
    images, positions = x.shape[0], cdiv(size[0] * size[1], 64)
    splits = cdiv(positions, cdiv(positions, max(1, wanted)))  # even shares
    return splits * cdiv(images, cdiv(images, max(1, wanted // splits)))


def _geometry(
    x: Tensor, weight_shape: Sequence[int], stride: int, padding: int, kind: int
) -> dict[str, Any]:
    o, c, kh, kw = weight_shape
    h, w = x.shape[2:]
    ho, wo = output_size((h, w), (kh, kw), stride, padding)
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


def output_size(
    size: tuple[int, int], kernel: tuple[int, int], stride: int, padding: int
) -> tuple[int, int]:
    height, width = (
        (length + 2 * padding - taps) // stride + 1
        for length, taps in zip(size, kernel, strict=True)
    )
    return height, width


def size(images: Tensor) -> tuple[int, int]:
    return images.shape[2], images.shape[3]


def empty_partial(x: Tensor, grad: Tensor, kh: int, kw: int, chunks: int) -> Tensor:
    c, o = x.shape[1], grad.shape[1]
    return torch.empty((chunks, o, kh, kw, c), dtype=torch.float32, device=x.device)
