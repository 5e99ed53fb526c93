"""JPEG files decoded by simplejpeg: the values of Pillow, and only files about which there is no doubt."""

from __future__ import annotations

import io
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from unflip import pictures
from unflip.pictures import PixelError, decode_pixels, decode_rgb

NEEDED = pytest.mark.skipif(
    not pictures.has_fast_jpeg(), reason="needs simplejpeg: pip install 'unflip[images]'"
)
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def image_of(random: random.Random, width: int, height: int) -> Image.Image:
    """Noise, or smooth colors."""
    numbers = np.random.default_rng(random.randrange(2**32))
    if random.random() < 0.5:
        return Image.fromarray(numbers.integers(0, 256, (height, width, 3), dtype=np.uint8))
    small = Image.fromarray(numbers.integers(0, 256, (3, 4, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageFile, "MAXBLOCK", 2**20)  # too small for some progressive files
        image.save(file, "JPEG", **options)
    return file.getvalue()


def some_jpeg(random: random.Random) -> bytes:
    image = image_of(random, random.randint(1, 70), random.randint(1, 70))
    options = {
        "quality": random.randint(1, 100),
        "progressive": random.random() < 0.4,
        "optimize": random.random() < 0.3,
        "comment": random.choice([None, b"text"]),
        "restart_marker_blocks": random.choice([0, 0, 1, 5]),
    }
    if random.random() < 0.2:
        return saved(image.convert("L"), **options)
    return saved(image, subsampling=random.choice([0, 1, 2]), **options)


def fast(data: bytes) -> Pixels | None:
    """What simplejpeg makes of a file; None if it is left to Pillow."""
    if not pictures._is_ordinary_jpeg(data):
        return None
    try:
        return pictures._simplejpeg().decode_jpeg(data, "RGB")  # type: ignore[union-attr]
    except ValueError:
        return None


def pillows(data: bytes) -> Pixels | None:
    try:
        return np.asarray(decode_rgb(data, "a"))
    except PixelError:
        return None


@pytest.fixture
def no_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_simplejpeg", lambda: None)


@NEEDED
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "gray"])
def test_values_are_pillows(subsampling: str, progressive: bool) -> None:
    numbers = random.Random(0)
    for width, height in [(1, 1), (8, 8), (17, 33), (250, 3), (341, 256), (255, 301)]:
        for quality in (5, 50, 75, 90, 100):
            image = image_of(numbers, width, height)
            options: dict[str, Any] = {"quality": quality, "progressive": progressive}
            if subsampling == "gray":
                image = image.convert("L")
            else:
                options["subsampling"] = subsampling
            data = saved(image, **options)
            found = fast(data)
            assert found is not None
            assert np.array_equal(found, Image.open(io.BytesIO(data)).convert("RGB"))
            assert np.array_equal(found, decode_pixels(data, "a"))


def damaged(random: random.Random, whole: bytes) -> Iterator[bytes]:
    """Cut off, with parts removed or added, and with other bytes, in the header as often as after it."""
    for _ in range(6):
        place = random.randrange(len(whole))
        yield whole[:place]
        yield whole[:place] + b"\xff\xd9"
        yield whole[:place] + whole[place + random.randint(1, 40) :]
        yield whole[:place] + random.randbytes(random.randint(1, 20)) + whole[place:]
        for end in (len(whole), min(len(whole), 700)):
            data = bytearray(whole)
            for _ in range(random.randint(1, 3)):
                data[random.randrange(end)] = random.choice([random.randrange(256), 0, 255])
            yield bytes(data)


@NEEDED
@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_give_the_values_of_pillow_or_are_left_to_it(seed: int) -> None:
    """Changes inside of the coded pixels are often not noticed by either."""
    numbers = random.Random(seed)
    counts = {"fast": 0, "refused": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(40):
            for data in damaged(numbers, some_jpeg(numbers)):
                right, found = pillows(data), fast(data)
                counts["refused"] += right is None
                if found is not None:
                    counts["fast"] += 1
                    assert right is not None, "Pillow refuses this file"
                    assert np.array_equal(found, right)
    assert min(counts.values()) > 50, counts


@NEEDED
def test_every_truncation_is_refused_in_pillows_words() -> None:
    whole = saved(image_of(random.Random(0), 40, 30), quality=80)
    for length in range(len(whole) - 2):  # Pillow does not miss the last marker
        with pytest.raises(PixelError) as refused:
            decode_pixels(whole[:length], "x/a.jpg")
        with pytest.raises(PixelError) as expected:
            decode_rgb(whole[:length], "x/a.jpg")
        assert str(refused.value) == str(expected.value)


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[274] = orientation
    return found


@pytest.mark.parametrize(
    "data",
    [
        saved(image_of(random.Random(0), 20, 10), exif=exif(6)),
        saved(image_of(random.Random(0), 20, 10), xmp=b'<x tiff:Orientation="6"/>'),
        saved(image_of(random.Random(0), 20, 10).convert("CMYK")),
        saved(image_of(random.Random(0), 20, 10), keep_rgb=True),
        saved(image_of(random.Random(0), 20, 10), icc_profile=b"profile"),
        saved(image_of(random.Random(0), 20, 10)) + b"more",
        b"",
        b"\xff\xd8\xff\xd9",
    ],
    ids=["exif", "xmp", "cmyk", "rgb", "icc", "more bytes", "empty", "no image"],
)
def test_special_files_are_left_to_pillow(data: bytes) -> None:
    assert not pictures._is_ordinary_jpeg(data)
    if data.startswith(pictures.JFIF[:2]) and len(data) > 4:
        assert np.array_equal(decode_pixels(data, "a"), decode_rgb(data, "a"))


def test_other_formats_and_several_images_are_left_to_pillow() -> None:
    image = image_of(random.Random(0), 20, 10)
    for kind, options in (("PNG", {}), ("MPO", {"save_all": True, "append_images": [image]})):
        file = io.BytesIO()
        image.save(file, kind, **options)
        assert not pictures._is_ordinary_jpeg(file.getvalue())
        assert np.array_equal(decode_pixels(file.getvalue(), "a"), decode_rgb(file.getvalue(), "a"))


def with_size(data: bytes, width: int, height: int) -> bytes:
    """Another size in the header of a baseline file."""
    place = data.index(b"\xff\xc0\x00\x11\x08") + 5
    return data[:place] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + data[place + 4 :]


def test_limits_of_size_are_pillows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = saved(image_of(random.Random(0), 20, 10))
    assert pictures._is_ordinary_jpeg(whole)
    for size in ((0, 10), (20, 0), (101, 1), (1, 101), (60_000, 60_000), (12_000, 10_000)):
        assert not pictures._is_ordinary_jpeg(with_size(whole, *size))
    with pytest.raises(PixelError, match=r"bomb\.jpg has too many pixels.*exceeds limit"):
        decode_pixels(with_size(whole, 12_000, 10_000), "bomb.jpg")
    with pytest.raises(PixelError, match="more than 100 times"):
        decode_pixels(with_size(whole, 1010, 10), "a")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert pictures._is_ordinary_jpeg(with_size(whole, 12_000, 10_000))


@pytest.mark.usefixtures("no_fast_path")
def test_pillow_decodes_where_simplejpeg_is_not_installed() -> None:
    data = saved(image_of(random.Random(0), 20, 10))
    assert np.array_equal(decode_pixels(data, "a"), decode_rgb(data, "a"))


class OtherValues:
    """A decoder whose values differ from Pillow's, as those of another JPEG library do."""

    @staticmethod
    def decode_jpeg(data: bytes, colorspace: str) -> Pixels:
        return np.asarray(Image.open(io.BytesIO(data)).convert(colorspace)) ^ np.uint8(1)


@pytest.mark.parametrize("module", [None, OtherValues])
def test_a_decoder_that_differs_from_pillow_is_not_used(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", module)  # None: importing it fails
    pictures._simplejpeg.cache_clear()
    try:
        assert pictures._simplejpeg() is None
    finally:
        pictures._simplejpeg.cache_clear()
