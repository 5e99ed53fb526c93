"""What a study takes from elsewhere, checked before anything is trained: the baseline's weights, and the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unflip.recipes.load import load_recipe, recipe_names
from unflip.recipes.schema import Data, Recipe
from unflip.runs import provenance
from unflip.runs.run import Run
from unflip.study.arm import Arm


def check_weights(arm: Arm, runs: Sequence[Run]) -> None:
    """Finished runs must have weights that others can start from: a baseline's, or the study's own."""
    for run in runs:
        problem = _unusable(run)
        if problem and arm.finished_in is None:
            raise ValueError(
                f"{problem}. Runs that are left in the study start from that one: restore its checkpoint, or choose "
                "another --out to train everything again"
            )
        if problem:
            raise ValueError(
                f"--baseline {arm.finished_in}: {problem}; no arm can start from metrics alone. Leave out --baseline "
                "to train one"
            )


def _unusable(run: Run) -> str | None:
    """Why the weights of a finished run cannot be used; None if they can."""
    try:
        run.load_checkpoint()
    except ValueError as error:
        return str(error)
    return None


def check_teacher(folder: Path | None, arm: Arm) -> None:
    """The teacher must be finished, have weights, and have seen no image that is held out here."""
    distill = arm.recipe.distill
    assert distill is not None
    wanted = f"arm {arm.name!r} learns from a finished run of {distill.teacher}"
    otherwise = f"(unflip train {_words(arm.recipe)}), or leave the arm out with --only"
    if folder is None:
        raise ValueError(f"{wanted}: give its folder as --teacher {otherwise}")
    run = Run.find(folder)
    if not run.finished:
        raise ValueError(f"{wanted}, which {folder} is not: give another --teacher {otherwise}")
    problem = _unusable(run)
    if problem:
        raise ValueError(f"{wanted}, but {problem}. Or give another --teacher {otherwise}")
    differ = provenance.other_images(run, arm.recipe.plain()["data"])
    if differ:
        raise ValueError(
            f"arm {arm.name!r} has data {differ[1]}, but the teacher in {folder} was trained on {differ[0]} and may "
            f"have seen images that are held out here: give another --teacher {otherwise}"
        )


def _words(recipe: Recipe) -> str:
    """The arguments that train the teacher on the same images."""
    assert recipe.distill is not None
    name = recipe.distill.teacher
    usual = load_recipe(name).data if name in recipe_names() else Data(name=recipe.data.name)
    before = usual.model_dump()
    changed = [
        f"data.{field}={value}"
        for field, value in recipe.data.model_dump().items()
        if field not in before or before[field] != value
    ]
    return " ".join([name, *changed])
