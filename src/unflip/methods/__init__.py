"""Binarization methods, one paper a file. Every module in this folder registers itself."""

import importlib
import pkgutil

from unflip.methods.base import (
    BinaryWeight,
    InputBinarizer,
    Method,
    WeightBinarizer,
    config_class,
    get,
    names,
    register,
    resolve,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "BinaryWeight",
    "InputBinarizer",
    "Method",
    "WeightBinarizer",
    "config_class",
    "get",
    "names",
    "register",
    "resolve",
]
