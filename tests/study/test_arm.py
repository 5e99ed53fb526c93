"""How a shipped recipe becomes an arm: the study's changes, the user's, and scaled epochs."""

from __future__ import annotations

import pytest

from unflip.recipes.load import load_recipe
from unflip.study.arm import Draft, make_arms, scaled

DRAFTS = (
    Draft("base", "base", "digits-dorefa"),
    Draft("slow", "slow", "digits-finetune", ("optimizer.lr=0.001",), "base"),
    Draft("lns", "LNS", "digits-lns", ("method.alpha=0.5",), "base"),
)


def test_overrides_reach_every_arm() -> None:
    arms = make_arms(DRAFTS, overrides=["model.width=4", "epochs=7"])
    assert [arm.recipe.model.options["width"] for arm in arms] == [4, 4, 4]
    assert [arm.recipe.epochs for arm in arms] == [7, 7, 7]
    assert [arm.recipe.name for arm in arms] == ["digits-dorefa", "slow", "lns"]


def test_the_users_override_beats_the_studys_default() -> None:
    arms = make_arms(DRAFTS, ["data.validation=300"], ["data.validation=50"])
    assert {arm.recipe.data.validation for arm in arms} == {50}


def test_what_an_arm_is_about_stays() -> None:
    arms = make_arms(DRAFTS, overrides=["optimizer.lr=0.5"])
    assert [arm.recipe.optimizer.lr for arm in arms] == [0.5, 0.001, 0.5]
    assert [arm.kept for arm in arms] == [(), ("optimizer.lr=0.5",), ()]


def test_options_go_to_the_arms_that_have_them() -> None:
    arms = make_arms(DRAFTS, overrides=["method.mapping=residual", "method.warm_steps=3"])
    method, without = arms[2].recipe.method, arms[0].recipe.method
    assert isinstance(method, dict)
    assert isinstance(without, dict)
    assert (method["mapping"], method["alpha"], method["warm_steps"]) == ("residual", 0.5, 3)
    assert not {"mapping", "warm_steps"} & without.keys()


@pytest.mark.parametrize("override", ["method.maping=plain", "method.alpha=1"])
def test_an_override_that_changes_nothing_is_an_error(override: str) -> None:
    with pytest.raises(ValueError, match=f"override '{override}' changes no arm") as caught:
        make_arms(DRAFTS, overrides=[override])
    assert ("Did you mean 'method.mapping'?" in str(caught.value)) == ("maping" in override)


def test_a_misspelt_field_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"epoch: unknown field\. Did you mean 'epochs'"):
        make_arms(DRAFTS, overrides=["epoch=3"])


def test_an_option_that_the_network_does_not_have_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"unknown option of model .* 'widht'\. Did you mean 'width'"
    ):
        make_arms(DRAFTS, overrides=["model.widht=4"])


def test_scaled_epochs_move_the_schedule() -> None:
    every = scaled(load_recipe("cifar10-resnet20-finetune"), 0.1)
    assert (every.epochs, every.schedule.every) == (12, 3)
    steps = ["schedule={name: step, at: [10, 20]}"]
    at = scaled(load_recipe("digits-dorefa", steps), 0.5)
    assert (at.epochs, at.schedule.at) == (15, (5, 10))
    rising = load_recipe("digits-dorefa", ["epochs=20", "schedule.warmup=4"])
    assert [scaled(rising, f).schedule.warmup for f in (0.5, 0.05, 2)] == [2, 0, 8]
    tiny = scaled(load_recipe("cifar10-resnet20-finetune"), 0.001)
    assert (tiny.epochs, tiny.schedule.every) == (1, 1)


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
def test_a_scale_out_of_range_is_an_error(factor: float) -> None:
    with pytest.raises(ValueError, match=r"epochs-scale=.* should be above 0"):
        scaled(load_recipe("digits-dorefa"), factor)


def test_an_option_of_what_an_arm_replaces_as_a_whole_is_not_overridden() -> None:
    draft = Draft("adam", "Adam", "digits-dorefa", ("optimizer={name: adam, lr: 0.001}",))
    plain = Draft("plain", "plain", "digits-dorefa")
    arms = make_arms([draft, plain], overrides=["optimizer.lr=0.05"])
    assert [arm.recipe.optimizer.lr for arm in arms] == [0.001, 0.05]
    assert [arm.kept for arm in arms] == [("optimizer.lr=0.05",), ()]


def test_an_arm_that_has_the_overrides_value_anyway_kept_nothing() -> None:
    assert not any(arm.kept for arm in make_arms(DRAFTS, overrides=["optimizer.lr=1e-3"]))


def test_an_override_that_does_not_go_with_an_arms_own_value() -> None:
    draft = Draft("steps", "steps", "digits-dorefa", ("schedule={name: step, at: [3]}",))
    every = Draft("every", "every", "digits-finetune")
    arms = make_arms([draft, every], overrides=["schedule.every=5"])
    assert [arm.kept for arm in arms] == [("schedule.every=5",), ()]
