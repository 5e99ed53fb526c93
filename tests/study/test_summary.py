"""study.json and table.md: the schema, the figures in them, and the t-tests."""

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
from unflip.study.figures import _by_epoch, _interval, draw
from unflip.study.paper import EXPERIMENTS
from unflip.study.runner import run_study, write_tables
from unflip.study.study import Study
from unflip.study.summary import Paper, holm, paired, seed_by_seed, welch
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


def test_seed_by_seed_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard deviation 1, t = 2 √3 with 2 degrees of freedom."""
    found = seed_by_seed([11, 22, 33], [10, 20, 30])
    assert found["difference"] == 2
    assert found["t"] == pytest.approx(2 * math.sqrt(3))
    assert found["df"] == 2
    assert found["p"] == pytest.approx(1 - math.sqrt(12 / 14))  # two degrees have a closed form
    same = seed_by_seed([80.3, 81.3, 82.3], [80.1, 81.1, 82.1])  # up to rounding
    assert same["difference"] == pytest.approx(0.2)
    assert (same["t"], same["df"], same["p"]) == (None, None, None)


def _saved(name: str, start: str | None, accuracies: dict[int, float | None]) -> dict[str, Any]:
    runs = [{"seed": seed, "accuracy": value} for seed, value in accuracies.items()]
    return {"name": name, "start": start, "runs": runs}


def test_pairs_are_of_the_same_seed_and_start() -> None:
    arms = [
        _saved("base", None, {0: 80.0, 1: 85.0, 2: 90.0}),
        _saved("other", None, {0: 80.0, 1: 85.1, 2: 90.0}),
        _saved("a", "base", {2: 91.0, 0: 81.0, 1: 86.3}),
        _saved("b", "base", {0: 81.0, 1: None, 2: 91.1}),
        _saved("c", "other", {0: 81.0, 1: 86.0, 2: 91.0}),
        _saved("d", "base", {0: 70.0}),
    ]
    found = {(test["a"], test["b"]): test for test in paired(arms)}
    assert list(found) == [("base", "a"), ("base", "b"), ("other", "c"), ("a", "b")]
    expected = stats.ttest_rel([80, 85, 90], [81, 86.3, 91])
    assert found["base", "a"]["p"] == pytest.approx(expected.pvalue)
    assert found["base", "a"]["n"] == 3
    assert found["a", "b"]["n"] == 2, "a seed that stopped is in no pair"
    assert found["a", "b"]["difference"] == pytest.approx(-0.05)
    assert list(found["a", "b"]) == ["a", "b", "difference", "t", "df", "p", "n"]


def test_holms_correction() -> None:
    """p of 0.01, 0.03 and 0.04 become 3 × 0.01, 2 × 0.03, and no less than that for the last."""

    def test(a: str, b: str, p: float | None) -> dict[str, Any]:
        return {"a": a, "b": b, "p": p}

    of_welch = [test("r", "x", 0.04), test("r", "y", 0.5), test("z", "r", 0.01), test("x", "y", 0)]
    of_pairs = [test("r", "y", 0.03), test("r", "x", None)]
    found = holm("r", of_welch, of_pairs)
    assert [(t["a"], t["b"], t["test"]) for t in found] == [
        ("z", "r", "welch"),
        ("r", "y", "paired"),
        ("r", "x", "welch"),
    ]
    assert [t["adjusted"] for t in found] == pytest.approx([0.03, 0.06, 0.06])
    assert holm("r", [test("r", "x", 0.7), test("r", "y", 0.8)], [])[1]["adjusted"] == 1
    assert holm(None, of_welch, of_pairs) == []


def test_the_schema(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    run_study(on_digits("ablation", tmp_path))
    saved = json.loads((tmp_path / "study.json").read_text())
    assert list(saved) == [
        *("study", "unflip", "title", "data", "evaluated_on", "epochs_note", "epochs_scale"),
        *("overrides", "seeds", "reference", "arms", "tests", "paired", "holm"),
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
    assert len(saved["tests"]) == 36
    assert all(list(t) == ["a", "b", "difference", "t", "df", "p"] for t in saved["tests"])
    assert len(saved["paired"]) == 36, "all start from the baseline"
    assert len(saved["holm"]) == 8
    command = saved["arms"][1]["command"]
    assert command.startswith("unflip study ablation --seeds 2 --override data.name=digits")
    assert command.endswith("--only finetune-0.01")


def test_what_was_changed_is_said(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("ablation", tmp_path, 1, "model.shortcut=conv", epochs_scale=2)
    summary = run_study(study, only=["baseline"])
    assert summary["overrides"][-1] == "model.shortcut=conv"
    assert summary["epochs_scale"] == 2
    said = "`model.width=2`, `epochs=1`, `model.shortcut=conv`."
    assert (tmp_path / "table.md").read_text().splitlines()[0].endswith(said)
    plain = EXPERIMENTS["ablation"].study(tmp_path, 2)
    assert (plain.overrides, plain.epochs_scale) == ((), 1)
    assert plain.command == "unflip study ablation --seeds 2 --data DIR"


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


def test_the_papers_best_run_is_kept(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("ablation", tmp_path, 1)
    arms = [replace(arm, paper=Paper(85.56, 0.11, 85.78)) for arm in study.arms]
    summary = run_study(replace(study, arms=tuple(arms)), only=["baseline"])
    assert summary["arms"][0]["paper"] == {"mean": 85.56, "std": 0.11, "best": 85.78}


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


def test_the_table_counts_accuracies(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    trainer.stops = {"finetune-0.01/seed-1": "the loss is nan"}
    run_study(on_digits("ablation", tmp_path, 3), only=["finetune-0.01"])
    written = (tmp_path / "table.md").read_text()
    assert "last epoch, up to 3 seeds." in written
    row = "83.30 (82.30 ± 1.41); seed 1 stopped: the loss is nan | 2 |"
    assert f"| fine-tuning, lr 0.01 | {row}" in written
    assert "| baseline (DoReFa) | 82.80 (81.80 ± 1.00) | 3 |" in written


def test_one_seed_has_no_p_and_one_comparison_no_correction(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    run_study(on_digits("ablation", tmp_path / "one", 1))
    written = (tmp_path / "one" / "table.md").read_text()
    assert "p: " not in written
    assert "| against fine-tuning, lr 0.01 |" in written
    run_study(on_digits("final", tmp_path / "two", 2), only=["baseline", "alone"])
    assert "p: Welch's t-test, two-sided.\n" in (tmp_path / "two" / "table.md").read_text()


def test_the_table_has_both_tests(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("ablation", tmp_path, 3)
    run_study(study, only=["finetune-0.01", "mapping", "lns"])
    for seed, accuracy in enumerate((60.0, 61.1, 62.0)):
        result = tmp_path / "lns" / f"seed-{seed}" / "result.json"
        result.write_text(json.dumps({**json.loads(result.read_text()), "accuracy": accuracy}))
    summary = write_tables(study)
    finetune, lns = (summary["arms"][i] for i in (1, 3))
    [test] = [t for t in summary["paired"] if {t["a"], t["b"]} == {"finetune-0.01", "lns"}]
    values = [[run["accuracy"] for run in arm["runs"]] for arm in (finetune, lns)]
    p = stats.ttest_rel(*values).pvalue
    assert test["p"] == pytest.approx(p)
    written = (tmp_path / "table.md").read_text()
    welch_p = stats.ttest_ind(*values, equal_var=False).pvalue
    assert f"| -21.27 ({welch_p:.2g}; paired {p:.2g}) |" in written
    assert "paired: the t-test seed by seed" in written
    assert (
        f"correction for all 3 (paired where there is one), p < 0.05 remains for LNS ({3 * p:.2g})."
        in (written)
    )


def test_pairs_are_of_the_seeds_in_common(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    """Fine-tuning has a third seed, far above; the mean over pairs leaves it out, and the table says both."""
    study = on_digits("ablation", tmp_path, 3)
    run_study(study, only=["finetune-0.01", "lns"])
    figures = {"finetune-0.01": (70.0, 71.0, 99.0), "lns": (70.1, 71.3)}
    for arm, accuracies in figures.items():
        for seed, accuracy in enumerate(accuracies):
            result = tmp_path / arm / f"seed-{seed}" / "result.json"
            result.write_text(json.dumps({**json.loads(result.read_text()), "accuracy": accuracy}))
    (tmp_path / "lns" / "seed-2" / "result.json").unlink()
    summary = write_tables(study)
    commands = {arm["name"]: arm["command"] for arm in summary["arms"]}
    assert "--seeds 3 " in commands["finetune-0.01"]
    assert "--seeds 2 " in commands["lns"], "what repeats its row"
    written = (tmp_path / "table.md").read_text()
    p = stats.ttest_rel(figures["lns"], figures["finetune-0.01"][:2]).pvalue
    assert f"; paired +0.20, {p:.2g}) |" in written
    assert "| -9.30 (" in written
    assert "(with its mean over the seeds that both have, where one has more)" in written


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("ablation", ["accuracy", "differences", "flips", "loss"]),
        ("alpha", ["accuracy", "alpha", "differences", "flips", "loss"]),
        ("sota", ["accuracy", "differences", "flips", "loss"]),
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


def test_the_interval_of_a_difference_is_that_of_the_test_in_the_table(
    on_digits: OnDigits, tmp_path: Path
) -> None:
    study = on_digits("ablation", tmp_path)
    lns, finetune = [85.0, 84.5, 85.2], [85.4, 85.5, 85.6]
    names = {"a": "finetune-0.01", "b": "lns"}
    summary = {"tests": [{**names, **welch(finetune, lns)}], "paired": []}
    for test, rule in ((stats.ttest_ind, {"equal_var": False}), (stats.ttest_rel, {})):
        expected = test(lns, finetune, **rule).confidence_interval(0.95)
        difference, half = _interval(study, summary, "lns") or (0.0, 0.0)
        found = (difference - half, difference + half)
        assert found == pytest.approx((expected.low, expected.high))
        summary["paired"] = [{**names, **seed_by_seed(finetune, lns)}]
    assert _interval(study, summary, "mapping") is None, "no test of it"


def test_mean_curves_are_of_all_runs_in_every_epoch(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    """One run measured in every epoch, another in the second alone and the last."""
    study = on_digits("ablation", tmp_path)
    run_study(study, only=["baseline"])
    path = tmp_path / "baseline" / "seed-1" / "metrics.jsonl"
    first, *others = path.read_text().splitlines()
    unmeasured = json.dumps({**json.loads(first), "accuracy": None})
    path.write_text("\n".join([unmeasured, *others]) + "\n")
    baseline = study.arm("baseline")
    accuracy, loss = (_by_epoch(study, baseline, key) for key in ("accuracy", "loss"))
    assert {epoch: len(values) for epoch, values in accuracy.items()} == {2: 2, 3: 2}
    assert {epoch: len(values) for epoch, values in loss.items()} == {1: 2, 2: 2, 3: 2}
    path.unlink()  # a run of which the result alone was kept
    assert {e: len(v) for e, v in _by_epoch(study, baseline, "accuracy").items()} == {
        1: 1,
        2: 1,
        3: 1,
    }


def test_the_caption_says_which_arms_kept_their_own_value(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    study = on_digits("ablation", tmp_path, 1, "optimizer.lr=0.01")
    run_study(study, only=["finetune-0.01", "finetune-0.001", "finetune-0.0001", "lns"])
    caption = (tmp_path / "table.md").read_text().splitlines()[0]
    kept = "fine-tuning, lr 0.001; fine-tuning, lr 0.0001"
    assert caption.endswith(f", `epochs=1`, `optimizer.lr=0.01` (own value kept: {kept}).")
