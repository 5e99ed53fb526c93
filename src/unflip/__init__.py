"""unflip: train, correct and deploy 1-bit neural networks in PyTorch.

Names are imported when they are first used: ``unflip.load`` runs a packed network where torch is not installed.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unflip import methods
    from unflip.binarize import binarize, flip_rate, flips_by_layer, load_twin, signs, summary
    from unflip.cost import cost
    from unflip.freeze import freeze
    from unflip.layers import (
        BinaryConv2d,
        BinaryLinear,
        after_step,
        auxiliary_loss,
        auxiliary_losses,
        before_step,
        start_epoch,
    )
    from unflip.packing import pack
    from unflip.runs.load import load_run
    from unflip.runtime import Model, load

__version__ = "0.1.0"

__all__ = [
    "BinaryConv2d",
    "BinaryLinear",
    "Model",
    "after_step",
    "auxiliary_loss",
    "auxiliary_losses",
    "before_step",
    "binarize",
    "cost",
    "flip_rate",
    "flips_by_layer",
    "freeze",
    "load",
    "load_run",
    "load_twin",
    "methods",
    "pack",
    "signs",
    "start_epoch",
    "summary",
]

_HOMES = {
    "unflip.binarize": ("binarize", "flip_rate", "flips_by_layer", "load_twin", "signs", "summary"),
    "unflip.cost": ("cost",),
    "unflip.freeze": ("freeze",),
    "unflip.layers": (
        "BinaryConv2d",
        "BinaryLinear",
        "after_step",
        "auxiliary_loss",
        "auxiliary_losses",
        "before_step",
        "start_epoch",
    ),
    "unflip.packing": ("pack",),
    "unflip.runs.load": ("load_run",),
    "unflip.runtime": ("Model", "load"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "methods":
        return _import("unflip.methods", name)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'unflip' has no attribute {name!r}")
    value = getattr(_import(_HOME_OF[name], name), name)
    globals()[name] = value
    return value


def _import(module: str, name: str) -> ModuleType:
    """The module that has ``name``. If it needs a package that is missing, the error says what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        from unflip.hints import EXTRAS, NotInstalled

        if error.name not in EXTRAS:
            raise
        raise NotInstalled(f"unflip.{name}", error.name) from None


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


class _Package(ModuleType):
    """``unflip.cost`` is the function, whichever module was imported first.

    Importing the submodule ``unflip.cost`` would bind its name here to the module.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
