"""Encoded images as upright pictures with 8 bits per channel. Packing, training and prediction all decode here.

Needs Pillow, which is imported when the first image is decoded; does not need torch. If simplejpeg is installed,
it decodes ordinary JPEG files for training: faster than Pillow, with the same values.
"""

from __future__ import annotations

import io
import os
import warnings
from functools import cache
from types import ModuleType
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image, Transpose
    from PIL.ImageFile import ImageFile

ORIENTATION = 0x0112  # the EXIF tag
# Pillow knows many more, and starts Ghostscript for one of them. JPEG includes the MPO of some cameras.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
# A JPEG file begins with the marker of a JFIF header, 16 bytes long, and ends with the last marker.
JFIF, LAST = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00", b"\xff\xd9"
JFIF_LENGTH = 20
TABLES = (
    b"\xff\xdb",
    b"\xff\xc4",
    b"\xff\xdd",
    b"\xff\xfe",
)  # two kinds, restart interval, comment
FRAMES = (b"\xff\xc0", b"\xff\xc2")  # baseline, progressive
SCAN = b"\xff\xda"
MOST_RATIO = 100  # long side to short side; resizing the short side of 1 × 30,000 pixels to 256 would take 6 GB


class PixelError(ValueError):
    """An image whose pixels cannot be used; the message names it and says what to do."""


def read_picture(path: str | os.PathLike[str], mode: str) -> Image:
    """The file's image in ``mode`` ("L" or "RGB"), rotated according to its EXIF orientation.

    16-bit gray is scaled to 8 bits. Pillow would clip it instead, which turns most pixels white.
    """
    name = os.fspath(path)
    if os.path.isdir(path):
        raise IsADirectoryError(f"{name} is a folder; give the images in it")
    if not os.path.exists(path):
        raise FileNotFoundError(f"the image {name} does not exist")
    if not os.path.isfile(path):
        raise OSError(f"{name} is not an ordinary file")
    with open(path, "rb") as file:
        return _decoded(file, mode, name, name)


def _decoded(file: IO[bytes], mode: str, name: str, shown: str) -> Image:
    """Whatever is wrong with the image becomes a PixelError. ``shown`` is its name if its format is not known."""
    from PIL import Image, UnidentifiedImageError

    try:
        with _open(file) as image:
            return _upright(image, mode, name)
    except (PixelError, MemoryError):  # a lack of memory is not the image's fault
        raise
    except UnidentifiedImageError as error:
        raise PixelError(
            f"{shown} is not an image of a known format ({', '.join(FORMATS)}); repair, convert or remove it"
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PixelError(f"{name} has too many pixels: {error}; make it smaller") from error
    except Exception as error:  # a damaged file can raise nearly anything from a decoder
        raise PixelError(
            f"{name} cannot be decoded as an image: {error}; repair or remove it"
        ) from error


def _open(source: IO[bytes]) -> ImageFile:
    """Too many pixels are an error: Pillow only warns up to twice its limit."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(source, formats=FORMATS)


def decode_rgb(data: bytes, name: str) -> Image:
    """Encoded bytes as an RGB picture, with the rules of :func:`read_picture`. Errors name the image ``name``.

    The bytes tell the format, not the name: a PNG file called .JPEG is decoded too.
    """
    return _decoded(io.BytesIO(data), "RGB", name, f"{name} ({len(data):,} bytes)")


def decode_pixels(data: bytes, name: str) -> npt.NDArray[np.uint8]:
    """:func:`decode_rgb` as an array H,W,3, which may be read-only."""
    if (simplejpeg := _simplejpeg()) is not None and _is_ordinary_jpeg(data):
        try:
            return simplejpeg.decode_jpeg(data, "RGB")
        except Exception:  # Pillow decides whether the file is damaged, and says so
            pass
    return np.asarray(decode_rgb(data, name))


def has_fast_jpeg() -> bool:
    """Whether simplejpeg is installed and gives the values of the installed version of Pillow."""
    return _simplejpeg() is not None


@cache
def _simplejpeg() -> ModuleType | None:
    """Only if it gives the same values as Pillow, which may have been built with another JPEG library."""
    try:
        import simplejpeg
        from PIL import Image

        noise = np.random.default_rng(0).integers(0, 256, (37, 43, 3), dtype=np.uint8)
        for options in ({"quality": 90}, {"quality": 60, "subsampling": 0, "progressive": True}):
            file = io.BytesIO()
            Image.fromarray(noise).save(file, "JPEG", **options)
            with Image.open(file) as image:
                expected = np.asarray(image)
            if not np.array_equal(simplejpeg.decode_jpeg(file.getvalue(), "RGB"), expected):
                return None
    except Exception:  # not installed, or it does not fit this version of numpy
        return None
    return simplejpeg


def _is_ordinary_jpeg(data: bytes) -> bool:
    """Whether a JPEG file is gray or YCbCr with 8 bits, of a size that is allowed, and its header has nothing else.

    EXIF data can turn an image, Adobe's marker changes the meaning of colors, and some files have several images.
    All these, and damaged headers, are left to Pillow.
    """
    if not (data.startswith(JFIF) and data.endswith(LAST)):
        return False
    position, frames = JFIF_LENGTH, 0
    while True:
        marker = data[position : position + 2]
        if marker == SCAN:
            return frames == 1
        length = int.from_bytes(data[position + 2 : position + 4], "big")
        if marker in FRAMES:
            frames += 1
            if not _is_ordinary_frame(data[position + 4 : position + 2 + length]):
                return False
        elif marker not in TABLES:
            return False
        if length < 2:
            return False
        position += 2 + length


def _is_ordinary_frame(frame: bytes) -> bool:
    """8 bits per value, one or three components, and not too many pixels."""
    from PIL import Image

    if len(frame) < 6 or frame[0] != 8 or frame[5] not in (1, 3) or len(frame) != 6 + 3 * frame[5]:
        return False
    height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
    if not 0 < max(width, height) <= MOST_RATIO * min(width, height):
        return False
    return Image.MAX_IMAGE_PIXELS is None or width * height <= Image.MAX_IMAGE_PIXELS


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
    if picture.mode != mode:  # otherwise this would be a copy
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
