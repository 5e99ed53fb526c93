"""The loop watches itself: a run that no longer learns stops and says why."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from unflip.data import ImageSet
from unflip.methods import LayerMeanSign
from unflip.train import TrainingStopped, load_recipe, train
from unflip.train.engine import Engine
from unflip.train.health import Health
from unflip.train.job import RunOptions

OVERRIDES = ["model.width=2", "data.validation=1200", "batch_size=64"]


def health(*overrides: str, name: str = "digits-dorefa") -> Health:
    return Health(load_recipe(name, list(overrides)), classes=10)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number(loss: float) -> None:
    problem = health().problem(2, loss, flips=5, latent_moved=True)
    assert problem is not None
    assert f"epoch 3: the loss is {loss}" in problem
    assert "Lower optimizer.lr (now 0.1)" in problem
    assert "precision=float32" in problem


def test_latent_weights_that_never_move() -> None:
    problem = health().problem(0, 2.0, flips=0, latent_moved=False)
    assert problem is not None
    assert "no latent weight changed" in problem
    assert "--eager" in problem
    stays = health("allow_no_flips=true").problem(0, 2.0, flips=0, latent_moved=False)
    assert stays == problem, "allow_no_flips is about flips, not about gradients"


def test_no_flips_near_the_highest_rate() -> None:
    seen = health("optimizer.latent_lr=0.3", "epochs=30")
    problem = seen.problem(14, 2.0, flips=0, latent_moved=True)
    assert problem is not None
    assert "epoch 15: no binary weight flipped" in problem
    assert "Raise optimizer.latent_lr (now 0.3)" in problem
    assert "allow_no_flips=true" in problem
    assert seen.problem(14, 2.0, flips=1, latent_moved=True) is None
    assert seen.problem(16, 2.0, flips=0, latent_moved=True) is None, "cosine is below a half there"
    allowed = health("epochs=30", "allow_no_flips=true")
    assert allowed.problem(14, 2.0, flips=0, latent_moved=True) is None


def test_signs_that_a_high_rate_keeps_from_flipping() -> None:
    """optimizer.lr=1000: latent weights so large that no step turns them. A higher rate is no help there."""
    problem = health("optimizer.lr=1000").problem(1, 929.7, flips=0, latent_moved=True)
    assert problem is not None
    assert "epoch 2: no binary weight flipped" in problem
    assert "the loss is 929.7 (2.303 when guessing)" in problem
    assert "Lower optimizer.lr (now 1000.0)" in problem
    assert "Raise" not in problem
    assert health("optimizer.lr=1000").problem(1, 929.7, flips=0, latent_moved=False) == problem


def test_signs_that_were_thrown_at_first_and_stay() -> None:
    """optimizer.latent_lr=1e6 at the usual lr: the rest of the network learns, so the loss says nothing."""
    seen = health("optimizer.latent_lr=1e6")
    assert seen.problem(0, 2.46, flips=0.5, latent_moved=True) is None
    problem = seen.problem(1, 2.1, flips=0, latent_moved=True)
    assert problem is not None
    assert "Lower optimizer.lr (now 0.1) or optimizer.latent_lr (now 1000000.0)" in problem
    usual = health("optimizer.latent_lr=0.01")
    assert usual.problem(0, 2.46, flips=0.02, latent_moved=True) is None
    assert "Raise optimizer.latent_lr" in (usual.problem(1, 2.1, flips=0, latent_moved=True) or "")


def test_a_loss_that_began_exploded_is_not_measured_by_its_start() -> None:
    seen = health("epochs=20")
    assert seen.problem(0, 5e17, 0.4, True) is None
    problem = seen.problem(6, 929.7, 0.01, True)
    assert problem is not None
    assert "the loss is 929.7, above 2.303, the loss of guessing" in problem
    assert "Lower optimizer.lr" in problem
    taught = health("epochs=20", "distill={teacher: digits-float}")
    assert taught.problem(0, 900.0, 0.4, True) is None
    assert taught.problem(6, 800.0, 0.01, True) is None, "a teacher's loss has another scale"


def test_with_a_teacher_guessing_costs_at_most_its_squared_temperature_more() -> None:
    """ReActNet's second step starts from float weights and its loss rises at first: all its runs were stopped."""
    distill = "distill={teacher: digits-float, temperature: 3, weight: 0.5}"
    seen = health("epochs=20", distill, name="digits-finetune")
    assert seen.problem(0, 0.2, 5, True) is None
    assert seen.problem(6, 0.4, 5, True) is None
    assert seen.problem(9, 11.51, 5, True) is None  # log(10) · (0.5 + 0.5 · 9) = 11.513
    assert "above 11.51, the loss of guessing" in (seen.problem(10, 11.52, 5, True) or "")


def test_a_loss_above_its_start_after_the_warm_up() -> None:
    seen = health("epochs=200")  # warm-up: a twentieth, 10 epochs
    assert seen.problem(0, 2.0, 5, True) is None
    assert seen.problem(1, 9.0, 5, True) is None
    assert seen.problem(9, 2.1, 5, True) is None
    assert seen.problem(10, 2.0, 5, True) is None
    problem = seen.problem(10, 2.01, 5, True)
    assert problem is not None
    assert "epoch 11: the loss is 2.01, above 2, where it started" in problem
    assert "Lower optimizer.lr" in problem


def test_a_short_run_has_five_epochs_to_warm_up() -> None:
    seen = health("epochs=20")
    assert seen.problem(0, 1.0, 5, True) is None
    assert seen.problem(4, 1.5, 5, True) is None
    assert seen.problem(5, 1.5, 5, True) is not None


def test_fine_tuning_may_rise_but_not_above_guessing() -> None:
    """It starts in a minimum: there the bar is log(classes)."""
    seen = health("epochs=20", name="digits-finetune")
    assert seen.problem(0, 0.01, 5, True) is None
    assert seen.problem(9, 2.3, 5, True) is None
    problem = seen.problem(9, 2.31, 5, True)
    assert problem is not None
    assert "the loss of guessing" in problem


def test_a_float_network_has_no_signs_to_watch() -> None:
    assert health(name="digits-float").problem(0, 2.0, None, None) is None


# In the loop


def run(out: Path, data: ImageSet, *overrides: str) -> None:
    recipe = load_recipe("digits-dorefa", [*OVERRIDES, *overrides])
    train(
        recipe,
        data,
        out,
        options=RunOptions(device="cpu", quiet=True, checkpoint_seconds=0),
    )


def epochs_written(out: Path) -> int:
    return len((out / "seed-0" / "metrics.jsonl").read_text().splitlines())


def test_a_dropped_gradient_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: ImageSet
) -> None:
    """What torch 2.11 did when it compiled a custom autograd.Function: a gradient of exactly zero."""

    monkeypatch.setattr(LayerMeanSign, "surrogate", lambda self, weight: weight.detach())
    with pytest.raises(TrainingStopped, match="epoch 1: no latent weight changed"):
        run(tmp_path, digits, "epochs=3")
    assert epochs_written(tmp_path) == 1
    assert not (tmp_path / "seed-0" / "result.json").exists()


def test_a_gradient_dropped_after_a_restart_stops_the_first_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: ImageSet
) -> None:
    """What the weights were at the epoch's start is saved with them."""
    step, steps = Engine.step, 0

    def fail_in_the_second_epoch(engine: Engine) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise MemoryError
        step(engine)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "step", fail_in_the_second_epoch)
        with pytest.raises(MemoryError):
            run(tmp_path, digits, "epochs=4")
    monkeypatch.setattr(LayerMeanSign, "surrogate", lambda self, weight: weight.detach())
    with pytest.raises(TrainingStopped, match="epoch 2: no latent weight changed"):
        run(tmp_path, digits, "epochs=4")


def test_too_slow_a_rate_for_any_sign_stops_the_run(tmp_path: Path, digits: ImageSet) -> None:
    slow = ("epochs=2", "optimizer.latent_lr=1e-7", "schedule.name=constant")
    with pytest.raises(TrainingStopped, match="epoch 1: no binary weight flipped"):
        run(tmp_path / "a", digits, *slow)
    run(tmp_path / "b", digits, *slow, "allow_no_flips=true")
    lines = (tmp_path / "b" / "seed-0" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["flips"] for line in lines] == [0, 0]


@pytest.mark.parametrize("name", ["digits-dorefa", "digits-float"])
def test_a_learning_rate_that_blows_up_stops_the_run(
    tmp_path: Path, digits: ImageSet, name: str
) -> None:
    """A binary layer refuses a NaN at once; a float network shows it in the epoch's loss."""
    recipe = load_recipe(name, [*OVERRIDES, "epochs=3", "optimizer.lr=1e30"])
    with pytest.raises(TrainingStopped, match=r"(?i)nan.*Lower optimizer\.lr \(now 1e\+30\)"):
        train(recipe, digits, tmp_path, options=RunOptions(device="cpu", quiet=True))
    assert not (tmp_path / "seed-0" / "result.json").exists()


def test_unlearning_stops_the_run_and_is_remembered_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: ImageSet
) -> None:
    """The loss of the first epoch is the bar, also for a process that was not there."""
    overrides = ("epochs=12", "schedule.name=constant", "optimizer.lr=0.02")
    step, steps = Engine.step, 0

    def unlearn(engine: Engine) -> None:
        nonlocal steps
        step(engine)
        steps += 1
        if steps == 12:  # the end of the sixth epoch: past the warm-up
            raise MemoryError
        if steps > 12:
            engine.learners[0].loss_sum += 5

    monkeypatch.setattr(Engine, "step", unlearn)
    with pytest.raises(MemoryError):
        run(tmp_path, digits, *overrides)
    assert epochs_written(tmp_path) == 5
    with pytest.raises(TrainingStopped, match=r"epoch 6: the loss is .*, where it started"):
        run(tmp_path, digits, *overrides)
    assert epochs_written(tmp_path) == 6


def test_other_errors_of_a_step_stay_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: ImageSet
) -> None:
    def fail(engine: Engine) -> None:
        raise ValueError("something else")

    monkeypatch.setattr(Engine, "step", fail)
    with pytest.raises(ValueError, match=r"^something else$"):
        run(tmp_path, digits, "epochs=1")


@pytest.mark.parametrize(
    ("expected", "accuracy", "warns"),
    [
        (80.0, 68.1, False),  # 15 % of 80 is 12 points
        (80.0, 67.9, True),
        (20.0, 15.1, False),  # at least 5 points
        (20.0, 14.9, True),
        (80.0, None, False),  # not measured in this epoch
    ],
)
def test_an_accuracy_far_below_the_expected_one(
    expected: float, accuracy: float | None, warns: bool
) -> None:
    seen = health(f"expected={{3: {expected}}}")
    problem = seen.behind(3, accuracy)
    assert (problem is not None) == warns
    assert seen.behind(2, 0.0) is None, "nothing is expected of that epoch"
    if problem:
        assert f"epoch 3: accuracy is {accuracy:.2f} %, far below the {expected:.2f} %" in problem
        assert "images and labels" in problem
        assert "batch_size=64" in problem
        assert "optimizer.lr (now 0.1)" in problem


def test_the_loop_warns_once_of_a_point(
    digits: ImageSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe("digits-float", [*OVERRIDES, "epochs=3", "expected={1: 0, 2: 100}"])
    train(recipe, digits, tmp_path / "out", options=RunOptions(device="cpu"))
    out = capsys.readouterr().out
    assert out.count("warning: ") == 1
    assert "seed-0: epoch 2: accuracy is" in out
