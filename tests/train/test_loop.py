"""Nothing is lost: runs that are killed, stopped, damaged or crowded out end as if nothing had happened.

One file of more than 400 lines, because all tests share the same ways to interrupt and resume a run.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unflip import models
from unflip.data import ImageSet
from unflip.methods.lns import LNS
from unflip.recipes.schema import Recipe
from unflip.runs import checkpoint as checkpoints
from unflip.runs.files import RunError
from unflip.runs.run import Run
from unflip.train import Job, RunOptions, load_recipe, loop, train, train_together
from unflip.train.engine import Engine
from unflip.train.live_run import LiveRun

Start = Callable[..., Any]
Hash = Callable[[Path], str]

EPOCHS, STEPS = 4, 5
NETWORK = (
    "model={name: vgg_small, width: 8}"  # five binary layers: a third of the time of ResNet-20
)
OVERRIDES = [NETWORK, "data.validation=1000", "batch_size=64", f"epochs={EPOCHS}"]
LNS_OVERRIDES = [*OVERRIDES, "method.warm_steps=20"]
MOVED = {"flips", "flip_rate", "differs_from_sign", "latent_change"}
FIELDS = {
    "epoch",
    "loss",
    "auxiliary_loss",
    "accuracy",
    "top5",
    "lr",
    "flips",
    "flip_rate",
    "differs_from_sign",
    "latent_change",
    "seconds",
}


@pytest.fixture(scope="module")
def dorefa() -> Recipe:
    return load_recipe("digits-dorefa", OVERRIDES)


@pytest.fixture(scope="module")
def lns() -> Recipe:
    return load_recipe("digits-lns", LNS_OVERRIDES)


def run(
    recipe: Recipe,
    data: ImageSet,
    out: Path,
    seeds: Sequence[int] = (0,),
    start: Path | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train with a checkpoint after every epoch."""
    often = RunOptions(checkpoint_seconds=0, device="cpu", **options)
    return train(recipe, data, out, seeds=seeds, start=start, options=often)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, digits: ImageSet, dorefa: Recipe) -> Path:
    """The run that nothing happened to; seed 0."""
    out = tmp_path_factory.mktemp("whole")
    run(dorefa, digits, out, quiet=True)
    return out


@pytest.fixture(scope="module")
def whole_lns(
    tmp_path_factory: pytest.TempPathFactory, digits: ImageSet, lns: Recipe, whole: Path
) -> Path:
    out = tmp_path_factory.mktemp("whole_lns")
    run(lns, digits, out, start=whole, quiet=True)
    return out


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What an epoch measured; its seconds are its own."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def epochs_written(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def same_run(found: Path, expected: Path, weights_hash: Hash) -> None:
    """Bit for bit the same weights and figures, and no more files than there should be."""
    assert weights_hash(found) == weights_hash(expected)
    assert metrics(found) == metrics(expected)
    assert sorted(p.name for p in found.iterdir()) == sorted(p.name for p in expected.iterdir())
    results = [json.loads((f / "result.json").read_text()) for f in (found, expected)]
    assert results[0]["accuracy"] == results[1]["accuracy"]


class Interrupting:
    """Stands in for Engine.step: sends this process a signal during the n-th step."""

    def __init__(self, number: int, what: signal.Signals = signal.SIGINT) -> None:
        self.real, self.number, self.what, self.steps = Engine.step, number, what, 0

    def __get__(self, engine: Engine, kind: type) -> Callable[[], None]:
        def step() -> None:
            self.steps += 1
            if self.steps == self.number:
                os.kill(os.getpid(), self.what)
            self.real(engine)

        return step


def interrupt(
    monkeypatch: pytest.MonkeyPatch, number: int, what: signal.Signals, training: Callable[[], Any]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "step", Interrupting(number, what))
        with pytest.raises(KeyboardInterrupt, match=what.name):
            training()


# Killed


def test_killed_at_ten_random_moments(
    start: Start, tmp_path: Path, whole: Path, weights_hash: Hash
) -> None:
    """kill -9 at a random moment of a random epoch, ten times, and the same command again each time."""
    dice = random.Random(3)
    folder = tmp_path / "seed-0"
    command = ["train", "digits-dorefa", *OVERRIDES, "--out", tmp_path]
    lines = (whole / "seed-0" / "metrics.jsonl").read_text().splitlines()
    epoch_seconds = min(json.loads(line)["seconds"] for line in lines)
    waiting = sorted(dice.choices(range(EPOCHS), k=10))
    while waiting:
        process = start(*command, checkpoint_seconds=0)
        process.wait_for(lambda: epochs_written(folder) >= waiting[0])
        time.sleep(dice.uniform(0, epoch_seconds * min(2, EPOCHS - waiting[0] - 0.5)))
        if process.send(signal.SIGKILL).code == 0:  # came too late
            same_run(folder, whole / "seed-0", weights_hash)
            shutil.rmtree(folder)
            continue
        assert process.code == -signal.SIGKILL, process.err
        waiting.pop(0)
    done = start(*command, checkpoint_seconds=0).wait()
    assert done.code == 0, done.err
    same_run(folder, whole / "seed-0", weights_hash)


def test_killed_at_every_write(
    start: Start, tmp_path: Path, whole: Path, weights_hash: Hash
) -> None:
    """kill -9 just before each file gets its name: the first of the run, then the second, and so on."""
    command = ["train", "digits-dorefa", *OVERRIDES, "--out", tmp_path]
    for number in range(1, 30):
        process = start(*command, checkpoint_seconds=0, die_at_write=number).wait()
        if process.code == 0:
            break
        assert process.code == -signal.SIGKILL, process.err
    assert number >= 7
    same_run(tmp_path / "seed-0", whole / "seed-0", weights_hash)


def test_two_seeds_killed_between_their_checkpoints(
    start: Start, tmp_path: Path, digits: ImageSet, dorefa: Recipe, whole: Path, weights_hash: Hash
) -> None:
    """One seed is then a checkpoint ahead of the other; both resume from the one they share."""
    command = ["train", "digits-dorefa", *OVERRIDES, "--out", tmp_path, "--seeds", "2"]
    for number in (2, 5, 9, 8, 11):
        process = start(*command, checkpoint_seconds=0, die_at_write=number).wait()
        assert process.code == -signal.SIGKILL, process.err
    done = start(*command, checkpoint_seconds=0).wait()
    assert done.code == 0, done.err
    same_run(tmp_path / "seed-0", whole / "seed-0", weights_hash)
    run(dorefa, digits, tmp_path / "alone", seeds=[1], quiet=True)
    same_run(tmp_path / "seed-1", tmp_path / "alone" / "seed-1", weights_hash)


# Stopped


@pytest.mark.parametrize("what", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_first(
    start: Start, tmp_path: Path, whole: Path, weights_hash: Hash, what: signal.Signals
) -> None:
    folder = tmp_path / "seed-0"
    command = ["train", "digits-dorefa", *OVERRIDES, "--out", tmp_path]
    # 20 s between checkpoints: only the signal can have made one
    process = start(*command, step_seconds=0.05)
    process.wait_for(lambda: epochs_written(folder) >= 1)
    assert process.send(what).code == 130
    assert "run the same command to resume" in process.err
    assert "Traceback" not in process.err
    epoch, step = checkpoints.available(folder)[-1]
    assert epoch >= 1
    assert step >= 1, "saved within the epoch"
    done = start(*command).wait()
    assert done.code == 0, done.err
    assert f"resuming at epoch {epoch + 1}, step {step}" in done.out
    assert weights_hash(folder) == weights_hash(whole / "seed-0")
    assert metrics(folder) == metrics(whole / "seed-0")


def test_a_signal_after_the_last_step_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
    digits: ImageSet,
    dorefa: Recipe,
    tmp_path: Path,
    whole: Path,
    weights_hash: Hash,
) -> None:
    """The run is finished, but a study would begin the next."""
    finish = LiveRun.finish

    def finish_while_told_to_stop(self: LiveRun, *args: Any) -> dict[str, Any]:
        signal.raise_signal(signal.SIGTERM)
        return finish(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(LiveRun, "finish", finish_while_told_to_stop)
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            run(dorefa, digits, tmp_path)
    same_run(tmp_path / "seed-0", whole / "seed-0", weights_hash)


def test_sigterm_before_the_first_epoch_leaves_nothing_behind(
    tmp_path: Path, digits: ImageSet, dorefa: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm start or a teacher's logits may take a while: SIGTERM cleans up there as Ctrl-C does."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(
        loop, "load_first_weights", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
    )
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM"):
        run(dorefa, digits, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_thread_can_train(
    tmp_path: Path, digits: ImageSet, dorefa: Recipe, whole: Path, weights_hash: Hash
) -> None:
    """Python gives signals to the main thread alone."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run, dorefa, digits, tmp_path).result()
    assert weights_hash(tmp_path / "seed-0") == weights_hash(whole / "seed-0")


@pytest.mark.parametrize("step", [1, STEPS, STEPS + 2, EPOCHS * STEPS])
def test_stopped_at_any_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    digits: ImageSet,
    dorefa: Recipe,
    whole: Path,
    weights_hash: Hash,
    step: int,
) -> None:
    """The first step, the last of an epoch, one in between, the last of all."""
    before = signal.getsignal(signal.SIGINT)
    interrupt(monkeypatch, step, signal.SIGINT, lambda: run(dorefa, digits, tmp_path))
    assert signal.getsignal(signal.SIGINT) is before
    assert checkpoints.available(tmp_path / "seed-0")[-1] == (
        (step - 1) // STEPS,
        (step - 1) % STEPS + 1,
    )
    run(dorefa, digits, tmp_path)
    assert weights_hash(tmp_path / "seed-0") == weights_hash(whole / "seed-0")
    assert metrics(tmp_path / "seed-0") == metrics(whole / "seed-0")


def test_lns_stopped_and_killed(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    digits: ImageSet,
    lns: Recipe,
    whole: Path,
    whole_lns: Path,
    weights_hash: Hash,
) -> None:
    """The mapping networks' state is saved with the rest, and the warm start is not repeated."""
    folder = tmp_path / "seed-0"
    interrupt(
        monkeypatch, STEPS + 3, signal.SIGTERM, lambda: run(lns, digits, tmp_path, start=whole)
    )
    assert "warm start" in capsys.readouterr().out
    command = ["train", "digits-lns", *LNS_OVERRIDES, "--out", tmp_path, "--start", whole]
    process = start(*command, checkpoint_seconds=0, step_seconds=0.05)
    process.wait_for(lambda: epochs_written(folder) >= 2)
    assert process.send(signal.SIGKILL).code == -signal.SIGKILL
    assert "resuming at epoch 2, step 3" in process.out
    assert "warm start" not in process.out

    def never(*args: Any) -> None:
        raise AssertionError("the warm start was repeated")

    monkeypatch.setattr(LNS, "prepare", never)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lns: a mapping network")  # it was taught before
        run(lns, digits, tmp_path, start=whole)
    same_run(folder, whole_lns / "seed-0", weights_hash)


def test_lns_killed_in_its_first_epoch_keeps_the_warm_start(
    start: Start, tmp_path: Path, whole: Path, whole_lns: Path, weights_hash: Hash
) -> None:
    command = ["train", "digits-lns", *LNS_OVERRIDES, "--out", tmp_path, "--start", whole]
    # writes 1 to 5: provenance, recipe, metrics, and the checkpoint a run begins with
    assert start(*command, checkpoint_seconds=0, die_at_write=6).wait().code == -signal.SIGKILL
    assert checkpoints.available(tmp_path / "seed-0") == [(0, 0)]
    done = start(*command, checkpoint_seconds=0).wait()
    assert done.code == 0, done.err
    assert "warm start" not in done.out
    same_run(tmp_path / "seed-0", whole_lns / "seed-0", weights_hash)


class WithDropout(nn.Module):
    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.3)
        )
        self.fc = nn.Linear(144, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.body(x))
        return out


@pytest.fixture
def dropout(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    def build(method: Any = "float", *, num_classes: int = 10, in_channels: int = 3) -> nn.Module:
        return WithDropout(in_channels, num_classes)

    monkeypatch.setattr(models.base, "_REGISTRY", {**models.base._REGISTRY})
    models.base.register_model("with_dropout", input_shape=(3, 8, 8))(build)
    return load_recipe("digits-float", [*OVERRIDES[1:], "model={name: with_dropout}"])


def test_dropout_draws_the_same_when_resumed_and_beside_other_seeds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    digits: ImageSet,
    dropout: Recipe,
    weights_hash: Hash,
) -> None:
    for seed in (0, 1):
        run(dropout, digits, tmp_path / "alone", seeds=[seed], quiet=True)
    together = tmp_path / "together"
    interrupt(
        monkeypatch,
        STEPS + 2,
        signal.SIGINT,
        lambda: run(dropout, digits, together, seeds=[0, 1], quiet=True),
    )
    run(dropout, digits, together, seeds=[0, 1], quiet=True)
    for seed in ("seed-0", "seed-1"):
        same_run(together / seed, tmp_path / "alone" / seed, weights_hash)


@pytest.mark.parametrize("method", ["stompp", "{name: binaryconnect, stochastic: true}"])
def test_binarizers_draw_the_same_when_resumed_and_beside_other_seeds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    digits: ImageSet,
    weights_hash: Hash,
    method: str,
) -> None:
    recipe = load_recipe("digits-dorefa", [*OVERRIDES, f"method={method}"])
    for seed in (0, 1):
        run(recipe, digits, tmp_path / "alone", seeds=[seed], quiet=True)
    together = tmp_path / "together"
    again = lambda: run(recipe, digits, together, seeds=[0, 1], quiet=True)  # noqa: E731
    interrupt(monkeypatch, STEPS + 2, signal.SIGINT, again)
    again()
    for seed in ("seed-0", "seed-1"):
        same_run(together / seed, tmp_path / "alone" / seed, weights_hash)


# Several seeds, finished runs, other recipes, other processes


def test_seeds_together_are_the_same_as_alone(
    tmp_path: Path, digits: ImageSet, dorefa: Recipe, whole: Path, weights_hash: Hash
) -> None:
    results = run(dorefa, digits, tmp_path / "both", seeds=[0, 1], quiet=True)
    assert [r["seed"] for r in results] == [0, 1]
    run(dorefa, digits, tmp_path / "alone", seeds=[1], quiet=True)
    same_run(tmp_path / "both" / "seed-0", whole / "seed-0", weights_hash)
    same_run(tmp_path / "both" / "seed-1", tmp_path / "alone" / "seed-1", weights_hash)
    assert weights_hash(tmp_path / "both" / "seed-0") != weights_hash(tmp_path / "both" / "seed-1")


def test_more_seeds_asked_for_after_one_was_stopped(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    digits: ImageSet,
    dorefa: Recipe,
    whole: Path,
    weights_hash: Hash,
) -> None:
    """The old one is finished from where it was, not begun again with the others."""
    interrupt(monkeypatch, 3 * STEPS, signal.SIGINT, lambda: run(dorefa, digits, tmp_path))
    capsys.readouterr()
    results = run(dorefa, digits, tmp_path, seeds=[0, 1])
    assert f"resuming at epoch 3, step {STEPS}" in capsys.readouterr().out
    assert [r["seed"] for r in results] == [0, 1]
    same_run(tmp_path / "seed-0", whole / "seed-0", weights_hash)
    assert epochs_written(tmp_path / "seed-1") == EPOCHS


def test_a_finished_run_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, digits: ImageSet, dorefa: Recipe, whole: Path
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("something was trained")

    monkeypatch.setattr(loop, "Learner", never)
    files = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (whole / "seed-0").iterdir()}
    [result] = run(dorefa, digits, whole)
    assert result == json.loads((whole / "seed-0" / "result.json").read_text())
    assert {
        p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (whole / "seed-0").iterdir()
    } == files


def test_the_run_of_another_recipe_is_refused(digits: ImageSet, whole: Path) -> None:
    other = load_recipe(
        "digits-dorefa",
        [*OVERRIDES, "optimizer.lr=0.2", "method.inputs=01", "schedule.name=constant"],
    )
    with pytest.raises(RunError) as error:
        run(other, digits, whole)
    text = str(error.value)
    assert str(whole / "seed-0") in text
    assert "optimizer.lr is 0.1 there and 0.2 here" in text
    assert "method.inputs is 'pm1' there and '01' here" in text
    assert "schedule.name is 'cosine' there and 'constant' here" in text
    assert text.count(" there and ") == 3, "only what differs"


def test_a_changed_description_is_no_other_recipe(
    digits: ImageSet, dorefa: Recipe, whole: Path
) -> None:
    run(dorefa.model_copy(update={"about": "said better"}), digits, whole)


def test_another_process_in_the_folder_is_refused(
    start: Start, tmp_path: Path, digits: ImageSet, whole: Path, weights_hash: Hash
) -> None:
    long = [*OVERRIDES, "epochs=300"]
    first = start("train", "digits-dorefa", *long, "--out", tmp_path, checkpoint_seconds=0)
    first.wait_for(lambda: epochs_written(tmp_path / "seed-0") >= 1)
    with pytest.raises(RunError, match=r"another process is training in .*seed-0"):
        run(load_recipe("digits-dorefa", long), digits, tmp_path, seeds=[1, 0], quiet=True)
    assert not (tmp_path / "seed-1").exists()
    assert first.process.is_alive()
    first.send(signal.SIGKILL)
    written = epochs_written(tmp_path / "seed-0")
    with pytest.raises(RunError, match="epochs is 300 there and 4 here"):
        run(load_recipe("digits-dorefa", OVERRIDES), digits, tmp_path)
    assert epochs_written(tmp_path / "seed-0") == written


# What is written


def test_one_line_an_epoch_with_every_field(whole: Path, whole_lns: Path) -> None:
    for out in (whole, whole_lns):
        text = (out / "seed-0" / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["epoch"] for line in lines] == [1, 2, 3, 4]
        assert all(line.keys() == FIELDS for line in lines)
        assert all(line["seconds"] > 0 for line in lines)
        assert all(0 < line["flip_rate"] < 1 for line in lines)
    plain, mapped = metrics(whole / "seed-0"), metrics(whole_lns / "seed-0")
    assert all(line["accuracy"] <= line["top5"] <= 100 for line in plain)
    assert {line["differs_from_sign"] for line in plain} == {0}
    assert [line["lr"] for line in plain] == pytest.approx(
        [0.1 * 0.5 * (1 + math.cos(math.pi * e / 4)) for e in range(4)]
    )
    assert plain[0]["auxiliary_loss"] == {}
    assert list(mapped[0]["auxiliary_loss"])[::4] == ["layer2.conv", "layer6.conv"]
    assert any(line["differs_from_sign"] > 0 for line in mapped)


def test_accuracy_measured_in_some_epochs_alone(
    tmp_path: Path,
    digits: ImageSet,
    dorefa: Recipe,
    whole: Path,
    weights_hash: Hash,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is measured changes nothing of what is trained, and the last epoch is always measured."""
    run(dorefa, digits, tmp_path, evaluate_every=3)
    assert "epoch 1/4  loss" in capsys.readouterr().out
    assert weights_hash(tmp_path / "seed-0") == weights_hash(whole / "seed-0")
    some, all_ = (
        [
            json.loads(line)["accuracy"]
            for line in (out / "seed-0/metrics.jsonl").read_text().splitlines()
        ]
        for out in (tmp_path, whole)
    )
    assert some == [None, None, all_[2], all_[3]]
    lines = [
        {"epoch": i + 1, "loss": 1, "accuracy": a, "seconds": 1} for i, a in enumerate([50.0, None])
    ]
    (tmp_path / "seed-0/metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    [found] = Run.below(tmp_path)
    assert found.position == (4, all_[3]), "a result is the last word"
    (tmp_path / "seed-0/result.json").unlink()
    assert found.position == (2, 50.0)
    with pytest.raises(ValueError, match="evaluate_every=0 should be at least 1"):
        run(dorefa, digits, tmp_path, evaluate_every=0)


def test_a_long_epoch_is_saved_in_its_middle(
    tmp_path: Path, digits: ImageSet, dorefa: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[tuple[int, int]] = []
    save = checkpoints.save
    monkeypatch.setattr(loop, "LONG_EPOCH_SECONDS", 0.0)
    monkeypatch.setattr(
        checkpoints, "save", lambda f, c: (saved.append((c.epoch, c.step)), save(f, c))
    )
    run(dorefa, digits, tmp_path, quiet=True)
    assert (0, 1) in saved
    assert (2, STEPS - 1) in saved
    assert saved[-1] == (EPOCHS, 0)


def test_flips_are_of_the_epoch(whole: Path, digits: ImageSet, dorefa: Recipe) -> None:
    """From the last two checkpoints, which are an epoch apart."""
    flips = total = 0
    before, after = (
        checkpoints.load_at(whole / "seed-0", epoch, 0).tensors for epoch in (EPOCHS - 1, EPOCHS)
    )
    for name in before:
        if name.startswith("latent."):
            weight = name.replace("latent.", "model.") + ".weight"
            flips += int(((before[weight] >= 0) != (after[weight] >= 0)).sum())
            total += before[weight].numel()
    last = metrics(whole / "seed-0")[-1]
    assert total > 10_000
    assert (last["flips"], last["flip_rate"]) == (flips, flips / total)


def test_the_result_is_the_last_epochs(whole: Path) -> None:
    result = json.loads((whole / "seed-0" / "result.json").read_text())
    last = metrics(whole / "seed-0")[-1]
    assert (result["accuracy"], result["loss"]) == (last["accuracy"], last["loss"])
    assert (result["recipe"], result["seed"], result["epochs"]) == ("digits-dorefa", 0, EPOCHS)
    assert result["evaluated_on"] == "validation"


def test_the_accuracy_is_that_of_the_saved_weights(
    whole: Path, digits: ImageSet, dorefa: Recipe
) -> None:
    """Computed again from the checkpoint, without the loop."""
    saved, _ = checkpoints.load_latest(whole / "seed-0")
    assert saved is not None
    model = models.create(
        "vgg_small", dorefa.method, **dorefa.model.options, in_channels=1, image_size=8
    )
    state = {k[6:]: v for k, v in saved.tensors.items() if k.startswith("model.")}
    model.load_state_dict(state)
    held_out, spec = digits.split(dorefa.data.validation), digits.spec
    images = (torch.from_numpy(held_out.test_images) / 255 - spec.mean[0]) / spec.std[0]
    with torch.no_grad():
        right = (model.eval()(images).argmax(1).numpy() == held_out.test_labels).mean()
    assert metrics(whole / "seed-0")[-1]["accuracy"] == pytest.approx(100 * right)


def test_a_float_network_has_no_flips(tmp_path: Path, digits: ImageSet) -> None:
    run(load_recipe("digits-float", [*OVERRIDES, "epochs=1"]), digits, tmp_path)
    [line] = metrics(tmp_path / "seed-0")
    assert line.keys() == FIELDS - MOVED - {"seconds"}


def test_tensorboard_files(tmp_path: Path, digits: ImageSet, lns: Recipe, whole: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = lns.model_copy(update={"epochs": 1})
    run(recipe, digits, tmp_path, start=whole, tensorboard=True)
    events = accumulator.EventAccumulator(str(tmp_path / "seed-0")).Reload()
    [line] = metrics(tmp_path / "seed-0")
    [loss] = events.Scalars("loss")
    assert (loss.step, loss.value) == (1, pytest.approx(line["loss"]))
    [mapped] = events.Scalars("auxiliary_loss/layer2.conv")
    assert mapped.value == pytest.approx(line["auxiliary_loss"]["layer2.conv"])


# Damage


def flip_a_bit(folder: Path, at: tuple[int, int]) -> None:
    path = folder / f"checkpoint-{at[0]:05d}-{at[1]:06d}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def damage(folder: Path, count: int) -> None:
    for at in checkpoints.available(folder)[-count:]:
        flip_a_bit(folder, at)


def test_a_damaged_checkpoint_is_said_and_the_one_before_it_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    digits: ImageSet,
    dorefa: Recipe,
    whole: Path,
    weights_hash: Hash,
) -> None:
    interrupt(monkeypatch, 3 * STEPS - 1, signal.SIGINT, lambda: run(dorefa, digits, tmp_path))
    damage(tmp_path / "seed-0", 1)
    capsys.readouterr()
    run(dorefa, digits, tmp_path)
    out = capsys.readouterr().out
    assert f"warning: {tmp_path / 'seed-0' / 'checkpoint-00002-000004'} is damaged" in out
    assert "resuming at epoch 3, step 0" in out
    same_run(tmp_path / "seed-0", whole / "seed-0", weights_hash)


def test_all_checkpoints_damaged_starts_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    digits: ImageSet,
    lns: Recipe,
    whole: Path,
    whole_lns: Path,
    weights_hash: Hash,
) -> None:
    """With its warm start, and with new checkpoints that are kept."""
    training = lambda: run(lns, digits, tmp_path, start=whole)  # noqa: E731
    interrupt(monkeypatch, 3 * STEPS, signal.SIGINT, training)
    damage(tmp_path / "seed-0", 2)
    capsys.readouterr()
    interrupt(monkeypatch, STEPS + 1, signal.SIGINT, training)
    out = capsys.readouterr().out
    assert out.count("is damaged") == 2
    assert "starting again" in out
    assert "warm start" in out
    assert checkpoints.survey(tmp_path / "seed-0") == ([(1, 0), (1, 1)], [])
    training()
    same_run(tmp_path / "seed-0", whole_lns / "seed-0", weights_hash)


def test_a_metrics_line_cut_short_by_a_kill(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    digits: ImageSet,
    dorefa: Recipe,
    whole: Path,
    weights_hash: Hash,
) -> None:
    interrupt(monkeypatch, STEPS + 1, signal.SIGINT, lambda: run(dorefa, digits, tmp_path))
    with open(tmp_path / "seed-0" / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 2, "loss": 1.')
    run(dorefa, digits, tmp_path)
    same_run(tmp_path / "seed-0", whole / "seed-0", weights_hash)


def test_lost_lines_of_the_metrics_are_said_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    digits: ImageSet,
    dorefa: Recipe,
    tmp_path: Path,
    whole: Path,
) -> None:
    interrupt(monkeypatch, 3 * STEPS + 1, signal.SIGINT, lambda: run(dorefa, digits, tmp_path))
    path = tmp_path / "seed-0" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:2]))
    capsys.readouterr()
    run(dorefa, digits, tmp_path)
    said = f"warning: the metrics of {path.parent} have lost the lines of epochs 1, 3\n"
    assert said in capsys.readouterr().out
    assert metrics(tmp_path / "seed-0") == [metrics(whole / "seed-0")[i] for i in (1, 3)]


def test_a_result_is_of_the_last_epoch_or_there_is_none(
    digits: ImageSet, dorefa: Recipe, tmp_path: Path, whole: Path, weights_hash: Hash
) -> None:
    """Killed before result.json was written, by a power cut that took the last line along."""
    folder = tmp_path / "seed-0"
    shutil.copytree(whole / "seed-0", folder)
    (folder / "result.json").unlink()
    path = folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(RunError, match=f"has no line of epoch {EPOCHS}, whose accuracy is"):
        run(dorefa, digits, tmp_path)
    assert not (folder / "result.json").exists()
    for last in folder.glob(f"checkpoint-{EPOCHS:05d}-*"):
        last.unlink()  # as the message says
    run(dorefa, digits, tmp_path)
    same_run(folder, whole / "seed-0", weights_hash)


def test_metrics_are_on_the_disk_before_a_checkpoint_is(
    monkeypatch: pytest.MonkeyPatch, digits: ImageSet, dorefa: Recipe, tmp_path: Path
) -> None:
    flushed, sync = [0], os.fsync

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl"):
            flushed.append(epochs_written(tmp_path / "seed-0"))
        sync(descriptor)

    def save(folder: Path, checkpoint: checkpoints.Checkpoint) -> None:
        assert flushed[-1] == checkpoint.epoch
        real(folder, checkpoint)

    real = checkpoints.save
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(checkpoints, "save", save)
    run(dorefa, digits, tmp_path)
    assert flushed[-1] == EPOCHS


def test_seconds_are_those_of_all_legs(
    monkeypatch: pytest.MonkeyPatch, digits: ImageSet, dorefa: Recipe, tmp_path: Path
) -> None:
    interrupt(monkeypatch, 2 * STEPS + 1, signal.SIGINT, lambda: run(dorefa, digits, tmp_path))
    path = tmp_path / "seed-0" / "metrics.jsonl"
    lines = [json.loads(line) | {"seconds": 1000} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [result] = run(dorefa, digits, tmp_path)
    assert 2000 < result["seconds"] < 2100


def test_the_start_run_must_be_finished(
    tmp_path: Path, digits: ImageSet, lns: Recipe, whole: Path
) -> None:
    """Trained side by side with others, a start is not trained first, as ``train`` does."""
    with pytest.raises(ValueError, match="starts from a run of digits-dorefa: give --start"):
        train_together([Job(lns, 0, tmp_path / "lns")], digits, RunOptions(device="cpu"))
    with pytest.raises(ValueError, match=r"a finished run of digits-dorefa, seed 1;"):
        run(lns, digits, tmp_path / "lns", start=whole, seeds=[1])
    assert not (tmp_path / "lns").exists()


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("data.validation=200", "digits with 200 images held out; .* 1,000 images held out, and"),
        ("model.width=4", "has model.width=4, but the run it starts from in .* has 8"),
        ("model={name: vgg_small}", "has model.width=128, but .* has 8"),  # a default
        ("model={name: resnet20}", "has model.name=resnet20, but .* has vgg_small"),
    ],
)
def test_the_start_run_is_of_the_same_images_and_network(
    tmp_path: Path, digits: ImageSet, whole: Path, override: str, reason: str
) -> None:
    other = load_recipe("digits-lns", [*LNS_OVERRIDES, override])
    with pytest.raises(ValueError, match=reason):
        run(other, digits, tmp_path / "lns", start=whole)
    assert not (tmp_path / "lns").exists()


def test_a_finished_start_run_is_used_at_its_last_epoch_or_not_at_all(
    tmp_path: Path, digits: ImageSet, lns: Recipe, whole: Path
) -> None:
    spoiled = tmp_path / "whole"
    shutil.copytree(whole, spoiled)
    for path in (spoiled / "seed-0").glob(f"checkpoint-{EPOCHS:05d}-*"):
        path.unlink()
    with pytest.raises(
        ValueError, match=f"is finished with {EPOCHS} epochs, but its last undamaged"
    ):
        run(lns, digits, tmp_path / "lns", start=spoiled)


# Disks


def tmpfs(folder: Path, size: str) -> None:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            return
    except FileNotFoundError:
        pass
    pytest.skip("mounting a tmpfs needs root")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk: room for two checkpoints of this network, not for a third."""
    folder = tmp_path / "disk"
    tmpfs(folder, "1m")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """A file that leaves so many bytes free."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    filler = folder / "filler"
    filler.write_bytes(bytes(free - leave))
    return filler


def test_a_disk_that_fills_up(
    disk: Path, digits: ImageSet, dorefa: Recipe, whole: Path, weights_hash: Hash
) -> None:
    """An error that names the file; the last good checkpoint stays, and the run resumes from it."""
    size = sum(p.stat().st_size for p in (whole / "seed-0").iterdir())
    filler = fill(disk, leave=int(size * 1.2))  # the third checkpoint has no room
    with pytest.raises(RunError, match="No space left on device") as error:
        run(dorefa, digits, disk / "run", quiet=True)
    assert str(disk / "run" / "seed-0" / "checkpoint-") in str(error.value)
    kept, problems = checkpoints.survey(disk / "run" / "seed-0")
    assert kept == [(0, 0), (1, 0)]
    assert problems == []
    filler.unlink()
    run(dorefa, digits, disk / "run", quiet=True)
    same_run(disk / "run" / "seed-0", whole / "seed-0", weights_hash)


@pytest.mark.parametrize("leave", [0, 20_000])
def test_a_disk_that_is_full_from_the_start(
    disk: Path, digits: ImageSet, dorefa: Recipe, leave: int
) -> None:
    fill(disk, leave=leave)
    with pytest.raises(RunError, match="No space left on device"):
        run(dorefa, digits, disk / "runs" / "mine", quiet=True)
    assert sorted(p.name for p in disk.iterdir()) == ["filler"]


# Nothing half-written


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["batch_size=400"], "batch_size=400"),
        (["data.validation=1347"], "validation=1347"),
        (["model.wdith=3"], "wdith"),
        (["model={name: resnet20, shortcut: long}"], "shortcut='long'"),
        (["method.inputs=both"], "inputs='both'"),
    ],
)
def test_what_cannot_run_leaves_no_folder(
    tmp_path: Path, digits: ImageSet, overrides: list[str], says: str
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=says):
        run(load_recipe("digits-dorefa", [*OVERRIDES, *overrides]), digits, tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_does_not_take_another_runs_folder_away(
    tmp_path: Path, digits: ImageSet, lns: Recipe, whole: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="finished run"):
        run(lns, digits, tmp_path, seeds=[0, 1], start=tmp_path / "nowhere")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_tensorboard_that_is_not_installed_is_said_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: ImageSet, dorefa: Recipe
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'unflip\[tensorboard\]'"):
        run(dorefa, digits, tmp_path / "out", tensorboard=True)
    assert list(tmp_path.iterdir()) == []


def seeds_of(results: Sequence[dict[str, Any]]) -> list[int]:
    return [result["seed"] for result in results]


def test_finished_and_unfinished_seeds_mix(
    tmp_path: Path, digits: ImageSet, dorefa: Recipe
) -> None:
    recipe = dorefa.model_copy(update={"epochs": 1})
    run(recipe, digits, tmp_path, seeds=[1], quiet=True)
    assert seeds_of(run(recipe, digits, tmp_path, seeds=[2, 1, 0], quiet=True)) == [2, 1, 0]
    assert {p.name for p in tmp_path.iterdir()} == {"seed-0", "seed-1", "seed-2"}


def test_other_recipes_side_by_side_end_as_alone(
    tmp_path: Path, digits: ImageSet, dorefa: Recipe, weights_hash: Hash
) -> None:
    """Two methods and rates in one process: each ends with the weights it has alone."""
    bireal = dorefa.model_copy(update={"name": "bireal", "method": "bireal"})
    slow = load_recipe("digits-dorefa", [*OVERRIDES, "optimizer.latent_lr=0.1"])
    jobs = [
        Job(recipe, 0, tmp_path / name)
        for name, recipe in (("dorefa", dorefa), ("bireal", bireal), ("slow", slow))
    ]
    together = train_together(jobs, digits, options=RunOptions(device="cpu", quiet=True))
    for job, result in zip(jobs, together, strict=True):
        [alone] = run(job.recipe, digits, tmp_path / "alone" / job.out.name, quiet=True)
        assert result["accuracy"] == alone["accuracy"]
        assert weights_hash(job.run.folder) == weights_hash(
            tmp_path / "alone" / job.out.name / "seed-0"
        )


def test_recipes_that_take_other_steps_are_not_trained_together(
    tmp_path: Path, digits: ImageSet, dorefa: Recipe
) -> None:
    longer = dorefa.model_copy(update={"name": "longer", "epochs": 9})
    jobs = [Job(dorefa, 0, tmp_path / "a"), Job(longer, 0, tmp_path / "b")]
    with pytest.raises(ValueError, match=r"longer cannot be trained beside .*epochs is 9, not 4"):
        train_together(jobs, digits, options=RunOptions(device="cpu"))


def test_estimated_flip_rates_are_estimated_before_the_first_epoch(
    tmp_path: Path, digits: ImageSet, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*LNS_OVERRIDES, "epochs=1", "method.loss=forward", "method.rates=estimated"]
    recipe = load_recipe("digits-lns", overrides)
    run(recipe, digits, tmp_path, start=whole)
    assert "flip rates of the baseline's layers" in capsys.readouterr().out
    saved, _ = checkpoints.load_latest(tmp_path / "seed-0")
    assert saved is not None
    rates = [v for k, v in saved.tensors.items() if k.endswith("weight_binarizer.rho_plus")]
    assert len(rates) == 5
    assert all(rate.min() > 0 and rate.max() < 0.5 for rate in rates)
    assert any(len(rate.unique()) > 1 for rate in rates)  # by |w|, not the given constant


def test_estimated_flip_rates_need_a_baseline() -> None:
    with pytest.raises(ValueError, match=r"rates='estimated' compares copies of .*: give start"):
        load_recipe("digits-lns", ["method.rates=estimated", "method.loss=forward", "start=null"])


@pytest.mark.parametrize(
    ("seconds", "last", "expected"),
    [(20, 0.1, 20), (20, 1.0, 50), (20, 60, 200), (0, 60, 0)],
)
def test_slow_checkpoints_are_written_less_often(seconds, last, expected):
    assert loop._pause(seconds, last) == pytest.approx(expected)
