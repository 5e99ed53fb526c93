"""Studies as resumable work: order, what runs side by side, interruption, and runs that stop.

One file of more than 400 lines, because all tests share the same small study.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unflip.data import InputSpec
from unflip.recipes.load import load_recipe
from unflip.recipes.schema import Data
from unflip.report import report_data
from unflip.runs import checkpoint as checkpoints
from unflip.runs.checkpoint import Checkpoint
from unflip.runs.files import RunError
from unflip.runs.run import Run
from unflip.study import runner
from unflip.study.output import summarize
from unflip.study.paper import EXPERIMENTS
from unflip.study.runner import StudyEngine, next_batch, run_study, write_tables
from unflip.study.study import Study
from unflip.study.summary import Summary
from unflip.study.task import Task
from unflip.train.job import RunOptions

OnDigits = Callable[..., Study]
IMAGES = {"training images": "some"}


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

    def wait(self) -> str:
        task = self.tasks.pop(0)
        task.run()
        return task.name

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


def test_an_arm_of_which_all_runs_stopped_stays_in_the_table(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    trainer.stops = {f"mapping/seed-{seed}": "the loss is nan" for seed in (0, 1)}
    study = on_digits("ablation", tmp_path)
    run_study(study, only=["mapping"])
    row = "| mapping without noisy supervision | seed 0 stopped: the loss is nan; seed 1 stopped:"
    summary = run_study(study, only=["lns"])
    assert [arm.name for arm in summary.arms] == ["baseline", "mapping", "lns"]
    assert row in (tmp_path / "table.md").read_text()
    summary = write_tables(study)
    assert [arm.name for arm in summary.arms] == ["baseline", "mapping", "lns"]
    assert row in (tmp_path / "table.md").read_text()


def test_only_some_arms(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("ablation", tmp_path)
    first = run_study(study, only=["lns"])
    assert [arm.name for arm in first.arms] == ["baseline", "lns"]
    second = run_study(study, only=["mapping"])
    assert [arm.name for arm in second.arms] == ["baseline", "mapping", "lns"]
    with pytest.raises(ValueError, match=r"unknown arm 'lsn'\. Did you mean 'lns'"):
        run_study(study, only=["lsn"])


def test_a_given_baseline_is_not_trained(
    trainer: Any, on_digits: OnDigits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_study(on_digits("ablation", tmp_path / "first"), only=["baseline"])
    given = tmp_path / "first" / "baseline"
    study = on_digits("controls", tmp_path / "second", baseline=given)
    summary = run_study(study, only=["rho-0"])
    assert trainer.trained[2:] == ["rho-0/seed-0", "rho-0/seed-1"]
    assert summary.arms[0].folder == "../first/baseline"
    assert len(summary.arms[0].runs) == 2
    longer = on_digits("controls", tmp_path / "third", baseline=given, epochs_scale=3)
    assert "trained differently: epochs is 1 there and 3 here" in capsys.readouterr().out
    assert longer.arms[1].recipe.epochs == 3
    assert "1 (from scratch), 3 (from the baseline); the latter 3 × those" in longer.epochs_note
    assert "--baseline" not in study.command  # it trains the same one
    assert longer.command.endswith("--baseline DIR")
    with pytest.raises(ValueError, match=r"another .* 2 there and 3 here\..* leave out"):
        on_digits("controls", tmp_path, 2, "model.width=3", baseline=given)
    with pytest.raises(ValueError, match=r"data.validation is 0 there and 10 here"):
        on_digits("alpha", tmp_path, 2, "data.validation=10", baseline=given)
    with pytest.raises(ValueError, match="seed-2 is not a finished run"):
        on_digits("controls", tmp_path, 3, baseline=given)


def test_a_given_baseline_is_shown_with_the_recipe_and_the_command_that_trained_it(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    run_study(on_digits("ablation", tmp_path / "first"), only=["baseline"])
    given = tmp_path / "first" / "baseline"
    study = on_digits("controls", tmp_path / "second", baseline=given, epochs_scale=3)
    baseline, lns = run_study(study, only=["lns"]).arms
    assert baseline.recipe["epochs"] == baseline.runs[0].epochs == 1
    assert lns.recipe["epochs"] == 3
    words = shlex.split(baseline.command)
    assert words[:3] == ["unflip", "train", "cifar10-resnet20-dorefa"]
    assert words[-2:] == ["--seeds", "2"]
    assert load_recipe(words[2], words[3:-2]).plain() == baseline.recipe
    [row, _] = report_data([study.out])["sections"][0]["arms"]
    assert "epochs: 1\n" in row["yaml"]
    assert not row["own_recipe"]


def test_the_papers_figure_does_not_stand_beside_a_given_baseline_of_other_epochs(
    tmp_path: Path,
) -> None:
    recipe = load_recipe("cifar10-resnet20-dorefa", ["epochs=200"])
    run = Run.of_seed(tmp_path, 0)
    run.folder.mkdir()
    run.begin(
        recipe.plain(), 0, "unflip train", InputSpec((3, 32, 32), ("a", "b"), (0,) * 3, (1,) * 3)
    )
    run.finish({"accuracy": 84.0, "epochs": 200, "seconds": 1.0})
    study = EXPERIMENTS["ablation"].study(tmp_path / "out", 1, baseline=tmp_path)
    assert study.arm("baseline").paper is None
    assert study.arm("lns").paper is not None


def test_another_option_of_the_method_is_another_recipe(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    run_study(on_digits("ablation", tmp_path), only=["lns"])
    saved = tmp_path / "lns" / "seed-0" / "recipe.json"
    run = json.loads(saved.read_text())
    run["recipe"]["method"]["sharpness"] = 3.0
    saved.write_text(json.dumps(run))
    with pytest.raises(RunError, match=r"method\.sharpness is 3\.0 there and 2\.0 here"):
        run_study(on_digits("ablation", tmp_path), only=["lns"])


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


def test_a_baseline_without_weights_is_refused_where_an_arm_starts_from_it(
    trainer: Any, on_digits: OnDigits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published results, for example, have metrics but no checkpoints."""
    run_study(on_digits("sota", tmp_path / "first"), only=["baseline", "lns"])
    given = tmp_path / "first" / "baseline"
    [weights] = (given / "seed-1").glob("checkpoint-*.safetensors")
    weights.write_bytes(b"damaged")
    calls = len(trainer.calls)
    with monkeypatch.context() as patched:
        patched.setattr(Data, "load", lambda *args: pytest.fail("no data are loaded for this"))
        with pytest.raises(ValueError, match=r"seed-1 has no usable .* start from metrics alone"):
            run_study(on_digits("sota", tmp_path / "second", baseline=given))
        checkpoints.save(given / "seed-1", Checkpoint(0, 0, {}, {}))  # undamaged, but not the last
        with pytest.raises(ValueError, match=r"finished with 1 epochs, .* undamaged .* of epoch 0"):
            run_study(on_digits("sota", tmp_path / "second", baseline=given))
    assert len(trainer.calls) == calls
    assert not (tmp_path / "second").exists()
    run_study(on_digits("sota", tmp_path / "second", baseline=given), only=["tbn"])
    run_study(on_digits("sota", tmp_path / "first", baseline=given), only=["lns"])  # is finished
    assert trainer.calls[calls:] == [["tbn/seed-0", "tbn/seed-1"]]
    study = on_digits("sota", tmp_path / "second", baseline=given, tables_only=True)
    assert [arm.name for arm in write_tables(study).arms] == ["baseline", "tbn"]


def test_a_start_that_lost_its_weights_is_refused_before_anything_is_trained(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    run_study(on_digits("sota", tmp_path), only=["baseline"])
    for part in (tmp_path / "baseline" / "seed-1").glob("checkpoint-*"):
        part.unlink()
    with pytest.raises(
        ValueError, match=r"seed-1 has no usable checkpoint\. .* restore its checkpoint"
    ):
        run_study(on_digits("sota", tmp_path))
    assert len(trainer.calls) == 1
    run_study(on_digits("sota", tmp_path), only=["tbn"])  # which starts from nothing


def test_a_seed_that_was_copied_is_not_counted_as_another(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    study = on_digits("sota", tmp_path)
    run_study(study, only=["tbn"])
    shutil.rmtree(tmp_path / "tbn" / "seed-1")
    shutil.copytree(tmp_path / "tbn" / "seed-0", tmp_path / "tbn" / "seed-1")
    for again in (lambda: run_study(study, only=["tbn"]), lambda: write_tables(study)):
        with pytest.raises(
            ValueError, match=r"recipe.json is of seed 0, but .* for seed 1: .*Delete"
        ):
            again()


def test_an_arm_of_another_baseline_is_refused(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    """For example, its baseline was trained again after it: the table would compare unrelated runs."""
    run_study(on_digits("sota", tmp_path, 1), only=["lns"])
    baseline, lns = tmp_path / "baseline", tmp_path / "lns" / "seed-0"
    given = {"images": IMAGES, "start": {"folder": "elsewhere", "sha256": "another"}}
    (lns / "provenance.json").write_text(json.dumps(given))
    with pytest.raises(RunError, match=rf"{lns} .* weights of elsewhere .* has others"):
        run_study(on_digits("sota", tmp_path, 1), only=["tbn"])
    given["start"]["sha256"] = checkpoints.identity(baseline / "seed-0")
    (lns / "provenance.json").write_text(json.dumps(given))
    run_study(on_digits("sota", tmp_path, 1), only=["tbn"])
    shutil.rmtree(baseline)
    calls = len(trainer.calls)
    with pytest.raises(RunError, match=rf"{baseline} does not hold a finished run"):
        run_study(on_digits("sota", tmp_path, 1))
    assert len(trainer.calls) == calls


def test_a_baseline_whose_result_was_deleted_resumes_under_finished_arms(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    """As the error of a damaged result.json or checkpoint says. It may end with other weights than the arms had."""
    run_study(on_digits("sota", tmp_path, 1), only=["lns"])
    baseline, lns = tmp_path / "baseline" / "seed-0", tmp_path / "lns" / "seed-0"
    given = {"images": IMAGES, "start": {"folder": "b", "sha256": checkpoints.identity(baseline)}}
    (lns / "provenance.json").write_text(json.dumps(given))
    (baseline / "result.json").unlink()
    with pytest.raises(RunError, match="does not hold a finished run"):
        run_study(on_digits("sota", tmp_path, 1), only=["tbn"])  # which does not train it
    summary = run_study(on_digits("sota", tmp_path, 1), only=["lns"])
    assert trainer.trained == ["baseline/seed-0", "lns/seed-0", "baseline/seed-0"]
    assert [len(arm.runs) for arm in summary.arms] == [1, 1]

    given["start"]["sha256"] = "another"
    (lns / "provenance.json").write_text(json.dumps(given))
    (baseline / "result.json").unlink()
    with pytest.raises(RunError, match=rf"{lns} .* has others"):
        run_study(on_digits("sota", tmp_path, 1), only=["lns"])


def test_another_recipe_in_the_folder_is_refused(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    run_study(on_digits("ablation", tmp_path), only=["baseline"])
    with pytest.raises(RunError, match="batch_size is 128 there and 64 here"):
        run_study(on_digits("ablation", tmp_path, 2, "batch_size=64"))
    assert len(trainer.calls) == 1


def test_a_result_without_its_recipe_is_refused(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    study = on_digits("ablation", tmp_path, 1)
    run_study(study, only=["baseline"])
    (tmp_path / "baseline" / "seed-0" / "recipe.json").unlink()
    for again in (lambda: run_study(study), lambda: write_tables(study)):
        with pytest.raises(ValueError, match=r"baseline/seed-0 has a result.json but no recipe"):
            again()
    assert len(trainer.calls) == 1


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (StudyEngine, {"name": "pol"}, "unknown engine 'pol'. Did you mean 'pool'"),
        (StudyEngine, {"at_once": 0}, "at-once=0 should be at least 1"),
        (StudyEngine, {"name": "pool", "workers": 0}, "workers=0 should be at least 1"),
        (RunOptions, {"device": "tpu"}, "device='tpu' should be cpu or cuda"),
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


def test_arms_that_distill_get_the_teacher_and_others_none(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    study = on_digits("beyond", tmp_path, 1, teacher=Path("t"))
    teachers = {arm.name: study.jobs(arm, [0])[0].teacher for arm in study.arms}
    learning = [arm.name for arm in study.arms if arm.recipe.distill]
    assert len(learning) == 3
    assert {teachers.pop(name) for name in learning} == {Path("t")}
    assert set(teachers.values()) == {None}
    without = EXPERIMENTS["beyond"].study(tmp_path, 1)
    command = r"\(unflip train cifar10-resnet20-teacher data.validation=10000\)"
    with pytest.raises(ValueError, match=rf"arm 'fast-distill' learns .* as --teacher {command}"):
        run_study(without)
    assert trainer.calls == []


def test_a_teacher_is_checked_before_anything_is_trained(
    trainer: Any, on_digits: OnDigits, tmp_path: Path, teacher_run: Path
) -> None:
    def refused(reason: str, *overrides: str, teacher: Path = teacher_run) -> None:
        study = on_digits("beyond", tmp_path / "out", 1, *overrides, teacher=teacher)
        with pytest.raises(ValueError, match=reason):
            run_study(study)
        assert trainer.calls == []

    command = r"\(unflip train cifar10-resnet20-teacher data.name=digits"
    refused(rf"which {tmp_path} is not: give another --teacher {command}\)", teacher=tmp_path)
    refused(
        rf"digits with 9 images held out, but the teacher .* validation=0 .* {command} data.validation=9\)",
        "data.validation=9",
    )
    weights = teacher_run / "seed-0" / "checkpoint-00001-000000.safetensors"
    checkpoints.save(weights.parent, Checkpoint(0, 0, {}, {}))
    weights.write_bytes(b"damaged")
    refused(r"is finished with 1 epochs, but its last undamaged checkpoint is of epoch 0")
    for path in (teacher_run / "seed-0").glob("checkpoint-*"):
        path.unlink()
    refused(r"has no usable checkpoint\. Or give another --teacher")
    study = on_digits("beyond", tmp_path / "out", 1, teacher=None)
    run_study(study, only=["conv"])
    assert trainer.trained == ["conv/seed-0"]


def test_a_finished_arm_needs_no_teacher_any_more(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    run_study(on_digits("beyond", tmp_path, 1), only=["fast-distill"])
    summary = run_study(on_digits("beyond", tmp_path, 1, teacher=None), only=["fast-distill"])
    assert [len(arm.runs) for arm in summary.arms] == [1]


def test_studies_that_make_no_sense_are_refused(on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("ablation", tmp_path)
    baseline, finetune = study.arms[:2]
    with pytest.raises(ValueError, match="starts from 'baseline', which should come before it"):
        replace(study, arms=(finetune, baseline))
    with pytest.raises(ValueError, match="two arms are called 'baseline'"):
        replace(study, arms=(baseline, baseline))
    with pytest.raises(ValueError, match="no arm or no seed"):
        replace(study, seeds=())
    data = finetune.recipe.data.model_copy(update={"validation": 5})
    other = replace(finetune, recipe=finetune.recipe.model_copy(update={"data": data}))
    with pytest.raises(ValueError, match="one table is about one set of images"):
        replace(study, arms=(baseline, other))


class Queue:
    """Workers that finish one task at a time, the last one begun first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.waiting = capacity, list[Task]()
        self.most, self.stopped = 0, False

    def start(self, task: Task) -> None:
        self.waiting.append(task)
        self.most = max(self.most, len(self.waiting))

    def wait(self) -> str:
        task = self.waiting.pop()
        task.run()
        return task.name

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


def test_workers_are_stopped_when_one_fails(
    trainer: Any, on_digits: OnDigits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(2)
    monkeypatch.setattr(runner, "_workers", lambda *args: queue)

    def fails(jobs: Any) -> None:
        if len(trainer.calls) == 2:
            raise RunError("the disk is full")

    trainer.before = fails
    with pytest.raises(RunError, match="the disk is full"):
        run_study(on_digits("ablation", tmp_path), engine=StudyEngine("pool"))
    assert queue.stopped
    assert len(Summary.read(tmp_path).arms[0].runs) == 2


def test_tables_of_what_is_finished_train_nothing(
    tmp_path: Path, trainer: Any, on_digits: OnDigits
) -> None:
    given = on_digits("readings", tmp_path / "given", 2)
    run_study(given, only=["baseline"])
    out = tmp_path / "out"
    run_study(on_digits("readings", out, 1), only=["conv"])
    trained = list(trainer.trained)

    baseline = tmp_path / "given" / "baseline"
    study = on_digits("readings", out, 5, baseline=baseline, tables_only=True)
    summary = write_tables(study)
    assert trainer.trained == trained
    assert {a.name: len(a.runs) for a in summary.arms} == {"baseline": 2, "conv": 1}
    written = (out / "table.md").read_text()
    assert "one shortcut per convolution" in written
    assert ", up to 2 seeds." in written

    with pytest.raises(ValueError, match="seed-2 is not a finished run"):
        on_digits("readings", out, 5, baseline=baseline)  # training needs all seeds
    with pytest.raises(ValueError, match="no finished run"):
        write_tables(on_digits("readings", tmp_path / "nothing", 5))


def test_tables_of_another_recipe_say_the_difference(
    tmp_path: Path, trainer: Any, on_digits: OnDigits
) -> None:
    run_study(on_digits("ablation", tmp_path, 2), only=["baseline"])
    with pytest.raises(RunError, match="batch_size is 128 there and 64 here"):
        write_tables(on_digits("ablation", tmp_path, 2, "batch_size=64"))


def test_arms_that_a_table_leaves_out_are_named(
    tmp_path: Path, trainer: Any, on_digits: OnDigits, capsys: pytest.CaptureFixture[str]
) -> None:
    """An override that one arm does not have, given later: its row is unchanged, the others are of another recipe."""
    run_study(on_digits("ablation", tmp_path, 1))
    assert "not in the table" not in capsys.readouterr().out
    changed = on_digits("ablation", tmp_path, 1, "method.rho_plus=0.1")
    for again in (
        lambda: run_study(changed, only=["finetune-0.01"]),
        lambda: write_tables(changed),
    ):
        names = [arm.name for arm in again().arms]
        assert "lns" not in names
        assert "finetune-0.01" in names
        said = capsys.readouterr().out
        assert (
            f"their runs in {tmp_path} are of another recipe: mapping, lns, lns-frozen, one-mean ("
            in said
        )
        assert "(method.rho_plus is 0.005 there and 0.1 here)" in said


@pytest.mark.parametrize("text", ["", '{"seeds": [0, ', "[]", '{"seeds": null}', "{}", "\0\0"])
def test_a_damaged_summary_is_set_aside_and_written_again(
    tmp_path: Path,
    trainer: Any,
    on_digits: OnDigits,
    capsys: pytest.CaptureFixture[str],
    text: str,
) -> None:
    study = on_digits("ablation", tmp_path, 1)
    undamaged = run_study(study, only=["baseline"])
    path = tmp_path / "study.json"
    for again in (lambda: run_study(study, only=["baseline"]), lambda: write_tables(study)):
        path.write_text(text)
        assert again() == undamaged == Summary.read(tmp_path)
        aside = tmp_path / "study.json.damaged"
        assert aside.read_text() == text
        said = capsys.readouterr().out
        assert f"{path} is damaged" in said
        assert f"written again from the runs; the damaged file is now {aside}" in said


def test_a_table_of_fewer_seeds_than_before_is_announced(
    tmp_path: Path, trainer: Any, on_digits: OnDigits, capsys: pytest.CaptureFixture[str]
) -> None:
    run_study(on_digits("ablation", tmp_path, 3), only=["baseline"])
    run_study(on_digits("ablation", tmp_path, 3), only=["baseline"])
    assert "now shows" not in capsys.readouterr().out
    said = f"the table in {tmp_path} had 3 seeds and now shows 1; --seeds 3 shows them again"
    run_study(on_digits("ablation", tmp_path, 1), only=["baseline"])
    assert said in capsys.readouterr().out
    write_tables(on_digits("ablation", tmp_path, 3))
    write_tables(on_digits("ablation", tmp_path, 1))
    assert said in capsys.readouterr().out


def test_a_finished_run_with_damaged_metrics_is_named_before_anything_is_trained(
    tmp_path: Path, trainer: Any, on_digits: OnDigits
) -> None:
    study = on_digits("ablation", tmp_path, 2)
    run_study(study, only=["baseline"])
    trained = list(trainer.trained)
    path = tmp_path / "baseline" / "seed-1" / "metrics.jsonl"
    first, _, last = path.read_text().splitlines()
    path.write_text(f"{first}\n{last[:9]}\n{last}\n")
    for again in (lambda: run_study(study), lambda: write_tables(study)):
        with pytest.raises(ValueError, match="line 2 should be an object") as caught:
            again()
        assert str(caught.value).startswith(f"{path} is damaged")
    assert trainer.trained == trained
