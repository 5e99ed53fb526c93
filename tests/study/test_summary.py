"""study.json: what it holds, that it is read as it was written, and what is refused."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unflip import __version__
from unflip.runs.files import DamagedFile
from unflip.study.runner import run_study
from unflip.study.study import Study
from unflip.study.summary import ArmSummary, Paper, Summary, TTest

OnDigits = Callable[..., Study]


def test_the_schema(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    run_study(on_digits("ablation", tmp_path))
    saved = json.loads((tmp_path / "study.json").read_text())
    assert list(saved) == [
        *("study", "unflip", "commit", "dirty", "title", "data", "evaluated_on", "epochs_note"),
        *("epochs_scale", "overrides", "seeds", "reference", "arms", "tests", "paired", "holm"),
    ]
    assert (saved["study"], saved["unflip"], saved["data"]) == ("ablation", __version__, "digits")
    assert (saved["evaluated_on"], saved["seeds"]) == ("test", [0, 1])
    arm_keys = (
        "name",
        "label",
        "folder",
        "start",
        "command",
        "recipe",
        "paper",
        "x",
        "kept",
        "runs",
    )
    of_some = ("top5", "top5_std", "loss", "loss_std", "memory_bits", "flops", "seconds_per_epoch")
    for arm in saved["arms"]:
        assert list(arm) == [*arm_keys, "mean", "std", "best", *of_some]
        assert (tmp_path / arm["folder"] / "seed-0" / "result.json").exists()
        run_keys = ("seed", "accuracy", "best_accuracy", "epochs", "seconds", "stopped", "top5")
        assert all(list(run) == list(run_keys) for run in arm["runs"])
        values = [run["accuracy"] for run in arm["runs"]]
        assert arm["mean"] == statistics.fmean(values)
        assert arm["std"] == statistics.stdev(values)
        assert arm["best"] == max(values)
        assert [run["best_accuracy"] for run in arm["runs"]] == [value + 1 for value in values]
    assert len(saved["tests"]) == 36
    assert all(list(t) == ["a", "b", "n", "difference", "t", "df", "p"] for t in saved["tests"])
    assert len(saved["paired"]) == 36, "all start from the baseline"
    assert len(saved["holm"]) == 8
    command = saved["arms"][1]["command"]
    assert command.startswith("unflip study ablation --seeds 2 --override data.name=digits")
    assert command.endswith("--only finetune-0.01")


def test_a_summary_that_is_read_is_the_one_that_was_written(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    """With a paper's figures, a swept value, a run that stopped, and all three kinds of tests."""
    trainer.stops = {"alpha-1/seed-2": "the loss is nan"}
    study = on_digits("alpha", tmp_path, 3, "optimizer.lr=0.5")
    arms = (replace(arm, paper=Paper(85.06, best=85.4)) for arm in study.arms)
    summary = run_study(replace(study, arms=tuple(arms)), only=["alpha-0", "alpha-1"])
    assert summary.tests
    assert summary.paired
    assert summary.holm
    assert Summary.read(tmp_path) == summary
    before = (tmp_path / "study.json").read_bytes()
    Summary.read(tmp_path).write(tmp_path)
    assert (tmp_path / "study.json").read_bytes() == before


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("extra",), 1, "extra: Extra inputs are not permitted"),
        (("arms", 1, "extra"), 1, "arms.1.extra: Extra inputs are not permitted"),
        (("arms", 1, "runs", 0, "extra"), 1, "arms.1.runs.0.extra: "),
        (("arms", 0, "runs", 0, "accuracy"), "85.1", "arms.0.runs.0.accuracy: Input should be"),
        (("arms", 0, "runs", 0, "accuracy"), math.nan, "arms.0.runs.0.accuracy: Input should be"),
        (("arms", 0, "runs", 0, "seed"), True, "arms.0.runs.0.seed: Input should be"),
        (("arms", 0, "runs"), None, "arms.0.runs: Input should be"),
        (("arms", 0, "paper"), {"mean": 1.0, "max": 2.0}, "arms.0.paper.max: "),
        (("arms", 0, "recipe"), [], "arms.0.recipe: Input should be"),
        (("tests", 0, "p"), "small", "tests.0.p: Input should be"),
        (("evaluated_on",), "train", "evaluated_on: Input should be 'test' or 'validation'"),
        (("seeds",), ["0"], "seeds.0: Input should be"),
        (("arms", 1, "start"), "nowhere", "starts from 'nowhere', which is not an arm"),
        (("arms", 1, "name"), "baseline", "two arms are called 'baseline'"),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused_with_its_place_and_a_remedy(
    written: Path, tmp_path: Path, place: tuple[Any, ...], value: Any, named: str
) -> None:
    saved = json.loads((written / "study.json").read_text())
    part = saved
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    path = tmp_path / "study.json"
    path.write_text(json.dumps(saved))
    with pytest.raises(DamagedFile) as caught:
        Summary.read(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{path} is damaged: ")
    assert named in message
    assert message.endswith("it rewrites the file from the runs")


@pytest.fixture
def written(trainer: Any, on_digits: OnDigits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small study."""
    out = tmp_path_factory.mktemp("written")
    run_study(on_digits("ablation", out), only=["lns"])
    return out


def test_numbers_that_are_not_finite_are_left_out() -> None:
    texts = {"name": "a", "label": "a", "folder": "a", "command": ""}
    arm = ArmSummary(**texts, recipe={}, runs=(), mean=math.nan, std=math.inf)
    assert (arm.mean, arm.std) == (None, None)
    test = TTest(a="a", b="b", t=math.inf, p=math.nan)
    assert (test.t, test.p) == (None, None)


def test_one_run_has_no_spread_and_no_test(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    summary = run_study(on_digits("ablation", tmp_path, 1))
    assert {arm.std for arm in summary.arms} == {None}
    assert summary.tests == ()
    assert "±" not in (tmp_path / "table.md").read_text().split("|---")[1]


def test_the_papers_best_run_is_kept(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("ablation", tmp_path, 1)
    arms = [replace(arm, paper=Paper(85.56, 0.11, 85.78)) for arm in study.arms]
    summary = run_study(replace(study, arms=tuple(arms)), only=["baseline"])
    assert summary.arms[0].paper == Paper(85.56, 0.11, 85.78)
