"""The command that repeats a run, and its recipe as YAML."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from unflip.recipes.load import load_recipe, recipe_names
from unflip.recipes.schema import NAMES, Recipe

MISSING = object()


def as_yaml(recipe: dict[str, Any]) -> str:
    """A file that ``unflip train`` takes; the innermost parts on one line, as the shipped recipes are."""
    try:
        return yaml.safe_dump(
            recipe, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
        )
    except RecursionError:
        raise ValueError("the recipe is nested too deep") from None


def train_command(recipe: Recipe, start: Path | None = None, teacher: Path | None = None) -> str:
    """``unflip train`` with what differs from the shipped recipe of that name, or with a YAML file; ``start`` and
    ``teacher`` as they were named. ``--seeds`` is for the caller to add: see :func:`with_seeds`."""
    differing = _overrides(recipe) if recipe.name in recipe_names() else None
    words = [recipe.name, *differing] if differing is not None else [f"{recipe.name}.yaml"]
    if recipe.data.name != "digits":
        words += ["--data", "DIR"]
    for option, folder in (("--start", start), ("--teacher", teacher)):
        words += [option, str(folder)] if folder else []
    return shlex.join(["unflip", "train", *words])


def with_seeds(command: str, seeds: Sequence[int]) -> str:
    """The command for all of ``seeds``."""
    most = max(seeds, default=0)
    return f"{command} --seeds {most + 1}" if most > 0 else command


def _overrides(recipe: Recipe) -> list[str] | None:
    """``field=value`` for each difference; None where overrides cannot say it."""
    found = list(_differences(load_recipe(recipe.name).plain(), recipe.plain()))
    if any(value is MISSING for _, value in found):
        return None
    return [f"{path}={_text(value)}" for path, value in found]


def _differences(
    old: dict[str, Any], new: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, Any]]:
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key, MISSING), new.get(key, MISSING)
        if path + key in NAMES or a == b:
            continue
        same_kind = isinstance(a, dict) and isinstance(b, dict) and a.get("name") == b.get("name")
        if same_kind:
            yield from _differences(a, b, f"{path}{key}.")
        else:
            yield path + key, b


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
