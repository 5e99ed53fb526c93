"""Image files as Pillow opens them, made upright and of 8 bits a channel: one way for training and for prediction.

Neither torch nor, until a file is read, Pillow is needed here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image


class PixelError(ValueError):
    """Pixels whose scale is not known; the message names the file and says what to do."""


def read_picture(path: str | os.PathLike[str], mode: str) -> Image:
    """The file's image in ``mode`` ("L" or "RGB"), turned as its EXIF orientation says.

    16 bits grey become 8 as the others are; Pillow would clip them, which turns most of them white.
    """
    from PIL import Image, ImageOps

    with Image.open(path) as file:
        if file.mode in ("I", "F"):
            raise PixelError(
                f"{os.fspath(path)} has 32 bits a pixel (mode {file.mode}), and what is white among them is not known; "
                "convert it to 8 or 16 bits first"
            )
        upright = ImageOps.exif_transpose(file)
    if upright.mode.startswith("I;16"):
        upright = Image.fromarray(_eight_bits(upright))
    return upright.convert(mode)


def _eight_bits(image: Image) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """65535 / 257 is 255; rounded to the nearest."""
    return ((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8)
