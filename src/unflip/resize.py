"""A part of an RGB image, resized with Pillow's antialiased bilinear filter and mirrored, in one call.

A small native library (``native/pixels``) computes it, several times as fast as Pillow and with the same bytes. Where
it is missing, as in a checkout without a build, Pillow does the work. Torch is not needed.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]  # left, top, right, bottom; the last two are not included
Way = Callable[[Pixels, Box, tuple[int, int], Box, bool, Pixels], None]
Rule = Callable[[Box, tuple[int, int]], bool]

NAMES = {"darwin": "libunflip_pixels.dylib", "win32": "unflip_pixels.dll"}
LIBRARY = NAMES.get(sys.platform, "libunflip_pixels.so")
LONGEST = 2**24  # of a side, in pixels
BEST, PLAIN, AVX2 = 0, 1, 2  # instruction sets
NO_MEMORY = 2


def resized(
    pixels: Pixels,
    box: Box,
    size: tuple[int, int],
    window: Box | None = None,
    flip: bool = False,
    out: Pixels | None = None,
    way: Way | None = None,
) -> Pixels:
    """The ``box`` of the image H,W,3, resized to ``size`` (width, height). Pixels outside of the box have no influence.

    Only the ``window`` of the result is returned, by default all of it; ``flip`` mirrors it, left to right. ``out``
    receives the result if it is given. ``way`` is :func:`by_library` or :func:`by_pillow`; both give the same bytes.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"pixels are {pixels.dtype} of shape {pixels.shape}; they must be uint8 of shape H,W,3"
        )
    if min(size) < 1 or max(*size, *pixels.shape) > LONGEST:
        raise ValueError(
            f"{pixels.shape[1]} × {pixels.shape[0]} pixels cannot be resized to {size[0]} × {size[1]}; "
            f"sides must be from 1 to {LONGEST:,} pixels"
        )
    window = window or (0, 0, *size)
    _check_inside("box", box, pixels.shape[1], pixels.shape[0])
    _check_inside("window", window, *size)
    shape = (window[3] - window[1], window[2] - window[0], 3)
    if out is None:
        out = np.empty(shape, np.uint8)
    elif out.dtype != np.uint8 or out.shape != shape or not out.flags.writeable:
        raise ValueError(
            f"out is {out.dtype} of shape {out.shape}; it must be writable uint8 of shape {shape}"
        )
    way = way or (by_library if has_library() else by_pillow)
    way(pixels, box, size, window, flip, out)
    return out


def by_library(
    pixels: Pixels,
    box: Box,
    size: tuple[int, int],
    window: Box,
    flip: bool,
    out: Pixels,
    instructions: int = BEST,
) -> None:
    """A way of :func:`resized`, which checks the arguments. Tests select instruction sets."""
    library, rule = _library(), _rule()
    if library is None or rule is None:
        raise ImportError(
            f"{LIBRARY} is missing or does not fit Pillow. Install unflip again: 'pip install .'"
        )
    _call(library, rule(box, size), pixels, box, size, window, flip, out, instructions)


def _call(
    library: ctypes.CDLL,
    rows_first: bool,
    pixels: Pixels,
    box: Box,
    size: tuple[int, int],
    window: Box,
    flip: bool,
    out: Pixels,
    instructions: int,
) -> None:
    source = pixels if _has_whole_pixels(pixels) else np.ascontiguousarray(pixels)
    into = out if _has_whole_pixels(out) else np.empty(out.shape, np.uint8)
    height, width, _ = pixels.shape
    left, top, right, bottom = window
    status = library.unflip_resize_rgb(
        *(source.ctypes.data, source.strides[0], width, height, *box, *size),
        *(left, top, right - left, bottom - top, flip, rows_first, instructions),
        *(into.ctypes.data, into.strides[0]),
    )
    if status == NO_MEMORY:
        raise MemoryError
    if status:
        raise ValueError(
            f"{LIBRARY} refused to resize {box} to {size} with instruction set {instructions}"
        )
    if into is not out:
        out[...] = into


def by_pillow(
    pixels: Pixels, box: Box, size: tuple[int, int], window: Box, flip: bool, out: Pixels
) -> None:
    """A way of :func:`resized`, which checks the arguments."""
    from PIL import Image

    left, top, right, bottom = box
    image = Image.fromarray(pixels[top:bottom, left:right])
    left, top, right, bottom = window
    found = np.asarray(image.resize(size, Image.Resampling.BILINEAR))[top:bottom, left:right]
    out[...] = found[:, ::-1] if flip else found


def has_library() -> bool:
    """Whether the library exists and gives the bytes of the installed version of Pillow."""
    return _rule() is not None


def always_columns_first(box: Box, size: tuple[int, int]) -> bool:
    """Until Pillow 12."""
    return False


def rows_first_if_they_shrink_more(box: Box, size: tuple[int, int]) -> bool:
    """Since Pillow 13: the height loses more than twice as many pixels as the width."""
    left, top, right, bottom = box
    lost = bottom - top - size[1]
    return lost > 0 and lost > 2 * (right - left - size[0])


RULES: tuple[Rule, ...] = (rows_first_if_they_shrink_more, always_columns_first)
# Width, height, and the size to which they are resized: on both sides of the rule of Pillow 13.
PROBES = ((17, 59, 35, 46), (30, 44, 24, 32), (30, 45, 24, 32), (23, 19, 31, 28), (40, 31, 29, 30))


@cache
def _rule() -> Rule | None:
    """When Pillow resizes rows before columns: the rule with which the library gives the same bytes as Pillow."""
    library = _library()
    if library is None:
        return None
    for rule in RULES:
        if all(_agree(library, rule, probe) for probe in PROBES):
            return rule
    return None


def _agree(library: ctypes.CDLL, rule: Rule, probe: tuple[int, int, int, int]) -> bool:
    width, height, *size = probe
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    box, window = (0, 0, width, height), (0, 0, size[0], size[1])
    found, right = np.empty((2, size[1], size[0], 3), np.uint8)
    by_pillow(pixels, box, window[2:], window, False, right)
    _call(library, rule(box, window[2:]), pixels, box, window[2:], window, False, found, BEST)
    return bool(np.array_equal(found, right))


@cache
def _library() -> ctypes.CDLL | None:
    """In an editable install, the package has two folders: the sources, and the one with built files."""
    for folder in sys.modules[__package__].__path__:
        path = Path(folder, LIBRARY)
        if path.exists():
            break
    else:
        return None
    try:
        library = ctypes.CDLL(str(path))
        function = library.unflip_resize_rgb
    except (OSError, AttributeError):  # of another system, or damaged
        return None
    row, side = ctypes.c_int64, ctypes.c_int32
    function.argtypes = [ctypes.c_void_p, row, *[side] * 15, ctypes.c_void_p, row]
    function.restype = ctypes.c_int
    return library


def _check_inside(name: str, box: Box, width: int, height: int) -> None:
    left, top, right, bottom = box
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise ValueError(f"the {name} {box} is empty or not inside of {width} × {height} pixels")


def _has_whole_pixels(pixels: Pixels) -> bool:
    """Whether rows are in order and without gaps between pixels; there may be gaps between rows."""
    return pixels.strides[1:] == (3, 1) and pixels.strides[0] >= 3 * pixels.shape[1]
