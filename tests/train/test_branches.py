"""Branches of a trained network: the same seeds give the same branches, and the network does not change."""

from typing import Any

import torch

import unflip
from unflip.data import ImageSet
from unflip.layers import binary_layers
from unflip.methods.flip_rates import FlipRates, compare_branches
from unflip.methods.lns import set_flip_rates
from unflip.recipes.build import build_model
from unflip.recipes.schema import Recipe
from unflip.train.learner import Learner
from unflip.train.start import train_branches


def recipe(**fields: Any) -> Recipe:
    values: dict[str, Any] = {
        "name": "test",
        "data": {"name": "digits"},
        "model": {"name": "resnet20", "width": 4},
        "method": {"name": "dorefa", "inputs": "pm1"},
        "epochs": 1,
        "batch_size": 128,
        "optimizer": {"lr": 0.1, "latent_lr": 1.0},
    }
    return Recipe.model_validate(values | fields)


def test_branches_of_a_trained_network(digits: ImageSet) -> None:
    device = torch.device("cpu")
    model = build_model(recipe(), digits.spec, seed=0)
    learner = Learner(recipe(), model, digits.source(device), device)
    learner.start_epoch(0, 0, 1.0)
    for _ in range(learner.steps):
        learner.step()
    baseline = {k: v.clone() for k, v in model.eval().state_dict().items()}

    def flip_rates(seed: int) -> FlipRates:
        branches = train_branches(
            model, recipe(), digits, count=3, epochs=1, rate=0.5, seed=seed, device=device
        )
        return compare_branches(model, branches, bins=4)

    rates = flip_rates(seed=0)
    assert not model.training
    assert all(torch.equal(v, baseline[k]) for k, v in model.state_dict().items()), "unchanged"
    assert list(rates.bins) == [name for name, _ in binary_layers(model)]
    assert all(len(found) == 4 for found in rates.bins.values())
    small = sum(found[0].disagreement for found in rates.bins.values())
    large = sum(found[-1].disagreement for found in rates.bins.values())
    assert small > 2 * large, "small weights flip more"
    assert 0 < rates.whole["layer3.0.conv1"].rho < 0.5
    assert flip_rates(seed=0) == rates, "the same seeds, the same branches"
    assert flip_rates(seed=1) != rates

    corrected = build_model(
        recipe(start="test", method={"name": "lns", "loss": "forward", "rates": "estimated"}),
        digits.spec,
        seed=0,
    )
    unflip.load_twin(corrected, model.state_dict())
    set_flip_rates(corrected, rates.for_weights(corrected))
    assert unflip.auxiliary_loss(corrected).isfinite()
