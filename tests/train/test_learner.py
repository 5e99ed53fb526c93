"""One network in training: every shipped recipe takes steps, and each group of parameters has its rate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from unflip.binarize import load_twin
from unflip.data import ImageSet, InputSpec
from unflip.layers import binary_layers
from unflip.methods.lns import warm_start
from unflip.recipes import load_recipe, recipe_names
from unflip.recipes.build import build_model
from unflip.train.engine import Engine
from unflip.train.learner import Learner, count_right, images_per_batch

CPU = torch.device("cpu")


def noise(size: int) -> ImageSet:
    """Ten classes of random images."""
    generator = torch.Generator().manual_seed(0)
    shape = (24, 3, size, size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).numpy()
    labels = torch.arange(24).numpy() % 10
    return ImageSet(
        train_images=images[:16],
        train_labels=labels[:16],
        test_images=images[16:],
        test_labels=labels[16:],
        classes=tuple("abcdefghij"),
        mean=(0.49, 0.48, 0.45),
        std=(0.25, 0.24, 0.26),
        crop_padding=4,
        flip=True,
    )


def _undecided(plan: Tensor, images: Tensor) -> Tensor:
    """A teacher that finds all ten classes equally likely."""
    return torch.zeros(len(plan), 10)


# Recipes for ImageNet have the networks and methods of those for Imagenette (tests/recipes/test_imagenet.py).
@pytest.mark.parametrize("name", [n for n in recipe_names() if not n.startswith("imagenet-")])
def test_every_shipped_recipe_runs_two_steps(name: str, digits: ImageSet) -> None:
    """From its start run's network, through its warm start, with its optimizer."""
    narrow = {
        "resnet18": ["model.width=8"],
        "resnet34": ["model.width=8"],
        "alexnet": ["model.width=6"],
    }
    recipe = load_recipe(name)
    overrides = ["batch_size=8", *narrow.get(recipe.model.name, [])]
    recipe = load_recipe(name, overrides)
    sets = {"cifar10": noise(32), "folder": noise(32), "images": noise(64), "digits": digits}
    data = sets[recipe.data.name]
    model = build_model(recipe, data.spec, seed=0)
    if recipe.start:
        first = build_model(load_recipe(recipe.start, overrides), data.spec, seed=1)
        load_twin(model, first.state_dict())
        last = dict(model.named_parameters())
        assert all(torch.equal(p, last[n]) for n, p in first.named_parameters())
    if recipe.method != "float" and not recipe.resolved_method().from_scratch:
        warm_start(model, steps=2)
    teacher = _undecided if recipe.distill else None
    learner = Learner(recipe, model, data.source(CPU), CPU, teacher)
    learner.start_epoch(seed=0, epoch=0, factor=recipe.schedule.factor_at(0, recipe.epochs))
    before = learner.snapshot()
    with Engine([learner], compiled=True, captured=True) as engine:
        engine.step()
        engine.step()
    assert learner.position.item() == 2
    assert learner.loss_sum.isfinite()
    assert 0.1 < learner.loss_sum.item() / 2 < 20
    moved = {n for n, v in learner.state().items() if not torch.equal(v, before[n])}
    for parameter, _ in model.named_parameters():
        if not parameter.endswith("adapted.after"):  # RPReLU's last shift: BatchNorm takes it away
            assert f"model.{parameter}" in moved, f"{parameter} does not learn"
    assert bool(list(binary_layers(model))) == (recipe.method != "float")


def test_parameter_groups_have_their_own_rates(digits: ImageSet) -> None:
    overrides = ["optimizer.lr=0.5", "optimizer.latent_lr=0.25", "method.lr=0.125"]
    recipe = load_recipe("digits-lns", [*overrides, "model.width=2"])
    learner = Learner(recipe, build_model(recipe, digits.spec, 0), digits.source(CPU), CPU)
    learner.set_rates(0.5)
    rates = {g["name"]: g["lr"] for g in learner.optimizers[0].param_groups}
    assert rates == {"latent": 0.125, "mapping": 0.0625, "rest": 0.25}
    names = {id(p): n for n, p in learner.model.named_parameters()}
    found = {
        g["name"]: {names[id(p)] for p in g["params"]} for g in learner.optimizers[0].param_groups
    }
    assert found["latent"] == {f"{n}.weight" for n, _ in binary_layers(learner.model)}
    assert all(".weight_binarizer." in n for n in found["mapping"])
    assert {"conv1.weight", "bn1.weight", "fc.bias", "layer1.0.prelu1.weight"} <= found["rest"]
    assert sum(map(len, found.values())) == len(names)


@pytest.mark.parametrize(
    ("decayed", "expected"),
    [("all", None), ("convolutions", ("conv",)), ("linear", ("fc.weight",))],
)
def test_weight_decay_is_for_some_layers(
    decayed: str, expected: tuple[str, ...] | None, digits: ImageSet
) -> None:
    """ReActNet's first step decays convolutions alone, DoReFa-Net's AlexNet its linear layers."""
    overrides = ["optimizer.weight_decay=0.5", f"optimizer.decayed={decayed}", "model.width=2"]
    recipe = load_recipe("digits-lns", overrides)
    learner = Learner(recipe, build_model(recipe, digits.spec, 0), digits.source(CPU), CPU)
    names = {id(p): n for n, p in learner.model.named_parameters()}
    groups = learner.optimizers[0].param_groups
    found = {names[id(p)]: g["weight_decay"] for g in groups for p in g["params"]}
    assert found.keys() == set(names.values()), "every parameter is in one group"
    for name, decay in found.items():
        parts = name.split(".")
        inside = "weight_binarizer" in parts
        wanted = expected is None or (
            not inside and name.endswith("weight") and any(part in name for part in expected)
        )
        assert decay == (0.5 if wanted else 0), name


def test_top_five_by_hand() -> None:
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1], [1.0, 2, 3, 4, 5, 6], [6.0, 5, 4, 3, 2, 1]])
    labels = torch.tensor([0, 1, 5])
    assert count_right(logits, labels, ranked=True).tolist() == [1, 2]


def test_batches_without_gradients_have_as_many_pixels() -> None:
    def spec(height: int, width: int) -> InputSpec:
        return InputSpec((3, height, width), ("a", "b"), (0.5,) * 3, (0.25,) * 3)

    sizes = {s: images_per_batch(spec(s, s)) for s in (32, 128, 224, 4000)}
    assert sizes == {32: 5000, 128: 312, 224: 102, 4000: 1}


def test_few_classes_have_no_top_five(digits: ImageSet) -> None:
    recipe = load_recipe("digits-float", ["model.width=2"])
    for classes, ranked in ((10, True), (9, False)):
        few = replace(
            digits,
            classes=digits.classes[:classes],
            **{
                f"{part}_{kind}": getattr(digits, f"{part}_{kind}")[
                    getattr(digits, f"{part}_labels") < classes
                ]
                for part in ("train", "test")
                for kind in ("images", "labels")
            },
        )
        learner = Learner(recipe, build_model(recipe, few.spec, 0), few.source(CPU), CPU)
        found = learner.evaluate(exact=True)
        assert found.top1 is not None
        assert (found.top5 is not None) == ranked
        assert not ranked or found.top1 <= (found.top5 or 0) <= 100


@pytest.mark.parametrize("method", ["biper", "ovsw", "rebnn"])
def test_a_resumed_learner_continues_with_the_methods_state(method: str, digits: ImageSet) -> None:
    """Averages of flips and balances are part of the state; gradients are changed in each step."""
    recipe = load_recipe("digits-dorefa", [f"method={method}", "model.width=4", "batch_size=32"])

    def learner(seed: int) -> Learner:
        made = Learner(recipe, build_model(recipe, digits.spec, seed), digits.source(CPU), CPU)
        made.start_epoch(seed=0, epoch=0, factor=1.0)
        return made

    whole, resumed = learner(0), learner(1)
    for _ in range(3):
        whole.step()
    resumed.restore(whole.snapshot())
    resumed.position.copy_(whole.position)
    for _ in range(2):
        whole.step()
        resumed.step()
    state = resumed.state()
    assert all(torch.equal(state[name], value) for name, value in whole.state().items())
    parts = [name.rsplit(".", 1)[1] for name in state if ".weight_binarizer." in name]
    counted = {"biper": [], "ovsw": ["flips"], "rebnn": ["gamma"]}[method]
    for name in (n for n in state if n.rsplit(".", 1)[1] in counted):
        assert state[name].count_nonzero() > 0, name
    assert set(counted) <= set(parts)
