"""Memory and FLOPs of an arm's network, for the tables that show them."""

from __future__ import annotations

import functools

import torch

from unflip.cost import Cost, cost
from unflip.data.spec import InputSpec
from unflip.recipes.build import build_model
from unflip.recipes.schema import Recipe


def count(recipe: Recipe, inputs: InputSpec) -> Cost:
    """The cost of a recipe's network for one image."""
    return _count(recipe.model_dump_json(), inputs)


@functools.cache  # a study's table is written again whenever a run ends
def _count(recipe: str, inputs: InputSpec) -> Cost:
    with torch.device("meta"):  # only shapes matter
        model = build_model(Recipe.model_validate_json(recipe), inputs, seed=0)
        return cost(model, torch.empty(1, *inputs.shape))
