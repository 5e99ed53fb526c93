"""Images in memory: the plan of an epoch, and crop, flip and normalization against a loop over the pixels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from unflip.data import ImageSet
from unflip.data.source import FinitePictures, MemorySource, mix

CPU = torch.device("cpu")


def image_set(
    count: int = 23, size: tuple[int, int] = (7, 7), padding: int = 3, flip: bool = True
) -> ImageSet:
    """Odd sizes, uneven channels, all 256 levels."""
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (count + 5, 3, *size), dtype=np.uint8)
    labels = random.integers(0, 4, count + 5)
    return ImageSet(
        train_images=images[:count],
        train_labels=labels[:count],
        test_images=images[count:],
        test_labels=labels[count:],
        classes=tuple("abcd"),
        mean=(0.1, 0.5, 0.9),
        std=(0.2, 0.3, 0.05),
        crop_padding=padding,
        flip=flip,
    )


def normalized(images: np.ndarray, data: ImageSet) -> Tensor:
    """(pixel / 255 - mean) / std in float64."""
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (data.mean, data.std))
    return torch.from_numpy((images / 255 - mean) / std)


def naive(data: ImageSet, index: int, top: int, left: int, flip: int) -> Tensor:
    """Pad the normalized image with zeros, crop, flip: pixel by pixel."""
    image = normalized(data.train_images[index], data)
    (height, width), p = image.shape[-2:], data.crop_padding
    padded = torch.zeros(3, height + 2 * p, width + 2 * p, dtype=torch.float64)
    padded[:, p : p + height, p : p + width] = image
    out = torch.empty_like(image)
    for row in range(height):
        for column in range(width):
            source = width - 1 - column if flip else column
            out[:, row, column] = padded[:, top + row, left + source]
    return out


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("size", [(7, 7), (5, 8)])
def test_a_batch_is_cropped_flipped_and_normalized(
    size: tuple[int, int], padding: int, flip: bool
) -> None:
    data = image_set(size=size, padding=padding, flip=flip)
    images = MemorySource(data, CPU)
    seen = set()
    for epoch in range(4):
        for plan in images.plan(seed=0, epoch=epoch, batch_size=6):
            batch, labels = images.batch(plan)
            expected = torch.stack([naive(data, *row) for row in plan.tolist()])
            torch.testing.assert_close(batch.double(), expected, rtol=1e-5, atol=1e-5)
            assert np.array_equal(labels, data.train_labels[plan[:, 0]])
            seen.update((top, left, mirrored) for _, top, left, mirrored in plan.tolist())
    shifts = range(2 * padding + 1)
    assert {top for top, _, _ in seen} == set(shifts)
    assert {left for _, left, _ in seen} == set(shifts)
    assert {mirrored for _, _, mirrored in seen} == ({0, 1} if flip else {0})


def test_in_float64_the_batch_is_the_naive_one_to_the_last_digits() -> None:
    data = image_set()
    images = MemorySource(data, CPU)
    images.mean = torch.tensor(data.mean, dtype=torch.float64) * 255
    images.std = torch.tensor(data.std, dtype=torch.float64) * 255
    plan = images.plan(seed=2, epoch=0, batch_size=23)[0]
    expected = torch.stack([naive(data, *row) for row in plan.tolist()])
    torch.testing.assert_close(images.batch(plan)[0], expected, rtol=1e-13, atol=1e-13)


def test_the_border_is_exactly_zero() -> None:
    """The mean of the normalized images, not some gray."""
    images = MemorySource(image_set(), CPU)
    batch, _ = images.batch(torch.tensor([[4, 0, 6, 0]]))
    assert (batch[0, :, :3] == 0).all()
    assert (batch[0, :, :, 4:] == 0).all()
    assert (batch[0, :, 3:, :4] != 0).any()


@pytest.mark.parametrize(("size", "batches"), [(1, 5), (2, 3), (5, 1), (5000, 1)])
def test_test_images_are_only_normalized(size: int, batches: int) -> None:
    data = image_set()
    source = MemorySource(data, CPU)
    found = list(source.test_batches(size))
    assert len(found) == batches
    images, labels = (torch.cat(part) for part in zip(*found, strict=True))
    expected = normalized(data.test_images, data)
    torch.testing.assert_close(images.double(), expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(labels, data.test_labels)
    assert source.test_count == 5


@pytest.mark.parametrize("size", [1, 2, 5000])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_every_test_image_is_in_one_part(size: int, parts: int) -> None:
    """Five images: for some of these numbers the parts are unequal or empty."""
    data = image_set()
    source = MemorySource(data, CPU)
    batches = [batch for i in range(parts) for batch in source.test_batches(size, (i, parts))]
    assert all(0 < len(labels) <= size for _, labels in batches)
    images, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    [(whole, expected)] = source.test_batches(5000)
    assert torch.equal(images, whole)
    assert torch.equal(labels, expected)


def test_a_plan_is_a_permutation() -> None:
    plan = MemorySource(image_set(count=24), CPU).plan(seed=5, epoch=3, batch_size=6)
    assert plan.shape == (4, 6, 4)
    assert sorted(plan[..., 0].flatten().tolist()) == list(range(24))


def test_the_last_partial_batch_is_dropped() -> None:
    plan = MemorySource(image_set(count=23), CPU).plan(seed=5, epoch=3, batch_size=6)
    assert plan.shape == (3, 6, 4)
    assert len(set(plan[..., 0].flatten().tolist())) == 18


def test_plans_repeat_for_the_same_seed_and_epoch_only() -> None:
    """And depend on nothing else: not on the global generator, not on plans drawn before."""
    images = MemorySource(image_set(count=64), CPU)
    torch.manual_seed(1)
    plans = {(s, e): images.plan(s, e, 8) for s in range(6) for e in range(6)}
    torch.manual_seed(2)
    again = {key: MemorySource(image_set(count=64), CPU).plan(*key, 8) for key in reversed(plans)}
    assert all(torch.equal(plans[key], again[key]) for key in plans)
    orders = {tuple(plan[..., 0].flatten().tolist()) for plan in plans.values()}
    assert len(orders) == len(plans), "seeds and epochs should not share an order"
    shifts = {tuple(plan[..., 1:].flatten().tolist()) for plan in plans.values()}
    assert len(shifts) == len(plans)


def test_shifts_and_flips_are_even() -> None:
    plan = MemorySource(image_set(count=6000, size=(3, 3), padding=1), CPU).plan(0, 0, 6000)[0]
    for column, values in ((1, 3), (2, 3), (3, 2)):
        counts = torch.bincount(plan[:, column], minlength=values)
        assert len(counts) == values
        assert (counts - 6000 / values).abs().max() < 250  # about six standard deviations
    same = (plan[:, 1] == plan[:, 2]).double().mean().item()
    assert abs(same - 1 / 3) < 0.04, "rows and columns are drawn apart"


def test_neighbouring_seeds_and_epochs_have_streams_of_their_own() -> None:
    mixed = {mix(seed, epoch) for seed in range(200) for epoch in range(200)}
    assert len(mixed) == 200 * 200
    assert all(0 <= value < 2**63 for value in mixed)


@pytest.mark.parametrize("change", ["reversed", "read-only", "transposed"])
def test_arrays_that_torch_cannot_share_are_copied(change: str) -> None:
    data = image_set()
    images = data.train_images
    if change == "reversed":
        images = images[::-1].copy()[::-1]
    elif change == "transposed":
        images = images.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
    else:
        images = images.copy()
        images.flags.writeable = False
    changed = MemorySource(replace(data, train_images=images), CPU)
    source = MemorySource(data, CPU)
    plan = source.plan(0, 0, 8)[0]
    assert torch.equal(changed.batch(plan)[0], source.batch(plan)[0])


def test_every_row_of_a_plan_is_one_of_the_pictures() -> None:
    source = MemorySource(image_set(count=24), CPU)
    assert isinstance(source, FinitePictures)
    assert source.pictures() == (24, 7, 7, 2)
    assert (source.plan(0, 0, 24)[0] < torch.tensor(source.pictures())).all()


def test_a_set_makes_its_source() -> None:
    data = image_set()
    source = data.source(CPU)
    assert source.spec is data.spec
    assert source.resident
    assert (len(source), len(data)) == (23, 23)
