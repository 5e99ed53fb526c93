"""Bop: three steps by hand, weights of ±1, γ on the recipe's schedule, its state in checkpoints."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.data import load as load_data
from unflip.layers import BinaryLinear, binary_layers
from unflip.methods.bop import Bop
from unflip.recipes import Recipe
from unflip.recipes.build import build_model
from unflip.train.learner import Learner


def step(optimizer: Bop, weight: nn.Parameter, grad: list[float]) -> Tensor:
    weight.grad = torch.tensor(grad)
    optimizer.step()
    return weight.detach()


def test_three_steps_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([0.3, -0.2, 5.0, -1.0]))
    optimizer = Bop([weight], lr=0.5, threshold=0.2)
    assert weight.tolist() == [1, -1, 1, -1]
    average = optimizer.state[weight]["average"]
    assert average.tolist() == [0, 0, 0, 0]

    #   m = [0.3, 0.3, -0.4, -0.1], w·m = [0.3, -0.3, -0.4, 0.1]: the first is above 0.2
    assert step(optimizer, weight, [0.6, 0.6, -0.8, -0.2]).tolist() == [-1, -1, 1, -1]
    torch.testing.assert_close(average, torch.tensor([0.3, 0.3, -0.4, -0.1]))
    #   m = [0.2, -0.3, -0.2, -0.3], w·m = [-0.2, 0.3, -0.2, 0.3]
    assert step(optimizer, weight, [0.1, -0.9, 0.0, -0.5]).tolist() == [-1, 1, 1, 1]
    torch.testing.assert_close(average, torch.tensor([0.2, -0.3, -0.2, -0.3]))
    #   m = [-0.25, 0.1, 0.205, 0.35], w·m = [0.25, 0.1, 0.205, 0.35]
    assert step(optimizer, weight, [-0.7, 0.5, 0.61, 1.0]).tolist() == [1, 1, -1, -1]


@pytest.mark.parametrize(("grad", "after"), [(0.25, 1), (0.2500001, -1), (-9.0, 1)])
def test_a_weight_flips_only_above_the_threshold_and_along_its_sign(
    grad: float, after: float
) -> None:
    weight = nn.Parameter(torch.ones(1))
    assert step(Bop([weight], lr=1.0, threshold=0.25), weight, [grad]).item() == after


def test_weights_without_a_gradient_stay() -> None:
    weight = nn.Parameter(torch.ones(3))
    Bop([weight]).step()
    assert weight.tolist() == [1, 1, 1]
    assert Bop([weight]).step(lambda: 7) == 7


def test_loaded_weights_count_as_their_signs() -> None:
    layer = BinaryLinear(4, 2, method="bop")
    optimizer = methods.get("bop").latent_optimizer([layer.weight])
    assert isinstance(optimizer, Bop)
    assert (layer.weight.abs() == 1).all()
    with torch.no_grad():
        layer.weight.uniform_(-0.5, 0.5)
    bits = layer.code().signs[0]
    assert torch.equal(layer.binary_weight(), bits), "no scale"
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    assert torch.equal(layer.weight, bits)


def test_defaults_are_the_papers_and_options_are_checked() -> None:
    optimizer = methods.get("bop").latent_optimizer([nn.Parameter(torch.ones(1))])
    assert optimizer is not None
    [group] = optimizer.param_groups
    assert (group["lr"], group["peak_lr"], group["threshold"]) == (1e-4, 1e-4, 1e-8)
    for options, words in (
        ({"gamma": 0.0}, "bop: gamma=0.0 should be a rate"),
        ({"gamma": 1.5}, "bop: gamma=1.5"),
        ({"threshold": -1.0}, "bop: threshold=-1.0 should be >= 0"),
    ):
        with pytest.raises(ValueError, match=words):
            methods.get("bop", **options)


def test_lns_has_nothing_to_look_at() -> None:
    with pytest.raises(ValueError, match="lns: base='bop' does not work: it has no latent weights"):
        methods.get("lns", base="bop")


def test_an_ordinary_optimizer_for_its_weights_is_noticed_once() -> None:
    layer = BinaryLinear(6, 4, method="bop")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            layer(torch.randn(2, 6)).sum().backward()
            optimizer.step()
            unflip.after_step(layer)
    [warned] = caught
    assert "latent_optimizer" in str(warned.message)


def recipe(**fields: Any) -> Recipe:
    values: dict[str, Any] = {
        "name": "test",
        "data": {"name": "digits"},
        "model": {"name": "resnet20", "width": 4},
        "method": {"name": "bop", "gamma": 1e-3, "threshold": 1e-6},
        "epochs": 2,
        "batch_size": 64,
        "optimizer": {"name": "adam", "lr": 0.01},
        "schedule": {"name": "step", "every": 1},
    }
    return Recipe.model_validate(values | fields)


def learner() -> Learner:
    data, device = load_data("digits", None), torch.device("cpu")
    return Learner(recipe(), build_model(recipe(), data.spec, seed=0), data.source(device), device)


def test_training_flips_signs_and_resumes() -> None:
    one, other = learner(), learner()
    recipe_optimizer, bop = one.optimizers
    assert isinstance(recipe_optimizer, torch.optim.Adam)
    assert isinstance(bop, Bop)
    weights = {id(layer.weight) for _, layer in binary_layers(one.model)}
    assert {id(p) for g in bop.param_groups for p in g["params"]} == weights
    assert not weights & {id(p) for g in recipe_optimizer.param_groups for p in g["params"]}

    one.start_epoch(0, 0, 1.0)
    before = unflip.signs(one.model)
    for _ in range(5):
        one.step()
    assert 0 < unflip.flip_rate(before, one.model) < 0.5
    assert all((layer.weight.abs() == 1).all() for _, layer in binary_layers(one.model))
    state = one.snapshot()
    assert "optimizer.layer1.0.conv1.weight.average" in state

    other.restore(state)
    other.start_epoch(0, 0, 1.0)
    other.position.fill_(5)
    for run in (one, other):
        for _ in range(5):
            run.step()
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name
    one.start_epoch(0, 1, 0.1)
    assert bop.param_groups[0]["lr"] == pytest.approx(1e-4), "γ follows the schedule"
