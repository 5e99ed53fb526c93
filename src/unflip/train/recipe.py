"""A recipe: one experiment as a YAML file, checked field by field."""

from __future__ import annotations

import difflib
import math
import re
import typing
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from unflip import methods, models
from unflip.data import KNOWN as KNOWN_DATA
from unflip.data import ImageSet
from unflip.hints import known
from unflip.runs.files import read_saved
from unflip.train.weights import ACCEPTED, HOW, OTHERS, is_weights
from unflip.uses import use


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names the field and what would be right."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Data(_Part):
    """Which images. ``validation`` holds that many training images out *as the test set*. ``size``, of a folder's
    images: the shorter side is resized to it and the centre cut out; without, all have one size."""

    name: str
    validation: Annotated[int, Field(ge=0)] = 0
    size: Count | None = None

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        return known(value, KNOWN_DATA, "data set")

    def of(self, images: ImageSet) -> ImageSet:
        """The images as a run sees them."""
        return images.split(self.validation) if self.validation else images

    def __str__(self) -> str:
        size = "" if self.size is None else f" of size {self.size}"
        return f"{self.name}{size} with {self.validation:,} images held out"

    @model_validator(mode="after")
    def _size_is_of_folders(self) -> Data:
        if self.size is not None and self.name != "folder":
            raise ValueError(f"size is for the data set 'folder', and the name is {self.name!r}")
        return self

    @model_serializer(mode="wrap")
    def _without_no_size(self, values: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Recipes of other data sets are written as before there was a size."""
        return {k: v for k, v in values(self).items() if (k, v) != ("size", None)}


class Model(BaseModel):
    """A registered network and its options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        return known(value, models.names(), "model")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Optimizer(_Part):
    """``latent_lr`` is the rate of the latent weights of binary layers; ``lr`` if not given."""

    name: Literal["sgd", "adam"] = "sgd"
    lr: Positive
    latent_lr: Positive | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NotNegative = 0.0


class Schedule(_Part):
    """The factor on every learning rate in each epoch."""

    name: Literal["constant", "cosine", "step"] = "constant"
    every: Count | None = None
    at: tuple[Count, ...] = ()
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1

    @model_validator(mode="after")
    def _steps(self) -> Schedule:
        if self.name == "step" and bool(self.every) == bool(self.at):
            raise ValueError("schedule 'step' needs either every or at")
        if self.name != "step" and (self.every or self.at):
            raise ValueError(f"every and at are of schedule 'step', and the name is {self.name!r}")
        return self

    def factor_at(self, epoch: int, epochs: int) -> float:
        """For epoch 0 .. epochs - 1."""
        if self.name == "cosine":
            return 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        if self.name == "step":
            drops = epoch // self.every if self.every else sum(epoch >= at for at in self.at)
            return float(self.factor**drops)
        return 1.0


class Distill(_Part):
    """Learn from the answers of a finished run of the recipe ``teacher`` too; see ``train/teacher.py``."""

    teacher: str
    temperature: Positive = 2.0
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5


class Recipe(_Part):
    """One experiment. See ``docs/training.md`` for each field."""

    name: str
    about: str = ""
    uses: tuple[str, ...] = ()  # before the names that these modules make known
    data: Data
    model: Model
    method: str | dict[str, Any] = "float"
    start: str | None = None
    distill: Distill | None = None
    epochs: Count
    batch_size: Count = 128
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    precision: Literal["float16", "float32"] = "float16"
    sync_batchnorm: bool = False
    allow_no_flips: bool = False

    @field_validator("name")
    @classmethod
    def _is_a_folder(cls, value: str) -> str:
        """Runs go to a folder of that name: one that leads elsewhere would take them out of --out."""
        if value in ("", ".", "..") or "/" in value:
            raise ValueError("should be a folder's name, for its runs: not empty, and without /")
        return value

    @field_validator("uses", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("uses")
    @classmethod
    def _import(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for module in value:
            use(module)
        return value

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """In another process, which has not read the recipe."""
        super().__setstate__(state)
        for module in self.uses:
            use(module)

    @model_serializer(mode="wrap")
    def _without_no_uses(self, values: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Recipes that use no code of one's own are written as before there was such a field."""
        return {k: v for k, v in values(self).items() if k != "uses" or v}

    @field_validator("start")
    @classmethod
    def _recipe_or_weights(cls, value: str | None) -> str | None:
        if value and Path(value).suffix in OTHERS:
            raise ValueError(f"should name a recipe, or {ACCEPTED}; {HOW}")
        return value

    @field_validator("method")
    @classmethod
    def _method(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        if value in ("float", {"name": "float"}):
            return "float"
        try:
            return methods.resolve(value).options()
        except TypeError as error:  # pydantic reports ValueErrors alone
            raise ValueError(f"{error} in {value}") from None

    @model_validator(mode="after")
    def _names_the_start_its_method_needs(self) -> Recipe:
        reason = None if self.method == "float" else methods.resolve(self.method).needs_start()
        if reason and self.start is None:
            raise ValueError(f"method {reason}, and the recipe names none: add start")
        return self

    def plain(self) -> dict[str, Any]:
        """The recipe as JSON values, every default filled in."""
        return self.model_dump(mode="json")


def recipe_names() -> list[str]:
    """The recipes that ship with unflip."""
    folder = resources.files("unflip") / "recipes"
    return sorted(Path(str(f)).stem for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_recipe(source: str | Path, overrides: list[str] | None = None) -> Recipe:
    """A shipped recipe by name or a YAML file by path, with ``field=value`` overrides applied."""
    values = _read(source)
    for override in overrides or []:
        _override(values, override)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(_explain(str(source), error)) from None


def named_in(
    source: str | Path, field: str, name: str, overrides: Sequence[str] | None = None
) -> str | Path:
    """What ``load_recipe`` takes for a recipe that another names in ``field``: a shipped one, or a YAML file beside the
    one that names it; or the path of a file of weights. Where an override names it, from where the command is given."""
    overridden = any(re.match(rf"{field}[=.]", override) for override in overrides or ())
    if not (_is_file(name) or is_weights(name)) or not _is_file(source) or overridden:
        return name
    path = Path(source).parent / name
    if _is_file(name) and not path.is_file():
        raise RecipeError(
            f"recipe {source}: {field} names {name!r}, but there is no file {path}; a path is taken from the folder of "
            "the recipe that names it"
        )
    return path


def run_name(named: str) -> str:
    """Where ``unflip train`` puts the run of a recipe that another names: a shipped one, or a YAML file."""
    return Path(named).name.removesuffix(".yaml").removesuffix(".yml")


def recipe_in(folder: Path) -> Recipe:
    """The recipe of the run in a folder."""
    return Recipe.model_validate(read_saved(folder / "recipe.json", "recipe")["recipe"])


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
    path = Path(source)
    if _is_file(source):
        if not path.is_file():
            raise RecipeError(f"there is no recipe file {path}")
        text, name = path.read_text(encoding="utf-8"), path.stem
    else:
        name = str(source)
        if name not in recipe_names():
            near = difflib.get_close_matches(name, recipe_names(), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise RecipeError(
                f"unknown recipe {name!r}.{hint} Shipped: {', '.join(recipe_names())}; "
                "or give the path of a .yaml file."
            )
        text = (resources.files("unflip") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    try:
        values = yaml.load(text, _Yaml)
    except yaml.YAMLError as error:
        raise RecipeError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise RecipeError(
            f"{source} should be a YAML mapping of fields, not {type(values).__name__}"
        )
    return {"name": name, **values}


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
    try:
        return yaml.load(text, _Yaml)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"override {override!r} is not YAML: {reason}") from None


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
