"""GBCN: two generations against a loop over their definition; balance, elitism, resuming."""

from typing import Any

import pytest
import torch
from torch import Tensor

import unflip
from unflip import methods
from unflip.data import load as load_data
from unflip.layers import BinaryConv2d, BinaryLayer, BinaryLinear
from unflip.methods.gbcn import GBCN, GRADIENT_SHARE, GeneticSign
from unflip.recipes import Recipe
from unflip.recipes.build import build_model
from unflip.train.learner import Learner


def genetic(layer: BinaryLayer) -> GeneticSign:
    assert isinstance(layer.weight_binarizer, GeneticSign)
    return layer.weight_binarizer


def a_step(layer: BinaryLayer, grad: Tensor) -> None:
    layer.weight.grad = grad
    unflip.after_step(layer)


def plus_or_minus(x: Tensor) -> list[list[float]]:
    return torch.where(x >= 0, 1.0, -1.0).tolist()


def generation_by_loops(
    population: list[Any], weight: Tensor, gradient: Tensor, mutation: float, seed: int
) -> list[Any]:
    """The survivors, pattern by pattern and filter by filter; the champions come first."""
    generator = torch.Generator().manual_seed(seed)
    count, filters, n = len(population), len(weight), weight.shape[1]
    parents = torch.rand((2, count, filters), generator=generator).tolist()
    crossed = torch.rand((count, filters, n), generator=generator).tolist()
    mutated = torch.rand((count, filters, n), generator=generator).tolist()
    ties = torch.rand((2 * count, filters, n), generator=generator).tolist()
    learned = plus_or_minus(weight)
    worth = weight / weight.abs().mean() - gradient / gradient.abs().mean().clamp_min(1e-37)
    survivors: list[Any] = [[None] * filters for _ in range(count)]
    for f in range(filters):
        pool = [population[p][f] for p in range(count)]
        for c in range(count):
            first, second = (pool[int(parents[i][c][f] * count)] for i in (0, 1))
            child = [first[i] if crossed[c][f][i] < 0.5 else second[i] for i in range(n)]
            pool.append([-s if mutated[c][f][i] < mutation else s for i, s in enumerate(child)])
        wanted = learned[f].count(1.0)
        for p, pattern in enumerate(pool):
            order = sorted(range(n), key=lambda i: -(pattern[i] + ties[p][f][i]))
            pool[p] = [1.0 if i in order[:wanted] else -1.0 for i in range(n)]
        pool.insert(0, learned[f])
        fitness = [sum(s * w for s, w in zip(p, worth[f].tolist(), strict=True)) for p in pool]
        best = sorted(range(len(pool)), key=lambda p: -fitness[p])[:count]
        for rank, p in enumerate(best):
            survivors[rank][f] = pool[p]
    return survivors


def test_two_generations() -> None:
    config = GBCN(population=4, mutation=0.4, seed=3)
    layer = BinaryLinear(7, 5, bias=False, method=config)
    binarizer, gradient = genetic(layer), torch.zeros(5, 7)
    population: list[Any] = []
    flipped = 0
    for epoch in (1, 2):
        grad = torch.randn(5, 7)
        a_step(layer, grad)
        gradient = gradient + GRADIENT_SHARE * (grad - gradient)
        weight = layer.weight.detach().clone()
        population = population or [plus_or_minus(weight) for _ in range(4)]
        seed = (3 << 48) ^ (epoch << 32)  # a layer without a name
        population = generation_by_loops(population, weight, gradient, 0.4 * (1 - epoch / 10), seed)
        unflip.start_epoch(layer, epoch, 10)
        assert binarizer.population.tolist() == population
        champions = torch.tensor(population[0])
        assert torch.equal(layer.code().signs[0], champions)
        assert torch.equal(layer.code().scales[0], weight.abs().mean(1, keepdim=True))
        flipped += int((champions != torch.where(weight >= 0, 1.0, -1.0)).sum())
        with torch.no_grad():  # the next step writes the champion into the weights
            layer.weight.grad = None
            unflip.after_step(layer)
            assert torch.equal(layer.weight, weight.abs() * champions)
            assert (binarizer.flips == 1).all()
            assert torch.equal(layer.code().signs[0], champions)
            layer.weight.add_(0.05 * torch.randn(5, 7))
    assert flipped > 0


def test_a_generation_is_balanced_and_no_step_back() -> None:
    layer = BinaryConv2d(6, 8, 3, method=GBCN(population=6, mutation=0.1))
    a_step(layer, 0.1 * torch.randn(layer.weight.shape))
    learned = layer.code().signs[0].flatten(1)
    unflip.start_epoch(layer, 1, 5)
    binarizer, champion = genetic(layer), layer.code().signs[0].flatten(1)
    assert 0 < (champion != learned).float().mean() < 0.2
    counts = (learned > 0).sum(1)
    assert ((binarizer.population > 0).sum(2) == counts).all(), "as many +1 as there were"
    w, g = layer.weight.detach().flatten(1), binarizer.gradient.flatten(1)
    worth = w / w.abs().mean() - g / g.abs().mean()
    gain = ((champion - learned) * worth).sum(1)
    assert (gain >= 0).all(), "sign(W) takes part, so its fitness is never lost"
    assert gain.max() > 0
    assert torch.equal(unflip.freeze(layer)(x := torch.randn(2, 6, 5, 5)), layer.eval()(x))


def test_the_gradient_follows_a_flipped_sign() -> None:
    layer = BinaryLinear(3, 1, bias=False, method="gbcn")
    layer.weight.data = torch.tensor([[0.5, -0.5, 2.0]])
    genetic(layer).flips.copy_(torch.tensor([[-1, 1, -1]]))
    assert layer.binary_weight().tolist() == [[-1, -1, -1]]
    upstream = torch.tensor([[0.3, 0.4, 0.5]])
    (grad,) = torch.autograd.grad(layer.binary_weight(), layer.weight, upstream)
    torch.testing.assert_close(grad, torch.tensor([[-0.3, 0.4, 0.0]]))
    a_step(layer, grad)
    # ḡ is of the binary weights, whichever way the latent ones point
    expected = GRADIENT_SHARE * torch.tensor([[0.3, 0.4, 0.0]])
    torch.testing.assert_close(genetic(layer).gradient, expected)
    assert layer.weight.tolist() == [[-0.5, -0.5, -2.0]]


def test_without_pressure_the_learned_signs_win() -> None:
    layer = BinaryLinear(12, 4, method=GBCN(pressure=0.0, mutation=0.5))
    a_step(layer, torch.randn(4, 12))
    unflip.start_epoch(layer, 1, 2)
    assert (genetic(layer).flips == 1).all()


def test_no_generation_before_the_first_epoch_and_one_an_epoch() -> None:
    layer = BinaryLinear(30, 10, method=GBCN(mutation=0.3))
    a_step(layer, torch.randn(10, 30))
    unflip.start_epoch(layer, 0, 4)
    assert (genetic(layer).flips == 1).all()
    unflip.start_epoch(layer, 1, 4)
    flips, population = genetic(layer).flips.clone(), genetic(layer).population.clone()
    assert (flips == -1).any()
    unflip.start_epoch(layer, 1, 4)  # an epoch that is resumed
    assert torch.equal(genetic(layer).flips, flips)
    assert torch.equal(genetic(layer).population, population)


def test_other_weights_begin_anew() -> None:
    layer = BinaryLinear(30, 10, method=GBCN(mutation=0.3))
    fresh = {k: v.clone() for k, v in layer.weight_binarizer.state_dict().items()}
    a_step(layer, torch.randn(10, 30))
    unflip.start_epoch(layer, 1, 4)
    unflip.load_twin(layer, {"weight": torch.randn(10, 30), "bias": torch.zeros(10)})
    state = layer.weight_binarizer.state_dict()
    assert all(torch.equal(state[k], v) for k, v in fresh.items())


def recipe() -> Recipe:
    return Recipe.model_validate(
        {
            "name": "test",
            "data": {"name": "digits"},
            "model": {"name": "resnet20", "width": 4},
            "method": {"name": "gbcn", "mutation": 0.05, "population": 3},
            "epochs": 4,
            "batch_size": 256,
            "optimizer": {"lr": 0.1},
        }
    )


def learner() -> Learner:
    data, device = load_data("digits", None), torch.device("cpu")
    return Learner(recipe(), build_model(recipe(), data.spec, seed=0), data.source(device), device)


@pytest.mark.parametrize("at", [(1, 0), (1, 2)], ids=str)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(at: tuple[int, int]) -> None:
    def run(learner: Learner, start: tuple[int, int], stop: tuple[int, int]) -> None:
        epoch, step = start
        while (epoch, step) < stop:
            learner.start_epoch(0, epoch, 1.0)
            learner.position.fill_(step)
            last = stop[1] if epoch == stop[0] else learner.steps
            while step < last:
                learner.step()
                step += 1
            epoch, step = epoch + 1, 0

    whole, first, second = learner(), learner(), learner()
    assert whole.steps == 5
    run(whole, (0, 0), (3, 1))
    run(first, (0, 0), at)
    second.restore(first.snapshot())
    run(second, at, (3, 1))
    expected = whole.model.state_dict()
    assert (expected["layer1.0.conv1.weight_binarizer.bred"]) == 4
    for name, tensor in second.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_options_are_checked_and_lns_refuses() -> None:
    for options, words in (
        ({"population": 1}, "gbcn: population=1 should be from 2 to 1000"),
        ({"population": 10**9}, "gbcn: population=1000000000 should be from 2 to 1000"),
        ({"mutation": 1.5}, "gbcn: mutation=1.5 should be a probability"),
        ({"pressure": -1.0}, "gbcn: pressure=-1.0 should be >= 0"),
        ({"seed": -1}, "gbcn: seed=-1 should be from 0"),
    ):
        with pytest.raises(ValueError, match=words):
            methods.get("gbcn", **options)
    with pytest.raises(ValueError, match="lns: base='gbcn' does not work: its genetic algorithm"):
        methods.get("lns", base="gbcn")
