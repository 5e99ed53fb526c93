"""Image files as upright pictures with 8 bits per channel. Training and prediction both read files here.

Needs Pillow, which is imported when the first file is read; does not need torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image


class PixelError(ValueError):
    """Pixels of unknown scale; the message names the file and says what to do."""


def read_picture(path: str | os.PathLike[str], mode: str) -> Image:
    """The file's image in ``mode`` ("L" or "RGB"), rotated according to its EXIF orientation.

    16-bit gray is scaled to 8 bits. Pillow would clip it instead, which turns most pixels white.
    """
    from PIL import Image, ImageOps

    with Image.open(path) as file:
        if file.mode in ("I", "F"):
            raise PixelError(
                f"{os.fspath(path)} has 32 bits per pixel (mode {file.mode}), of which the value of white is unknown; "
                "convert it to 8 or 16 bits"
            )
        upright = ImageOps.exif_transpose(file)
    if upright.mode.startswith("I;16"):
        upright = Image.fromarray(_eight_bits(upright))
    return upright.convert(mode)


def _eight_bits(image: Image) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Divided by 257, since 65535 / 257 is 255, and rounded to the nearest."""
    return ((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8)
