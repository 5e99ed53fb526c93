"""Encoded images as upright pictures with 8 bits per channel. Packing, training and prediction all decode here.

Needs Pillow, which is imported when the first image is decoded; does not need torch.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image, Transpose

ORIENTATION = 0x0112  # the EXIF tag


class PixelError(ValueError):
    """An image whose pixels cannot be used; the message names it and says what to do."""


def read_picture(path: str | os.PathLike[str], mode: str) -> Image:
    """The file's image in ``mode`` ("L" or "RGB"), rotated according to its EXIF orientation.

    16-bit gray is scaled to 8 bits. Pillow would clip it instead, which turns most pixels white.
    """
    from PIL import Image

    with Image.open(path) as file:
        return _upright(file, mode, os.fspath(path))


def decode_rgb(data: bytes, name: str) -> Image:
    """Encoded bytes as an RGB picture, with the rules of :func:`read_picture`. Errors name the image ``name``.

    The bytes tell the format, not the name: a PNG file called .JPEG is decoded too.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as file:
            return _upright(file, "RGB", name)
    except PixelError:
        raise
    except UnidentifiedImageError as error:
        raise PixelError(
            f"{name} is not an image of a known format ({len(data):,} bytes); repair or remove it"
        ) from error
    except Exception as error:  # a damaged file can raise nearly anything from a decoder
        raise PixelError(
            f"{name} cannot be decoded as an image: {error}; repair or remove it"
        ) from error


def _upright(file: Image, mode: str, name: str) -> Image:
    if file.mode in ("I", "F"):
        raise PixelError(
            f"{name} has 32 bits per pixel (mode {file.mode}), of which the value of white is unknown; "
            "convert it to 8 or 16 bits"
        )
    file.load()
    # Not ImageOps.exif_transpose: it copies upright images too, and fails where it cannot rewrite the other EXIF tags.
    orientation = file.getexif().get(ORIENTATION)
    file.info.pop("transparency", None)  # dropped by the conversion; Pillow would warn about it
    picture = _eight_bits(file) if file.mode.startswith("I;16") else file
    picture = picture.convert(mode)
    turns = _turns()
    return picture.transpose(turns[orientation]) if orientation in turns else picture


def _turns() -> dict[int, Transpose]:
    """What makes an image upright, by EXIF orientation; 1 is upright."""
    from PIL.Image import Transpose

    return {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }


def _eight_bits(image: Image) -> Image:
    """Divided by 257, since 65535 / 257 is 255, and rounded to the nearest."""
    from PIL import Image as images

    levels = (np.asarray(image).astype(np.uint32) + 128) // 257
    return images.fromarray(levels.astype(np.uint8))
