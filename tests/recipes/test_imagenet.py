"""The recipes for ImageNet and Imagenette: complete, of the published networks, and each with its short form."""

from __future__ import annotations

import re
from importlib import resources

import pytest
import torch

from unflip.data import InputSpec
from unflip.recipes import load_recipe, recipe_names
from unflip.recipes.build import build_model
from unflip.recipes.load import needed_recipe, refuse_cycle
from unflip.train.start import refuse_other_network

RESNET = [
    *("float", "dorefa", "finetune", "lns", "bireal", "adabin", "reactnet-step1", "reactnet"),
    *("bireal-prelu", "bireal-prelu-finetune", "bireal-prelu-lns"),
]
ALEXNET = ["float", "xnor", "dorefa", "dorefa-finetune", "dorefa-lns"]
KINDS = [
    *(f"resnet18-{kind}" for kind in RESNET),
    *(f"alexnet-{kind}" for kind in ALEXNET),
    "resnet34-teacher",
]
OURS = ["imagenette-resnet18-strongest-step1", "imagenette-resnet18-strongest"]
NAMES = [n for n in recipe_names() if n.startswith(("imagenet-", "imagenette-"))]


def test_all_are_shipped() -> None:
    expected = {f"{images}-{kind}" for images in ("imagenet", "imagenette") for kind in KINDS}
    assert set(NAMES) == expected | set(OURS)


@pytest.mark.parametrize("name", NAMES)
def test_it_builds_at_its_size_and_has_its_start(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.about
    classes = 1000 if name.startswith("imagenet-") else 10
    size = recipe.data.options["size"]
    spec = InputSpec(
        (3, size, size), tuple(map(str, range(classes))), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    )
    with torch.device("meta"):
        model = build_model(recipe, spec, seed=0).eval()
        assert model(torch.empty(2, 3, size, size)).shape == (2, classes)
    refuse_cycle(recipe)
    if recipe.start:
        start = needed_recipe(recipe, "start")
        refuse_other_network(recipe, start, "its start")
        assert start.plain() == load_recipe(recipe.start).plain(), "no override is needed"
    if recipe.distill:
        assert needed_recipe(recipe, "distill").method == "float"


@pytest.mark.parametrize("kind", KINDS)
def test_the_short_form_has_the_same_network_and_method(kind: str) -> None:
    whole, short = (load_recipe(f"{images}-{kind}") for images in ("imagenet", "imagenette"))
    assert (whole.model, whole.method) == (short.model, short.method)
    assert (whole.start or "").replace("imagenet-", "imagenette-") == (short.start or "")
    assert whole.data.options == {"size": 224}
    assert short.data.options == {"size": 128, "resize": 144}
    assert short.epochs <= 80
    assert whole.expected == {}, "we have not run it"


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("imagenet-")])
def test_it_names_its_source_and_that_it_was_not_run(name: str) -> None:
    text = (resources.files("unflip.recipes") / f"{name}.yaml").read_text(encoding="utf-8")
    assert "\n# Not run on ImageNet by us.\n" in text
    assert re.search(r"arXiv:\d{4}\.\d{5}|NeurIPS 2012", text)


def test_the_papers_settings() -> None:
    """Section 4 of arXiv:2010.04871."""
    for kind in ("dorefa", "bireal-prelu"):
        baseline = load_recipe(f"imagenet-resnet18-{kind}")
        assert (baseline.epochs, baseline.batch_size) == (120, 256)
        assert (baseline.optimizer.lr, baseline.optimizer.weight_decay) == (0.1, 0)
        factors = [baseline.schedule.factor_at(e, 120) for e in (0, 69, 70, 89, 90, 109, 110)]
        assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.001])
    for kind in ("resnet18-finetune", "resnet18-lns", "alexnet-dorefa-lns"):
        tuned = load_recipe(f"imagenet-{kind}")
        assert (tuned.epochs, tuned.optimizer.lr, tuned.optimizer.weight_decay) == (45, 0.01, 0)
        factors = [tuned.schedule.factor_at(e, 45) for e in (0, 14, 15, 29, 30, 44)]
        assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_reactnets_settings() -> None:
    """The two steps of arXiv:2003.03488, as released."""
    first, second = (
        load_recipe(f"imagenet-resnet18-{kind}") for kind in ("reactnet-step1", "reactnet")
    )
    for step in (first, second):
        assert (step.epochs, step.optimizer.name, step.optimizer.lr) == (128, "adam", 0.0025)
        assert step.distill is not None
        assert (step.distill.weight, step.distill.temperature) == (1, 1)
        factors = [step.schedule.factor_at(e, 128) for e in (0, 64, 127)]
        assert factors == pytest.approx([1, 0.5, 1 / 128])
    assert (first.resolved_method().options()["weights"], second.start) == (
        "float",
        "imagenet-resnet18-reactnet-step1",
    )
    assert second.resolved_method().options()["weights"] == "bireal"
