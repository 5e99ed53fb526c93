"""The commands in results/*/runs.csv train the recipes of their runs, with the recipes of today."""

from __future__ import annotations

import argparse
import csv
import io
import json
import shlex
import tarfile
from pathlib import Path
from typing import Any

import pytest

from unflip.recipes.load import load_recipe
from unflip.recipes.schema import NAMES, Recipe
from unflip.study import cifar, imagenet, paper
from unflip.study.compare import compare
from unflip.study.methods import methods_study

RESULTS = Path(__file__).resolve().parents[2] / "results"
EXPERIMENTS = {**paper.EXPERIMENTS, **cifar.EXPERIMENTS, **imagenet.EXPERIMENTS}


def recorded() -> dict[tuple[str, str, str], str]:
    """(study, arm, command) -> the folder of its first run in an archive. One recipe, in a YAML file, is left out."""
    found: dict[tuple[str, str, str], str] = {}
    for path in sorted(RESULTS.glob("*/runs.csv")):
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if ".yaml" not in row["command"]:
                    key = row["study"], row["arm"], row["command"]
                    found.setdefault(key, f"{path.parent.name}/{row['raw']}")
    return found


RECORDED = recorded()


@pytest.fixture(scope="module")
def recipes() -> dict[str, dict[str, Any]]:
    """The recipe of every archived run, by its folder."""
    found = {}
    for archive in RESULTS.rglob("raw.tar.xz"):
        with tarfile.open(archive) as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                if name == "recipe.json":
                    file = tar.extractfile(member)
                    assert file is not None
                    found[folder] = json.load(io.TextIOWrapper(file, "utf-8"))["recipe"]
    return found


def trained_by(command: str, out: Path) -> Recipe:
    """The recipe that ``unflip train`` or one arm of ``unflip study`` would train."""
    parser = argparse.ArgumentParser()
    for option in ("--data", "--baseline", "--teacher", "--recipe", "--only", "--out"):
        parser.add_argument(option)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs")
    parser.add_argument("--epochs-scale", type=float, default=1.0)
    parser.add_argument("--override", action="append", default=[])
    parser.add_argument("words", nargs="+")
    given = parser.parse_intermixed_args(shlex.split(command)[1:])
    kind, name, *rest = given.words
    if kind == "train":
        return load_recipe(name, rest)
    if name == "methods":
        recipe = load_recipe(given.recipe, [f"epochs={given.epochs}", *given.override])
        return methods_study(recipe, out, [given.only], given.seeds).arm(given.only).recipe
    if name == "compare":
        return compare(rest, out).arm(given.only or rest[0]).recipe
    study = EXPERIMENTS[name].study(
        out, given.seeds, epochs_scale=given.epochs_scale, overrides=given.override
    )
    return study.arm(given.only).recipe


def as_trained(recipe: Recipe) -> dict[str, Any]:
    """All that decides how the network is trained; a start's name does not."""
    return {**recipe.plain(), **dict.fromkeys(NAMES), "start": recipe.start is not None}


@pytest.mark.parametrize(
    ("key", "folder"), RECORDED.items(), ids=[" ".join(k[:2]) for k in RECORDED]
)
def test_a_recorded_command_trains_the_recipe_of_its_runs(
    key: tuple[str, str, str], folder: str, recipes: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    recipe = trained_by(key[2], tmp_path)
    assert as_trained(recipe) == as_trained(Recipe.model_validate(recipes[folder]))
