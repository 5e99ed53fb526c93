"""Memory and FLOPs of an arm's network, for the tables that show them."""

from __future__ import annotations

import torch

from unflip.cost import Cost, cost
from unflip.data.spec import InputSpec
from unflip.recipes.build import build_model
from unflip.recipes.schema import Recipe


def count(recipe: Recipe, inputs: InputSpec) -> Cost:
    """The cost of a recipe's network for one image."""
    with torch.device("meta"):  # only shapes matter
        return cost(build_model(recipe, inputs, seed=0), torch.empty(1, *inputs.shape))
