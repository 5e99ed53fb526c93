"""Training a study: order, what runs side by side, interruption, and runs that stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unflip.runs.files import RunError
from unflip.study import runner
from unflip.study.output import summarize
from unflip.study.runner import StudyEngine, next_batch, run_study
from unflip.study.study import Study
from unflip.study.summary import Summary
from unflip.study.task import Task
from unflip.train.job import RunOptions

OnDigits = Callable[..., Study]


def test_every_run_once_the_baseline_first(
    trainer: Any, on_digits: OnDigits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = on_digits("ablation", tmp_path)
    run_study(study)
    assert trainer.calls[0] == ["baseline/seed-0", "baseline/seed-1"]
    assert len(trainer.calls) == len(study.arms), "on a CPU, the seeds of one arm at a time"
    assert len(set(trainer.trained)) == len(trainer.trained) == 2 * len(study.arms)
    said = capsys.readouterr().out
    runs = 2 * len(study.arms)
    assert f"ablation: baseline (seeds 0, 1); {runs} of {runs} runs left" in said
    assert f"ablation: {study.arms[-1].name} (seeds 0, 1); 2 of {runs} runs left" in said


def test_a_killed_study_resumes(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("ablation", tmp_path)

    def killed(jobs: Any) -> None:
        if len(trainer.calls) == 3:
            raise KeyboardInterrupt

    trainer.before = killed
    with pytest.raises(KeyboardInterrupt):
        run_study(study)
    before = list(trainer.trained)
    assert len(before) == 6
    assert [len(arm.runs) for arm in Summary.read(tmp_path).arms] == [2, 2, 2, 0, 0, 0, 0, 0, 0]
    trainer.before = lambda jobs: None
    summary = run_study(study)
    assert len(trainer.trained) == len(set(trainer.trained)) == 18, "nothing is run twice"
    assert all(len(arm.runs) == 2 for arm in summary.arms)
    run_study(study)
    assert len(trainer.trained) == 18


def test_more_seeds_later(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    run_study(on_digits("ablation", tmp_path, 1), only=["lns"])
    run_study(on_digits("ablation", tmp_path, 3), only=["lns"])
    assert trainer.calls == [
        ["baseline/seed-0"],
        ["lns/seed-0"],
        ["baseline/seed-1", "baseline/seed-2"],
        ["lns/seed-1", "lns/seed-2"],
    ]


def test_arms_that_fit_are_trained_side_by_side(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    study = on_digits("ablation", tmp_path)
    run_study(study, engine=StudyEngine(at_once=5))
    sizes = [len(call) for call in trainer.calls]
    assert sizes == [2, 4, 4, 4, 4], "the baseline alone, then two arms whole"
    assert trainer.calls[1][0].startswith("finetune-0.01/")
    assert next_batch(study.ready(), 5) == []


class Recorder:
    """Workers that do each task when they are waited for."""

    capacity = 2

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.most = 0

    def start(self, task: Task) -> None:
        self.tasks.append(task)
        self.most = max(self.most, len(self.tasks))

    def wait(self) -> tuple[str, Exception | None]:
        task = self.tasks.pop(0)
        task.run()
        return task.name, None

    def stop(self) -> None:
        assert not self.tasks


def test_workers_take_several_arms_each(
    trainer: Any,
    on_digits: OnDigits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = Recorder()
    monkeypatch.setattr(runner, "_workers", lambda *_: workers)
    run_study(on_digits("ablation", tmp_path), engine=StudyEngine("pool", at_once=5))
    assert [len(call) for call in trainer.calls] == [2, 4, 4, 4, 4]
    assert len({run for call in trainer.calls for run in call}) == 18, "no run twice"
    assert workers.most == 2
    assert "finetune-0.01, finetune-0.001 are done" in capsys.readouterr().out


def test_an_arm_with_more_seeds_than_fit_at_once(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    run_study(
        on_digits("ablation", tmp_path, 3), only=["finetune-0.01"], engine=StudyEngine(at_once=2)
    )
    assert [len(call) for call in trainer.calls] == [2, 1, 2, 1]


def test_other_epochs_are_not_trained_beside(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    study = on_digits("sota", tmp_path, 1)
    arms = [
        replace(arm, recipe=arm.recipe.model_copy(update={"epochs": 9}))
        if arm.name == "tbn"
        else arm
        for arm in study.arms
    ]
    run_study(replace(study, arms=tuple(arms)), engine=StudyEngine(at_once=10))
    assert trainer.calls == [
        ["baseline/seed-0", "xnor/seed-0", "dsq/seed-0"],
        ["tbn/seed-0"],
        ["lns/seed-0"],
    ]


@pytest.mark.parametrize("says_which", [True, False])
def test_a_run_that_stops_is_recorded_and_the_others_continue(
    trainer: Any, on_digits: OnDigits, tmp_path: Path, says_which: bool
) -> None:
    trainer.stops = {"baseline/seed-1": "the loss is nan"}
    trainer.says_which = says_which
    study = on_digits("ablation", tmp_path, 3)
    summary = run_study(study, only=["finetune-0.01"])
    baseline, finetune = summary.arms
    assert [run.stopped for run in baseline.runs] == [None, "the loss is nan", None]
    assert [run.accuracy is None for run in baseline.runs] == [False, True, False]
    assert "stopped: the loss is nan" in str(finetune.runs[1].stopped)
    assert trainer.calls[-1] == ["finetune-0.01/seed-0", "finetune-0.01/seed-2"]
    count = len(trainer.calls)
    assert run_study(study, only=["finetune-0.01"]) == summary
    assert len(trainer.calls) == count, "a run that stopped is not tried again"
    assert "seed 1 stopped: the loss is nan" in (tmp_path / "table.md").read_text()
    (tmp_path / "baseline" / "seed-1" / "stopped.json").unlink()
    trainer.stops = {}
    again = run_study(study, only=["finetune-0.01"])
    assert all(len(arm.runs) == 3 and arm.runs[1].accuracy for arm in again.arms)


def test_only_some_arms(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("ablation", tmp_path)
    first = run_study(study, only=["lns"])
    assert [arm.name for arm in first.arms] == ["baseline", "lns"]
    second = run_study(study, only=["mapping"])
    assert [arm.name for arm in second.arms] == ["baseline", "mapping", "lns"]
    with pytest.raises(ValueError, match=r"unknown arm 'lsn'\. Did you mean 'lns'"):
        run_study(study, only=["lsn"])


def test_the_error_that_ended_a_study_is_raised_if_its_table_cannot_be_written(
    trainer: Any, on_digits: OnDigits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_study(on_digits("sota", tmp_path), only=["baseline"])
    trainer.before = lambda jobs: signal.raise_signal(signal.SIGTERM)

    def broken(study: Study, last: bool) -> Summary:
        raise AttributeError("partially initialized module")

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        run_study(on_digits("sota", tmp_path), output=broken)
    assert "table could not be written again: partially initialized" in capsys.readouterr().out


def test_sigterm_between_two_runs_is_like_ctrl_c(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    def stopped(study: Study, last: bool) -> Summary:
        if not told:
            told.append(study.name)
            signal.raise_signal(signal.SIGTERM)
        return summarize(study)

    told: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        run_study(on_digits("sota", tmp_path), output=stopped)
    assert len(trainer.calls) == 1
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (StudyEngine, {"name": "pol"}, "unknown engine 'pol'. Did you mean 'pool'"),
        (StudyEngine, {"at_once": 0}, "at-once=0 should be at least 1"),
        (StudyEngine, {"name": "pool", "workers": 0}, "workers=0 should be at least 1"),
        (RunOptions, {"device": "tpu"}, "device='tpu' should be cpu, cuda or cuda:N"),
        (RunOptions, {"evaluate_every": 0}, "evaluate_every=0 should be at least 1"),
    ],
)
def test_engines_and_options_are_checked_when_they_are_made(
    kind: type, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_a_gpu_that_is_missing_is_refused_and_leaves_nothing(
    on_digits: OnDigits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device='cuda', but torch .* finds no GPU here"):
        run_study(on_digits("ablation", tmp_path / "out"), options=RunOptions(device="cuda"))
    assert not (tmp_path / "out").exists()


class Queue:
    """Workers that finish one task at a time, the last one begun first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.waiting = capacity, list[Task]()
        self.most, self.stopped = 0, False

    def start(self, task: Task) -> None:
        self.waiting.append(task)
        self.most = max(self.most, len(self.waiting))

    def wait(self) -> tuple[str, Exception | None]:
        task = self.waiting.pop()
        try:
            task.run()
        except RunError as error:
            return task.name, error
        return task.name, None

    def stop(self) -> None:
        self.stopped = True


def test_workers_get_an_arm_when_its_start_is_finished(
    trainer: Any, on_digits: OnDigits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(3)
    monkeypatch.setattr(runner, "_workers", lambda *args: queue)
    run_study(on_digits("ablation", tmp_path), engine=StudyEngine("pool"))
    assert trainer.calls[0] == ["baseline/seed-0", "baseline/seed-1"]
    assert len(trainer.calls) == 9
    assert len(set(trainer.trained)) == 18
    assert (queue.most, queue.waiting, queue.stopped) == (3, [], True)


def test_an_error_is_raised_after_the_other_arms(
    trainer: Any, on_digits: OnDigits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(2)
    monkeypatch.setattr(runner, "_workers", lambda *args: queue)

    left = [2]  # calls until the one that fails

    def fails(jobs: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise RunError("the disk is full")

    trainer.before = fails
    with pytest.raises(RunError, match="the disk is full"):
        run_study(on_digits("ablation", tmp_path), engine=StudyEngine("pool"))
    assert len(trainer.calls) == 8, "all arms but one"
    assert queue.stopped
    assert len(Summary.read(tmp_path).arms[0].runs) == 2
