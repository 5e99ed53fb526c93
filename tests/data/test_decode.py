"""Encoded bytes become upright RGB pictures, with the same pixels as from a file."""

from __future__ import annotations

import io
import random
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from unflip.pictures import PixelError, decode_rgb, read_picture

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 17, 3), dtype=np.uint8)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def converted(mode: str) -> Image.Image:
    return Image.fromarray(PIXELS).convert(mode)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("RGB", "JPEG"),
        ("CMYK", "JPEG"),  # Pillow writes these inverted, with Adobe's marker
        ("L", "JPEG"),
        ("RGB", "PNG"),
        ("RGBA", "PNG"),
        ("LA", "PNG"),
        ("P", "PNG"),
        ("1", "PNG"),
        ("RGB", "WEBP"),
        ("RGB", "BMP"),
    ],
)
def test_every_mode_becomes_rgb_as_pillow_converts_it(tmp_path: Path, mode: str, kind: str) -> None:
    data = saved(converted(mode), kind)
    picture = decode_rgb(data, "a.JPEG")
    assert picture.mode == "RGB"
    assert np.array_equal(picture, Image.open(io.BytesIO(data)).convert("RGB"))
    path = tmp_path / "a.JPEG"  # whatever the format
    path.write_bytes(data)
    assert np.array_equal(picture, read_picture(path, "RGB"))


def test_cmyk_keeps_its_colors() -> None:
    """An inverted one would be far away."""
    flat = Image.new("RGB", (16, 16), (200, 30, 60)).convert("CMYK")
    picture = np.asarray(decode_rgb(saved(flat, "JPEG", quality=95), "a"), dtype=int)
    assert np.abs(picture - (200, 30, 60)).max() <= 6


def test_sixteen_bits_are_scaled() -> None:
    gray = PIXELS[..., 0]
    data = saved(Image.fromarray(gray.astype(np.uint16) * 257), "PNG")
    assert np.array_equal(np.asarray(decode_rgb(data, "a"))[..., 1], gray)


@pytest.mark.parametrize("transparency", [3, bytes([0, 128, 255])])
def test_a_palette_with_transparency_keeps_its_colors_without_a_warning(transparency) -> None:
    image = converted("P")
    data = saved(image, "PNG", transparency=transparency)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = decode_rgb(data, "a")
    assert np.array_equal(picture, image.convert("RGB"))


@pytest.mark.parametrize("orientation", [0, *range(1, 9), 9])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    data = saved(converted("RGB"), kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(decode_rgb(data, "a"), expected)


def test_thirty_two_bits_are_refused_by_name() -> None:
    data = saved(Image.fromarray(np.full((4, 4), 5000, dtype=np.int32)), "TIFF")
    with pytest.raises(PixelError, match=r"x/a\.JPEG has 32 bits per pixel"):
        decode_rgb(data, "x/a.JPEG")


def test_a_decompression_bomb_is_refused_by_name() -> None:
    """A PNG of a few bytes that claims 60,000 × 60,000 pixels."""

    def block(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", zlib.compress(b""))
    with pytest.raises(PixelError, match=r"bomb\.png cannot be decoded.*exceeds limit.*remove it"):
        decode_rgb(data, "bomb.png")


def test_damaged_images_are_named_whatever_the_decoder_raises() -> None:
    """Some changes are not noticed by the format; all others raise one kind of error."""
    generator = random.Random(0)
    exif = Image.Exif()
    exif[274], exif[270] = 6, "text"
    refused = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in ("JPEG", "PNG", "WEBP"):
            whole = saved(converted("RGB"), kind, exif=exif)
            for _ in range(150):
                data = bytearray(whole)
                for _ in range(generator.randint(1, 4)):
                    data[generator.randrange(len(data))] = generator.randrange(256)
                try:
                    decode_rgb(bytes(data[: generator.choice((None, 30, 200))]), "x/a.jpg")
                except PixelError as error:
                    refused.append(str(error))
    assert len(refused) > 200
    assert all("x/a.jpg" in message for message in refused)
    with pytest.raises(PixelError, match=r"x/a\.jpg is not an image of a known format \(0 bytes\)"):
        decode_rgb(b"", "x/a.jpg")
