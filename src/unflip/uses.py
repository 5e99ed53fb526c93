"""Custom methods, networks and data sets: a recipe's ``uses`` names the Python modules that register them."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class ModuleMissing(ImportError):
    """A module that is not there. No ValueError: pydantic would go on, and complain of every name it makes known."""


def use(name: str) -> ModuleType:
    """Import a module; its ``@register``, ``@register_model`` and ``@register_data`` make known what is in it.

    It is looked for where Python looks, and in the folder that the command is given in: the ``unflip`` command, unlike
    ``python -m unflip``, does not look there by itself.
    """
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) or name.endswith(".py"):
        stem = Path(name).stem
        raise ModuleMissing(
            f"uses {name!r}, which should be a module's name as in 'import NAME': {stem!r} for {stem}.py"
        )
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last: no file here hides an installed module
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks something itself
        raise ModuleMissing(
            f"uses {name!r}, and there is no such module in {here} or where Python looks (PYTHONPATH)"
        ) from None
    except (ValueError, TypeError) as error:  # one line would not show where
        raise ImportError(f"module {name!r} fails when it is imported: {error}") from error


def same_definition(old: Any, new: Any) -> bool:
    """Whether ``new`` is ``old`` defined again: a notebook cell that is run twice, or a module that is reloaded."""
    names = [(one.__module__, one.__qualname__) for one in (old, new)]
    return old is not new and names[0] == names[1]
