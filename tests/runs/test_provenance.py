"""A run is of the images, the start and the teacher that it was given: asked again for others, it says so."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unflip.data import ImageSet
from unflip.recipes.schema import Distill, Recipe
from unflip.runs.files import RunError
from unflip.study import study as core
from unflip.study.methods import methods_study
from unflip.study.runner import run_study, write_tables
from unflip.train import load_recipe, train
from unflip.train.job import RunOptions

Start = Callable[..., Any]
SMALL = [
    "model.width=2",
    "data.validation=1100",
    "batch_size=64",
    "epochs=1",
    "allow_no_flips=true",
]


def run(recipe: Recipe, data: ImageSet, out: Path, **options: Any) -> list[dict[str, Any]]:
    return train(recipe, data, out, options=RunOptions(device="cpu", quiet=True), **options)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, digits: ImageSet) -> Path:
    """Two seeds, so that there is another start."""
    out = tmp_path_factory.mktemp("baseline")
    run(load_recipe("digits-dorefa", SMALL), digits, out, seeds=range(2))
    return out


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, digits: ImageSet, baseline: Path) -> Path:
    """Fine-tuned from the baseline, which is its teacher too."""
    out = tmp_path_factory.mktemp("tuned")
    run(student(), digits, out, start=baseline, teacher=baseline)
    return out


def student() -> Recipe:
    recipe = load_recipe("digits-finetune", SMALL)
    return recipe.model_copy(update={"distill": Distill(teacher="digits-dorefa")})


@pytest.fixture(scope="module")
def others(digits: ImageSet) -> ImageSet:
    """One pixel of one training image is another."""
    images = digits.train_images.copy()
    images[3, 0, 4, 4] ^= 1
    return dataclasses.replace(digits, train_images=images)


def changes(data: ImageSet, **parts: Any) -> set[str]:
    after = dataclasses.replace(data, **parts).fingerprint
    return {part for part, value in data.fingerprint.items() if after[part] != value}


def test_a_fingerprint_is_of_what_is_in_the_images(digits: ImageSet, others: ImageSet) -> None:
    assert changes(digits, train_images=digits.train_images.copy()) == set()
    assert changes(digits, train_images=others.train_images) == {"training images"}
    assert changes(digits, test_labels=digits.test_labels[::-1]) == {"test images"}
    assert changes(digits, classes=tuple("abcdefghij")) == {"classes"}
    swapped = (
        digits.train_images[::-1],
        digits.train_labels[::-1],
    )  # another order is another run
    assert changes(digits, train_images=swapped[0], train_labels=swapped[1]) == {"training images"}


def test_a_fingerprint_of_fifty_thousand_images_is_quick() -> None:
    images, labels = np.zeros((60_000, 3, 32, 32), dtype=np.uint8), np.arange(60_000) % 10
    data = ImageSet(
        images[:50_000], labels[:50_000], images[50_000:], labels[50_000:],
        tuple("abcdefghij"), (0.5,) * 3, (0.5,) * 3, 4, True,
    )  # fmt: skip
    began = time.perf_counter()
    assert data.fingerprint is data.fingerprint, "and made once"
    assert time.perf_counter() - began < 2  # 0.2 s; this machine may have other things to do


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_of_other_images_is_refused(
    tmp_path: Path, digits: ImageSet, others: ImageSet, baseline: Path, finished: bool
) -> None:
    shutil.copytree(baseline, tmp_path / "run")
    if not finished:
        (tmp_path / "run" / "seed-0" / "result.json").unlink()
    recipe = load_recipe("digits-dorefa", SMALL)
    with pytest.raises(RunError) as error:
        run(recipe, others, tmp_path / "run")
    text = str(error.value)
    assert f"{tmp_path / 'run' / 'seed-0'} holds a run that was given something else" in text
    assert text.count("--data: its training images are 247 of 1 × 8 × 8 (") == 1
    assert "test images" not in text, "only what differs"
    assert "Choose another --out" in text
    [result] = run(recipe, digits, tmp_path / "run")  # another folder, the same images
    assert result["epochs"] == 1


@pytest.mark.parametrize("what", ["start", "teacher"])
def test_a_run_from_other_weights_is_refused(
    tmp_path: Path, digits: ImageSet, baseline: Path, tuned: Path, what: str
) -> None:
    shutil.copytree(baseline, tmp_path / "elsewhere")
    given = {"start": baseline, "teacher": baseline, what: tmp_path / "elsewhere"}
    [result] = run(student(), digits, tuned, **given)  # a copy is the same, wherever it lies
    assert result["recipe"] == "digits-finetune"
    for path in (tmp_path / "elsewhere" / "seed-0").glob("checkpoint-*"):
        path.unlink()
    run(student(), digits, tuned, **given)  # published without weights: nothing tells
    shutil.rmtree(tmp_path / "elsewhere" / "seed-0")
    shutil.copytree(baseline / "seed-1", tmp_path / "elsewhere" / "seed-0")
    named = rf"--{what}: it had the weights of {baseline} .*, {tmp_path / 'elsewhere'} has others"
    with pytest.raises(RunError, match=named):
        run(student(), digits, tuned, **given)
    with pytest.raises(RunError, match=rf"--{what}: .* {tmp_path} holds no finished run"):
        run(student(), digits, tuned, **{**given, what: tmp_path})


def test_a_start_that_is_not_used_is_refused_of_a_finished_run_too(
    digits: ImageSet, baseline: Path
) -> None:
    with pytest.raises(ValueError, match="starts from nothing, but --start is"):
        run(load_recipe("digits-dorefa", SMALL), digits, baseline, start=baseline)


@pytest.mark.parametrize("what", ["start", "teacher"])
def test_weights_from_other_images_are_refused(
    tmp_path: Path, digits: ImageSet, others: ImageSet, baseline: Path, what: str
) -> None:
    run(load_recipe("digits-dorefa", SMALL), others, tmp_path / "others")
    given = {"start": baseline, "teacher": baseline, what: tmp_path / "others"}
    with pytest.raises(ValueError, match=r"has data training images 247 .* held out here"):
        run(student(), digits, tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_weights_measured_on_other_test_images_may_be_gone_on_from(
    tmp_path: Path, digits: ImageSet, baseline: Path
) -> None:
    recipe = load_recipe("digits-dorefa", [*SMALL, "data.validation=0", "batch_size=1000"])
    fewer = dataclasses.replace(
        digits, test_images=digits.test_images[1:], test_labels=digits.test_labels[1:]
    )
    run(recipe, digits, tmp_path / "dorefa")
    tuning = load_recipe("digits-finetune", [*SMALL, "data.validation=0", "batch_size=1000"])
    run(tuning, fewer, tmp_path / "tuned", start=tmp_path / "dorefa")
    with pytest.raises(RunError, match=r"its test images are 450 .*, these are 449"):
        run(recipe, fewer, tmp_path / "dorefa")


def test_a_run_of_before_is_taken_as_it_is(
    tmp_path: Path, digits: ImageSet, others: ImageSet, baseline: Path
) -> None:
    shutil.copytree(baseline, tmp_path / "old")
    (tmp_path / "old" / "seed-0" / "provenance.json").unlink()
    recipe = load_recipe("digits-dorefa", SMALL)
    run(recipe, others, tmp_path / "old")
    run(load_recipe("digits-finetune", SMALL), others, tmp_path / "tuned", start=tmp_path / "old")
    (tmp_path / "old" / "seed-0" / "result.json").unlink()
    run(recipe, others, tmp_path / "old")
    unknown = tmp_path / "old" / "seed-0" / "provenance.json"
    assert not unknown.exists(), "it went on, and what its first epochs saw is not known"


def test_what_is_written_of_a_run(tuned: Path, baseline: Path) -> None:
    given = json.loads((tuned / "seed-0" / "provenance.json").read_text())
    assert set(given) == {"images", "start", "teacher", "threads"}
    assert given["images"]["classes"].startswith("10: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 (")
    last = json.loads((baseline / "seed-0" / "checkpoint-00001-000000.json").read_text())
    assert given["start"] == {"folder": str(baseline), "sha256": last["sha256"]}
    [threads] = given["threads"]
    assert threads >= 1


def test_a_run_goes_on_with_another_number_of_threads_and_says_so(
    tmp_path: Path, digits: ImageSet, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copied" / "seed-0"
    shutil.copytree(baseline / "seed-0", folder)
    recipe = load_recipe("digits-dorefa", SMALL)

    [before] = json.loads((folder / "provenance.json").read_text())["threads"]

    def go_on(threads: int) -> str:
        (folder / "result.json").unlink()
        torch.set_num_threads(threads)
        train(recipe, digits, folder.parent, options=RunOptions(device="cpu"))
        return capsys.readouterr().out

    assert "threads" not in go_on(before)
    said = f"{folder} goes on with torch's threads at {before + 1}, and had {before}: its last"
    assert said in go_on(before + 1)
    assert json.loads((folder / "provenance.json").read_text())["threads"] == [before, before + 1]
    (folder / "provenance.json").unlink()
    assert "threads" not in go_on(before), "of a run of before, nobody knows"


def test_a_finished_run_whose_baseline_is_gone_trains_none(
    unflip: Start, tmp_path: Path, tuned: Path
) -> None:
    recipe = load_recipe("digits-finetune", SMALL)
    shutil.copytree(tuned, tmp_path / "digits-finetune")
    path = tmp_path / "digits-finetune" / "seed-0" / "recipe.json"
    path.write_text(json.dumps({"recipe": recipe.plain(), "seed": 0}))  # without the teacher
    command = ["train", "digits-finetune", *SMALL, "--out", path.parents[1], "--device", "cpu"]
    done = unflip(*command)
    assert done.code == 0, done.err
    assert not (tmp_path / "digits-dorefa").exists()
    other = unflip(*command, "--start", tmp_path)
    assert other.code == 1
    assert f"{tmp_path} holds no finished run" in other.err


# Image folders


def draw(folder: Path, classes: tuple[str, ...], seed: int = 0) -> Path:
    pictures = pytest.importorskip("PIL.Image")
    dice = np.random.default_rng(seed)
    for part, count in (("train", 8), ("test", 2)):
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = dice.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                pictures.fromarray(pixels).save(folder / part / name / f"{i}.png")
    return folder


OF_FOLDERS = [
    "data.name=folder",
    "model.width=2",
    "batch_size=8",
    "epochs=1",
    "allow_no_flips=true",
]


def test_the_commands_refuse_another_folder(unflip: Start, tmp_path: Path) -> None:
    ours, theirs = draw(tmp_path / "a", ("cat", "dog")), draw(tmp_path / "b", ("cow", "hen"))
    command = ["train", "digits-dorefa", *OF_FOLDERS, "--out", tmp_path / "run", "--device", "cpu"]
    assert unflip(*command, "--data", ours).code == 0
    again = unflip(*command, "--data", theirs)
    assert again.code == 1
    assert "its classes are 2: cat, dog (" in again.err
    assert "these are 2: cow, hen (" in again.err
    packed = unflip("pack", tmp_path / "run", "-o", tmp_path / "x.unflip", "--data", theirs)
    assert packed.code == 1
    assert "give the images it was trained on" in packed.err
    assert not (tmp_path / "x.unflip").exists()
    moved = ours.rename(tmp_path / "c")
    packed = unflip("pack", tmp_path / "run", "-o", tmp_path / "x.unflip", "--data", moved)
    assert packed.code == 0, packed.err


def test_a_study_of_other_images_is_refused_and_of_the_same_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = draw(tmp_path / "a", ("cat", "dog")), draw(tmp_path / "b", ("cat", "dog"), 1)
    recipe = load_recipe("digits-dorefa", OF_FOLDERS)

    study = methods_study(recipe, tmp_path / "out", ("dorefa", "bireal"), 1)

    def run(data: Path | None, *names: str) -> dict[str, Any]:
        return run_study(study, data, only=names, device="cpu", quiet=True)

    run(ours, "dorefa")
    with pytest.raises(RunError, match="--data: its training images are 16 of"):
        run(theirs, "dorefa", "bireal")
    assert not (tmp_path / "out" / "bireal").exists()
    moved = ours.rename(tmp_path / "c")
    summary = run(moved, "dorefa", "bireal")
    assert [len(arm["runs"]) for arm in summary["arms"]] == [1, 1]
    monkeypatch.setattr(core, "load", lambda *args: pytest.fail("tables need no images"))
    shown = write_tables(study)["arms"]
    assert [arm for arm in shown if arm["runs"][0]["accuracy"] is not None] == summary["arms"]
    run(None, "dorefa", "bireal")  # nothing is left
