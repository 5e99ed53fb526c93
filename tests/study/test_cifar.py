"""The tables of CIFAR-10 and the search for a record: arms, teachers, and the whole path on digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unflip.recipes.schema import Recipe
from unflip.study.cifar import EXPERIMENTS
from unflip.study.runner import StudyEngine, run_study
from unflip.train.job import RunOptions

DIGITS = ("data.name=digits", "model.width=2")
CPU = RunOptions(device="cpu", quiet=True)
TABLES = ("cifar10-vgg-small", "cifar10-resnet18")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_arms_are_recipes(name: str, tmp_path: Path) -> None:
    study = EXPERIMENTS[name].study(tmp_path)
    for arm in study.arms:
        assert Recipe.model_validate(arm.recipe.plain()) == arm.recipe
        assert (arm.start is None) == (arm.recipe.start is None)
        assert (arm.teacher is None) == (arm.recipe.distill is None), (
            "a study trains its own teachers"
        )
        assert arm.once == (arm.recipe.method == "float")
    assert study.reference in [arm.name for arm in study.arms]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_of_one_network(name: str, tmp_path: Path) -> None:
    study = EXPERIMENTS[name].study(tmp_path)
    assert len(study.seeds) == 3
    network = "vgg_small" if name == "cifar10-vgg-small" else "resnet18_cifar"
    binary = [arm for arm in study.arms if not arm.once]
    assert {arm.recipe.model.name for arm in binary} == {network}
    assert {arm.recipe.data.validation for arm in study.arms} == {0}
    for method in ("irnet", "recu", "reste", "adabin"):
        own, ours = study.arm(method).recipe, study.arm(f"{method}-ours").recipe
        assert own.resolved_method().name == ours.resolved_method().name == method
        assert own.distill is None
        assert ours.distill is not None
        assert ours.epochs == study.arm("strongest").recipe.epochs == 400


def test_published_figures_stand_beside_their_recipe_alone(tmp_path: Path) -> None:
    study = EXPERIMENTS["cifar10-vgg-small"].study(tmp_path)
    published = {arm.name: arm.paper.mean for arm in study.arms if arm.paper}
    assert published == {
        "irnet": 90.4,
        "recu": 92.2,
        "reste": 92.55,
        "adabin": 92.3,
        "biper": 92.46,
    }
    short = EXPERIMENTS["cifar10-vgg-small"].study(tmp_path, epochs_scale=0.1)
    assert not any(arm.paper for arm in short.arms)


def test_a_record_is_chosen_on_held_out_images(tmp_path: Path) -> None:
    study = EXPERIMENTS["record"].study(tmp_path)
    assert {arm.recipe.data.validation for arm in study.arms} == {10000}
    tested = EXPERIMENTS["record"].study(tmp_path, 5, overrides=["data.validation=0"])
    assert [arm.name for arm in tested.only(["large-teacher"]).arms] == [
        "teacher-18",
        "large-teacher",
    ]
    assert {arm.recipe.data.validation for arm in tested.arms} == {0}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_fake_arms_run(name: str, trainer: Any, tmp_path: Path) -> None:
    overrides = [*DIGITS, "data.validation=0"]
    study = EXPERIMENTS[name].study(tmp_path, 2, epochs_scale=0.001, overrides=overrides)
    summary = run_study(study, engine=StudyEngine(at_once=10))
    assert all(arm.mean for arm in summary.arms)
    assert trainer.trained.count("teacher-18/seed-0") == 1


@pytest.mark.parametrize(
    ("name", "arm"), [("cifar10-vgg-small", "recu-ours"), ("record", "smooth")]
)
def test_one_arm_and_its_teacher_on_digits(name: str, arm: str, tmp_path: Path) -> None:
    overrides = [*DIGITS, "batch_size=256", "data.validation=300"]
    study = EXPERIMENTS[name].study(tmp_path, 1, epochs_scale=0.001, overrides=overrides)
    summary = run_study(study, only=[arm], options=CPU)
    assert [len(found.accuracies) for found in summary.arms] == [1, 1]
