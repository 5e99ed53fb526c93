"""Encoded images as upright pictures with 8 bits per channel. Packing, training and prediction all decode here.

Needs Pillow, which is imported when the first image is decoded; does not need torch.
"""

from __future__ import annotations

import io
import os
import warnings
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image, Transpose

ORIENTATION = 0x0112  # the EXIF tag
# Pillow knows many more, and starts Ghostscript for one of them. JPEG includes the MPO of some cameras.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
MOST_RATIO = 100  # long side to short side; resizing the short side of 1 × 30,000 pixels to 256 would take 6 GB


class PixelError(ValueError):
    """An image whose pixels cannot be used; the message names it and says what to do."""


def read_picture(path: str | os.PathLike[str], mode: str) -> Image:
    """The file's image in ``mode`` ("L" or "RGB"), rotated according to its EXIF orientation.

    16-bit gray is scaled to 8 bits. Pillow would clip it instead, which turns most pixels white.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        file = Image.open(path, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise _unknown(os.fspath(path)) from error
    with file:
        return _upright(file, mode, os.fspath(path))


def decode_rgb(data: bytes, name: str) -> Image:
    """Encoded bytes as an RGB picture, with the rules of :func:`read_picture`. Errors name the image ``name``.

    The bytes tell the format, not the name: a PNG file called .JPEG is decoded too.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            # Pillow only warns up to twice its limit.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            file = Image.open(io.BytesIO(data), formats=FORMATS)
        with file:
            return _upright(file, "RGB", name)
    except (PixelError, MemoryError):  # a lack of memory is not the image's fault
        raise
    except UnidentifiedImageError as error:
        raise _unknown(f"{name} ({len(data):,} bytes)") from error
    except Exception as error:  # a damaged file can raise nearly anything from a decoder
        raise PixelError(
            f"{name} cannot be decoded as an image: {error}; repair or remove it"
        ) from error


def _unknown(name: str) -> PixelError:
    return PixelError(
        f"{name} is not an image of a known format ({', '.join(FORMATS)}); repair, convert or remove it"
    )


def _upright(file: Image, mode: str, name: str) -> Image:
    if file.mode in ("I", "F"):
        raise PixelError(
            f"{name} has 32 bits per pixel (mode {file.mode}), of which the value of white is unknown; "
            "convert it to 8 or 16 bits"
        )
    if max(file.size) > MOST_RATIO * min(file.size):
        raise PixelError(
            f"{name} has {file.width} × {file.height} pixels: its long side is more than {MOST_RATIO} times its short "
            "side; crop or remove it"
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
