"""``unflip study ...`` as a person meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unflip.study.paper import EXPERIMENTS

Start = Callable[..., Any]
TINY = tuple(
    word
    for override in (
        "data.name=digits",
        "data.validation=1200",
        "model.width=2",
        "epochs=1",
        "batch_size=64",
        "allow_no_flips=true",
    )
    for word in ("--override", override)
)


def test_help_names_every_study_and_arm(unflip: Start) -> None:
    shown = unflip("study", "--help").out
    assert all(name in shown for name in (*EXPERIMENTS, "methods", "autobnn"))
    arms = unflip("study", "ablation", "--help").out
    for word in ("finetune-0.0001", "mapping", "--baseline", "--epochs-scale", "--at-once"):
        assert word in arms


@pytest.mark.parametrize(
    ("name", "learning", "teacher"),
    [
        (
            "beyond",
            "fast-distill, fast-all, decayed-distill",
            "unflip train cifar10-resnet20-teacher data.validation=10000",
        ),
        ("final", "strongest", "unflip train cifar10-resnet20-teacher"),
        ("ablation", None, None),
    ],
)
def test_the_first_look_of_the_help_needs_no_teacher(
    name: str, learning: str | None, teacher: str | None, tmp_path: Path
) -> None:
    shown = EXPERIMENTS[name].help()
    assert ("teacher" in shown) == (learning is not None)
    if learning:
        assert f"With a teacher: {learning}; --teacher ({teacher})." in shown
    words = shown.rpartition("A first look: ")[2].split()
    assert words[:3] == ["unflip", "study", name]
    only = words[words.index("--only") + 1 :] if "--only" in words else []
    study = EXPERIMENTS[name].study(tmp_path, 2, epochs_scale=0.05)
    (study.only(only) if only else study).check_folders()


def test_a_study_by_one_command(unflip: Start) -> None:
    words = ("study", "ablation", *TINY, "--seeds", "1", "--only", "finetune-0.01")
    done = unflip(*words, "--device", "cpu")
    assert done.code == 0, done.err
    assert "| fine-tuning, lr 0.01 |" in done.out
    assert "in runs/ablation" in done.out
    saved = json.loads((done.folder / "runs" / "ablation" / "study.json").read_text())
    assert saved["evaluated_on"] == "validation"
    assert [arm["name"] for arm in saved["arms"]] == ["baseline", "finetune-0.01"]


def test_steps_after_the_last_epoch_are_said(unflip: Start, tmp_path: Path) -> None:
    recipe = tmp_path / "steps.yaml"
    recipe.write_text(
        "data: {name: digits}\nmodel: {name: resnet20, width: 2}\nmethod: dorefa\nepochs: 4\n"
        "optimizer: {lr: 0.1}\nschedule: {name: step, at: [2, 3]}\n"
    )
    words = ("study", "compare", recipe, "--seeds", "1", "--device", "cpu")
    short = unflip(*words, "--override", "epochs=1")
    warning = (
        "warning: steps: the learning rate never falls, because schedule.at=[2, 3] and epochs=1."
    )
    assert short.out.startswith(warning + " --epochs-scale moves the steps, too.")
    assert "warning" not in unflip(*words, "--epochs-scale", "0.5", "--out", "scaled").out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ablation", "--only", "lsn"], "unknown arm 'lsn'. Did you mean 'lns'?"),
        (["ablation", "--override", "epoch=3"], "epoch: unknown field. Did you mean 'epochs'?"),
        (["ablation", "--override", "model.widht=4"], "'widht'. Did you mean 'width'?"),
        (["methods", "--epochs", "1", "--override", "model.widht=4"], "Did you mean 'width'?"),
        (["ablation", "--override", "method.alhpa=1"], "Did you mean 'method.alpha'?"),
        (["alpha", "--override", "method.alpha=1"], "changes no arm of this study"),
        (["ablation", "--only", "lns", "--tables-only"], "trains none: leave out --only"),
        (["rho", "--epochs-scale", "0"], "epochs-scale=0.0 should be above 0"),
        (["sota", "--engine", "threads"], "unknown engine 'threads'"),
        (["controls", "--baseline", "there"], "there/seed-0 is not a finished run"),
        (["beyond", "--baseline", "there"], "study beyond has no baseline: leave out --baseline"),
        (["ablation", "--data", "nowhere"], "nowhere"),
        (
            ["imagenet-resnet18"],
            "no images: give --data imagenet.pack (unflip data pack IMAGENET_FOLDER imagenet.pack)",
        ),
        (["methods", "--epochs", "1", "--only", "lns"], "unknown method to compare 'lns'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line_and_leave_nothing(
    unflip: Start, arguments: list[str], says: str
) -> None:
    command = unflip("study", *arguments, "--device", "cpu")
    assert command.code == 1
    assert command.out == ""
    [line] = command.err.splitlines()
    assert says in line
    assert sorted(path.name for path in command.folder.iterdir()) == ["stderr", "stdout"]


def test_the_command_of_a_recipe_file_finds_it_again(unflip: Start, tmp_path: Path) -> None:
    mine = tmp_path / "my own.yaml"
    mine.write_text(
        "data: {name: digits}\nmodel: {name: resnet20, width: 2}\nepochs: 1\noptimizer: {lr: 0.1}\n"
    )
    words = ("--epochs", "1", "--recipe", str(mine), "--only", "dorefa", "--seeds", "1")
    done = unflip("study", "methods", *words, "--device", "cpu")
    assert done.code == 0, done.err
    [arm] = json.loads((done.folder / "runs" / "methods" / "study.json").read_text())["arms"]
    assert f"--recipe '{mine}' --epochs 1" in arm["command"]
