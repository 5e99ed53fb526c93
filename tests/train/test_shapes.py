"""What the images decide of a network, and recipes that have it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unflip.data import ImageSet
from unflip.recipes.build import build_model
from unflip.train import RecipeError, RunOptions, load_recipe, train

Start = Callable[..., Any]
QUIET = RunOptions(device="cpu", quiet=True)
VGG = ["model={name: vgg_small, width: 8}", "data.validation=1200", "batch_size=64", "epochs=1"]


def test_vgg_small_learns_from_images_of_8_by_8(digits: ImageSet, tmp_path: Path) -> None:
    [result] = train(load_recipe("digits-dorefa", VGG), digits, tmp_path, options=QUIET)
    assert 0 <= result["accuracy"] <= 100


@pytest.mark.parametrize(
    ("override", "right"),
    [("model.image_size=32", 8), ("model.num_classes=5", 10), ("model.in_channels=3", 1)],
)
def test_a_network_for_other_images(digits: ImageSet, override: str, right: int) -> None:
    with pytest.raises(ValueError, match=f"has {override}") as caught:
        build_model(load_recipe("digits-dorefa", [*VGG, override]), digits.spec, seed=0)
    assert "digits has 10 classes and images of 1×8×8" in str(caught.value)
    assert str(caught.value).endswith(f"leave it out, or give {right}")
    build_model(
        load_recipe("digits-dorefa", [*VGG, f"{override.partition('=')[0]}={right}"]),
        digits.spec,
        0,
    )


def test_more_classes_than_there_are(digits: ImageSet) -> None:
    with pytest.raises(ValueError, match=r"model\.num_classes=11, but digits has 10 classes"):
        build_model(load_recipe("digits-dorefa", ["model.num_classes=11"]), digits.spec, seed=0)


def test_a_network_with_a_linear_layer_for_each_pixel_wants_squares(digits: ImageSet) -> None:
    wide = replace(
        digits, train_images=digits.train_images[:, :, :4], test_images=digits.test_images[:, :, :4]
    )
    with pytest.raises(
        ValueError, match="vgg_small takes square images, and those of digits are 4×8"
    ):
        build_model(load_recipe("digits-dorefa", VGG), wide.spec, seed=0)
    build_model(load_recipe("digits-dorefa"), wide.spec, seed=0)  # a ResNet takes any


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Images of several sizes, bright ones and dark ones."""
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for part, count in (("train", 8), ("test", 2)):
        for name, level in (("bright", 150), ("dark", 0)):
            folder = tmp_path / "pictures" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(level, level + 100, (12 + i, 16, 3), dtype=np.uint8)
                image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "pictures"


def test_a_folder_of_images_from_training_to_evaluation(
    unflip: Start, pictures: Path, tmp_path: Path
) -> None:
    recipe = (
        "digits-dorefa",
        "data.name=folder",
        "model.width=2",
        "epochs=1",
        "batch_size=4",
        "allow_no_flips=true",
    )
    done = unflip("train", *recipe, "--data", pictures)
    assert "in a recipe, data.size" in done.err
    out, packed = tmp_path / "out", tmp_path / "network.unflip"
    done = unflip("train", *recipe, "data.size=8", "--data", pictures, "--out", out)
    assert done.code == 0, done.err
    done = unflip("pack", out, "-o", packed)
    assert done.code == 0, done.err
    done = unflip("evaluate", packed, "folder", "--data", pictures, "--size", 8)
    assert done.code == 0, done.err
    assert "4 test images of folder" in done.out


def test_size_is_for_folders() -> None:
    with pytest.raises(RecipeError, match=r"option of data set 'digits' 'size'\. Known: name, val"):
        load_recipe("digits-dorefa", ["data.size=8"])
    assert "size" not in load_recipe("digits-dorefa").plain()["data"]
    sized = load_recipe("digits-dorefa", ["data.name=folder", "data.size=8"])
    assert sized.plain()["data"] == {"name": "folder", "validation": 0, "size": 8}


def test_the_help_says_how_a_folder_is_laid_out(unflip: Start) -> None:
    shown = unflip("train", "--help").out
    for words in (
        "data.name=folder",
        "data.size=32",
        "DIR/train/CLASS/*.png",
        "DIR/test/CLASS/*.png",
    ):
        assert words in shown
