"""Training: recipes, the loop, checkpoints, and several seeds, GPUs or machines at once."""

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
