"""LNS before the first epoch: warm start, flip rates, parameter groups and their options."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import unflip
from unflip import methods
from unflip.layers import (
    BinaryLayer,
    BinaryLinear,
    binary_layers,
)
from unflip.methods import ParameterGroup, Preparation
from unflip.methods.lns import (
    LNS,
    MappedSign,
    mapped_layers,
    sign_agreement,
    warm_start,
)
from unflip.methods.warm_start import WarmStartLog

Net = Callable[..., nn.Module]


def mapped(layer: nn.Module) -> MappedSign:
    assert isinstance(layer, BinaryLayer)
    assert isinstance(layer.weight_binarizer, MappedSign)
    return layer.weight_binarizer


class Prepared:
    """A preparation that records what a method asks of it."""

    def __init__(
        self, memo: dict[str, Any] | None = None, baseline: nn.Module | None = None
    ) -> None:
        self.memo = memo
        self.baseline = baseline
        self.said: list[str] = []
        self.asked: list[tuple[int, int, float]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def branches(self, count: int, epochs: int, rate: float) -> tuple[nn.Module, list[nn.Module]]:
        self.asked.append((count, epochs, rate))
        assert self.baseline is not None
        copies = [copy.deepcopy(self.baseline) for _ in range(count)]
        with torch.no_grad():
            for number, one in enumerate(copies):
                for _, layer in binary_layers(one):
                    layer.weight[number].neg_()  # another filter in each
        return self.baseline, copies


@pytest.mark.filterwarnings("ignore:after at most 30 steps")
def test_prepare_is_the_warm_start_of_its_options(same_net: Net) -> None:
    options = {"warm_steps": 30, "warm_lr": 1e-2, "warm_agreement": 0.9, "warm_patience": 25}
    model, expected, preparation = same_net(**options), same_net(), Prepared()
    LNS(**options).prepare(model, preparation)  # type: ignore[arg-type]
    log = WarmStartLog(preparation.said.append)
    reached = warm_start(expected, 30, 1e-2, 0.9, 25, progress=log)
    assert sign_agreement(model) == reached
    assert preparation.said == [log.summary()]
    least = f"{min(reached.values()):.4%}"
    assert log.summary().startswith(f"warm start: signs agree on {least} or more in each of 4")
    assert preparation.asked == []
    assert not any(b.untaught for _, _, b in mapped_layers(model))


@pytest.mark.filterwarnings("ignore:after at most 5 steps")
def test_runs_side_by_side_share_their_warm_start(same_net: Net) -> None:
    preparation = Prepared(memo={})
    for alpha in (0.0, 1.0):
        method = LNS(warm_steps=5, alpha=alpha)
        method.prepare(same_net(warm_steps=5, alpha=alpha), preparation)
    assert preparation.memo is not None
    assert len(preparation.memo) == 4


def test_without_warm_steps_nothing_is_prepared(same_net: Net) -> None:
    model, preparation = same_net(warm_steps=0), Prepared()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    LNS(warm_steps=0).prepare(model, preparation)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(b.untaught for _, _, b in mapped_layers(model))
    assert preparation.said == []


def test_prepare_estimates_flip_rates_from_branches(same_net: Net, float_net: Net) -> None:
    method = LNS(rates="estimated", warm_steps=0)
    model = same_net(rates="estimated", warm_steps=0)
    preparation = Prepared(baseline=unflip.binarize(float_net(), "dorefa", quiet=True))
    method.prepare(model, preparation)
    assert preparation.asked == [(3, 2, 0.1)]
    [said] = preparation.said
    assert said.startswith("flip rates of the baseline's layers: ")
    for _, _, binarizer in mapped_layers(model):
        assert (binarizer.rho_plus != 0.005).any()


def test_only_estimated_rates_need_a_start() -> None:
    assert LNS().needs_start() is None
    assert "the network that the run starts from" in (LNS(rates="estimated").needs_start() or "")
    assert not LNS.from_scratch
    assert methods.config_class("dorefa").from_scratch


@pytest.mark.parametrize("lr", [None, 0.25])
def test_theta_is_a_parameter_group(lr: float | None, float_net: Net, lns_net: Net) -> None:
    model = lns_net(base="recu")
    [group] = LNS(base="recu", lr=lr).parameter_groups(model)
    assert (group.name, group.lr) == ("mapping", lr)
    theta = {n for n, p in model.named_parameters() if any(p is q for q in group.parameters)}
    assert theta == {n for n, _ in model.named_parameters() if ".mapping." in n}
    assert LNS().parameter_groups(float_net()) == []


def test_by_default_a_method_prepares_nothing(float_net: Net) -> None:
    method, preparation = methods.get("dorefa"), Prepared()
    model = unflip.binarize(float_net(), "dorefa", quiet=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    method.prepare(model, preparation)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert method.parameter_groups(model) == []
    assert method.needs_start() is None


def test_a_base_prepares_too(lns_net: Net) -> None:
    @dataclass(frozen=True)
    class Calibrated(type(methods.get("dorefa"))):  # type: ignore[misc]
        def prepare(self, model: nn.Module, preparation: Preparation) -> None:
            preparation.say("calibrated")

        def parameter_groups(self, model: nn.Module) -> list[ParameterGroup]:
            return [ParameterGroup("steps", [], 0.5)]

    method, preparation = LNS(base=Calibrated(), warm_steps=0), Prepared()
    method.prepare(lns_net(), preparation)
    assert preparation.said == ["calibrated"]
    groups = method.parameter_groups(lns_net())
    assert [group.name for group in groups] == ["mapping", "steps"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warm_steps": -1}, "lns: warm_steps=-1 should be >= 0; 0 means no warm start"),
        ({"warm_steps": 2.0}, "lns: warm_steps=2.0 should be a whole number"),
        ({"warm_steps": True}, "lns: warm_steps=True should be a whole number"),
        ({"warm_lr": 0}, "lns: warm_lr=0 should be a finite number > 0.*warm_steps=0"),
        ({"warm_lr": math.inf}, "lns: warm_lr=inf should be a finite number > 0"),
        ({"warm_agreement": 0.5}, "lns: warm_agreement=0.5 should be a share of signs"),
        ({"warm_agreement": 99.95}, "warm_agreement=99.95 should be a share .*<= 1"),
        (
            {"warm_agreement": 0},
            "warm_agreement=0 should be a share .* or null, to end at no share",
        ),
        ({"warm_patience": 0}, "lns: warm_patience=0 should be a number of steps >= 1; leave it"),
        ({"warm_patience": 1.5}, "lns: warm_patience=1.5 should be a whole number or None"),
        ({"lr": 0}, "lns: lr=0 should be a finite number > 0; leave it out"),
        ({"lr": math.nan}, "lns: lr=nan should be a finite number > 0"),
        ({"lr": "fast"}, "lns: lr='fast' should be a number or None"),
    ],
    ids=str,
)
def test_options_of_the_training_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        methods.get("lns", **options)


def test_options_of_the_training_do_not_change_the_family() -> None:
    warm = {"warm_steps": 0, "warm_lr": 0.1, "warm_agreement": None, "warm_patience": 5}
    trained = LNS(lr=0.1, task_gradient="both", output="tanh", **warm)  # type: ignore[arg-type]
    assert trained.family == LNS().family == "lns(base=dorefa)"


def test_predict_is_f_of_w_and_none_for_other_methods() -> None:
    layer = BinaryLinear(8, 6, method="lns")
    assert torch.equal(mapped(layer).predict(layer.weight), mapped(layer).mapping(layer.weight))
    assert BinaryLinear(8, 6, method="dorefa").weight_binarizer.predict(layer.weight) is None
