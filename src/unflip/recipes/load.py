"""Reading recipes: the shipped ones by name, YAML files by path, and ``field=value`` overrides."""

from __future__ import annotations

import copy
import difflib
import functools
import json
import re
import typing
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from unflip.recipes.schema import NAMES, Recipe, is_weights

Field = Literal["start", "distill"]  # fields in which a recipe names another
MOST_LETTERS = 100_000
DEEPEST = 50  # mappings and lists in each other


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names the field and what would be right."""


def recipe_names() -> list[str]:
    """The recipes that ship with unflip."""
    folder = resources.files("unflip.recipes")
    return sorted(Path(str(f)).stem for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_recipe(source: str | Path, overrides: Sequence[str] | None = None) -> Recipe:
    """A shipped recipe by name or a YAML file by path, with ``field=value`` overrides applied."""
    recipe = _checked(source, overrides or ())
    if recipe.expected and overrides:
        recipe = _expecting(recipe, _checked(source, [o for o in overrides if _field(o) == "uses"]))
    if _is_file(source):
        recipe.found_in(Path(source).parent, *(_field(o) for o in overrides or ()))
    return recipe


def _checked(source: str | Path, overrides: Sequence[str]) -> Recipe:
    return checked(read_values(source, overrides), str(source))


def checked(values: dict[str, Any], source: str, run: object = None) -> Recipe:
    """The recipe of these values; ``source`` names them in messages. ``run``: the run that they are from, if it may be
    a stranger's. Then no module is imported that the recipe uses."""
    try:
        return Recipe.model_validate(values, context=run)
    except ValidationError as error:
        raise RecipeError(_explain(source, error)) from None


def _expecting(recipe: Recipe, original: Recipe) -> Recipe:
    """The recipe without its expected accuracies, if overrides change how the network is trained."""
    mine, theirs = ({**r.plain(), **dict.fromkeys(NAMES)} for r in (recipe, original))
    if mine == theirs or recipe.expected != original.expected:  # expected may be overridden too
        return recipe
    return recipe.model_copy(update={"expected": {}})


def _field(override: str) -> str:
    return re.split("[=.]", override)[0]


def read_values(source: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A recipe's values with overrides applied, neither checked nor filled in: this does not need torch."""
    values = _read(source)
    for override in overrides:
        _override(values, override)
    return values


def named_by(recipe: Recipe, field: Field) -> str | None:
    """What ``recipe`` has in ``start`` or ``distill.teacher``."""
    teacher = recipe.distill.teacher if recipe.distill else None
    return recipe.start if field == "start" else teacher


def needed_source(recipe: Recipe, field: Field) -> str | Path | None:
    """What ``recipe`` names in ``start`` or ``distill.teacher``, as :func:`load_recipe` takes it: a shipped recipe's
    name, or the path of a YAML file or a file of weights. None if it names nothing."""
    named = named_by(recipe, field)
    if named is None or not (_is_file(named) or is_weights(named)):
        return named
    path = recipe.beside(field) / named
    if _is_file(named) and not path.is_file():
        raise RecipeError(
            f"recipe {recipe.name}: {field} names {named!r}, but there is no file {path}. Give the path relative to "
            "the folder of the recipe that names it"
        )
    return path


def needed_recipe(recipe: Recipe, field: Field) -> Recipe:
    """The recipe that ``recipe`` starts from or learns from, on the same images and, for a start, with the same
    network. Modules that ``recipe`` uses are used there too: these may define both."""
    source = needed_source(recipe, field)
    assert source is not None
    parts = ("data", "model") if field == "start" else ("data",)
    plain = recipe.plain()
    fields = [f"{part}={json.dumps(plain[part])}" for part in parts]
    modules = list(dict.fromkeys([*load_recipe(source).uses, *recipe.uses]))
    return load_recipe(source, [*fields, f"uses={json.dumps(modules)}"])


def refuse_cycle(recipe: Recipe, above: tuple[str, ...] = ()) -> None:
    """Refuse a recipe that needs itself, directly or through others; ``above`` are the recipes that need it."""
    if recipe.name in above:
        chain = " → ".join((*above, recipe.name))
        raise RecipeError(f"recipe {recipe.name} needs itself: {chain}. Change start or distill")
    fields: tuple[Field, ...] = ("start", "distill")
    for field in fields:
        source = needed_source(recipe, field)
        if source is not None and not is_weights(source):
            refuse_cycle(load_recipe(source), (*above, recipe.name))


def run_name(named: str) -> str:
    """The folder of the run of a recipe that another names: a shipped recipe, or a YAML file."""
    return Path(named).name.removesuffix(".yaml").removesuffix(".yml")


def _is_file(source: str | Path) -> bool:
    return Path(source).suffix in (".yaml", ".yml")


class _Yaml(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as a string; people write it as a number."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"),
    list("-+0123456789"),
)


def _read(source: str | Path) -> dict[str, Any]:
    if not _is_file(source):
        return copy.deepcopy(_shipped(str(source)))
    path = Path(source)
    if not path.is_file():
        raise RecipeError(f"there is no recipe file {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not a text file in UTF-8: {error}") from None
    return _parsed(text, str(source), path.stem)


@functools.cache  # a help text of a study reads the same few recipes many times
def _shipped(name: str) -> dict[str, Any]:
    if name not in recipe_names():
        near = difflib.get_close_matches(name, recipe_names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RecipeError(
            f"unknown recipe {name!r}.{hint} 'unflip recipes' lists the shipped ones; or give the path of a .yaml file."
        )
    text = (resources.files("unflip.recipes") / f"{name}.yaml").read_text(encoding="utf-8")
    return _parsed(text, name, name)


def _parsed(text: str, source: str, name: str) -> dict[str, Any]:
    values = _values(text, source)
    if not isinstance(values, dict):
        raise RecipeError(
            f"{source} should be a YAML mapping of fields, not {type(values).__name__}"
        )
    return {"name": name, **values}


def _values(text: str, source: str) -> Any:
    """YAML that does not become much larger than its text. ``source`` begins the message otherwise."""
    if len(text) > MOST_LETTERS:
        raise RecipeError(f"{source} has {len(text):,} letters; at most {MOST_LETTERS:,} are read")
    try:
        _refuse_growth(text, source)
        return yaml.load(text, _Yaml)
    except yaml.YAMLError as error:
        raise RecipeError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    # 2021-99-99 looks like a date, and a tag may not fit its value
    except (ValueError, OverflowError, AttributeError, LookupError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"{source} has a value that YAML cannot read: {error}") from None


def _refuse_growth(text: str, source: str) -> None:
    """A few lists of aliases of lists of aliases would be gigabytes."""
    depth = 0
    for event in yaml.parse(text, _Yaml):
        line = f"{source}, line {event.start_mark.line + 1 if event.start_mark else '?'}"
        if isinstance(event, yaml.AliasEvent):
            raise RecipeError(
                f"{line}: aliases (*{event.anchor}) are not supported; write the value again"
            )
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise RecipeError(f"{line}: more than {DEEPEST} lists or mappings in each other")


def _override(values: dict[str, Any], override: str) -> None:
    """Apply ``optimizer.lr=0.01`` to the nested mapping."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise RecipeError(
            f"override {override!r} should look like field=value, e.g. optimizer.lr=0.01"
        )
    *parents, field = path.split(".")
    target = values
    for parent in parents:
        if isinstance(target.get(parent), str):  # method: dorefa -> method: {name: dorefa}
            target[parent] = {"name": target[parent]}
        target = target.setdefault(parent, {})
        if not isinstance(target, dict):
            raise RecipeError(f"override {override!r}: {parent!r} has no fields of its own")
    target[field] = _value(override, text)


def _value(override: str, text: str) -> Any:
    if re.fullmatch(r"0\d+", text):  # method.inputs=01 is a name; YAML reads an octal number
        return text
    return _values(text, f"override {override!r}")


def _explain(source: str, error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"]) or "together"
        if problem["type"] == "extra_forbidden":
            lines.append(f"{field}: unknown field.{_nearest_field(problem['loc'])}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            whole = isinstance(problem["input"], dict)  # too long to show, or not there at all
            given = "" if whole else f" (got {problem['input']!r})"
            lines.append(f"{field}: {message}{given}")
    return f"recipe {source}: " + "; ".join(lines)


def _nearest_field(location: tuple[int | str, ...]) -> str:
    part: Any = Recipe
    for step in location[:-1]:
        part = part.model_fields[str(step)].annotation
        part = next((p for p in typing.get_args(part) if p is not type(None)), part)  # X | None
    fields = list(getattr(part, "model_fields", {}))
    near = difflib.get_close_matches(str(location[-1]), fields, n=1, cutoff=0.4)
    return f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(fields)}."
