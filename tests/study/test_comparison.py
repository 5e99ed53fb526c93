"""Welch's and paired t-tests, Holm's correction, and the interval of a difference."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from scipy import stats

from unflip.runs.run import Outcome
from unflip.study.comparison import holm, paired, paired_tests, welch, welch_tests
from unflip.study.figures import _interval
from unflip.study.output import summarize
from unflip.study.study import Study
from unflip.study.summary import ArmSummary, TTest

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
