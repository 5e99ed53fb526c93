"""The experiments of the paper: their arms parse, and are what their labels say."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unflip.data import load
from unflip.layers import auxiliary_losses
from unflip.methods.lns import mapped_layers
from unflip.recipes.build import build_model
from unflip.recipes.load import load_recipe
from unflip.recipes.schema import Data, Recipe
from unflip.runs.load import load_run
from unflip.study.paper import EXPERIMENTS
from unflip.study.runner import StudyEngine, run_study
from unflip.study.study import Study
from unflip.train.job import RunOptions

CPU = RunOptions(device="cpu", quiet=True)
OnDigits = Callable[..., Study]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_arms_are_recipes(name: str, tmp_path: Path) -> None:
    study = EXPERIMENTS[name].study(tmp_path)
    assert study.arms[0].name == ("conv" if name == "beyond" else "baseline")
    assert study.arms[0].recipe.epochs == 400
    plain = [json.dumps({**arm.recipe.plain(), "name": "", "about": ""}) for arm in study.arms]
    assert len(set(plain)) == len(plain), "no two arms are the same"
    for arm in study.arms:
        assert Recipe.model_validate(arm.recipe.plain()) == arm.recipe
        assert (arm.start is None) == (arm.recipe.start is None)
        assert arm.recipe.epochs == (400 if arm.start is None else 120)
    assert study.reference in [arm.name for arm in study.arms]
    after = any(arm.start for arm in study.arms)
    expected = "400 (from scratch), 120 (from the baseline)." if after else "400 (from scratch)."
    assert study.epochs_note == f"Epochs: {expected}"


@pytest.mark.parametrize(
    ("name", "arm", "mean", "std"),
    [
        ("ablation", "baseline", 85.06, None),
        ("ablation", "finetune-0.01", 85.26, 0.06),
        ("ablation", "mapping", 85.36, 0.06),
        ("ablation", "lns", 85.56, 0.11),
        ("sota", "xnor", 85.23, None),
        ("sota", "tbn", 84.34, None),
        ("sota", "dsq", 84.11, None),
    ],
)
def test_the_papers_figures(
    tmp_path: Path, name: str, arm: str, mean: float, std: float | None
) -> None:
    paper = EXPERIMENTS[name].study(tmp_path).arm(arm).paper
    assert paper is not None
    assert (paper.mean, paper.std) == (mean, std)


def test_the_papers_figures_stand_beside_its_images_alone(
    tmp_path: Path, on_digits: OnDigits
) -> None:
    assert not any(arm.paper for arm in on_digits("ablation", tmp_path).arms)
    assert not any(arm.paper for arm in EXPERIMENTS["beyond"].study(tmp_path).arms)
    assert not any(arm.paper for arm in EXPERIMENTS["alpha"].study(tmp_path).arms)
    assert EXPERIMENTS["ablation"].study(tmp_path).arm("finetune-0.001").paper is None


@pytest.mark.parametrize(
    ("change", "stays"),
    [
        ({}, True),
        ({"overrides": ["model.shortcut=conv"]}, True),
        ({"overrides": ["model.width=32"]}, False),
        ({"overrides": ["model.widths=[1, 1, 2]"]}, False),
        ({"overrides": ["model={name: vgg_small}"]}, False),
        ({"overrides": ["epochs=30"]}, False),
        ({"epochs_scale": 0.05}, False),
    ],
    ids=str,
)
def test_the_papers_figures_stand_beside_its_network_and_epochs_alone(
    tmp_path: Path, change: dict[str, Any], stays: bool
) -> None:
    study = EXPERIMENTS["ablation"].study(tmp_path, **change)
    assert [study.arm(name).paper is not None for name in ("baseline", "lns")] == [stays, stays]


@pytest.mark.parametrize(
    "name", ["alpha", "rho", "controls", "interpretations", "corrections", "beyond"]
)
def test_what_chooses_looks_at_no_test_image_unless_told_to(tmp_path: Path, name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert {arm.recipe.data.validation for arm in experiment.study(tmp_path).arms} == {10000}
    assert not any(arm.paper for arm in experiment.study(tmp_path).arms)
    told = experiment.study(tmp_path, overrides=["data.validation=0"])
    assert {arm.recipe.data for arm in told.arms} == {Data(name="cifar10")}
    if name != "beyond":  # which is none of the paper's
        assert told.arm("baseline").paper is not None


@pytest.mark.parametrize(("name", "count"), [("alpha", 10), ("rho", 11)])
def test_sweeps_hold_the_baselines_images_out_too(tmp_path: Path, name: str, count: int) -> None:
    study = EXPERIMENTS[name].study(tmp_path)
    assert {arm.recipe.data.validation for arm in study.arms} == {10000}
    swept = [arm for arm in study.arms if arm.x is not None]
    assert len(swept) == count
    for arm in swept:
        method = arm.recipe.method
        assert isinstance(method, dict)
        rates = {method["rho_plus"], method["rho_minus"]}
        assert (method["alpha"], rates) == ((arm.x, {0.01}) if name == "alpha" else (1, {arm.x}))


@pytest.mark.parametrize(
    ("name", "alpha", "same"), [("one-mean", 1, "lns"), ("residual-one-mean", 0.1, "residual")]
)
def test_one_mean_is_the_mean_over_all_weights(
    tmp_path: Path, on_digits: OnDigits, name: str, alpha: float, same: str
) -> None:
    study = on_digits("controls", tmp_path)
    digits = load("digits")

    def losses(arm: str) -> tuple[float, Any]:
        model = build_model(study.arm(arm).recipe, digits.spec, seed=0)
        return sum(v.item() for v in auxiliary_losses(model).values()), model

    one, model = losses(name)
    each = [
        binarizer.supervision(binarizer.predict(weight), binarizer.noisy_labels(weight)).flatten()
        for _, weight, binarizer in mapped_layers(model)
    ]
    assert one == pytest.approx(alpha * torch.cat(each).mean().item(), rel=1e-5)
    layers, _ = losses(same)
    assert layers == pytest.approx(sum(v.mean().item() for v in each), rel=1e-5)


def test_a_stretched_alpha_and_faster_latent_weights(tmp_path: Path) -> None:
    study = EXPERIMENTS["controls"].study(tmp_path)
    method = study.arm("stretched-alpha").recipe.method
    assert isinstance(method, dict)
    assert method["alpha"] * (1 - 2 * 0.005) == pytest.approx(1, abs=1e-6)
    assert (method["rho_plus"], method["rho_minus"]) == (0, 0)
    rates = [study.arm(n).recipe.optimizer for n in ("finetune", "latent-10x", "latent-20x")]
    assert [r.latent_lr for r in rates] == [None, 0.1, 0.2]
    assert {r.lr for r in rates} == {0.01}
    fast = study.arm("lns-fast").recipe
    assert (fast.optimizer.lr, fast.optimizer.latent_lr) == (0.01, 0.1)
    assert fast.method == study.arm("lns").recipe.method


def test_interpretations_differ_from_lns_in_what_their_label_says(tmp_path: Path) -> None:
    study = EXPERIMENTS["interpretations"].study(tmp_path)
    lns = study.arm("lns").recipe
    default = lns.method
    assert isinstance(default, dict)

    def changes(arm: str) -> dict[str, Any]:
        recipe = study.arm(arm).recipe
        assert isinstance(recipe.method, dict)
        assert recipe.model_copy(
            update={"method": default, "name": lns.name, "allow_no_flips": True}
        ) == lns.model_copy(update={"allow_no_flips": True})
        return {k: v for k, v in recipe.method.items() if v != default.get(k)}

    straight = {"task_gradient": "straight_through"}
    converged = {"warm_agreement": None, "warm_patience": 1000, "warm_steps": 10000}
    assert changes("straight") == straight
    assert changes("straight-slow") == {**straight, "lr": 0.001}
    assert changes("straight-alpha-0") == {**straight, "alpha": 0}
    assert changes("straight-converged") == {**straight, **converged}
    assert changes("slow-converged") == {"lr": 0.001, **converged}
    assert changes("straight-tanh") == {**straight, "output": "tanh"}
    assert changes("both-slow") == {"task_gradient": "both", "lr": 0.001}
    for rho in (0, 0.005, 0.05, 0.2):
        rates = {} if rho == 0.005 else {"rho_plus": rho, "rho_minus": rho}
        found = changes(f"straight-after-{rho:g}")
        assert found == {**straight, "loss_on": "after_sign", **rates}
    assert {arm.recipe.model.options["shortcut"] for arm in study.arms} == {"conv"}
    assert study.arm("baseline").recipe.schedule.at == (120, 240, 320)
    block = EXPERIMENTS["interpretations"].study(tmp_path, overrides=["model.shortcut=block"])
    assert {arm.recipe.model.options["shortcut"] for arm in block.arms} == {"block"}


def test_labels_stay_true_under_overrides(tmp_path: Path) -> None:
    """Ten times another rate, or an α stretched by a ρ, follows what the user changed."""
    changed = ["optimizer.lr=0.02", "method.alpha=2", "method.rho_plus=0.1", "method.rho_minus=0.1"]
    study = EXPERIMENTS["controls"].study(tmp_path, overrides=changed)

    def method(arm: str) -> dict[str, Any]:
        found = study.arm(arm).recipe.method
        assert isinstance(found, dict)
        return found

    for arm, times in {"lns-fast": 10, "latent-10x": 10, "latent-20x": 20}.items():
        rates = study.arm(arm).recipe.optimizer
        assert (rates.lr, rates.latent_lr) == (0.02, pytest.approx(0.02 * times))
    assert method("mapping-slow")["lr"] == pytest.approx(0.0002)
    assert method("stretched-alpha")["alpha"] == pytest.approx(2 / (1 - 2 * 0.1))
    assert method("stretched-alpha")["rho_plus"] == 0
    assert method("mapping")["alpha"] == method("residual-still")["alpha"] == 0
    assert method("lns")["alpha"] == 2


def test_faster_is_faster_than_the_arm_would_be_without(tmp_path: Path) -> None:
    changed = ["optimizer.latent_lr=0.2", "model.shortcut=conv", "schedule={name: constant}"]
    study = EXPERIMENTS["readings"].study(tmp_path, overrides=changed)
    assert study.arm("baseline").recipe.optimizer.latent_lr == 0.2
    assert study.arm("latent-10x").recipe.optimizer.latent_lr == 2
    labelled = study.arm("baseline").recipe  # "cosine decay, one shortcut per block"
    assert (labelled.schedule.name, labelled.model.options["shortcut"]) == ("cosine", "block")
    assert study.arm("conv").recipe.schedule.name == "constant"


def test_the_shipped_baseline_is_the_interpretation_that_matches_the_paper_best(
    tmp_path: Path,
) -> None:
    shipped = load_recipe("cifar10-resnet20-dorefa")
    assert EXPERIMENTS["readings"].study(tmp_path).arm("conv-wide").recipe == shipped
    for name in ("ablation", "sota", "interpretations", "replication", "replication-from-one"):
        study = EXPERIMENTS[name].study(tmp_path, overrides=["data.validation=0"])
        assert study.arm("baseline").recipe == shipped


def test_the_forward_corrections_rho_is_its_labels(tmp_path: Path) -> None:
    study = EXPERIMENTS["corrections"].study(tmp_path, overrides=["method.rho_plus=0.1"])
    rates = [study.arm(name).recipe.method["rho_plus"] for name in ("lns", "forward")]  # type: ignore[index]
    assert rates == [0.1, 0.005]


def test_a_mapping_that_stays_zero(tmp_path: Path, on_digits: OnDigits) -> None:
    """In the control, g of W/s + g(W) has no say: the signs are those of W after training as before."""
    study = on_digits("controls", tmp_path, 1)
    summary = run_study(study, only=["residual-still"], options=CPU)  # really trained
    [run] = summary.arms[1].runs
    assert run.accuracy is not None
    assert run.best_accuracy is not None
    assert 0 <= run.accuracy <= run.best_accuracy <= 100
    assert (tmp_path / "accuracy.svg").exists()
    folder = tmp_path / "residual-still" / "seed-0"
    line = json.loads((folder / "metrics.jsonl").read_text())
    assert line["differs_from_sign"] == 0
    assert line["flips"] > 0
    for _, weight, binarizer in mapped_layers(load_run(folder)):
        assert torch.equal(binarizer.predict(weight), weight / weight.abs().mean())


def test_the_strongest_network_is_tested_once_it_is_chosen(tmp_path: Path) -> None:
    final, beyond = (EXPERIMENTS[name].study(tmp_path) for name in ("final", "beyond"))
    assert [arm.name for arm in final.arms] == ["baseline", "strongest", "alone"]
    assert {arm.recipe.data for arm in final.arms} == {Data(name="cifar10")}
    assert not any(arm.paper for arm in final.arms)

    def but_for_images(arm: str, study: Study) -> dict[str, Any]:
        return {**study.arm(arm).recipe.plain(), "data": None, "name": None, "expected": None}

    assert but_for_images("baseline", final) == but_for_images("conv", beyond)
    strongest = but_for_images("strongest", final)
    for arm, parts in {
        "decayed-mean": ("model",),
        "decayed-shifts": ("method",),
        "decayed-distill": ("distill", "epochs", "batch_size", "schedule"),
    }.items():
        chosen = but_for_images(arm, beyond)
        assert all(strongest[part] == chosen[part] for part in parts)
        # a longer run needs less of it, as every network's
        assert strongest["optimizer"] == {**chosen["optimizer"], "weight_decay": 5e-5}
    assert {**strongest, "distill": None} == but_for_images("alone", final)


def test_the_fake_arms_of_every_experiment_run(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    for name in EXPERIMENTS:
        study = on_digits(name, tmp_path / name, 1)
        summary = run_study(study, engine=StudyEngine(at_once=10))
        means = [arm.mean or 0 for arm in summary.arms]
        assert len(means) == len(study.arms)
        assert statistics.fmean(means) > 80
