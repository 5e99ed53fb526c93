"""A study of given recipes: each is an arm, and so is the recipe it starts from."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unflip.recipes.load import load_recipe, needed_source, refuse_cycle
from unflip.recipes.schema import is_weights
from unflip.study.arm import Arm, Draft, make_arms, options
from unflip.study.study import Study
from unflip.train.start import refuse_other_network

OWN = ("name", "start")  # fields that differ between recipes by nature


def compare(
    recipes: Sequence[str | Path],
    out: Path,
    seeds: int = 5,
    *,
    overrides: Sequence[str] = (),
    epochs_scale: float = 1.0,
    teacher: Path | None = None,
) -> Study:
    """The recipes (shipped ones by name, YAML files by path) as the arms of a study; the table compares the others with
    the first. A recipe that one of them starts from becomes an arm before it. ``overrides`` are for every arm."""
    for override in overrides:
        if override.partition("=")[0] in OWN:
            raise ValueError(f"override {override!r}: every recipe has its own; change the recipe")
    drafts: dict[str, Draft] = {}
    for source in recipes:
        refuse_cycle(load_recipe(source))
    names = [_draft(source, drafts) for source in recipes]
    arms = make_arms(_told_apart(list(drafts.values())), (), overrides, epochs_scale)
    data = arms[0].recipe.data.name
    words = [shlex.quote(str(recipe)) for recipe in recipes]
    words += [*options(data, seeds, overrides, epochs_scale), f"--out {shlex.quote(str(out))}"]
    study = Study(
        out.resolve().name,
        tuple(arms),
        out,
        tuple(range(seeds)),
        command=" ".join(["unflip study compare", *words]),
        epochs_note=_epochs_note(arms, epochs_scale),
        reference=names[0],
        teacher=teacher,
        overrides=tuple(overrides),
        epochs_scale=epochs_scale,
    )
    for arm in (arm for arm in arms if arm.start):  # now, not when the start has been trained
        first = study.arm(str(arm.start))
        refuse_other_network(
            arm.recipe, first.recipe, f"recipe {first.name}, which it starts from,"
        )
    return study


def _told_apart(drafts: Sequence[Draft]) -> list[Draft]:
    """Labels that several recipes share get the recipe's name added."""
    labels = [draft.label for draft in drafts]
    return [
        replace(draft, label=f"{draft.label} ({draft.name})")
        if labels.count(draft.label) > 1
        else draft
        for draft in drafts
    ]


def _epochs_note(arms: Sequence[Arm], scale: float) -> str:
    text = "Epochs: " + ", ".join(f"{arm.recipe.epochs} ({arm.label})" for arm in arms)
    return f"{text}." if scale == 1 else f"{text}; {scale:g} × those of the recipes."


def _draft(source: str | Path, drafts: dict[str, Draft]) -> str:
    """Add a recipe's draft after that of its start; returns its name."""
    recipe = load_recipe(source)
    start = None
    if recipe.start and is_weights(recipe.start):
        raise ValueError(
            f"recipe {recipe.name} starts from the weights in {recipe.start}: a study trains what its arms start from, "
            "seed by seed; give start a recipe, or train this one with unflip train"
        )
    if recipe.start:
        first = needed_source(recipe, "start")
        assert first is not None
        start = _draft(first, drafts)
    label = " ".join(recipe.about.split()) or recipe.name  # a table's row is one line
    there = drafts.setdefault(recipe.name, Draft(recipe.name, label, str(source), start=start))
    if Path(there.source).resolve() != Path(source).resolve():
        raise ValueError(
            f"{there.source} and {source} are both called {recipe.name!r}, which is the folder of their runs: rename "
            "one of the files, or set another name in it"
        )
    return recipe.name
