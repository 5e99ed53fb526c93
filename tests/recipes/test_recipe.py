"""Recipes: their values, overrides and files; a mistake is named."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from unflip.recipes.load import RecipeError, load_recipe, recipe_names
from unflip.recipes.schema import Recipe, Schedule

PAPER = [f"cifar10-resnet20-{kind}" for kind in ("float", "dorefa", "finetune", "mapping", "lns")]


def test_the_papers_recipes_are_shipped() -> None:
    assert set(PAPER) <= set(recipe_names())
    assert {"digits-float", "digits-dorefa", "digits-finetune", "digits-lns"} <= set(recipe_names())


def test_the_papers_settings() -> None:
    """Section 4.1 of the paper, and the interpretation of its baseline that matches it best."""
    baseline = load_recipe("cifar10-resnet20-dorefa")
    assert (baseline.epochs, baseline.batch_size) == (400, 128)
    assert (baseline.optimizer.name, baseline.optimizer.lr) == ("sgd", 0.1)
    assert (baseline.optimizer.momentum, baseline.optimizer.weight_decay) == (0.9, 0)
    assert baseline.schedule == Schedule(name="step", at=(120, 240, 320), factor=0.2)
    assert baseline.model.options["shortcut"] == "conv"
    for kind in ("finetune", "mapping", "lns"):
        tuned = load_recipe(f"cifar10-resnet20-{kind}")
        assert (tuned.epochs, tuned.batch_size) == (120, 128)
        assert (tuned.optimizer.lr, tuned.optimizer.weight_decay) == (0.01, 0)
        assert tuned.start == "cifar10-resnet20-dorefa"
        assert tuned.model == baseline.model
        factors = [tuned.schedule.factor_at(e, 120) for e in (0, 29, 30, 59, 60, 89, 90, 119)]
        assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    lns = load_recipe("cifar10-resnet20-lns").method
    mapping = load_recipe("cifar10-resnet20-mapping").method
    assert isinstance(lns, dict)
    assert isinstance(mapping, dict)
    assert (lns["alpha"], lns["rho_plus"], lns["rho_minus"]) == (1, 0.005, 0.005)
    assert mapping["alpha"] == 0
    assert lns["base"] == mapping["base"] == baseline.method


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("epoch=3", "epoch: unknown field. Did you mean 'epochs'?"),
        ("optimiser.lr=0.1", "optimiser: unknown field. Did you mean 'optimizer'?"),
        ("optimizer.momentun=0.5", "optimizer.momentun: unknown field. Did you mean 'momentum'?"),
        ("method.warm_agrement=1", "unknown option of method 'lns' 'warm_agrement'. Did you mean"),
        ("method.lr=0", "lns: lr=0 should be a finite number > 0"),
        ("schedule.evry=3", "schedule.evry: unknown field. Did you mean 'every'?"),
        (
            "data.validatoin=3",
            "data: unknown option of data set 'digits' 'validatoin'. Did you mean 'validation'?",
        ),
        ("optimizer.zzz=3", "optimizer.zzz: unknown field. Known: name, lr, latent_lr"),
        ("method.rho_pls=1", "unknown option of method 'lns' 'rho_pls'. Did you mean 'rho_plus'?"),
        (
            "method.base.inputz=pm1",
            "unknown option of method 'dorefa' 'inputz'. Did you mean 'inputs'?",
        ),
        ("method.name=dorefaa", "unknown method 'dorefaa'. Did you mean 'dorefa'?"),
        ("model.name=resnet2", "unknown model 'resnet2'. Did you mean 'resnet20'?"),
        ("data.name=digit", "unknown data set 'digit'. Did you mean 'digits'?"),
        ("shortcuts=int4", "shortcuts: Input should be 'float' or 'int8'"),
        ("precision=float17", "precision: Input should be 'float16' or 'float32'"),
        ("name=../elsewhere", "without / (got '../elsewhere')"),
        ("name=..", "name: should be the name of a folder"),
        ("name=''", "name: should be the name of a folder"),
        ("epochs=0", "epochs: Input should be greater than or equal to 1 (got 0)"),
        ("epochs=1.5", "epochs: Input should be a valid integer"),
        ("epochs=ten", "epochs: Input should be a valid integer"),
        ("data=digits", "data: "),
        ("method.alpha=.nan", "alpha=nan"),
        ("method.alpha=much", "alpha='much' should be a number"),
        ("method=3", "method"),
        ("method={base: dorefa}", "'name'"),
        ("schedule.every=null", "schedule 'step' needs either every or at"),
        ("schedule.at=[3, 4]", "schedule 'step' needs either every or at"),
        (
            "schedule.name=cosine",
            "every and at belong to schedule 'step', but the name is 'cosine'",
        ),
        ("schedule.factor=1.5", "schedule.factor: Input should be less than 1"),
    ],
)
def test_mistakes_are_named(override: str, says: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("digits-lns", [override])
    assert str(error.value).startswith("recipe digits-lns: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["ends", "shortcuts"])
def test_8_bits_are_for_binary_networks(field: str) -> None:
    plain = load_recipe("digits-dorefa").plain()
    assert load_recipe("digits-dorefa", [f"{field}=int8"]).plain() == {**plain, field: "int8"}
    assert load_recipe("digits-dorefa", [f"{field}=float"]).plain() == plain
    with pytest.raises(RecipeError, match=f"{field}=int8 is for binary .*: remove {field}"):
        load_recipe("digits-dorefa", [f"{field}=int8", "method=float"])


@pytest.mark.parametrize("field", ["lr", "latent_lr"])
@pytest.mark.parametrize("value", ["nan", ".nan", "inf", ".inf", "-0.1", "0", "1e400", "-1e-3"])
def test_a_learning_rate_that_is_none(field: str, value: str) -> None:
    with pytest.raises(RecipeError, match=rf"optimizer\.{field}: .*(finite|greater than 0)"):
        load_recipe("digits-dorefa", [f"optimizer.{field}={value}"])


@pytest.mark.parametrize("field", ["momentum", "weight_decay"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1e-3"])
def test_other_numbers_that_are_none(field: str, value: str) -> None:
    with pytest.raises(RecipeError, match=rf"optimizer\.{field}: "):
        load_recipe("digits-dorefa", [f"optimizer.{field}={value}"])


def test_overrides_become_what_they_say() -> None:
    recipe = load_recipe(
        "digits-dorefa",
        [
            "optimizer.lr=1e-3",
            "optimizer.latent_lr=2.5E+2",
            "epochs=1e1",
            "sync_batchnorm=true",
            "allow_no_flips=false",
            "method.input_bits=2",
            "method.inputs=01",
            "model.width=4",
            "schedule.name=step",
            "schedule.at=[10, 20]",
            "name=mine",
        ],
    )
    assert recipe.optimizer.lr == 0.001
    assert recipe.optimizer.latent_lr == 250
    assert recipe.epochs == 10
    assert recipe.sync_batchnorm is True
    assert recipe.allow_no_flips is False
    assert recipe.method == {"name": "dorefa", "inputs": "01", "input_bits": 2}
    assert recipe.model.options["width"] == 4
    assert recipe.schedule == Schedule(name="step", at=(10, 20))
    assert recipe.name == "mine"


def test_the_last_override_wins_and_a_name_takes_options() -> None:
    recipe = load_recipe(
        "digits-float", ["method=lns", "method.alpha=1e-1", "epochs=3", "epochs=4"]
    )
    assert isinstance(recipe.method, dict)
    assert recipe.method["name"] == "lns"
    assert recipe.method["alpha"] == 0.1
    assert recipe.epochs == 4


@pytest.mark.parametrize("override", ["epochs", "=3", "optimizer.lr:0.1"])
def test_an_override_without_equals(override: str) -> None:
    with pytest.raises(RecipeError, match="should look like field=value"):
        load_recipe("digits-dorefa", [override])


@pytest.mark.parametrize("override", ["epochs.many=3", "epochs=["])
def test_an_override_that_makes_no_sense(override: str) -> None:
    with pytest.raises(RecipeError, match="override 'epochs"):
        load_recipe("digits-dorefa", [override])


def test_a_custom_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "data: {name: digits}\nmodel: {name: vgg_small, width: 4}\nepochs: 2\n"
        "method: {name: lns, alpha: 1e-2}\noptimizer: {lr: 1e-3}\n"
    )
    recipe = load_recipe(path)
    assert recipe.name == "mine"
    assert recipe.optimizer.lr == 0.001
    assert isinstance(recipe.method, dict)
    assert recipe.method["alpha"] == 0.01
    again = Recipe.model_validate(recipe.plain())
    assert again.plain() == recipe.plain(), "recipe.json holds all of it"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "should be a YAML mapping of fields, not list"),
        ("", "should be a YAML mapping of fields, not NoneType"),
        ("a: [1", "is not YAML"),
        ("epochs: 3\n", "data: Field required; model: Field required; optimizer: Field required"),
        ("a: !!python/object/apply:os.system [ls]", "is not YAML"),
        ("about: |\n" + 30_000 * " ab\n", "has 120,009 letters; at most 100,000 are read"),
        ("epochs: " + 5000 * "[", "line 1: more than 50 lists or mappings in each other"),
        ("epochs: 2021-99-99", "has a value that YAML cannot read: month must be in 1..12"),
        ("epochs: " + 5000 * "9", "has a value that YAML cannot read: Exceeds the limit"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert str(path) in str(error.value)
    assert says in str(error.value)


def test_aliases_that_grow(tmp_path: Path) -> None:
    """60 lists, each of them twice in the next one. With 25 it took half a minute and 2 GB to print the error."""
    path = tmp_path / "mine.yaml"
    lists = [f"x{i}: &x{i} [*x{i - 1}, *x{i - 1}]\n" for i in range(1, 60)]
    path.write_text("x0: &x0 [a]\n" + "".join(lists) + "epochs: *x59\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml, line 2: aliases \(\*x0\) are not supp"):
        load_recipe(path)


def test_unknown_recipes_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"'digits-lsn'. Did you mean 'digits-lns'\? 'unflip recipes' lists "
    ):
        load_recipe("digits-lsn")
    with pytest.raises(RecipeError, match="there is no recipe file"):
        load_recipe(tmp_path / "none.yaml")


def test_cosine_falls_from_one_to_almost_nothing() -> None:
    factors = [Schedule(name="cosine").factor_at(epoch, 400) for epoch in range(400)]
    assert factors[0] == 1
    assert factors[200] == pytest.approx(0.5)
    assert factors[399] == pytest.approx(0.5 * (1 + math.cos(math.pi * 399 / 400)))
    assert 0 < factors[399] < 1e-4
    assert all(a > b for a, b in pairwise(factors))
    assert Schedule(name="cosine").factor_at(0, 1) == 1


def test_steps_fall_at_their_epochs() -> None:
    every = Schedule(name="step", every=30)
    assert [every.factor_at(e, 120) for e in (0, 29)] == [1, 1]
    assert [every.factor_at(e, 120) for e in (30, 59)] == pytest.approx([0.1, 0.1])
    assert [every.factor_at(e, 120) for e in (60, 119)] == pytest.approx([0.01, 0.001])
    at = Schedule(name="step", at=(80, 120, 160), factor=0.2)
    assert [at.factor_at(e, 200) for e in (0, 79, 80, 119, 120, 159, 160, 199)] == pytest.approx(
        [1, 1, 0.2, 0.2, 0.04, 0.04, 0.008, 0.008]
    )


def test_rates_rise_before_they_fall() -> None:
    cosine = Schedule(name="cosine", warmup=4)
    assert [cosine.factor_at(e, 24) for e in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    plain = Schedule(name="cosine")
    assert [cosine.factor_at(e, 24) for e in range(4, 24)] == [
        plain.factor_at(e, 20) for e in range(20)
    ]
    step = Schedule(name="step", at=(10,), warmup=1)
    assert [step.factor_at(e, 20) for e in (0, 1, 9, 10)] == pytest.approx([0.5, 1, 1, 0.1])
    assert "warmup" not in Schedule().model_dump()
    with pytest.raises(
        RecipeError, match=r"schedule.warmup=3 leaves no epoch of epochs=3: make it smaller"
    ):
        load_recipe("digits-dorefa", ["epochs=3", "schedule.warmup=3"])


def test_labels_that_are_not_used_cannot_be_smoothed() -> None:
    overrides = ["label_smoothing=0.1", "distill.teacher=digits-float", "distill.weight=1"]
    with pytest.raises(
        RecipeError, match=r"label_smoothing=0.1 has no effect, because distill.weight=1"
    ):
        load_recipe("digits-dorefa", overrides)
    assert (
        load_recipe("digits-dorefa", [*overrides[:2], "distill.weight=0.5"]).label_smoothing == 0.1
    )
    assert "label_smoothing" not in load_recipe("digits-dorefa").plain()


def test_constant_stays() -> None:
    assert {Schedule().factor_at(e, 10) for e in range(10)} == {1.0}


def test_size_is_for_folders() -> None:
    with pytest.raises(RecipeError, match=r"option of data set 'digits' 'size'\. Known: name, val"):
        load_recipe("digits-dorefa", ["data.size=8"])
    assert "size" not in load_recipe("digits-dorefa").plain()["data"]
    sized = load_recipe("digits-dorefa", ["data.name=folder", "data.size=8"])
    assert sized.plain()["data"] == {"name": "folder", "validation": 0, "size": 8}


@pytest.mark.parametrize("value", ["!!timestamp x", '!!int ""', '!!float ""', "!!bool x"])
def test_values_that_yaml_cannot_make(tmp_path: Path, value: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"about: {value}\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml has a value that YAML cannot read"):
        load_recipe(path)
