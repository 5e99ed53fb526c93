"""Custom methods, networks and data sets: a recipe's ``uses`` names the Python modules that register them."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from unflip.hints import Foreseen


class ModuleMissing(Foreseen, ImportError):
    """A module that does not exist. Not a ValueError: pydantic would continue, and report every name it registers."""


class CodeRefused(Foreseen, ImportError):
    """Reading a run would execute the code of a module that nobody named. Not a ValueError, as above."""


def use(name: str) -> ModuleType:
    """Import a module; its ``@register``, ``@register_model`` and ``@register_data`` make known what is in it.

    Python looks for it in its search path, and then in the current folder: the ``unflip`` command, unlike
    ``python -m unflip``, does not look there by default.
    """
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) or name.endswith(".py"):
        stem = Path(name).stem
        raise ModuleMissing(
            f"uses: {name!r} is not a module's name, as in 'import NAME'; for {stem}.py write {stem!r}"
        )
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that no file here hides an installed module
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists; something it imports is missing
        raise ModuleMissing(
            f"uses: module {name!r} was not found in {here} or in Python's search path (PYTHONPATH)"
        ) from None
    except (ValueError, TypeError) as error:  # one line would not show where
        raise ImportError(f"module {name!r} fails when it is imported: {error}") from error


def use_all(names: Iterable[str] | None) -> None:
    """The modules of the option ``--uses``."""
    for name in names or ():
        use(name)


def refuse_code(names: Iterable[str], run: str) -> None:
    """Refuse modules that are not imported yet: anyone can write their names into a run, and importing one executes
    its code."""
    new = [name for name in names if name not in sys.modules]
    if new:
        options = " ".join(f"--uses {name}" for name in new)
        raise CodeRefused(
            f"{run} has a recipe that uses {', '.join(new)}: reading the run would execute that code. If you trust it, "
            f"add {options}; in Python, first import {', '.join(new)}"
        )


def code_hash(name: str) -> str | None:
    """SHA-256 of the module's file; None if it has none."""
    path = getattr(use(name), "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None


def same_definition(old: Any, new: Any) -> bool:
    """Whether ``new`` is ``old`` defined again: a notebook cell that is run twice, or a module that is reloaded."""
    names = [(one.__module__, one.__qualname__) for one in (old, new)]
    return old is not new and names[0] == names[1]
