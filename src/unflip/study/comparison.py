"""Whether the arms of a study differ: Welch's and paired t-tests, and Holm's correction."""

from __future__ import annotations

import importlib.util
import math
import statistics
import warnings
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Literal

from unflip.study.summary import ArmSummary, Corrected, TTest

if TYPE_CHECKING:
    from unflip.study.summary import Summary

TestName = Literal["welch", "paired"]


def welch_tests(arms: Sequence[ArmSummary]) -> list[TTest]:
    """Welch's t-test of each pair of arms with at least two runs each; p is not corrected for the number of tests."""
    able = [arm for arm in arms if len(arm.accuracies) >= 2]
    if not _scipy():
        return []
    return [welch(a, b) for a, b in combinations(able, 2)]


def paired_tests(arms: Sequence[ArmSummary]) -> list[TTest]:
    """The paired t-test over seeds of each pair of arms that start from the same runs, or one from the other.

    Such arms share everything but the method, so the luck of a seed's first weights is not part of the difference.
    """
    found = []
    for a, b in combinations(arms, 2) if _scipy() else ():
        seeds = [seed for seed in a.by_seed if seed in b.by_seed]
        if _related(a, b) and len(seeds) >= 2:
            found.append(paired(a, b, seeds))
    return found


def _related(a: ArmSummary, b: ArmSummary) -> bool:
    same = a.start is not None and a.start == b.start
    return same or a.start == b.name or b.start == a.name


def _scipy() -> bool:
    """A machine that trains need not have SciPy: the same command elsewhere adds the tests."""
    return importlib.util.find_spec("scipy") is not None


def welch(a: ArmSummary, b: ArmSummary) -> TTest:
    """Whether two means differ, for samples of unequal variance; no t if both have none."""
    from scipy import stats  # type: ignore[import-untyped]

    x, y = a.accuracies, b.accuracies
    difference = statistics.fmean(x) - statistics.fmean(y)
    if statistics.pvariance(x) == statistics.pvariance(y) == 0:
        return TTest(a=a.name, b=b.name, difference=difference)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # one arm may have equal runs; the other does not
        t, df, p = _finite(stats.ttest_ind(x, y, equal_var=False))
    return TTest(a=a.name, b=b.name, difference=difference, t=t, df=df, p=p)


def paired(a: ArmSummary, b: ArmSummary, seeds: Sequence[int]) -> TTest:
    """Whether the mean of the differences per seed is not zero; no t if all differences are equal."""
    from scipy import stats

    x, y = ([arm.by_seed[seed] for seed in seeds] for arm in (a, b))
    differences = [i - j for i, j in zip(x, y, strict=True)]
    mean, n = statistics.fmean(differences), len(seeds)
    if len({round(d, 9) for d in differences}) == 1:  # accuracies are percents: less is rounding
        return TTest(a=a.name, b=b.name, n=n, difference=mean)
    t, df, p = _finite(stats.ttest_rel(x, y))
    return TTest(a=a.name, b=b.name, n=n, difference=mean, t=t, df=df, p=p)


def _finite(found: object) -> tuple[float, float, float]:
    t, df, p = (float(getattr(found, name)) for name in ("statistic", "df", "pvalue"))
    assert math.isfinite(p)
    return t, df, p


def holm(
    reference: str | None, welch_found: Sequence[TTest], paired_found: Sequence[TTest]
) -> list[Corrected]:
    """Holm's correction over all comparisons with the reference, smallest p first; paired where possible."""
    family = [
        (name, test)
        for name, test in chosen_tests(welch_found, paired_found).values()
        if reference in (test.a, test.b)
    ]
    family.sort(key=lambda pair: pair[1].p or 0.0)
    least, corrected = 0.0, []
    for rank, (name, test) in enumerate(family):
        assert test.p is not None
        least = max(least, min(1.0, (len(family) - rank) * test.p))
        corrected.append(Corrected(a=test.a, b=test.b, test=name, p=test.p, adjusted=least))
    return corrected


def chosen_tests(
    welch_found: Sequence[TTest], paired_found: Sequence[TTest]
) -> dict[tuple[str, str], tuple[TestName, TTest]]:
    """For each pair of arms its test that has a p, with its name; paired before Welch's."""
    chosen: dict[tuple[str, str], tuple[TestName, TTest]] = {}
    chosen.update({(t.a, t.b): ("welch", t) for t in welch_found if t.p is not None})
    chosen.update({(t.a, t.b): ("paired", t) for t in paired_found if t.p is not None})
    return chosen


def difference_in_common(summary: Summary, arm: str, reference: str) -> float | None:
    """Mean paired difference (arm − reference) over the seeds both have. None if both have the same seeds or the arms
    are not paired."""
    test = next((t for t in summary.paired if {t.a, t.b} == {arm, reference}), None)
    if test is None or test.difference is None:
        return None
    both = (a for a in summary.arms if a.name in (arm, reference))
    if all(test.n == len(a.accuracies) for a in both):
        return None
    return test.difference if test.a == arm else -test.difference
