"""Binarization methods, one paper per file.

base.py       what a method is
registry.py   methods by name; the modules in this folder register themselves
pieces.py     parts that several methods share
others        one method per file, and what LNS consists of

A method of your own imports what it needs from here: ``from unflip.methods import Method, WeightBinarizer, register``.
"""

import importlib
import pkgutil
from types import ModuleType

from unflip.methods.base import (
    BinaryWeight,
    FloatInput,
    InputBinarizer,
    InputCode,
    Method,
    ParameterGroup,
    Preparation,
    WeightBinarizer,
)
from unflip.methods.pieces import (
    ApproxSign,
    Carry,
    ClippedFilterMeanSign,
    ClippedSign,
    FilterMeanSign,
    LayerMeanSign,
    PlainSign,
    filter_mean,
    layer_mean,
    least_float,
    one_step_code,
    replace_prelus,
    sign_code,
)
from unflip.methods.registry import config_class, get, names, register, resolve

__all__ = [
    "ApproxSign",
    "BinaryWeight",
    "Carry",
    "ClippedFilterMeanSign",
    "ClippedSign",
    "FilterMeanSign",
    "FloatInput",
    "InputBinarizer",
    "InputCode",
    "LayerMeanSign",
    "Method",
    "ParameterGroup",
    "PlainSign",
    "Preparation",
    "WeightBinarizer",
    "config_class",
    "filter_mean",
    "get",
    "layer_mean",
    "least_float",
    "names",
    "one_step_code",
    "register",
    "replace_prelus",
    "resolve",
    "sign_code",
]


def __getattr__(name: str) -> ModuleType:
    """``unflip.methods.lns`` imports that module."""
    if name in {module.name for module in pkgutil.iter_modules(__path__)}:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
