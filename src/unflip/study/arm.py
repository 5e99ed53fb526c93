"""An arm of a study: one recipe, trained for every seed, and how it is made from a shipped one."""

from __future__ import annotations

import dataclasses
import difflib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from unflip.recipes.load import RecipeError, load_recipe
from unflip.recipes.schema import Recipe
from unflip.study.summary import Paper


@dataclass(frozen=True)
class Arm:
    """One row of a table. ``start`` is the arm whose runs give the first weights, seed by seed, or its only run if it
    is trained ``once``; ``teacher`` is the arm whose first seed it learns from."""

    name: str
    label: str
    recipe: Recipe
    start: str | None = None
    paper: Paper | None = None
    x: float | None = None  # the value of a sweep
    finished_in: Path | None = None  # finished runs of another folder: read, never trained
    trained_otherwise: bool = False  # the recipe is that of the finished runs, not the study's
    kept: tuple[str, ...] = ()  # overrides that it ignores, because it is about that field
    teacher: str | None = None
    once: bool = False  # trained for the first seed only, for all seeds of other arms
    control: bool = False  # trained whatever a choice of arms says


@dataclass(frozen=True)
class Draft:
    """An arm before the user's options: a shipped recipe and the arm's changes.

    ``derived`` gives changes that follow from the rest of the recipe, including the user's overrides: ten times
    another rate stays ten times that rate. ``keeps`` are fields that the label mentions but the arm does not change.
    """

    name: str
    label: str
    source: str
    changes: tuple[str, ...] = ()
    start: str | None = None
    paper: Paper | None = None
    x: float | None = None
    derived: Callable[[Recipe], Sequence[str]] | None = None
    keeps: tuple[str, ...] = ()
    teacher: str | None = None
    once: bool = False
    control: bool = False


def make_arms(
    drafts: Sequence[Draft],
    defaults: Sequence[str] = (),
    overrides: Sequence[str] = (),
    epochs_scale: float = 1.0,
) -> list[Arm]:
    """The drafts as arms. ``defaults`` are the study's own changes to every recipe, ``overrides`` the user's.

    The subject of an arm is not overridden: in a sweep of α, ``method.alpha=1`` would make all arms the same, and the
    labels would be wrong. Options of a method go to the arms that have them. An override that no arm takes is an
    error.
    """
    from unflip import models  # needs torch, which declaring a study does not

    taken: set[str] = set()
    arms = []
    for draft in drafts:
        plain = load_recipe(draft.source, [*defaults, *draft.changes])
        mine = [o for o in overrides if _fits(o, plain) and not _contradicts(o, draft)]
        taken.update(mine)
        changed = draft.changes or draft.derived
        named = [f"name={draft.name}"] if changed else []  # no longer the shipped recipe
        changes = [*defaults, *draft.changes, *named, *mine]
        recipe = load_recipe(draft.source, changes)
        if draft.derived:
            recipe = load_recipe(draft.source, [*changes, *draft.derived(recipe)])
        models.check_names(recipe.model.name, recipe.model.options)
        arms.append(
            Arm(
                draft.name,
                draft.label,
                scaled(recipe, epochs_scale),
                draft.start,
                draft.paper,
                draft.x,
                kept=tuple(o for o in overrides if _fits(o, plain) and _keeps(o, draft, changes)),
                teacher=draft.teacher,
                once=draft.once,
                control=draft.control,
            )
        )
    for override in overrides:
        if override not in taken:
            raise ValueError(
                f"override {override!r} changes no arm of this study: either no arm has that option, "
                f"or it is what the arms differ in.{_nearest(override, arms)}"
            )
    return arms


def _nearest(override: str, arms: Sequence[Arm]) -> str:
    """The option of the arms' methods that was probably meant."""
    path = override.partition("=")[0]
    there = {f"method.{o}" for arm in arms for o in _method_options(arm.recipe)}
    near = difflib.get_close_matches(path, there, n=1, cutoff=0.8)
    return f" Did you mean {near[0]!r}?" if near and path not in there else ""


def _method_options(recipe: Recipe) -> set[str]:
    if isinstance(recipe.method, str):
        return set()
    config = type(recipe.resolved_method())
    return {"name", *(field.name for field in dataclasses.fields(config))}


def _fits(override: str, recipe: Recipe) -> bool:
    """Whether the recipe has the overridden option; fields that every recipe has are checked when it is loaded."""
    first, _, rest = override.partition("=")[0].partition(".")
    if first == "method" and rest:
        return rest.split(".")[0] in _method_options(recipe)
    return True


def _contradicts(override: str, draft: Draft) -> bool:
    path = override.partition("=")[0]
    own = [name for change in (*draft.changes, *draft.keeps) for name in _fields(change)]
    return any(path == p or p.startswith(f"{path}.") or path.startswith(f"{p}.") for p in own)


def _fields(change: str) -> list[str]:
    """The fields that a change is about. Another network is about its name and the options given with it, so that its
    other options, such as the width, can be overridden."""
    path, _, value = change.partition("=")
    if path != "model":
        return [path]
    return [f"model.{option}" for option in yaml.safe_load(value)]


def _keeps(override: str, draft: Draft, changes: list[str]) -> bool:
    """Whether the arm ignores an override that would change it, because it is about that field."""
    if not _contradicts(override, draft):
        return False
    try:
        return (
            load_recipe(draft.source, [*changes, override]).plain()
            != load_recipe(draft.source, changes).plain()
        )
    except RecipeError:  # the two values contradict each other
        return True


def options(
    data: str, seeds: int, overrides: Sequence[str] = (), epochs_scale: float = 1.0
) -> list[str]:
    """The options of a command that repeats a study; only digits need no folder."""
    words = [f"--seeds {seeds}", *(["--data DIR"] if data != "digits" else [])]
    words += [f"--epochs-scale {epochs_scale:g}"] if epochs_scale != 1 else []
    return words + [f"--override {shlex.quote(override)}" for override in overrides]


def scaled(recipe: Recipe, factor: float) -> Recipe:
    """The recipe with ``factor`` times the epochs; steps of its schedule move with them."""
    if not 0 < factor <= 100:
        raise ValueError(f"epochs-scale={factor} should be above 0 and at most 100")
    if factor == 1:
        return recipe

    def times(epochs: int) -> int:
        return max(1, round(epochs * factor))

    steps = recipe.schedule
    every = None if steps.every is None else times(steps.every)
    epochs = times(recipe.epochs)
    warmup = min(round(steps.warmup * factor), epochs - 1)
    new = {"every": every, "at": tuple(map(times, steps.at)), "warmup": warmup}
    return recipe.model_copy(update={"epochs": epochs, "schedule": steps.model_copy(update=new)})
