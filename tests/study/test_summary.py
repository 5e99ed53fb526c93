"""study.json and table.md: the schema, the figures in them, and Welch's t-test."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from scipy import stats

from unflip import __version__
from unflip.study.arm import Paper
from unflip.study.figures import draw
from unflip.study.study import Study, run_study
from unflip.study.summary import welch
from unflip.study.table import best_mean_std

OnDigits = Callable[..., Study]


def test_welch_by_hand() -> None:
    """Means 2 and 4, variances 1 and 4: t = −2/√(5/3), df = (5/3)² / (1/18 + 16/18) = 50/17."""
    found = welch([1, 2, 3], [2, 4, 6])
    assert found["difference"] == -2
    assert found["t"] == pytest.approx(-2 / math.sqrt(5 / 3))
    assert found["df"] == pytest.approx(50 / 17)


def test_welch_p_is_the_area_of_students_tails() -> None:
    found = welch([85.1, 85.4, 85.2, 85.9], [84.9, 85.0, 84.7])
    t, df = found["t"], found["df"]
    assert t is not None
    assert df is not None
    constant = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
    width = t / 100_000
    middle = sum((1 + (width * (i + 0.5)) ** 2 / df) ** (-(df + 1) / 2) for i in range(100_000))
    assert found["p"] == pytest.approx(1 - 2 * constant * middle * width, abs=1e-6)


def test_welch_is_scipys() -> None:
    a, b = [85.06, 85.2, 84.9, 85.31], [85.56, 85.7, 85.4]
    found, expected = welch(a, b), stats.ttest_ind(a, b, equal_var=False)
    assert (found["t"], found["p"]) == (expected.statistic, expected.pvalue)
    assert welch(b, a)["t"] == -expected.statistic


def test_welch_without_spread_has_no_t() -> None:
    assert welch([1, 1], [2, 2]) == {"difference": -1, "t": None, "df": None, "p": None}


def test_the_schema(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    run_study(on_digits("ablation", tmp_path))
    saved = json.loads((tmp_path / "study.json").read_text())
    assert list(saved) == [
        *("study", "unflip", "title", "data", "evaluated_on", "epochs_note", "seeds"),
        *("arms", "tests"),
    ]
    assert (saved["study"], saved["unflip"], saved["data"]) == ("ablation", __version__, "digits")
    assert (saved["evaluated_on"], saved["seeds"]) == ("test", [0, 1])
    arm_keys = ("name", "label", "folder", "start", "command", "recipe", "paper", "x", "runs")
    for arm in saved["arms"]:
        assert list(arm) == [*arm_keys, "mean", "std", "best"]
        assert (tmp_path / arm["folder"] / "seed-0" / "result.json").exists()
        run_keys = ("seed", "accuracy", "best_accuracy", "epochs", "seconds", "stopped")
        assert all(list(run) == list(run_keys) for run in arm["runs"])
        values = [run["accuracy"] for run in arm["runs"]]
        assert arm["mean"] == statistics.fmean(values)
        assert arm["std"] == statistics.stdev(values)
        assert arm["best"] == max(values)
        assert [run["best_accuracy"] for run in arm["runs"]] == [value + 1 for value in values]
    assert len(saved["tests"]) == 15
    assert all(list(t) == ["a", "b", "difference", "t", "df", "p"] for t in saved["tests"])
    command = saved["arms"][1]["command"]
    assert command.startswith("unflip study ablation --seeds 2 --override data.name=digits")
    assert command.endswith("--only finetune-0.01")


def test_one_run_has_no_spread_and_no_test(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    summary = run_study(on_digits("ablation", tmp_path, 1))
    assert {arm["std"] for arm in summary["arms"]} == {None}
    assert summary["tests"] == []
    assert "±" not in (tmp_path / "table.md").read_text().split("|---")[1]


def test_best_mean_and_std_as_the_paper_writes_them() -> None:
    assert best_mean_std(85.78, 85.56, 0.11) == "85.78 (85.56 ± 0.11)"
    assert best_mean_std(None, 85.06, None) == "85.06"


def test_the_table(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    """Accuracies of the fake trainer: 80 + a tenth of the name's length + the seed."""
    study = on_digits("ablation", tmp_path, 3, epochs_scale=2)
    arms = [
        replace(a, paper=Paper(85.56, 0.11, 85.78)) if a.name == "lns" else a for a in study.arms
    ]
    run_study(replace(study, arms=tuple(arms)))
    written = (tmp_path / "table.md").read_text()
    assert "digits, test accuracy of the last epoch, 3 seeds." in written
    assert "Epochs: 2 (from scratch), 2 (from the baseline); 2 × those of the recipes." in written
    assert "| | best (mean ± std), % | runs | paper, % | against fine-tuning, lr 0.01 (p) |" in (
        written.replace("|  |", "| |")
    )
    assert "| LNS | 82.30 (81.30 ± 1.00) | 3 | 85.78 (85.56 ± 0.11) | -1.00 (0.29) |" in written
    assert "| baseline (DoReFa) | 82.80 (81.80 ± 1.00) | 3 |  | -0.50 (0.57) |" in written
    assert "| fine-tuning, lr 0.01 | 83.30 (82.30 ± 1.00) | 3 |  |  |" in written


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("ablation", ["accuracy", "flips", "loss"]),
        ("alpha", ["accuracy", "alpha", "flips", "loss"]),
        ("sota", ["accuracy", "flips", "loss"]),
    ],
)
def test_figures_are_svg_and_the_same_again(
    trainer: Any, on_digits: OnDigits, tmp_path: Path, name: str, figures: list[str]
) -> None:
    study = on_digits(name, tmp_path)
    summary = run_study(study)
    paths = sorted(draw(study, summary))
    assert [path.name for path in paths] == [f"{name}.svg" for name in figures]
    for path in paths:
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in sorted(draw(study, summary))] == before
