"""The studies of ImageNet and Imagenette: arms, teachers, columns, and their way into results/."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unflip.data import InputSpec
from unflip.recipes.load import read_values, recipe_names
from unflip.recipes.schema import Data
from unflip.study.counting import count
from unflip.study.imagenet import ALEXNET, EXPERIMENTS, IMAGENET, RESNET18
from unflip.study.runner import run_study
from unflip.study.summary import Summary
from unflip.train.job import RunOptions

RESULTS = Path(__file__).resolve().parents[2] / "results"
ONE = ("epochs=1", "schedule={name: cosine}")
TINY = ("data={name: digits}", "model.width=8", *ONE, "batch_size=256", "allow_no_flips=true")


def inputs(size: int, classes: int) -> InputSpec:
    return InputSpec((3, size, size), tuple(map(str, range(classes))), (0.5,) * 3, (0.2,) * 3)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_arms_are_recipes_that_start_and_learn_from_each_other(
    name: str, tmp_path: Path
) -> None:
    experiment = EXPERIMENTS[name]
    study = experiment.study(tmp_path)
    plain = [json.dumps({**arm.recipe.plain(), "name": "", "about": ""}) for arm in study.arms]
    assert len(set(plain)) == len(plain), "no two arms are the same"
    sources = {draft.name: draft.source for draft in experiment.drafts}
    for arm in study.arms:
        recipe, teacher = arm.recipe, arm.recipe.distill and arm.recipe.distill.teacher
        assert recipe.start == (sources[arm.start] if arm.start else None)
        assert teacher == (sources[arm.teacher] if arm.teacher else None)
        assert sources[arm.name].startswith(name.partition("-")[0] + "-")
        assert bool(arm.paper) <= name.startswith("imagenet-"), "no claim about Imagenette"
    assert study.reference in sources
    assert len(study.seeds) == (1 if name.startswith("imagenet-") else 3)
    study.check_folders()


def test_every_recipe_is_an_arm() -> None:
    used = {draft.source for experiment in EXPERIMENTS.values() for draft in experiment.drafts}
    shipped = {name for name in recipe_names() if name.startswith(("imagenet-", "imagenette-"))}
    assert used == shipped


@pytest.mark.parametrize("table", ["resnet18", "alexnet", "ablation"])
def test_both_forms_have_the_same_arms(table: str) -> None:
    def shape(images: str) -> list[tuple[object, ...]]:
        drafts = EXPERIMENTS[f"{images}-{table}"].drafts
        return [(d.name, d.label, d.changes, d.start, d.teacher) for d in drafts]

    long, short = shape("imagenet"), shape("imagenette")
    assert short[: len(long)] == long
    ours = [name for name, *_ in short[len(long) :]]
    assert ours == (["strongest-step1", "strongest"] if table == "resnet18" else [])


@pytest.mark.parametrize(
    ("name", "arm", "top1", "top5"),
    [
        ("imagenet-resnet18", "baseline", 52.5, 76.7),
        ("imagenet-resnet18", "lns", 53.1, 77.0),
        ("imagenet-resnet18", "bireal-prelu-lns", 59.4, 81.7),
        ("imagenet-resnet18", "adabin", 63.1, 84.3),
        ("imagenet-ablation", "finetune", 52.8, None),
        ("imagenet-alexnet", "lns", 44.4, None),
    ],
)
def test_the_published_figures(
    name: str, arm: str, top1: float, top5: float | None, tmp_path: Path
) -> None:
    paper = EXPERIMENTS[name].study(tmp_path).arm(arm).paper
    assert paper is not None
    assert (paper.mean, paper.top5) == (top1, top5)
    fewer = EXPERIMENTS[name].study(tmp_path, epochs_scale=0.1)
    assert fewer.arm(arm).paper is None, "of as many epochs alone"


def test_every_published_figure_has_its_arm() -> None:
    def names(table: str) -> set[str]:
        return {draft.name for draft in EXPERIMENTS[f"imagenet-{table}"].drafts}

    assert set(RESNET18) <= names("resnet18") | names("ablation")
    assert set(ALEXNET) <= names("alexnet")


def test_a_method_of_the_papers_table_replaces_that_of_dorefas_recipe(tmp_path: Path) -> None:
    study = EXPERIMENTS["imagenet-resnet18"].study(tmp_path)
    common = [arm for arm in study.arms if "(common recipe)" in arm.label]
    assert len(common) >= 10
    usual = study.arm("baseline").recipe.plain()
    for arm in common:
        recipe = arm.recipe.plain()
        assert recipe["method"]["name"] == arm.name
        for field in ("data", "epochs", "batch_size", "optimizer", "schedule"):
            assert recipe[field] == usual[field]


def test_teacher_first_step_and_second_step_follow_each_other(trainer: Any, tmp_path: Path) -> None:
    study = EXPERIMENTS["imagenette-resnet18"].study(tmp_path, 2, overrides=TINY)
    run_study(study, only=["reactnet"])
    assert trainer.trained == [
        "teacher/seed-0",  # one is enough
        *("reactnet-step1/seed-0", "reactnet-step1/seed-1"),
        *("reactnet/seed-0", "reactnet/seed-1"),
    ]
    run_study(study, only=["reactnet"])
    assert len(trainer.trained) == 5, "nothing is trained twice"
    command = Summary.read(tmp_path).arms[-1].command
    assert command.startswith("unflip study imagenette-resnet18 --seeds 2")
    assert command.endswith("--only reactnet")
    assert "--teacher" not in command


def test_a_teacher_that_stops_ends_the_arms_that_need_it(trainer: Any, tmp_path: Path) -> None:
    trainer.stops = {"teacher/seed-0": "the loss is nan"}
    study = EXPERIMENTS["imagenette-resnet18"].study(tmp_path, 2, overrides=TINY)
    summary = run_study(study, only=["reactnet"])
    reason = "teacher, which it learns from, stopped: the loss is nan"
    first, last = (summary.arm(name) for name in ("reactnet-step1", "reactnet"))
    assert first is not None
    assert last is not None
    assert [run.stopped for run in first.runs] == [reason] * 2
    assert last.runs[0].stopped == f"reactnet-step1, which it starts from, stopped: {reason}"


def test_a_given_teacher_is_not_trained(trainer: Any, tmp_path: Path, teacher_run: Path) -> None:
    experiment = EXPERIMENTS["imagenette-resnet18"]
    study = experiment.study(tmp_path, 1, overrides=TINY, teacher=teacher_run)
    summary = run_study(study, only=["reactnet"])
    assert trainer.trained == ["reactnet-step1/seed-0", "reactnet/seed-0"]
    assert "--teacher DIR" in summary.arms[-1].command


@pytest.mark.parametrize(
    ("classes", "published", "cells"),
    [
        (1000, " published, % |", ["53.1 / 77.0", "33.5", "164"]),
        (10, "", ["17.3", "163"]),  # a smaller last layer; the figures are of other images
    ],
)
def test_the_table_has_top5_memory_flops_and_what_is_published(
    classes: int,
    published: str,
    cells: list[str],
    trainer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Data, "load", lambda data, folder: None)  # the fake trainer needs none
    trainer.inputs = inputs(224, classes)
    run_study(EXPERIMENTS["imagenet-ablation"].study(tmp_path, 2), only=["lns"])
    written = (tmp_path / "table.md").read_text()
    heads = (
        f"|  | top-1, best (mean ± std), % | top-5, % | runs |{published} memory, Mbit | FLOPs, M |"
    )
    assert heads in written
    [row] = [line for line in written.splitlines() if line.startswith("| LNS |")]
    whole = ["LNS", "81.30 (80.80 ± 0.71)", "95.50 ± 0.71", "2", *cells]
    assert [cell.strip() for cell in row.split("|")][1:-1] == whole
    assert "a 1-bit one counts 1/64" in written


# ResNet-18: Liu et al., *Bi-Real Net*, ECCV 2018, in units of 10^6. Its XNOR-Net has 3 M more than ours: cost.py counts
# convolutions and linear layers, and so not the multiplications of the K maps.
# AlexNet: the LNS paper, memory in units of 2^20. Ours includes scale and shift of BatchNorm, 0.6.
@pytest.mark.parametrize(
    ("table", "arm", "memory", "unit", "flops"),
    [
        ("resnet18", "float", 374.1, 10**6, 1.81e9),
        ("resnet18", "bireal", 33.6, 10**6, 1.63e8),
        ("resnet18", "xnor", 33.7, 10**6, 1.67e8),
        ("alexnet", "float", 1860, 2**20, None),
        ("alexnet", "baseline", 180, 2**20, None),
        ("alexnet", "lns", 180, 2**20, None),
    ],
)
def test_memory_and_flops_are_the_published_ones(
    table: str, arm: str, memory: float, unit: int, flops: float | None, tmp_path: Path
) -> None:
    study = EXPERIMENTS[f"imagenet-{table}"].study(tmp_path)
    spent = count(study.arm(arm).recipe, inputs(224, 1000))
    assert spent.memory_bits / unit == pytest.approx(memory, abs=0.1 if flops else 1.2)
    assert flops is None or spent.flops == pytest.approx(flops, rel=0.02)


def test_hours_follow_from_epochs_images_and_speed() -> None:
    dorefa, lns = (read_values(f"imagenet-resnet18-{name}") for name in ("dorefa", "lns"))
    assert IMAGENET.hours(dorefa) == pytest.approx(
        dorefa["epochs"] * 1_281_167 / IMAGENET.images_per_second / 3600
    )
    factor = IMAGENET.slower["lns"]
    assert IMAGENET.hours(lns) / lns["epochs"] == pytest.approx(
        factor * IMAGENET.hours(dorefa) / dorefa["epochs"]
    )
    shown = EXPERIMENTS["imagenet-resnet18"].help()
    assert f" baseline {IMAGENET.hours(dorefa):.1f}, finetune " in shown
    assert f" lns {IMAGENET.hours(lns):.1f}, bireal " in shown
    assert "unflip data pack IMAGENET_FOLDER imagenet.pack" in shown
    assert "Minutes per run" in EXPERIMENTS["imagenette-resnet18"].help()


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, RESULTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass asks for the module that it is in
    spec.loader.exec_module(module)
    return module


def test_a_study_is_trained_archived_and_shown(tmp_path: Path) -> None:
    """Two arms, really trained; their numbers are the same in table.md and in results/."""
    study = EXPERIMENTS["imagenette-ablation"].study(tmp_path / "runs", 3, overrides=TINY)
    summary = run_study(study, only=["finetune"], options=RunOptions(device="cpu", quiet=True))
    assert all(run.top5 and run.accuracy for arm in summary.arms for run in arm.runs)
    assert all(run.top5 >= run.accuracy for arm in summary.arms for run in arm.runs)  # type: ignore[operator]
    archive, tables = script("archive"), script("tables")
    for _ in range(2):  # rows are replaced
        archive.main(tmp_path / "runs", tmp_path / "imagenette" / "imagenette-ablation")
    found = tables.read_studies(tmp_path)
    assert [len(arm.rows) for arm in found["imagenette-ablation"].values()] == [3, 3]
    shown = tables.study_table(found["imagenette-ablation"], "finetune", {}).splitlines()
    written = (tmp_path / "runs" / "table.md").read_text().splitlines()
    assert [line.replace("−", "-") for line in shown[:4]] == written[2:6]
