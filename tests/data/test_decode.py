"""Encoded bytes become upright RGB pictures, with the same pixels as from a file."""

from __future__ import annotations

import io
import os
import random
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from unflip import pictures
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
    """Old versions of Pillow open 16-bit PNG files so."""
    deep = Image.fromarray(np.full((4, 4), 5000, dtype=np.int32))
    with pytest.raises(PixelError, match=r"x/a\.JPEG has 32 bits per pixel"):
        pictures._upright(deep, "RGB", "x/a.JPEG")


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "PPM", "EPS"])
def test_other_formats_are_refused_by_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow starts Ghostscript for EPS, which runs a program that the file brings."""
    monkeypatch.setattr("subprocess.check_call", lambda *words, **more: pytest.fail(str(words)))
    with pytest.raises(PixelError, match=r"x/a\.JPEG .*is not an image of a known format"):
        decode_rgb(saved(converted("RGB"), kind), "x/a.JPEG")


def test_the_first_image_of_a_cameras_mpo_is_decoded() -> None:
    image = Image.new("RGB", (16, 16), (200, 30, 60))
    data = saved(image, "MPO", save_all=True, append_images=[Image.new("RGB", (16, 16))])
    picture = np.asarray(decode_rgb(data, "a"), dtype=int)
    assert np.abs(picture - (200, 30, 60)).max() <= 6


@pytest.mark.parametrize("size", [(30_000, 1), (1, 101)])
def test_a_narrow_strip_is_refused_by_name(size: tuple[int, int], tmp_path: Path) -> None:
    """With the short side resized to 256, this would be 7,680,000 × 256 pixels."""
    strip = Image.new("RGB", size)
    with pytest.raises(
        PixelError, match=r"x/a\.JPEG has .* pixels: its long side is more than 100"
    ):
        decode_rgb(saved(strip, "PNG"), "x/a.JPEG")
    strip.save(tmp_path / "a.png")
    with pytest.raises(PixelError, match="crop or remove it"):
        read_picture(tmp_path / "a.png", "L")
    decode_rgb(saved(strip.resize((100, 1)), "PNG"), "x/a.JPEG")


def test_a_lack_of_memory_is_not_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*_: object) -> Image.Image:
        raise MemoryError

    data = saved(converted("L"), "JPEG")
    monkeypatch.setattr(Image.Image, "convert", convert)
    with pytest.raises(MemoryError):
        decode_rgb(data, "a")


@pytest.mark.parametrize("side", [10_000, 60_000])  # Pillow warns about the first
def test_a_decompression_bomb_is_refused_by_name(side: int) -> None:
    """A PNG of a few bytes that claims many pixels."""

    def block(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", zlib.compress(b""))
    with pytest.raises(PixelError, match=r"bomb\.png has too many pixels.*exceeds limit.*smaller"):
        decode_rgb(data, "bomb.png")


def test_damaged_images_are_named_whatever_the_decoder_raises(tmp_path: Path) -> None:
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
                data, length = bytearray(whole), generator.choice((None, 30, 200))
                for _ in range(generator.randint(1, 4)):
                    data[generator.randrange(len(data))] = generator.randrange(256)
                (tmp_path / "a.jpg").write_bytes(data[:length])
                for read in (
                    lambda data=data[:length]: decode_rgb(bytes(data), "x/a.jpg"),
                    lambda: read_picture(tmp_path / "a.jpg", "RGB"),
                ):
                    try:
                        read()
                    except PixelError as error:
                        refused.append(str(error))
    assert len(refused) > 400
    assert all("/a.jpg" in message for message in refused)
    with pytest.raises(PixelError, match=r"x/a\.jpg \(0 bytes\) is not an image of a known format"):
        decode_rgb(b"", "x/a.jpg")


def test_files_that_are_too_large_or_endless(tmp_path: Path) -> None:
    """Pillow's error is not one that commands foresee, and a pipe would be waited for."""
    chunks = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0), b"IDAT" + bytes(9)
    path = tmp_path / "bomb.png"
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for chunk in chunks:
            length, check = len(chunk) - 4, zlib.crc32(chunk)
            file.write(struct.pack(">I", length) + chunk + struct.pack(">I", check))
    with pytest.raises(PixelError, match=r"bomb\.png has too many pixels"):
        read_picture(path, "RGB")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(OSError, match="not an ordinary file"):
        read_picture(tmp_path / "pipe.png", "RGB")
