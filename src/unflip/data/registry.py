"""The data sets that recipes and commands know by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from unflip.data.dataset import Dataset
from unflip.hints import known
from unflip.uses import same_definition

# Module and loader of each data set of ours, imported when first asked for: importing unflip.data stays cheap.
SHIPPED = {
    "cifar10": ("unflip.data.cifar", "load_cifar10"),
    "digits": ("unflip.data.digits", "load_digits"),
    "folder": ("unflip.data.folders", "load_folder"),
    "images": ("unflip.data.images", "load_images"),
}
RESERVED = ("name", "validation")  # fields of a recipe's data that no option can have

Loader = TypeVar("Loader", bound=Callable[..., Dataset])

_REGISTRY: dict[str, Callable[..., Dataset]] = {}


def register_data(name: str) -> Callable[[Loader], Loader]:
    """Decorator: make a loader known by ``name`` to recipes, :func:`load` and the CLI.

    A loader is a function ``load(folder, size=None, ...)``: the folder of the images (a Path, or None where the user
    gave none), then options with defaults, which a recipe sets as ``data.size`` and so on.
    """

    def add(loader: Loader) -> Loader:
        there = _loader(name) if name in names() else None
        if there is not None and not same_definition(there, loader):
            raise ValueError(
                f"data set {name!r} is already registered by {there!r}: choose another name"
            )
        _check_signature(name, loader)
        _REGISTRY[name] = loader
        return loader

    return add


def names() -> list[str]:
    """The known data sets."""
    return sorted({*SHIPPED, *_REGISTRY})


def load(name: str, folder: Path | None = None, **options: Any) -> Dataset:
    """Load the data set ``name`` from ``folder``; unknown names and options are refused by name."""
    for option in options:
        known(option, option_names(name), f"option of data set {name!r}")
    return _loader(name)(folder, **options)


def option_names(name: str) -> list[str]:
    """The options of the data set ``name``."""
    return list(inspect.signature(_loader(name)).parameters)[1:]


def in_words(data: Mapping[str, Any]) -> str:
    """A recipe's data for a message: folder (size=32) with 100 images held out."""
    options = [f"{option}={value}" for option, value in data.items() if option not in RESERVED]
    which = f"{data['name']} ({', '.join(options)})" if options else data["name"]
    return f"{which} with {data.get('validation', 0):,} images held out"


def _loader(name: str) -> Callable[..., Dataset]:
    known(name, names(), "data set")
    if name in _REGISTRY:
        return _REGISTRY[name]
    module, function = SHIPPED[name]
    loader: Callable[..., Dataset] = getattr(importlib.import_module(module), function)
    return loader


def _check_signature(name: str, loader: Callable[..., Dataset]) -> None:
    parameters = list(inspect.signature(loader).parameters.values())
    wanted = f"data set {name!r}: its loader {loader.__qualname__}"
    if not parameters or parameters[0].name != "folder":
        raise ValueError(f"{wanted} must take folder first: def {loader.__name__}(folder, ...)")
    for option in parameters[1:]:
        if option.name in RESERVED:
            raise ValueError(
                f"{wanted} has an option {option.name!r}, which means something else in a recipe's data: rename it"
            )
        if option.default is inspect.Parameter.empty:
            raise ValueError(
                f"{wanted} has an option {str(option)!r} without a default: give it a name and a default"
            )
