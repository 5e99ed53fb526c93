"""The network of a recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unflip import models
from unflip.data.spec import InputSpec
from unflip.ends import quantize_ends, quantize_shortcuts
from unflip.recipes.schema import Recipe

MOST_WEIGHTS = 2**30


def build_model(recipe: Recipe, inputs: InputSpec, seed: int) -> nn.Module:
    """The recipe's network for these inputs; the same seed gives the same weights on any device."""
    options = {**recipe.model.options, **_decided_by_images(recipe, inputs)}
    _check_size(recipe, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = models.create(recipe.model.name, recipe.method, **options)
    if recipe.ends == "int8":
        quantize_ends(model, {"mean": inputs.mean, "std": inputs.std})
    if recipe.shortcuts == "int8":
        quantize_shortcuts(model)
    return model


def _decided_by_images(recipe: Recipe, inputs: InputSpec) -> dict[str, int]:
    """Options of the network that follow from the images. A recipe that contradicts them would fail far from here."""
    channels, height, width = inputs.shape
    decided = {"in_channels": channels, "num_classes": len(inputs.classes), "image_size": height}
    known = models.all_options(recipe.model.name, {})
    decided = {name: value for name, value in decided.items() if name in known}
    for name, value in decided.items():
        given = recipe.model.options.get(name, value)
        if given != value:
            raise ValueError(
                f"recipe {recipe.name} has model.{name}={given}, but {recipe.data.name} has {len(inputs.classes)} "
                f"classes and images of {channels}×{height}×{width}: leave it out, or give {value}"
            )
    if "image_size" in decided and height != width:
        raise ValueError(
            f"recipe {recipe.name}: {recipe.model.name} takes square images, and those of {recipe.data.name} are "
            f"{height}×{width}"
        )
    return decided


def _check_size(recipe: Recipe, options: dict[str, Any]) -> None:
    """Count the weights of the float network on the meta device, which allocates nothing. A custom network is code that
    the user chose, and it may not work on that device."""
    name = recipe.model.name
    if not models.builder(name).__module__.startswith("unflip.models."):
        return
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            weights = sum(p.numel() for p in models.create(name, **options).parameters())
    except (RuntimeError, TypeError, OverflowError):  # a size that does not fit into 64 bits
        weights = 2**63
    if weights > MOST_WEIGHTS:
        sizes = ", ".join(f"{option}={value!r:.80}" for option, value in options.items())
        raise ValueError(
            f"recipe {recipe.name}: the model {name} with {sizes} has {weights:,} weights or more; at most "
            f"{MOST_WEIGHTS:,} are supported. Choose smaller sizes"
        )
