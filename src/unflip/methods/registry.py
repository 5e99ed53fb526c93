"""Methods by name. A module in this folder registers its method; it is imported at the first lookup."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from unflip.hints import known
from unflip.methods.base import Method
from unflip.uses import same_definition

M = TypeVar("M", bound=Method)

_REGISTRY: dict[str, type[Method]] = {}


@functools.cache
def load_shipped() -> None:
    """Import every module in this folder, so that its methods are registered.

    Not when the package is imported: ``layers`` needs the classes in ``base.py``, and some methods need ``layers``.
    """
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")


def register(name: str) -> Callable[[type[M]], type[M]]:
    """Class decorator: make a method known by ``name`` to recipes, ``binarize`` and the command line."""

    def add(cls: type[M]) -> type[M]:
        if not cls.__module__.startswith(f"{__package__}."):
            load_shipped()  # so that the second of two methods with one name is always the new one
        earlier = _REGISTRY.get(name)
        if earlier is not None and not same_definition(earlier, cls):
            raise ValueError(
                f"method {name!r} is already registered by {earlier!r}: register {cls.__qualname__} under another name"
            )
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return add


def names() -> list[str]:
    """The names of all methods."""
    load_shipped()
    return sorted(_REGISTRY)


def config_class(name: str) -> type[Method]:
    """The config class registered as ``name``."""
    return _REGISTRY[known(name, names(), "method")]


def get(name: str, **options: Any) -> Method:
    """The method ``name`` with ``options``; raises ValueError for an unknown name or option."""
    cls = config_class(name)
    fields = [f.name for f in dataclasses.fields(cls)]
    for option in options:
        known(option, fields, f"option of method {name!r}")
    return cls(**options)


def resolve(method: str | Mapping[str, Any] | Method) -> Method:
    """A method from its name, or from a mapping with ``name`` and options; a Method is returned unchanged."""
    if isinstance(method, Method):
        return method
    if isinstance(method, str):
        return get(method)
    if isinstance(method, Mapping) and isinstance(method.get("name"), str):
        return get(**method)
    raise TypeError(
        f"method={method!r} should be a name ({', '.join(names())}), "
        "a mapping with 'name' and options, or a Method"
    )
