"""Crops, flips and colors, and the random numbers behind them."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from unflip import resize
from unflip.data import DataError
from unflip.data.transforms import (
    EIGENVALUES,
    EIGENVECTORS,
    Numbers,
    Transform,
    epoch_keys,
    epoch_order,
    jittered,
    lighting,
    random_box,
    resized_to,
    scramble,
)
from unflip.resize import Pixels

Image = pytest.importorskip("PIL.Image")

# Of seed 0 in epoch 0.
FIRST_ORDER = [3, 8, 6, 0, 7, 4, 9, 2, 5, 1]
FIRST_KEYS = [850663866476343339, 8741477432509436094]


def picture(width: int, height: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_numbers_are_those_of_splitmix64() -> None:
    """The first numbers of its reference implementation for the seed 1234567."""
    state, gamma = 1234567, 0x9E3779B97F4A7C15
    found = [scramble((state + (i + 1) * gamma) % 2**64) for i in range(3)]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    numbers = Numbers(1234567)
    assert [numbers.uniform() for _ in range(3)] == [(z >> 11) / 2**53 for z in found]


def test_an_epoch_depends_on_seed_and_epoch_alone() -> None:
    """The values are fixed: another version of unflip, or another machine, must give the same batches."""
    assert epoch_order(0, 0, 10).tolist() == FIRST_ORDER
    assert epoch_keys(0, 0, 2).tolist() == FIRST_KEYS
    orders = {tuple(epoch_order(s, e, 50).tolist()) for s in range(4) for e in range(4)}
    assert len(orders) == 16
    assert all(sorted(order) == list(range(50)) for order in orders)
    keys = np.concatenate([epoch_keys(s, e, 5000) for s in range(4) for e in range(4)])
    assert len(set(keys.tolist())) == 16 * 5000
    assert keys.min() >= 0


def test_random_boxes_have_the_distribution_of_the_reference() -> None:
    """On a square, share s with log-ratio u fits if s <= exp(-|u|); so the mean of s has a closed form."""
    side, least, bound = 1000, 0.08, math.log(4 / 3)
    boxes = [random_box(side, side, least, Numbers(int(k))) for k in epoch_keys(1, 1, 10_000)]
    left, top, right, bottom = np.array(boxes).T
    width, height = right - left, bottom - top
    assert min(left.min(), top.min()) >= 0
    assert max(right.max(), bottom.max()) <= side
    shares, ratios = width * height / side**2, width / height
    weight = 1 - math.exp(-bound) - least * bound
    mean = ((1 - math.exp(-2 * bound)) / 2 - least**2 * bound) / 2 / weight
    assert shares.mean() == pytest.approx(mean, abs=0.01)
    assert shares.min() == pytest.approx(least, abs=0.01)
    assert (ratios.min(), ratios.max()) == pytest.approx((3 / 4, 4 / 3), abs=0.02)
    assert np.log(ratios).mean() == pytest.approx(0, abs=0.01)
    for start, length in ((left, width), (top, height)):
        assert (start / (side - length + 1)).mean() == pytest.approx(0.5, abs=0.01)


def test_an_image_that_no_attempt_fits_is_cut_in_the_center() -> None:
    for seed in range(20):  # scale_min=1: only the whole area is tried
        assert random_box(100, 12, 1.0, Numbers(seed)) == (42, 0, 58, 12)
        assert random_box(12, 100, 1.0, Numbers(seed)) == (0, 42, 12, 58)


def test_half_of_the_images_are_flipped() -> None:
    image = np.tile(np.arange(16, dtype=np.uint8)[:, None], (16, 1, 3))
    transform = Transform(size=4, resize=4)
    rows = [transform.for_training(image, int(key))[0, :, 0] for key in epoch_keys(0, 0, 2000)]
    falling = [row[0] > row[-1] for row in rows]
    assert np.mean(falling) == pytest.approx(0.5, abs=0.04)


def naive(image: Pixels, box: tuple[int, int, int, int], size: tuple[int, int]) -> np.ndarray:
    """The box resized with a triangle filter, which is widened where the image shrinks. In float."""
    left, top, right, bottom = box
    pixels = image.astype(float)[top:bottom, left:right]
    return np.einsum(
        "yh,xw,hwc->yxc",
        weights(bottom - top, size[1]),
        weights(right - left, size[0]),
        pixels,
        optimize=True,
    )


def weights(old: int, new: int) -> np.ndarray:
    scale = old / new
    distance = (np.arange(new)[:, None] + 0.5) * scale - (np.arange(old) + 0.5)
    triangle = np.clip(1 - np.abs(distance) / max(scale, 1), 0, None)
    return triangle / triangle.sum(1, keepdims=True)


@pytest.mark.parametrize("size", [(50, 37), (31, 80), (300, 200)])
def test_crops_equal_a_naive_reference(size: tuple[int, int]) -> None:
    image, transform = picture(*size), Transform(size=24, resize=28)
    for key in map(int, epoch_keys(3, 0, 6)):
        numbers = Numbers(key)
        expected = naive(image, random_box(*size, 0.08, numbers), (24, 24))
        expected = expected[:, ::-1] if numbers.uniform() < 0.5 else expected
        assert np.abs(transform.for_training(image, key) - expected).max() < 1.01  # two roundings
    whole = resized_to(*size, 28)
    left, top = round((whole[0] - 24) / 2), round((whole[1] - 24) / 2)
    expected = naive(image, (0, 0, *size), whole)[top : top + 24, left : left + 24]
    assert np.abs(transform.for_testing(image) - expected).max() < 1.01  # two roundings


def test_pixels_are_those_of_torchvision() -> None:
    functional = pytest.importorskip("torchvision.transforms.functional")
    for seed, size in enumerate([(50, 37), (31, 80), (300, 201), (28, 41), (64, 64)]):
        image, transform = picture(*size, seed), Transform(size=25, resize=28)
        whole = Image.fromarray(image)
        for key in map(int, epoch_keys(seed, 0, 10)):
            numbers = Numbers(key)
            left, top, right, bottom = random_box(*size, 0.08, numbers)
            height, width = bottom - top, right - left
            cut = functional.resized_crop(whole, top, left, height, width, [25, 25])
            cut = functional.hflip(cut) if numbers.uniform() < 0.5 else cut
            assert np.array_equal(transform.for_training(image, key), np.asarray(cut))
        cut = functional.center_crop(functional.resize(whole, 28), [25, 25])
        assert np.array_equal(transform.for_testing(image), np.asarray(cut))


def test_pixels_are_written_to_the_place_in_a_batch() -> None:
    for transform in (Transform(24, 28), Transform(24, 28, jitter=0.4, lighting=0.1)):
        image, batch = picture(50, 37), np.zeros((4, 24, 24, 3), np.uint8)
        transform.for_training(image, 5, batch[1])
        transform.for_testing(image, batch[3])
        assert np.array_equal(batch[1], transform.for_training(image, 5))
        assert np.array_equal(batch[3], transform.for_testing(image))
        assert not batch[[0, 2]].any()


def test_pillow_and_the_native_library_give_the_same_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not resize.has_library():
        pytest.skip("needs the native library")
    transform = Transform(size=25, resize=28, jitter=0.4)
    cases = [(picture(50, 37, seed), int(key)) for seed, key in enumerate(epoch_keys(0, 0, 20))]

    def found() -> list[Pixels]:
        trained = [transform.for_training(image, key) for image, key in cases]
        return trained + [transform.for_testing(image) for image, _ in cases]

    native = found()
    monkeypatch.setattr(resize, "has_library", lambda: False)
    assert all(map(np.array_equal, native, found()))


def test_boxes_are_those_of_torchvision_for_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    transforms = pytest.importorskip("torchvision.transforms")
    for seed, size in enumerate([(50, 37), (200, 31), (31, 200), (300, 280)] * 5):
        numbers = Numbers(seed)
        monkeypatch.setattr(
            torch.Tensor, "uniform_", lambda t, low, high, n=numbers: t.fill_(n.uniform(low, high))
        )
        monkeypatch.setattr(
            torch, "randint", lambda low, high, size, n=numbers: torch.tensor([n.below(high)])
        )
        top, left, height, width = transforms.RandomResizedCrop.get_params(
            Image.fromarray(picture(*size)), [0.08, 1.0], [3 / 4, 4 / 3]
        )
        found = random_box(*size, 0.08, Numbers(seed))
        # torchvision draws in float32, which can round a side to another pixel.
        for mine, theirs in zip(found, (left, top, left + width, top + height), strict=True):
            assert abs(mine - theirs) <= 1


def test_jitter_changes_brightness_contrast_and_saturation() -> None:
    colors = picture(9, 7).astype(np.float32)
    gray = colors @ np.array([0.299, 0.587, 0.114])
    seen = set()
    for key in map(int, epoch_keys(0, 0, 60)):
        numbers = Numbers(key)
        found = jittered(colors, 0.4, numbers)
        replay = Numbers(key)
        order = replay.below(6)
        a, b, c = (replay.uniform(0.6, 1.4) for _ in range(3))
        seen.add(order)
        if order == 0:  # brightness a, contrast b, saturation c
            x, g = colors * a, gray * a
            x, g = x * b + g.mean() * (1 - b), g * b + g.mean() * (1 - b)
            assert np.allclose(found, x * c + g[..., None] * (1 - c), atol=1e-2)
        assert numbers.state == replay.state
    assert seen == set(range(6))
    plain, changed = Transform(8, 8), Transform(8, 8, jitter=0.4)
    image = picture(30, 30)
    assert not np.array_equal(plain.for_training(image, 5), changed.for_training(image, 5))
    assert changed.for_training(image, 5).dtype == np.uint8


def test_lighting_is_noise_along_the_principal_components() -> None:
    shifts = np.array([lighting(0.1, Numbers(int(k))) for k in epoch_keys(0, 0, 4000)])
    expected = EIGENVECTORS @ np.diag((25.5 * EIGENVALUES) ** 2) @ EIGENVECTORS.T
    assert np.allclose(np.cov(shifts.T), expected, rtol=0.1, atol=0.05)
    assert np.abs(shifts.mean(0)).max() < 0.2
    assert np.allclose(EIGENVECTORS.T @ EIGENVECTORS, np.eye(3), atol=1e-3)
    image = picture(30, 30)
    plain = Transform(8, 8).for_training(image, 5).astype(int)
    lit = Transform(8, 8, lighting=0.1).for_training(image, 5).astype(int)
    inside = (lit > 0) & (lit < 255)
    for channel in range(3):  # one shift for all pixels of a channel
        assert len(set((lit - plain)[..., channel][inside[..., channel]].tolist())) == 1


def test_the_long_side_is_rounded_down() -> None:
    assert resized_to(500, 375, 256) == (341, 256)
    assert resized_to(375, 500, 256) == (256, 341)
    assert all(b >= a for a, b in pairwise(resized_to(w, 100, 64)[0] for w in range(100, 160)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size=0 must be a whole number of pixels, at least 1"),
        ({"size": 224, "resize": 200}, "resize=200 must be a whole number of pixels, at least 224"),
        ({"scale_min": 0}, "scale_min=0 must be a number above 0"),
        ({"jitter": -1}, "jitter=-1 must be a number from 0 to 1"),
        ({"lighting": 2}, "lighting=2 must be a number from 0 to 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Transform(**options)  # type: ignore[arg-type]
