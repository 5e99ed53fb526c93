"""Resizing gives Pillow's bytes for every size, box, window and instruction set, and refuses what makes no sense."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from PIL import Image

from unflip import resize
from unflip.resize import AVX2, BEST, PLAIN, Box, Pixels, Way, by_library, by_pillow, resized

LIBRARY = pytest.mark.skipif(not resize.has_library(), reason="needs the native library")
SMALL = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)


def instruction_sets() -> list[int]:
    """Those of this CPU."""
    if not resize.has_library():
        return []
    found = []
    for number in (BEST, PLAIN, AVX2):
        try:
            resized(SMALL, (0, 0, 50, 40), (9, 9), way=partial(by_library, instructions=number))
        except ValueError:
            continue
        found.append(number)
    return found


def ways() -> list[Way]:
    sets = [partial(by_library, instructions=number) for number in instruction_sets()]
    return [by_pillow, *sets]


def expected(
    pixels: Pixels, box: Box, size: tuple[int, int], window: Box | None, flip: bool
) -> Pixels:
    """Pillow's functions one after another, without our code."""
    image = Image.fromarray(pixels).crop(box).resize(size, Image.Resampling.BILINEAR)
    if window is not None:
        image = image.crop(window)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


def some_box(random: random.Random, width: int, height: int) -> Box:
    left, top = random.randrange(width), random.randrange(height)
    return left, top, random.randint(left + 1, width), random.randint(top + 1, height)


def some_image(random: random.Random, width: int, height: int) -> Pixels:
    """Noise, or only black and white, where sums are largest."""
    numbers = np.random.default_rng(random.randrange(2**32))
    shape = (height, width, 3)
    if random.random() < 0.3:
        return numbers.integers(0, 2, shape, dtype=np.uint8) * np.uint8(255)
    return numbers.integers(0, 256, shape, dtype=np.uint8)


def some_side(random: random.Random) -> int:
    """1 to 600 pixels, small ones as often as large ones."""
    return max(1, round(600 ** random.random()))


@LIBRARY
@pytest.mark.parametrize("seed", range(8))
def test_bytes_are_pillows(seed: int) -> None:
    numbers = random.Random(seed)
    for _ in range(40):
        pixels = some_image(numbers, some_side(numbers), some_side(numbers))
        height, width, _ = pixels.shape
        box = some_box(numbers, width, height) if numbers.random() < 0.7 else (0, 0, width, height)
        size = (some_side(numbers), some_side(numbers))
        if numbers.random() < 0.2:  # one axis stays as it is
            size = (box[2] - box[0], size[1])
        if numbers.random() < 0.2:
            size = (size[0], box[3] - box[1])
        window = some_box(numbers, *size) if numbers.random() < 0.5 else None
        flip = numbers.random() < 0.5
        right = expected(pixels, box, size, window, flip)
        for way in ways():
            found = resized(pixels, box, size, window, flip, way=way)
            assert np.array_equal(found, right), (pixels.shape, box, size, window, flip, way)


@LIBRARY
@pytest.mark.parametrize("size", [(224, 224), (1, 1), (7, 300)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 100), (100, 1), (600, 6), (6, 600), (3000, 30)])
def test_extreme_ratios_and_single_pixels(shape: tuple[int, int], size: tuple[int, int]) -> None:
    pixels = some_image(random.Random(0), *shape)
    box = (0, 0, *shape)
    for way in ways():
        assert np.array_equal(
            resized(pixels, box, size, way=way), expected(pixels, box, size, None, False)
        )


@LIBRARY
@pytest.mark.parametrize("value", [0, 1, 127, 128, 254, 255])
def test_a_flat_image_stays_flat(value: int) -> None:
    """Weights are rounded, so their sum is not exactly 1; this must not show, nor overflow."""
    pixels = np.full((331, 517, 3), value, np.uint8)
    for size in [(224, 224), (600, 600), (13, 5)]:
        for way in ways():
            assert (resized(pixels, (0, 0, 517, 331), size, way=way) == value).all()


@LIBRARY
def test_every_pair_of_sides() -> None:
    """Weights depend on the two lengths alone; both axes are the same code."""
    pixels = some_image(random.Random(1), 131, 131)
    for before in range(1, 132, 5):
        for after in range(1, 132, 7):
            box, size = (0, 0, before, before), (after, after)
            right = expected(pixels, box, size, None, False)
            for way in ways():
                assert np.array_equal(resized(pixels, box, size, way=way), right)


def test_the_result_is_written_into_out_and_nowhere_else() -> None:
    box, size = (3, 2, 44, 37), (31, 29)
    right = expected(SMALL, box, size, None, True)
    for way in ways():
        batch = np.full((3, 29, 31, 3), 7, np.uint8)
        assert resized(SMALL, box, size, flip=True, out=batch[1], way=way) is not None
        assert np.array_equal(batch[1], right)
        assert (batch[[0, 2]] == 7).all()
        wide = np.full((29, 40, 3), 7, np.uint8)  # gaps between rows
        resized(SMALL, box, size, flip=True, out=wide[:, 4:35], way=way)
        assert np.array_equal(wide[:, 4:35], right)
        assert (wide[:, :4] == 7).all()
        assert (wide[:, 35:] == 7).all()
        planes = np.zeros((3, 29, 31), np.uint8)  # channels first
        resized(SMALL, box, size, flip=True, out=planes.transpose(1, 2, 0), way=way)
        assert np.array_equal(planes.transpose(1, 2, 0), right)


def test_images_may_have_any_strides() -> None:
    for pixels in (SMALL[::-1], SMALL[:, ::2], SMALL[5:30, 7:40], SMALL.transpose(1, 0, 2)):
        height, width, _ = pixels.shape
        right = expected(np.ascontiguousarray(pixels), (1, 1, width, height), (20, 21), None, False)
        for way in ways():
            assert np.array_equal(resized(pixels, (1, 1, width, height), (20, 21), way=way), right)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"box": (0, 0, 51, 40)}, "box .* is empty or not inside of 50 × 40"),
        ({"box": (-1, 0, 50, 40)}, "box"),
        ({"box": (9, 0, 9, 40)}, "box"),
        ({"box": (0, 40, 50, 41)}, "box"),
        ({"size": (0, 5)}, "cannot be resized to 0 × 5"),
        ({"size": (2**24 + 1, 5)}, "cannot be resized"),
        ({"window": (0, 0, 9, 9)}, "window .* is empty or not inside of 8 × 8"),
        ({"window": (3, 3, 3, 8)}, "window"),
        ({"pixels": SMALL[..., :2]}, "uint8 of shape H,W,3"),
        ({"pixels": SMALL.astype(np.float32)}, "pixels are float32"),
        ({"out": np.zeros((8, 9, 3), np.uint8)}, r"shape \(8, 8, 3\)"),
        ({"out": np.zeros((8, 8, 3), np.int8)}, "out is int8"),
        ({"out": np.broadcast_to(np.uint8(0), (8, 8, 3))}, "writable"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changed: dict[str, object], message: str) -> None:
    for way in (None, *ways()):
        options = {"pixels": SMALL, "box": (0, 0, 50, 40), "size": (8, 8), "way": way, **changed}
        with pytest.raises(ValueError, match=message):
            resized(**options)  # type: ignore[arg-type]


@LIBRARY
def test_the_library_checks_its_arguments_itself() -> None:
    """A program may call it without Python's checks."""
    function = resize._library().unflip_resize_rgb  # type: ignore[union-attr]
    out = np.zeros((8, 8, 3), np.uint8)
    right = [SMALL.ctypes.data, 150, 50, 40, 0, 0, 50, 40, 8, 8, 0, 0, 8, 8, 0, 0, 0]
    right += [out.ctypes.data, 24]
    assert function(*right) == 0
    huge = 2**31 - 1
    wrong: dict[int, list[int | None]] = {
        0: [None],
        1: [149, -150, 2**63 - 1],
        2: [0, -1, 51, huge],
        3: [0, -1, huge],
        4: [-1, 50, huge],
        5: [-1, 40, huge],
        6: [0, 51, -huge],
        7: [0, 41],
        8: [0, 7, -1, huge],
        9: [0, 7, -1, huge],
        10: [-1, 1, huge],
        11: [-1, 1, huge],
        12: [0, 9, -1, huge],
        13: [0, 9, huge],
        16: [-1, 3],
        17: [None],
        18: [23, -24, 2**63 - 1],
    }
    for place, values in wrong.items():
        for value in values:
            assert function(*right[:place], value, *right[place + 1 :]) == 1, (place, value)


def forget() -> None:
    resize._library.cache_clear()
    resize._rule.cache_clear()


@LIBRARY
def test_the_order_of_the_two_axes_is_pillows() -> None:
    """Around the limit at which Pillow 13 changes the order."""
    numbers = random.Random(3)
    for _ in range(300):
        width, lost = numbers.randint(2, 90), numbers.randint(-20, 20)
        size = (max(1, width - lost), numbers.randint(1, 60))
        height = max(1, size[1] + 2 * (width - size[0]) + numbers.randint(-1, 2))
        pixels, box = some_image(numbers, width, height), (0, 0, width, height)
        assert np.array_equal(
            resized(pixels, box, size, way=by_library), expected(pixels, box, size, None, False)
        )


@LIBRARY
def test_a_library_that_differs_from_pillow_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A future version of Pillow may have another rule."""
    monkeypatch.setattr(resize, "RULES", (lambda box, size: True,))
    forget()
    try:
        assert not resize.has_library()
        found = resized(SMALL, (1, 2, 30, 31), (12, 13))
    finally:
        forget()
    assert np.array_equal(found, expected(SMALL, (1, 2, 30, 31), (12, 13), None, False))


def test_pillow_resizes_where_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("does-not-exist.so", "__init__.py"):  # the second is not a library
        monkeypatch.setattr(resize, "LIBRARY", missing)
        forget()
        try:
            found = resized(SMALL, (1, 2, 30, 31), (12, 13))
            with pytest.raises(ImportError, match="is missing or does not fit"):
                resized(SMALL, (1, 2, 30, 31), (12, 13), way=by_library)
        finally:
            forget()
        assert np.array_equal(found, expected(SMALL, (1, 2, 30, 31), (12, 13), None, False))
