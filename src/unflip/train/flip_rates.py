"""Branches of a trained network, for the estimate of its flip rates (``methods/flip_rates.py``)."""

from __future__ import annotations

import copy

import torch
from torch import nn

from unflip.data import ImageSet
from unflip.data.source import Images, mix
from unflip.methods.flip_rates import FlipRates, compare_branches
from unflip.train.engine import Engine
from unflip.train.learner import Learner
from unflip.train.recipe import Recipe, Schedule


def flip_rates(
    baseline: nn.Module,
    recipe: Recipe,
    data: ImageSet,
    *,
    branches: int = 3,
    epochs: int = 2,
    rate: float = 0.1,
    bins: int = 8,
    seed: int = 0,
    device: str | None = None,
    eager: bool = False,
) -> FlipRates:
    """Train ``branches`` copies of ``baseline`` for ``epochs`` with other orders of the data, and compare their signs.

    ``recipe`` is the one the baseline was trained with; branches train at ``rate`` times its learning rates, constant.
    The baseline is left as it is.
    """
    if recipe.distill is not None:
        raise ValueError(
            f"recipe {recipe.name} has a teacher: its branches would have to learn from it too, which is not supported"
        )
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    short = recipe.model_copy(update={"epochs": epochs, "schedule": Schedule()})
    images = Images(data, found)
    learners = [
        Learner(short, copy.deepcopy(baseline).train(), images, found) for _ in range(branches)
    ]
    engine = Engine(learners, compiled=not eager, captured=not eager)
    for epoch in range(epochs):
        for branch, learner in enumerate(learners):
            learner.start_epoch(mix(seed, branch), epoch, rate)
        for _ in range(learners[0].steps):
            engine.step()
    return compare_branches(baseline, [learner.model for learner in learners], bins)
