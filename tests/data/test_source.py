"""Batches: the plan of an epoch, and crop, flip and normalisation against a loop over the images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unflip.data import ImageSet
from unflip.data.source import Images, mix

CPU = torch.device("cpu")


def image_set(count: int = 23, size: int = 7, padding: int = 3, flip: bool = True) -> ImageSet:
    """Odd sizes, uneven channels, all 256 levels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count + 5, 3, size, size), generator=generator)
    labels = torch.randint(0, 4, (count + 5,), generator=generator)
    return ImageSet(
        train_images=images[:count].to(torch.uint8),
        train_labels=labels[:count],
        test_images=images[count:].to(torch.uint8),
        test_labels=labels[count:],
        classes=tuple("abcd"),
        mean=(0.1, 0.5, 0.9),
        std=(0.2, 0.3, 0.05),
        crop_padding=padding,
        flip=flip,
    )


def normalised(images: Tensor, data: ImageSet) -> Tensor:
    """As everyone does it: to 0..1, less the mean, over the deviation; in float64."""
    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (data.mean, data.std))
    return (images.double() / 255 - mean) / std


def naive(data: ImageSet, index: int, top: int, left: int, flip: int) -> Tensor:
    """Pad the normalised image with zeros, crop, flip: pixel by pixel."""
    image = normalised(data.train_images[index], data)
    size, p = image.shape[-1], data.crop_padding
    padded = torch.zeros(3, size + 2 * p, size + 2 * p, dtype=torch.float64)
    padded[:, p : p + size, p : p + size] = image
    out = torch.empty_like(image)
    for row in range(size):
        for column in range(size):
            source = size - 1 - column if flip else column
            out[:, row, column] = padded[:, top + row, left + source]
    return out


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("flip", [False, True])
def test_a_batch_is_cropped_flipped_and_normalised(padding: int, flip: bool) -> None:
    data = image_set(padding=padding, flip=flip)
    images = Images(data, CPU)
    seen = set()
    for epoch in range(4):
        for plan in images.epoch_plan(seed=0, epoch=epoch, batch_size=6):
            batch, labels = images.batch(plan)
            expected = torch.stack([naive(data, *row) for row in plan.tolist()])
            torch.testing.assert_close(batch.double(), expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(labels, data.train_labels[plan[:, 0]])
            seen.update((top, left, mirrored) for _, top, left, mirrored in plan.tolist())
    shifts = range(2 * padding + 1)
    assert {top for top, _, _ in seen} == set(shifts)
    assert {left for _, left, _ in seen} == set(shifts)
    assert {mirrored for _, _, mirrored in seen} == ({0, 1} if flip else {0})


def test_in_float64_the_batch_is_the_naive_one_to_the_last_digits() -> None:
    data = image_set()
    images = Images(data, CPU)
    images.mean = torch.tensor(data.mean, dtype=torch.float64) * 255
    images.std = torch.tensor(data.std, dtype=torch.float64) * 255
    plan = images.epoch_plan(seed=2, epoch=0, batch_size=23)[0]
    expected = torch.stack([naive(data, *row) for row in plan.tolist()])
    torch.testing.assert_close(images.batch(plan)[0], expected, rtol=1e-13, atol=1e-13)


def test_the_border_is_exactly_zero() -> None:
    """The mean of the normalised images, not of some grey."""
    images = Images(image_set(), CPU)
    batch, _ = images.batch(torch.tensor([[4, 0, 6, 0]]))
    assert (batch[0, :, :3] == 0).all()
    assert (batch[0, :, :, 4:] == 0).all()
    assert (batch[0, :, 3:, :4] != 0).any()


def test_test_images_are_only_normalised() -> None:
    data = image_set()
    batch, labels = Images(data, CPU).test_batch(1, 4)
    expected = normalised(data.test_images[1:4], data)
    torch.testing.assert_close(batch.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(labels, data.test_labels[1:4])


def test_a_plan_is_a_permutation() -> None:
    plan = Images(image_set(count=24), CPU).epoch_plan(seed=5, epoch=3, batch_size=6)
    assert plan.shape == (4, 6, 4)
    assert sorted(plan[..., 0].flatten().tolist()) == list(range(24))


def test_the_last_partial_batch_is_dropped() -> None:
    plan = Images(image_set(count=23), CPU).epoch_plan(seed=5, epoch=3, batch_size=6)
    assert plan.shape == (3, 6, 4)
    assert len(set(plan[..., 0].flatten().tolist())) == 18


def test_plans_repeat_for_the_same_seed_and_epoch_only() -> None:
    """And depend on nothing else: not on the global generator, not on plans drawn before."""
    images = Images(image_set(count=64), CPU)
    torch.manual_seed(1)
    plans = {(s, e): images.epoch_plan(s, e, 8) for s in range(6) for e in range(6)}
    torch.manual_seed(2)
    again = {key: Images(image_set(count=64), CPU).epoch_plan(*key, 8) for key in reversed(plans)}
    assert all(torch.equal(plans[key], again[key]) for key in plans)
    orders = {tuple(plan[..., 0].flatten().tolist()) for plan in plans.values()}
    assert len(orders) == len(plans), "seeds and epochs should not share an order"
    shifts = {tuple(plan[..., 1:].flatten().tolist()) for plan in plans.values()}
    assert len(shifts) == len(plans)


def test_shifts_and_flips_are_even() -> None:
    plan = Images(image_set(count=6000, size=3, padding=1), CPU).epoch_plan(0, 0, 6000)[0]
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


def test_images_should_be_square() -> None:
    data = image_set()
    wide = ImageSet(
        **{
            **data.__dict__,
            "train_images": data.train_images[..., :5, :],
            "test_images": data.test_images[..., :5, :],
        }
    )
    with pytest.raises(ValueError, match=r"square .* not \(5, 7\)"):
        Images(wide, CPU)
