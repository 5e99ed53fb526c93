"""The command that repeats a run, and its recipe as YAML."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from unflip.runs.provenance import PARTS
from unflip.train.recipe import Recipe, load_recipe, recipe_names

MISSING = object()


def as_yaml(recipe: dict[str, Any]) -> str:
    """A file that ``unflip train`` takes; the innermost parts on one line, as the shipped recipes are."""
    return yaml.safe_dump(
        recipe, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )


def train_command(recipe: dict[str, Any], seeds: list[int], given: dict[str, Any]) -> str:
    """``unflip train`` with what differs from the shipped recipe of that name, or with a file of one's own; start and
    teacher as they were named, where that is known."""
    name = recipe["name"]
    differing = _overrides(recipe) if name in recipe_names() else None
    words = [name, *differing] if differing is not None else [f"{name}.yaml"]
    if recipe["data"]["name"] != "digits":
        words += ["--data", "DIR"]
    for part in (part for part in PARTS if part in given):
        words += [f"--{part}", given[part]["folder"]]
    if max(seeds, default=0) > 0:
        words += ["--seeds", str(max(seeds) + 1)]
    return shlex.join(["unflip", "train", *words])


def _overrides(recipe: dict[str, Any]) -> list[str] | None:
    """``field=value`` for each difference; None where overrides cannot say it."""
    try:
        here = Recipe.model_validate(recipe).plain()  # fills in fields that are newer than the run
    except ValueError:
        return None
    shipped = load_recipe(recipe["name"]).plain()
    found = list(_differences(shipped, here))
    if any(value is MISSING for _, value in found):
        return None
    return [f"{path}={_text(value)}" for path, value in found]


def _differences(
    old: dict[str, Any], new: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, Any]]:
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key, MISSING), new.get(key, MISSING)
        if path + key in ("name", "about") or a == b:
            continue
        same_kind = isinstance(a, dict) and isinstance(b, dict) and a.get("name") == b.get("name")
        if same_kind:
            yield from _differences(a, b, f"{path}{key}.")
        else:
            yield path + key, b


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
