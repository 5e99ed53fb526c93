"""The search of widths: a fake fitness for the evolution, then a tiny real one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unflip import models
from unflip.cost import cost
from unflip.data import load
from unflip.recipes.load import load_recipe
from unflip.recipes.schema import Recipe
from unflip.study import autobnn
from unflip.study.autobnn import Found, Search, Widths, search_widths
from unflip.train.health import TrainingStopped

DATA = load("digits")
SEARCH = Search(population=4, generations=2, budget=2.0, seed=3)


@pytest.fixture(autouse=True)
def _made_up_costs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting is most of a search with a fake fitness. Tests that ask for ``real_costs`` count."""

    def counted(self: autobnn._Evolution, widths: Widths | None) -> tuple[float, int]:
        squares = sum(w * w for w in widths or (1, 1, 1))
        return 1e6 * (1 + squares), int(1000 * squares)

    if "real_costs" not in request.fixturenames:
        monkeypatch.setattr(autobnn._Evolution, "counted", counted)


@pytest.fixture
def real_costs() -> None:
    """FLOPs and memory of the networks themselves."""


def recipe(*overrides: str) -> Recipe:
    return load_recipe("digits-dorefa", ["epochs=1", "allow_no_flips=true", *overrides])


class Target:
    """The nearer to some widths, the fitter; remembers what it was asked."""

    def __init__(self, *target: float) -> None:
        self.target, self.asked = target, list[list[float]]()

    def __call__(self, chosen: Recipe, folder: Path) -> float:
        widths = chosen.model.options["widths"]
        assert folder.is_dir()
        self.asked.append(widths)
        return -sum((w - t) ** 2 for w, t in zip(widths, self.target, strict=True))


def searched(out: Path, fitness: Any = None, search: Search = SEARCH) -> Found:
    return search_widths(recipe(), DATA, out, search=search, fitness=fitness or Target(0.5, 3, 1))


@pytest.mark.parametrize("budget", [0.5, 1.0, 2.0])
def test_within_budget_and_the_best_never_gets_worse(tmp_path: Path, budget: float) -> None:
    search = Search(population=4, generations=2, budget=budget)
    found = searched(tmp_path, search=search)
    assert all(c.flops_ratio <= budget for c in found.candidates)
    values = [c.fitness for c in found.best]
    assert len(values) == 3
    assert values == sorted(values)
    assert found.best[-1] == found.candidates[0]
    assert len({c.widths for c in found.candidates}) == len(found.candidates)


def test_it_finds_the_target(tmp_path: Path) -> None:
    found = searched(tmp_path, search=Search(population=8, generations=12, budget=4.0))
    assert found.best[-1].widths == (0.5, 3, 1)


def test_the_widest_uniform_network_takes_part(tmp_path: Path) -> None:
    found = searched(tmp_path, search=Search(population=2, generations=0, budget=1.0))
    assert (1, 1, 1) in [c.widths for c in found.candidates]


def test_the_same_seed_the_same_result(tmp_path: Path) -> None:
    first, again = searched(tmp_path / "a"), searched(tmp_path / "b")
    assert first == again
    files = [(tmp_path / n / "search.json").read_bytes() for n in "ab"]
    assert files[0] == files[1]
    other = searched(tmp_path / "c", search=Search(4, 2, 2.0, seed=4))
    assert {c.widths for c in other.candidates} != {c.widths for c in first.candidates}


def test_a_search_that_was_killed_resumes(tmp_path: Path) -> None:
    whole = Target(0.5, 3, 1)
    expected = searched(tmp_path / "whole", whole)
    first = Target(0.5, 3, 1)

    def killed(chosen: Recipe, folder: Path) -> float:
        if len(first.asked) == 6:
            raise KeyboardInterrupt
        return first(chosen, folder)

    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path / "killed", killed)
    rest = Target(0.5, 3, 1)
    assert searched(tmp_path / "killed", rest) == expected
    assert first.asked + rest.asked == whole.asked
    assert len(first.asked) == 6
    nothing = Target(0.5, 3, 1)
    assert searched(tmp_path / "killed", nothing) == expected
    assert not nothing.asked


def test_another_recipe_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    searched(tmp_path)
    with pytest.raises(ValueError, match="evaluated with another recipe"):
        search_widths(
            recipe("batch_size=32"), DATA, tmp_path, search=SEARCH, fitness=Target(1, 1, 1)
        )


def test_other_images_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    fewer = replace(DATA, train_images=DATA.train_images[1:], train_labels=DATA.train_labels[1:])
    held_out = recipe("data.validation=100")
    search_widths(held_out, DATA, tmp_path, search=SEARCH, fitness=Target(1, 1, 1))
    with pytest.raises(ValueError, match=r"evaluated on other images: .*1,347 of .*1,346 of"):
        search_widths(held_out, fewer, tmp_path, search=SEARCH, fitness=Target(1, 1, 1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fitness": None}, "its fitness is None, not a number"),
        ({"images": ...}, "it has no images"),
    ],
    ids=str,
)
def test_a_damaged_fitness_is_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    found = searched(tmp_path).candidates[0]
    path = tmp_path / f"w-{'-'.join(f'{w:g}' for w in found.widths)}" / "fitness.json"
    saved = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({k: v for k, v in saved.items() if v is not ...}))
    with pytest.raises(ValueError, match=named) as caught:
        searched(tmp_path)
    assert str(caught.value).startswith(f"{path} is damaged")
    assert "Delete it to evaluate the candidate again" in str(caught.value)


def test_a_candidate_that_stops_is_last(tmp_path: Path) -> None:
    good = Target(0.5, 3, 1)

    def sometimes(chosen: Recipe, folder: Path) -> float:
        if chosen.model.options["widths"][0] > 1:
            raise TrainingStopped("the loss is nan")
        return float("inf") if chosen.model.options["widths"][0] == 1 else good(chosen, folder)

    found = searched(tmp_path, sometimes, Search(population=8, generations=1, budget=2.0))
    stopped = [c.fitness is None for c in found.candidates]
    assert any(stopped)
    assert stopped == sorted(stopped)
    written = (tmp_path / "table.md").read_text()
    assert "stopped: the loss is nan" in written


def test_a_space_smaller_than_the_population(tmp_path: Path) -> None:
    search = Search(population=9, generations=2, budget=9.0, candidates=(1, 2))
    found = searched(tmp_path, search=search)
    assert len(found.candidates) == 8  # 2³


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"population": 1}, "population=1 should be a whole number >= 2"),
        ({"generations": -1}, "generations=-1 should be"),
        ({"budget": 0}, "budget=0 should be a number > 0"),
        ({"mutation": 2}, "mutation=2 should be a probability"),
        ({"candidates": (1, 0)}, "candidates=.* should be numbers > 0"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"autobnn: {message}"):
        Search(**options)


def test_what_cannot_be_searched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"budget=0.01 is below the smallest network's 0\.\d+"):
        searched(tmp_path, search=Search(budget=0.01))
    with pytest.raises(
        ValueError, match=r"recipe 'digits-lns' starts from .* give a recipe without"
    ):
        search_widths(load_recipe("digits-lns"), DATA, tmp_path)
    alexnet = recipe().model_copy(update={"model": type(recipe().model)(name="alexnet")})
    with pytest.raises(
        ValueError,
        match=r"'alexnet' has no widths.*resnet18, resnet18_cifar, resnet20, resnet34, vgg_small",
    ):
        search_widths(alexnet, DATA, tmp_path)


@pytest.mark.parametrize(
    "model", [{"name": "resnet18", "width": 8}, {"name": "vgg_small", "width": 8, "image_size": 8}]
)
def test_the_other_models(real_costs: None, tmp_path: Path, model: dict[str, Any]) -> None:
    chosen = recipe().model_copy(update={"model": type(recipe().model)(**model)})
    target = Target(*[1] * (4 if model["name"] == "resnet18" else 6))
    search = Search(population=2, generations=1, budget=1.5)
    found = search_widths(chosen, DATA, tmp_path, search=search, fitness=target)
    assert all(c.flops_ratio <= 1.5 for c in found.candidates)


def test_a_real_search_on_digits(
    real_costs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = recipe("model.width=4", "method=autobnn")
    search = Search(population=2, generations=1, budget=4.0, candidates=(1, 2))
    found = search_widths(chosen, DATA, tmp_path, search=search, device="cpu")
    saved = json.loads((tmp_path / "search.json").read_text())
    assert saved["recipe"]["data"]["validation"] == len(DATA.train_images) // 10
    assert [c["fitness"] for c in saved["candidates"]] == [c.fitness for c in found.candidates]
    folders = sorted(p.parent.name for p in tmp_path.glob("w-*/fitness.json"))
    assert len(folders) == len(found.candidates) == 4
    best = found.candidates[0]
    network = models.create("resnet20", "autobnn", width=4, widths=best.widths, in_channels=1)
    counted = cost(network, torch.zeros(1, 1, 8, 8))
    assert (best.flops, best.memory_bits) == (counted.flops, counted.memory_bits)
    for folder in folders:
        result = json.loads((tmp_path / folder / "seed-0" / "result.json").read_text())
        assert result["evaluated_on"] == "validation"
    assert "held-out training images" in (tmp_path / "table.md").read_text()
    monkeypatch.setattr("unflip.study.autobnn.train", None)  # finished ones are not run again
    assert search_widths(chosen, DATA, tmp_path, search=search) == found
