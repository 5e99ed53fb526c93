"""The recipe ``images``: what is chosen for a folder of images, and that it trains."""

from __future__ import annotations

import json
import re
import shlex
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
    ("side", "size", "model"),
    [
        (8, 8, "resnet20"),
        (30, 28, "resnet20"),
        (32, 32, "resnet20"),
        (64, 64, "resnet20"),
        (120, 120, "resnet18"),
        (500, 128, "resnet18"),
    ],
)
def test_the_network_depends_on_the_size_of_the_images(side: int, size: int, model: str) -> None:
    values = fitted(Survey(10, 50_000, 5000, side, has_test=True))
    overrides = [f"{field}={json.dumps(value)}" for field, value in values.items()]
    recipe = load_recipe("images", overrides)
    assert (recipe.data.options["size"], recipe.model.name) == (size, model)


def test_photos_have_the_settings_that_were_measured_on_imagenette() -> None:
    values = fitted(Survey(10, 3000, 300, 144, has_test=True))
    ours = load_recipe("images", [f"{field}={json.dumps(v)}" for field, v in values.items()])
    theirs = load_recipe("imagenette-resnet18-adabin")
    for field in ("model", "method", "batch_size", "optimizer"):
        assert getattr(ours, field) == getattr(theirs, field)


@pytest.mark.parametrize("images", [4, 30, 300, 3000, 50_000, 1_000_000])
def test_epochs_and_batches_fit_the_number_of_images(images: int) -> None:
    values = fitted(Survey(2, images, images // 2, 32, has_test=False))
    share = 0.9 if images >= 1000 else 0.8
    steps = values["epochs"] * (int(images * share) // values["batch_size"] or 1)
    assert steps >= FEWEST_STEPS or values["epochs"] == MOST_EPOCHS
    assert 1 <= values["batch_size"] < images
    assert values["data"]["test_share"] == pytest.approx(1 - share)
    assert values["optimizer.latent_lr"] == pytest.approx(10 * values["optimizer.lr"], rel=0.01)


def test_a_tenth_of_each_class_is_held_out(tmp_path: Path) -> None:
    draw(tmp_path, {"cat": 20, "dog": 5, "one": 1})
    found = load_folder(tmp_path, size=8, test_share=0.1)
    assert np.bincount(found.test_labels, minlength=3).tolist() == [2, 1, 0]
    assert np.bincount(found.train_labels).tolist() == [18, 4, 1]
    pixels = {image.tobytes() for image in found.train_images}
    assert not pixels & {image.tobytes() for image in found.test_images}


@pytest.mark.parametrize("name", ["test", "val", "validation", "valid"])
def test_a_folder_with_test_images_uses_them(tmp_path: Path, name: str) -> None:
    draw(tmp_path / "train", {"cat": 4, "dog": 4})
    draw(tmp_path / name, {"cat": 1, "dog": 1})
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
        ({"cat/kittens": 2, "dog": 2}, "only folders such as 'kittens'"),
        ({"photos/cat": 2, "photos/dog": 2}, "photos as the folder of the images"),
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
    assert done.out == "" or "No class has two" in says, "a choice for images that cannot be used"


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    draw(tmp_path, {"cat": 4, "dog": 4})
    (tmp_path / "cat" / "photo.heic").touch()
    (tmp_path / "cat" / "more.png").mkdir()
    words = fit_images(tmp_path).words
    assert "8 images of 2 classes" in words
    assert f"2 other files or folders are ignored, such as {tmp_path}/cat/more.png/." in words
    (tmp_path / "stray.jpg").touch()
    (tmp_path / ".DS_Store").touch()
    words = fit_images(tmp_path).words
    assert f"3 other files or folders are ignored, such as {tmp_path}/stray.jpg." in words
    for image in (tmp_path / "dog").iterdir():
        image.rename(image.with_suffix(".gif"))
    with pytest.raises(DataError, match=r"--data .*dog is a class .* only \.gif\. Convert"):
        survey(tmp_path)


def test_images_that_do_not_fit_into_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path, {"cat": 4, "dog": 4})
    memory = {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 2048}
    monkeypatch.setattr("os.sysconf", memory.__getitem__)
    with pytest.raises(DataError, match=r"8 images of 12×12 pixels take .* data\.size"):
        load_folder(tmp_path, size=12, test_share=0.2)
    assert len(load_folder(tmp_path, size=8, test_share=0.2)) == 6


def test_reading_many_images_shows_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(tmp_path, {"cat": 4, "dog": 4})
    monkeypatch.setattr("unflip.data.folders.PROGRESS_SECONDS", -1.0)
    load_folder(tmp_path, size=8, test_share=0.2)
    assert "read 3 of 6 images" in capsys.readouterr().err


def test_gray_images_of_mixed_sizes_are_learned(tmp_path: Path, unflip: Callable[..., Any]) -> None:
    """Two classes, few images; --teacher without a value trains a float network first."""
    draw(tmp_path / "data", {"dark": 12, "bright": 12}, sides=(9, 12, 17), mode="L")
    out = tmp_path / "runs" / "mine"
    words = ("--data", tmp_path / "data", "--out", out)
    done = unflip("train", "images", "--teacher", "epochs=12", "model.width=4", *words)
    assert done.code == 0, done.err
    assert "24 images of 2 classes, about 12 pixels" in done.out
    teacher = load_recipe(tmp_path / "runs" / "images-teacher.yaml")
    assert (teacher.method, teacher.epochs) == ("float", 3)
    assert Run.of_seed(tmp_path / "runs" / "images-teacher", 0).finished
    result = json.loads((out / "seed-0" / "result.json").read_text())
    assert result["accuracy"] > 70
    assert re.search(r"0 +\d+\.\d\d %", done.out)
    packing = re.search("^Next: unflip (pack .*)$", done.out, re.MULTILINE)
    assert packing is not None
    assert unflip(*shlex.split(packing[1])).code == 0
