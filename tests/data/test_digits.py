"""The digits, and the checks that every image set shares."""

import dataclasses
import hashlib
import sys

import numpy as np
import pytest
import torch

from unflip.data import DataError, ImageSet, channel_statistics, stratified_order
from unflip.data.digits import load_digits
from unflip.hints import NotInstalled


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    return load_digits()


def test_the_published_images_are_all_there_once(digits: ImageSet) -> None:
    from sklearn.datasets import load_digits as read_digits

    assert digits.train_images.shape == (1347, 1, 8, 8)
    assert digits.test_images.shape == (450, 1, 8, 8)
    ours = np.concatenate([digits.train_images, digits.test_images]).reshape(-1, 64)
    theirs = np.rint(read_digits().data * 255 / 16).astype(np.uint8)
    assert sorted(map(bytes, ours)) == sorted(map(bytes, theirs))
    assert ours.max() == 255


def test_each_image_keeps_its_label(digits: ImageSet) -> None:
    from sklearn.datasets import load_digits as read_digits

    raw = read_digits()
    pixels = np.rint(raw.data * 255 / 16).astype(np.uint8)
    label_of = dict(zip(map(bytes, pixels), raw.target, strict=True))
    found = [label_of[bytes(image)] for image in digits.test_images.reshape(-1, 64)]
    assert found == digits.test_labels.tolist()


def test_the_split_never_changes(digits: ImageSet) -> None:
    content = digits.test_images.tobytes() + digits.test_labels.tobytes()
    assert hashlib.md5(content).hexdigest() == "192805acc4f26ff63833648d685dfdfc"


def test_both_parts_and_a_validation_split_are_stratified(digits: ImageSet) -> None:
    assert all(43 <= count <= 47 for count in np.bincount(digits.test_labels))
    held_out = digits.split(300).test_labels
    assert all(28 <= count <= 32 for count in np.bincount(held_out))


def test_the_rest_of_the_description(digits: ImageSet) -> None:
    scaled = digits.train_images / 255
    assert digits.mean == pytest.approx([scaled.mean()])
    assert digits.std == pytest.approx([scaled.std()])
    assert digits.classes == tuple("0123456789")
    assert (digits.crop_padding, digits.flip) == (1, False)


def test_without_scikit_learn_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(NotInstalled, match=r"needs sklearn.*unflip\[train\]"):
        load_digits()


def test_split_takes_the_last_training_images(digits: ImageSet) -> None:
    part = digits.split(validation=347)
    assert np.array_equal(part.train_images, digits.train_images[:1000])
    assert np.array_equal(part.train_labels, digits.train_labels[:1000])
    assert np.array_equal(part.test_images, digits.train_images[1000:])
    assert np.array_equal(part.test_labels, digits.train_labels[1000:])


@pytest.mark.parametrize("validation", [0, -1, 1347, 2000, 0.2])
def test_split_refuses_what_leaves_a_part_empty(digits: ImageSet, validation: int) -> None:
    with pytest.raises(DataError, match=rf"validation={validation} must .* 1 to 1346"):
        digits.split(validation)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train_images": np.zeros((2, 1, 8, 8), np.float32)},
            "train_images must be .*uint8.*float32",
        ),
        ({"test_images": np.zeros((2, 8, 8), np.uint8)}, r"test_images .*\(2, 8, 8\)"),
        ({"train_images": np.zeros((0, 1, 8, 8), np.uint8)}, "non-empty"),
        ({"train_labels": np.zeros(1347, np.float32)}, "train_labels must be an int64.*float32"),
        ({"train_labels": np.zeros(3, np.int64)}, r"\(1347,\), one label per image"),
        ({"test_labels": np.full(450, 10)}, r"test_labels must lie in 0\.\.9.*10\.\.10"),
        ({"test_labels": np.full(450, -1)}, r"found -1\.\.-1"),
        ({"test_images": np.zeros((450, 3, 8, 8), np.uint8)}, r"\(3, 8, 8\)"),
        ({"mean": (0.5, 0.5)}, r"mean=\(0\.5, 0\.5\) must have one value"),
        ({"std": (0.0,)}, r"std=\(0\.0,\) must be positive"),
        ({"crop_padding": -2}, "crop_padding=-2"),
        ({"train_images": [[1]]}, "train_images must be a numpy array, not list"),
        ({"test_labels": torch.zeros(450)}, "test_labels must be a numpy array, not Tensor"),
    ],
)
def test_an_image_set_checks_itself(
    digits: ImageSet, change: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        dataclasses.replace(digits, **change)  # type: ignore[arg-type]


def test_channel_statistics_are_those_of_each_channel() -> None:
    images = np.random.default_rng(0).integers(0, 256, (7, 3, 5, 4), dtype=np.uint8)
    scaled = images / 255
    mean, std = channel_statistics(images)
    assert mean == pytest.approx(scaled.mean((0, 2, 3)), rel=1e-14)
    assert std == pytest.approx(scaled.std((0, 2, 3)), rel=1e-14)


def test_stratified_order_keeps_proportions_in_every_tail() -> None:
    labels = np.array([0] * 80 + [1] * 20)
    order = stratified_order(labels)
    assert sorted(order) == list(range(100))
    for tail in range(5, 101, 5):
        assert (labels[order[-tail:]] == 1).sum() == tail // 5
    assert list(order[labels[order] == 0]) == list(range(80))
