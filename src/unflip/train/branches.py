"""Branches of a trained network: copies that are trained further with other orders of the data."""

from __future__ import annotations

import copy

import torch
from torch import nn

from unflip.data import ImageSet
from unflip.data.source import Images, mix
from unflip.train.engine import Engine
from unflip.train.learner import Learner
from unflip.train.recipe import Recipe, Schedule


def train_branches(
    baseline: nn.Module,
    recipe: Recipe,
    data: ImageSet,
    count: int,
    epochs: int,
    rate: float,
    *,
    seed: int,
    device: torch.device,
    eager: bool = False,
) -> list[nn.Module]:
    """Train ``count`` copies of ``baseline`` for ``epochs``, each with another order of the data.

    ``recipe`` is the one the baseline was trained with. Branches train at ``rate`` times its learning rates, without
    a schedule. The baseline does not change.
    """
    if recipe.distill is not None:
        raise ValueError(
            f"recipe {recipe.name} has a teacher; branches of a run with a teacher are not supported. "
            "Start from a run without distill"
        )
    short = recipe.model_copy(update={"epochs": epochs, "schedule": Schedule()})
    images = Images(data, device)
    learners = [
        Learner(short, copy.deepcopy(baseline).train(), images, device) for _ in range(count)
    ]
    engine = Engine(learners, compiled=not eager, captured=not eager)
    for epoch in range(epochs):
        for branch, learner in enumerate(learners):
            learner.start_epoch(mix(seed, branch), epoch, rate)
        for _ in range(learners[0].steps):
            engine.step()
    return [learner.model for learner in learners]
