"""A run belongs to its images, its start and its teacher: others are refused, and its code's version is recorded."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unflip as package
import unflip.data as data_module
from unflip.data import Dataset, ImageSet
from unflip.recipes.schema import Distill, Recipe
from unflip.runs import provenance
from unflip.runs.files import RunError
from unflip.runs.provenance import unflip_version
from unflip.runs.run import Run
from unflip.study.methods import methods_study
from unflip.study.runner import run_study
from unflip.study.summary import Summary
from unflip.train import RunOptions, live_run, load_recipe, train

Start = Callable[..., Any]
SMALL = [
    "model={name: vgg_small, width: 4}",
    "data.validation=1100",
    "batch_size=64",
    "epochs=1",
    "allow_no_flips=true",
]


def run(recipe: Recipe, data: ImageSet, out: Path, **given: Any) -> list[dict[str, Any]]:
    return train(recipe, data, out, options=RunOptions(device="cpu", quiet=True), **given)


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
    assert f"{tmp_path / 'run' / 'seed-0'} holds a run that was made from something else" in text
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
    with pytest.raises(RunError, match=rf"--{what}: .* {tmp_path} does not hold a finished run"):
        run(student(), digits, tuned, **{**given, what: tmp_path})


def test_a_start_that_is_not_used_is_refused_of_a_finished_run_too(
    digits: ImageSet, baseline: Path
) -> None:
    with pytest.raises(ValueError, match="has no start, but --start is"):
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


def test_weights_measured_on_other_test_images_may_be_a_start(
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


def test_a_run_without_provenance_is_taken_as_it_is(
    tmp_path: Path, digits: ImageSet, others: ImageSet, baseline: Path
) -> None:
    shutil.copytree(baseline, tmp_path / "copy")
    (tmp_path / "copy" / "seed-0" / "provenance.json").unlink()
    recipe = load_recipe("digits-dorefa", SMALL)
    run(recipe, others, tmp_path / "copy")
    run(load_recipe("digits-finetune", SMALL), others, tmp_path / "tuned", start=tmp_path / "copy")
    (tmp_path / "copy" / "seed-0" / "result.json").unlink()
    run(recipe, others, tmp_path / "copy")
    unknown = tmp_path / "copy" / "seed-0" / "provenance.json"
    assert not unknown.exists(), "it resumed, and nobody knows what its first epochs saw"


def test_what_is_written_of_a_run(tuned: Path, baseline: Path) -> None:
    given = json.loads((tuned / "seed-0" / "provenance.json").read_text())
    assert set(given) == {"images", "versions", "start", "teacher", "threads"}
    assert given["images"]["classes"].startswith("10: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 (")
    last = json.loads((baseline / "seed-0" / "checkpoint-00001-000000.json").read_text())
    assert given["start"] == {"folder": str(baseline), "sha256": last["sha256"]}
    [threads] = given["threads"]
    assert threads >= 1


def test_a_run_that_resumes_with_another_commit_warns_and_records_both(
    tmp_path: Path,
    digits: ImageSet,
    baseline: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "copied" / "seed-0"
    shutil.copytree(baseline / "seed-0", folder)
    [before] = json.loads((folder / "provenance.json").read_text())["versions"]
    later = {**before, "commit": "c0ffee"}
    monkeypatch.setattr(provenance, "unflip_version", lambda: later)
    monkeypatch.setattr(live_run, "unflip_version", lambda: later)
    (folder / "result.json").unlink()
    recipe = load_recipe("digits-dorefa", SMALL)
    [result] = train(recipe, digits, folder.parent, options=RunOptions(device="cpu"))
    assert f"trained with commit {before['commit']} of unflip" in capsys.readouterr().out
    assert json.loads((folder / "provenance.json").read_text())["versions"] == [before, later]
    assert result["commit"] == "c0ffee"


def test_a_run_that_resumes_with_another_number_of_threads_warns(
    tmp_path: Path, digits: ImageSet, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copied" / "seed-0"
    shutil.copytree(baseline / "seed-0", folder)
    recipe = load_recipe("digits-dorefa", SMALL)

    [before] = json.loads((folder / "provenance.json").read_text())["threads"]

    def resume(threads: int) -> str:
        (folder / "result.json").unlink()
        torch.set_num_threads(threads)
        train(recipe, digits, folder.parent, options=RunOptions(device="cpu"))
        return capsys.readouterr().out

    assert "threads" not in resume(before)
    said = f"resuming {folder} with {before + 1} CPU threads; it was started with {before}. Results"
    assert said in resume(before + 1)
    assert json.loads((folder / "provenance.json").read_text())["threads"] == [before, before + 1]
    (folder / "provenance.json").unlink()
    assert "threads" not in resume(before), "nobody knows how many it had"


def test_a_finished_run_whose_baseline_is_gone_trains_none(
    unflip: Start, tmp_path: Path, tuned: Path
) -> None:
    recipe = load_recipe("digits-finetune", SMALL)
    shutil.copytree(tuned, tmp_path / "digits-finetune")
    path = tmp_path / "digits-finetune" / "seed-0" / "recipe.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "recipe": recipe.plain()}))  # without the teacher
    command = ["train", "digits-finetune", *SMALL, "--out", path.parents[1], "--device", "cpu"]
    done = unflip(*command)
    assert done.code == 0, done.err
    assert not (tmp_path / "digits-dorefa").exists()
    other = unflip(*command, "--start", tmp_path)
    assert other.code == 1
    assert f"{tmp_path} does not hold a finished run" in other.err


# The version of unflip


def test_a_result_says_how_it_was_made(baseline: Path) -> None:
    result = Run.of_seed(baseline, 0).result
    assert result is not None
    assert {key: result[key] for key in unflip_version()} == unflip_version()
    assert set(unflip_version()) == {"unflip", "commit", "dirty"}
    assert (result["device"], result["precision"]) == ("cpu", "float32"), "half is for GPUs"
    assert result["torch"] == torch.__version__
    assert result["unflip"] == package.__version__


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a copy of the package that git does not know yet, as a virtual environment's is."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    root = Path(package.__file__).parent
    only_python = shutil.ignore_patterns("*.so", "__pycache__", "*.js", "*.css")
    shutil.copytree(root, tmp_path / "src" / "unflip", ignore=only_python)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "first")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def version_in(folder: Path, **environment: str) -> dict[str, Any]:
    program = (
        "import json; from unflip.runs.provenance import unflip_version as version, __file__ as path; "
        "print(json.dumps([version(), path]))"
    )
    kept = {k: v for k, v in os.environ.items() if k != "UNFLIP_COMMIT"}
    packages = [path for path in sys.path if path.endswith("site-packages")]
    paths = os.pathsep.join([str(folder / "src"), *packages])
    env = {**kept, "PYTHONPATH": paths, **environment}
    # -S: without the finder of an editable install, which would come before the copy
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found, path = json.loads(done.stdout)
    assert Path(path).is_relative_to(folder), "of the copy"
    return found


def test_the_commit_is_that_of_the_checkout(checkout: Path) -> None:
    """None for an installed package, also if a checkout lies around it."""
    none = {"unflip": package.__version__, "commit": None, "dirty": None}
    assert version_in(checkout) == none
    git(checkout, "add", "src")
    git(checkout, "commit", "--quiet", "-m", "all of it")
    head = git(checkout, "rev-parse", "HEAD")
    assert version_in(checkout) == {**none, "commit": head, "dirty": False}
    (checkout / "notes.txt").write_text("not a source")
    assert version_in(checkout)["dirty"] is False
    (checkout / "src" / "unflip" / "ste.py").write_text("# changed")
    assert version_in(checkout) == {**none, "commit": head, "dirty": True}
    copied = version_in(checkout, UNFLIP_COMMIT="c0ffee")
    assert copied == {**none, "commit": "c0ffee"}, "where sources were copied without git"
    assert version_in(checkout, UNFLIP_COMMIT="")["commit"] == head
    assert version_in(checkout, PATH="")["commit"] is None, "without git"


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
    assert unflip(*command, "--data", ours.rename(tmp_path / "c")).code == 0


def test_a_study_of_other_images_is_refused_and_of_the_same_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = draw(tmp_path / "a", ("cat", "dog")), draw(tmp_path / "b", ("cat", "dog"), 1)
    recipe = load_recipe("digits-dorefa", OF_FOLDERS)

    study = methods_study(recipe, tmp_path / "out", ("dorefa", "bireal"), 1)
    loaded: list[Path | None] = []
    load = data_module.load

    def load_and_note(name: str, folder: Path | None = None, **options: Any) -> Dataset:
        loaded.append(folder)
        return load(name, folder, **options)

    monkeypatch.setattr(data_module, "load", load_and_note)

    def run(data: Path | None, *names: str) -> Summary:
        return run_study(study, data, only=names, options=RunOptions(device="cpu", quiet=True))

    run(ours, "dorefa")
    with pytest.raises(RunError, match="--data: its training images are 16 of"):
        run(theirs, "dorefa", "bireal")
    assert not (tmp_path / "out" / "bireal").exists()
    moved = ours.rename(tmp_path / "c")
    summary = run(moved, "dorefa", "bireal")
    assert [len(arm.runs) for arm in summary.arms] == [1, 1]
    assert moved in loaded
    loaded.clear()
    assert run(None, "dorefa", "bireal") == summary
    assert loaded == [], "nothing is left to train, and tables need no images"
