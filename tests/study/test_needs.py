"""What a study takes from elsewhere: a given baseline, the starts of its arms, and a teacher."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
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
from unflip.study.paper import EXPERIMENTS
from unflip.study.runner import run_study, write_tables
from unflip.study.study import Study

OnDigits = Callable[..., Study]
IMAGES = {"training images": "some"}


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
        rf"digits with 9 images held out, but the teacher .* with 0 images .* {command} data.validation=9\)",
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
