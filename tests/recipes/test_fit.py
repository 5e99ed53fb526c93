"""The recipe ``images``: what is chosen for a folder of images, and that it trains."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from unflip.data.errors import DataError
from unflip.data.folders import load_folder
from unflip.data.survey import Survey, survey
from unflip.recipes.fit import FEWEST_STEPS, MOST_EPOCHS, fit_images, fitted
from unflip.recipes.load import load_recipe
from unflip.runs import Run


def draw(
    folder: Path, counts: dict[str, int], sides: tuple[int, ...] = (12,), mode: str = "RGB"
) -> Path:
    """Dark and bright images, of one size after another."""
    random = np.random.default_rng(0)
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            shape = (sides[i % len(sides)], sides[i % len(sides)] + i % 3, 3)
            pixels = random.integers(0, 90, shape, dtype=np.uint8) + np.uint8(150 * label % 256)
            Image.fromarray(pixels).convert(mode).save(folder / name / f"{i:03}.png")
    return folder


@pytest.mark.parametrize(
    ("side", "size", "width"),
    [(8, 8, 16), (30, 28, 16), (32, 32, 16), (64, 64, 16), (500, 128, 32)],
)
def test_the_network_depends_on_the_size_of_the_images(side: int, size: int, width: int) -> None:
    values = fitted(Survey(10, 50_000, 5000, side, has_test=True))
    assert (values["data"]["size"], values["model.width"]) == (size, width)


@pytest.mark.parametrize("images", [4, 30, 300, 3000, 50_000, 1_000_000])
def test_epochs_and_batches_fit_the_number_of_images(images: int) -> None:
    values = fitted(Survey(2, images, images // 2, 32, has_test=False))
    steps = values["epochs"] * (images * 9 // 10 // values["batch_size"] or 1)
    assert steps >= FEWEST_STEPS or values["epochs"] == MOST_EPOCHS
    assert 1 <= values["batch_size"] < images
    assert values["optimizer.latent_lr"] == pytest.approx(10 * values["optimizer.lr"], rel=0.01)


def test_a_tenth_of_each_class_is_held_out(tmp_path: Path) -> None:
    draw(tmp_path, {"cat": 20, "dog": 5, "one": 1})
    found = load_folder(tmp_path, size=8, test_share=0.1)
    assert np.bincount(found.test_labels, minlength=3).tolist() == [2, 1, 0]
    assert np.bincount(found.train_labels).tolist() == [18, 4, 1]
    pixels = {image.tobytes() for image in found.train_images}
    assert not pixels & {image.tobytes() for image in found.test_images}


def test_a_folder_with_test_images_uses_them(tmp_path: Path) -> None:
    draw(tmp_path / "train", {"cat": 4, "dog": 4})
    draw(tmp_path / "val", {"cat": 1, "dog": 1})
    assert survey(tmp_path).has_test
    overrides = fit_images(tmp_path).overrides
    assert not any("test_share" in override for override in overrides)
    with pytest.raises(DataError, match=r"test_share=0\.1 is for image sets without test images"):
        load_folder(tmp_path, size=8, test_share=0.1)


def test_all_damaged_files_are_named_at_once(tmp_path: Path) -> None:
    draw(tmp_path, {"cat": 6, "dog": 6})
    for name in ("cat/002.png", "dog/005.png"):  # one to train with, one to test on
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"(?s)2 images cannot be used.*cat/002.png.*dog/005.png"):
        load_folder(tmp_path, size=8, test_share=0.2)


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({}, "holds no folders"),
        ({"cat": 3}, "only one class"),
        ({"cat": 1, "dog": 1}, "No class has two images"),
    ],
)
def test_folders_that_cannot_be_trained_on(
    tmp_path: Path, unflip: Callable[..., Any], counts: dict[str, int], says: str
) -> None:
    draw(tmp_path, counts)
    done = unflip("train", "images", "--data", tmp_path)
    assert done.code == 1
    assert says in done.err
    assert "Traceback" not in done.err


def test_gray_images_of_mixed_sizes_are_learned(tmp_path: Path, unflip: Callable[..., Any]) -> None:
    """Two classes, few images; --teacher without a value trains a float network first."""
    draw(tmp_path / "data", {"dark": 12, "bright": 12}, sides=(9, 12, 17), mode="L")
    out = tmp_path / "runs" / "mine"
    words = ("--data", tmp_path / "data", "--out", out, "--teacher")
    done = unflip("train", "images", "epochs=12", "model.width=4", *words)
    assert done.code == 0, done.err
    assert "24 images of 2 classes, about 12 pixels" in done.out
    teacher = load_recipe(tmp_path / "runs" / "images-teacher.yaml")
    assert (teacher.method, teacher.epochs) == ("float", 3)
    assert Run.of_seed(tmp_path / "runs" / "images-teacher", 0).finished
    result = json.loads((out / "seed-0" / "result.json").read_text())
    assert result["accuracy"] > 70
    assert re.search(r"0 +\d+\.\d\d %", done.out)
