"""Recipes: one experiment each, as a YAML file. None of this imports torch until a recipe is checked.

schema.py     the fields of a recipe and their checks
load.py       the shipped recipes by name, files by path, overrides, and the recipe that another one needs
command.py    the command that repeats a run, and a recipe as YAML
build.py      the network of a recipe (needs torch)
*.yaml        the shipped recipes
"""

from unflip.recipes.load import RecipeError, load_recipe, recipe_names
from unflip.recipes.schema import Recipe

__all__ = ["Recipe", "RecipeError", "load_recipe", "recipe_names"]
