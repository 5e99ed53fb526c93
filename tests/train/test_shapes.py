"""What the images decide of a network, and recipes that have it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unflip.data import ImageSet
from unflip.train import RunOptions, load_recipe, train

Start = Callable[..., Any]
QUIET = RunOptions(device="cpu", quiet=True)
VGG = ["model={name: vgg_small, width: 8}", "data.validation=1200", "batch_size=64", "epochs=1"]


def test_vgg_small_learns_from_images_of_8_by_8(digits: ImageSet, tmp_path: Path) -> None:
    [result] = train(load_recipe("digits-dorefa", VGG), digits, tmp_path, options=QUIET)
    assert 0 <= result["accuracy"] <= 100


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


def test_the_help_says_how_a_folder_is_laid_out(unflip: Start) -> None:
    shown = unflip("train", "--help").out
    for words in (
        "unflip train images --data DIR",
        "DIR/CLASS/*.jpg",
        "DIR/train/CLASS",
        "DIR/val/CLASS",
    ):
        assert words in shown
