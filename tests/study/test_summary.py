"""study.json and table.md: the schema, the figures in them, and the t-tests.

One file of more than 400 lines, because all tests share the same summaries.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from scipy import stats

from unflip import __version__
from unflip.runs.files import DamagedFile
from unflip.runs.run import Outcome
from unflip.study.comparison import holm, paired, paired_tests, welch, welch_tests
from unflip.study.figures import _by_epoch, _interval, draw
from unflip.study.output import summarize
from unflip.study.paper import EXPERIMENTS
from unflip.study.runner import run_study, write_tables
from unflip.study.study import Study
from unflip.study.summary import ArmSummary, Paper, Summary, TTest
from unflip.study.table import best_mean_std

OnDigits = Callable[..., Study]


def row(
    name: str, accuracies: Sequence[float] | Mapping[int, float | None], start: str | None = None
) -> ArmSummary:
    """An arm of a summary with these accuracies, by seed."""
    by_seed = accuracies if isinstance(accuracies, Mapping) else dict(enumerate(accuracies))
    runs = tuple(Outcome(seed, value) for seed, value in by_seed.items())
    return ArmSummary(
        name=name, label=name, folder=name, start=start, command="", recipe={}, runs=runs
    )


def test_welch_by_hand() -> None:
    """Means 2 and 4, variances 1 and 4: t = −2/√(5/3), df = (5/3)² / (1/18 + 16/18) = 50/17."""
    found = welch(row("a", [1, 2, 3]), row("b", [2, 4, 6]))
    assert (found.a, found.b, found.n, found.difference) == ("a", "b", None, -2)
    assert found.t == pytest.approx(-2 / math.sqrt(5 / 3))
    assert found.df == pytest.approx(50 / 17)


def test_welch_p_is_the_area_of_students_tails() -> None:
    found = welch(row("a", [85.1, 85.4, 85.2, 85.9]), row("b", [84.9, 85.0, 84.7]))
    t, df = found.t, found.df
    assert t is not None
    assert df is not None
    constant = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
    width = t / 100_000
    middle = sum((1 + (width * (i + 0.5)) ** 2 / df) ** (-(df + 1) / 2) for i in range(100_000))
    assert found.p == pytest.approx(1 - 2 * constant * middle * width, abs=1e-6)


def test_welch_is_scipys() -> None:
    a, b = [85.06, 85.2, 84.9, 85.31], [85.56, 85.7, 85.4]
    found, expected = welch(row("a", a), row("b", b)), stats.ttest_ind(a, b, equal_var=False)
    assert (found.t, found.p) == (expected.statistic, expected.pvalue)
    assert welch(row("b", b), row("a", a)).t == -expected.statistic


def test_welch_without_spread_has_no_t() -> None:
    assert welch(row("a", [1, 1]), row("b", [2, 2])) == TTest(a="a", b="b", difference=-1)


def test_welch_with_spread_in_one_arm_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = welch(row("a", [10.1, 10.1, 10.1]), row("b", [10.1, 10.2, 10.4]))
    assert found.p == pytest.approx(stats.ttest_1samp([10.1, 10.2, 10.4], 10.1).pvalue)


def test_paired_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard deviation 1, t = 2 √3 with 2 degrees of freedom."""
    found = paired(row("a", [11, 22, 33]), row("b", [10, 20, 30]), [0, 1, 2])
    assert (found.difference, found.df, found.n) == (2, 2, 3)
    assert found.t == pytest.approx(2 * math.sqrt(3))
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))  # two degrees have a closed form
    same = paired(row("a", [80.3, 81.3, 82.3]), row("b", [80.1, 81.1, 82.1]), [0, 1, 2])
    assert same.difference == pytest.approx(0.2)  # all differences are equal up to rounding
    assert (same.t, same.df, same.p) == (None, None, None)


def test_pairs_are_of_the_same_seed_and_start() -> None:
    arms = [
        row("base", {0: 80.0, 1: 85.0, 2: 90.0}),
        row("other", {0: 80.0, 1: 85.1, 2: 90.0}),
        row("a", {2: 91.0, 0: 81.0, 1: 86.3}, "base"),
        row("b", {0: 81.0, 1: None, 2: 91.1}, "base"),
        row("c", {0: 81.0, 1: 86.0, 2: 91.0}, "other"),
        row("d", {0: 70.0}, "base"),
    ]
    found = {(test.a, test.b): test for test in paired_tests(arms)}
    assert list(found) == [("base", "a"), ("base", "b"), ("other", "c"), ("a", "b")]
    expected = stats.ttest_rel([80, 85, 90], [81, 86.3, 91])
    assert found["base", "a"].p == pytest.approx(expected.pvalue)
    assert found["base", "a"].n == 3
    assert found["a", "b"].n == 2, "a seed that stopped is in no pair"
    assert found["a", "b"].difference == pytest.approx(-0.05)
    assert len(welch_tests(arms)) == 10, "each two of the five arms with more than one run"


def test_without_scipy_there_are_no_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arms = [row("base", [80, 81]), row("a", [82, 84], "base")]
    assert welch_tests(arms) == paired_tests(arms) == []


def test_holms_correction() -> None:
    """p of 0.01, 0.03 and 0.04 become 3 × 0.01, 2 × 0.03, and no less than that for the last."""

    def test(a: str, b: str, p: float | None) -> TTest:
        return TTest(a=a, b=b, p=p)

    of_welch = [test("r", "x", 0.04), test("r", "y", 0.5), test("z", "r", 0.01), test("x", "y", 0)]
    of_pairs = [test("r", "y", 0.03), test("r", "x", None)]
    found = holm("r", of_welch, of_pairs)
    assert [(t.a, t.b, t.test) for t in found] == [
        ("z", "r", "welch"),
        ("r", "y", "paired"),
        ("r", "x", "welch"),
    ]
    assert [t.adjusted for t in found] == pytest.approx([0.03, 0.06, 0.06])
    assert holm("r", [test("r", "x", 0.7), test("r", "y", 0.8)], [])[1].adjusted == 1
    assert holm(None, of_welch, of_pairs) == []


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
    of_methods = ("memory_bits", "flops", "seconds_per_epoch")
    for arm in saved["arms"]:
        assert list(arm) == [*arm_keys, "mean", "std", "best", *of_methods]
        assert (tmp_path / arm["folder"] / "seed-0" / "result.json").exists()
        run_keys = ("seed", "accuracy", "best_accuracy", "epochs", "seconds", "stopped")
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
    arm = ArmSummary.model_validate({**row("a", [1.0]).model_dump(), "mean": math.nan})
    assert arm.mean is None
    test = TTest(a="a", b="b", t=math.inf, p=math.nan)
    assert (test.t, test.p) == (None, None)


def test_the_caption_names_the_overrides(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("ablation", tmp_path, 1, "model.shortcut=conv", epochs_scale=2)
    summary = run_study(study, only=["baseline"])
    assert summary.overrides[-1] == "model.shortcut=conv"
    assert summary.epochs_scale == 2
    said = "`model.width=2`, `epochs=1`, `model.shortcut=conv`."
    assert (tmp_path / "table.md").read_text().splitlines()[0].endswith(said)
    plain = EXPERIMENTS["ablation"].study(tmp_path, 2)
    assert (plain.overrides, plain.epochs_scale) == ((), 1)
    assert plain.command == "unflip study ablation --seeds 2 --data DIR"


def test_one_run_has_no_spread_and_no_test(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    summary = run_study(on_digits("ablation", tmp_path, 1))
    assert {arm.std for arm in summary.arms} == {None}
    assert summary.tests == ()
    assert "±" not in (tmp_path / "table.md").read_text().split("|---")[1]


def test_best_mean_and_std_as_the_paper_writes_them() -> None:
    assert best_mean_std(85.78, 85.56, 0.11) == "85.78 (85.56 ± 0.11)"
    assert best_mean_std(None, 85.06, None) == "85.06"


def test_the_papers_best_run_is_kept(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("ablation", tmp_path, 1)
    arms = [replace(arm, paper=Paper(85.56, 0.11, 85.78)) for arm in study.arms]
    summary = run_study(replace(study, arms=tuple(arms)), only=["baseline"])
    assert summary.arms[0].paper == Paper(85.56, 0.11, 85.78)


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
    [test] = [t for t in summary.paired if {t.a, t.b} == {"finetune-0.01", "lns"}]
    values = [summary.arms[i].accuracies for i in (1, 3)]
    p = stats.ttest_rel(*values).pvalue
    assert test.p == pytest.approx(p)
    written = (tmp_path / "table.md").read_text()
    welch_p = stats.ttest_ind(*values, equal_var=False).pvalue
    assert f"| -21.27 ({welch_p:.2g}; paired {p:.2g}) |" in written
    assert "paired: the paired t-test over seeds" in written
    assert (
        f"correction for all 3 (paired where possible), p < 0.05 remains for LNS ({3 * p:.2g})."
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
    commands = {arm.name: arm.command for arm in summary.arms}
    assert "--seeds 3 " in commands["finetune-0.01"]
    assert "--seeds 2 " in commands["lns"], "as many as its row has"
    written = (tmp_path / "table.md").read_text()
    p = stats.ttest_rel(figures["lns"], figures["finetune-0.01"][:2]).pvalue
    assert f"; paired +0.20, {p:.2g}) |" in written
    assert "| -9.30 (" in written
    assert "(with the mean difference over the seeds that both have, if one has more)" in written


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
    lns, finetune = [85.0, 84.5, 85.2], [85.4, 85.5, 85.6]
    arms = row("finetune-0.01", finetune), row("lns", lns)
    summary = summarize(on_digits("ablation", tmp_path))
    summary = summary.model_copy(update={"tests": (welch(*arms),)})
    for test, rule in ((stats.ttest_ind, {"equal_var": False}), (stats.ttest_rel, {})):
        expected = test(lns, finetune, **rule).confidence_interval(0.95)
        difference, half = _interval(summary, "lns") or (0.0, 0.0)
        found = (difference - half, difference + half)
        assert found == pytest.approx((expected.low, expected.high))
        summary = summary.model_copy(update={"paired": (paired(*arms, [0, 1, 2]),)})
    assert _interval(summary, "mapping") is None, "no test of it"


def test_mean_curves_are_of_all_runs_in_every_epoch(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    """One run measured accuracy in every epoch, another not in the first."""
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
    path.unlink()  # only its result was kept
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
