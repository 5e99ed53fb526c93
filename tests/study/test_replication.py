"""The paper's ablation again: from ten baselines and from one, with arms chosen on held-out images, after a loss."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from unflip.runs.run import Run
from unflip.study.experiment import best_of
from unflip.study.paper import EXPERIMENTS
from unflip.study.runner import StudyEngine, run_study
from unflip.study.study import Study
from unflip.train.job import RunOptions

OnDigits = Callable[..., Study]
CPU = RunOptions(device="cpu", quiet=True)
CONTROLS = {
    "baseline",
    "finetune",
    "finetune-0.001",
    "finetune-0.0001",
    "mapping",
    "mapping-slow",
    "lns",
    "straight-alpha-0",
}


def first_weights(run: Run) -> dict[str, torch.Tensor]:
    state = safetensors.torch.load_file(sorted(run.folder.glob("checkpoint-*"))[-1])
    return {name: tensor for name, tensor in state.items() if name.endswith("conv1.weight")}


def test_ten_seeds_on_test_images(tmp_path: Path) -> None:
    study = EXPERIMENTS["replication"].study(tmp_path)
    assert len(study.seeds) == 10
    assert {arm.recipe.data.validation for arm in study.arms} == {0}
    assert {arm.recipe.model.options["shortcut"] for arm in study.arms} == {"conv"}
    assert study.arm("baseline").recipe.schedule.at == (120, 240, 320)
    assert {arm.name for arm in study.arms if arm.control} == CONTROLS
    rates = [study.arm(f"finetune{name}").recipe.optimizer.lr for name in ("", "-0.001", "-0.0001")]
    assert rates == [0.01, 0.001, 0.0001]
    paper = {arm.name: arm.paper.mean for arm in study.arms if arm.paper}
    assert paper["straight"] == paper["lns"] == 85.56
    assert (paper["mapping"], paper["finetune"]) == (85.36, 85.26)
    assert "straight-alpha-0" not in paper, "which is a control, not the paper's"


def test_interpretations_are_the_same_in_both_studies(tmp_path: Path) -> None:
    held_out, tested = (
        EXPERIMENTS[name].study(tmp_path) for name in ("interpretations", "replication")
    )
    for arm in held_out.arms:
        twin = tested.arm(arm.name)
        images = {"data": None, "expected": None}  # what was measured on test images, too
        assert {**arm.recipe.plain(), **images} == {**twin.recipe.plain(), **images}


def test_all_seeds_start_from_one_network(on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("replication-from-one", tmp_path, 3)
    jobs = study.jobs(study.arm("lns"), [0, 1, 2])
    assert [job.start for job in jobs] == [tmp_path / "baseline" / "seed-0"] * 3
    assert study.size == 1 + 3 * (len(study.arms) - 1)
    assert [arm.name for arm, _ in study.ready()] == ["baseline"]


def test_from_one_network_on_digits(on_digits: OnDigits, tmp_path: Path) -> None:
    quick = ("batch_size=256", "method.warm_steps=3")
    study = on_digits("replication-from-one", tmp_path, 2, *quick)
    summary = run_study(study, only=["finetune-0.0001", "straight"], options=CPU)
    runs = {arm.name: len(arm.accuracies) for arm in summary.arms}
    assert runs == {"baseline": 1, "finetune-0.0001": 2, "straight": 2}
    assert all(arm.loss is not None for arm in summary.arms)
    head = (tmp_path / "table.md").read_text().splitlines()[2]
    assert "training loss" in head
    # at this rate nothing moves far in two steps, so both seeds are still near their one start
    base = first_weights(Run.of_seed(tmp_path / "baseline", 0))
    for seed in (0, 1):
        near = first_weights(Run.of_seed(tmp_path / "finetune-0.0001", seed))
        for name, weight in base.items():
            torch.testing.assert_close(near[name], weight, rtol=0, atol=0.02)


def test_a_study_goes_on_elsewhere_from_a_copy(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    """A lost machine costs the runs that were not finished, no others."""
    first, second = tmp_path / "first", tmp_path / "second"

    def lost(jobs: Any) -> None:
        if any(job.out.name == "slow" for job in jobs):
            raise KeyboardInterrupt

    trainer.before = lost
    some = ["finetune", "slow", "straight"]
    with pytest.raises(KeyboardInterrupt):
        run_study(on_digits("interpretations", first), only=some, engine=StudyEngine(at_once=2))
    done = list(trainer.trained)
    assert "finetune/seed-1" in done
    assert "finetune" in (first / "study.json").read_text(), "the table has what is finished"
    shutil.copytree(first, second)
    trainer.before, trainer.calls = (lambda jobs: None), []
    study = on_digits("interpretations", second)
    summary = run_study(study, only=some, engine=StudyEngine(at_once=2))
    assert not set(done) & set(trainer.trained)
    assert all(len(arm.accuracies) == 2 for arm in summary.arms)


def test_arms_are_chosen_on_held_out_images(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    chosen = on_digits("replication", tmp_path / "replication", 1)
    wanted = tmp_path / "interpretations"
    study = EXPERIMENTS["interpretations"].study(
        wanted,
        1,
        overrides=["data.name=digits", "data.validation=300", "model.width=2", "epochs=1"],
    )
    others = ["both", "slow-tanh", "straight-converged", "slow", "straight", "straight-frozen"]
    run_study(study, only=[*others, "mapping-slow"], engine=StudyEngine(at_once=10))
    names = best_of(wanted, chosen)
    assert set(names[:-3]) == CONTROLS
    # the fake trainer's accuracy grows with the length of a name
    assert names[-3:] == ["straight-converged", "straight-frozen", "slow-tanh"]
    assert [arm.name for arm in chosen.only(names).arms if not arm.control] == [
        "slow-tanh",
        "straight-frozen",
        "straight-converged",
    ]

    tested = tmp_path / "tested"
    run_study(on_digits("interpretations", tested, 1), only=["finetune"])
    with pytest.raises(ValueError, match="measured on test images, and nothing may be chosen"):
        best_of(tested, chosen)
