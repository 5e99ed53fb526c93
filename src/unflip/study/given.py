"""What a study takes from elsewhere, looked at before anything is trained: the baseline's weights, and the teacher."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from unflip.study import record
from unflip.study.arm import Arm
from unflip.train import checkpoint as checkpoints
from unflip.train.recipe import Data, Recipe, load_recipe, recipe_names
from unflip.train.runs import seed_folder
from unflip.train.teacher import shown


def check_weights(arm: Arm, runs: Sequence[Path]) -> None:
    """The runs of a baseline trained before have weights that others can start from."""
    for run in runs:
        if checkpoints.load_latest(run)[0] is None:
            raise ValueError(
                f"--baseline {arm.finished_in}: {run} has no usable checkpoint, only its metrics were kept, and no arm "
                "can start from those; leave out --baseline to train one"
            )


def check_teacher(folder: Path | None, arm: Arm) -> None:
    """The teacher is finished, has weights, and has seen no image that is held out here."""
    distill = arm.recipe.distill
    assert distill is not None
    wanted = f"arm {arm.name!r} learns from a finished run of {distill.teacher}"
    otherwise = f"(unflip train {_words(arm.recipe)}), or leave the arm out with --only"
    if folder is None:
        raise ValueError(f"{wanted}: give its folder as --teacher {otherwise}")
    run = seed_folder(folder, 0)
    if not record.finished(run) or checkpoints.load_latest(run)[0] is None:
        kept = "holds its metrics alone" if record.finished(run) else "is not one"
        raise ValueError(f"{wanted}; --teacher {folder} {kept}: give another {otherwise}")
    there = Recipe.model_validate(json.loads((run / "recipe.json").read_text())["recipe"]).data
    if there != arm.recipe.data:
        raise ValueError(
            f"arm {arm.name!r} has data {shown(arm.recipe.data)}, the one in --teacher {folder} has {shown(there)}, "
            f"and may have seen images that are held out here: give another {otherwise}"
        )


def _words(recipe: Recipe) -> str:
    """What trains the teacher on the same images."""
    assert recipe.distill is not None
    name = recipe.distill.teacher
    usual = load_recipe(name).data if name in recipe_names() else Data(name=recipe.data.name)
    changed = [
        f"data.{field}={getattr(recipe.data, field)}"
        for field in Data.model_fields
        if getattr(recipe.data, field) != getattr(usual, field)
    ]
    return " ".join([name, *changed])
