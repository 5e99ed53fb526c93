"""Training: recipes, the loop, checkpoints, and several seeds, GPUs or machines at once."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unflip.train.loop import Job, TrainingStopped, train, train_together
    from unflip.train.recipe import Recipe, RecipeError, load_recipe, recipe_names

__all__ = [
    "Job",
    "Recipe",
    "RecipeError",
    "TrainingStopped",
    "load_recipe",
    "recipe_names",
    "train",
    "train_together",
]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: reading a recipe does not need torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "recipe" if "ecipe" in name else "loop"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
