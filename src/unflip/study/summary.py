"""``study.json``: every run of a study, mean and standard deviation of each arm, and Welch's t-tests."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from unflip import __version__
from unflip.study.arm import Arm

if TYPE_CHECKING:
    from unflip.study.study import Study


def summarize(study: Study) -> dict[str, Any]:
    """The study as JSON values."""
    arms = [_arm(study, arm) for arm in study.arms]
    data = study.arms[0].recipe.data
    return {
        "study": study.name,
        "unflip": __version__,
        "title": study.title,
        "data": data.name,
        "evaluated_on": "validation" if data.validation else "test",
        "epochs_note": study.epochs_note,
        "seeds": list(study.seeds),
        "arms": arms,
        "tests": tests(arms),
    }


def _arm(study: Study, arm: Arm) -> dict[str, Any]:
    records = [study.record(arm, seed) for seed in study.seeds]
    values = [r.accuracy for r in records if r is not None and r.accuracy is not None]
    paper = arm.paper and {"mean": arm.paper.mean, "std": arm.paper.std}
    return {
        "name": arm.name,
        "label": arm.label,
        "folder": os.path.relpath(study.folder(arm), study.out),
        "start": arm.start,
        "command": f"{study.command} --only {arm.name}".strip(),
        "recipe": arm.recipe.plain(),
        "paper": paper,
        "x": arm.x,
        "runs": [dataclasses.asdict(r) for r in records if r is not None],
        "mean": statistics.fmean(values) if values else None,
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "best": max(values, default=None),
    }


def accuracies(arm: dict[str, Any]) -> list[float]:
    """Of the runs of an arm that were finished."""
    return [run["accuracy"] for run in arm["runs"] if run["accuracy"] is not None]


def tests(arms: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Welch's t-test of each two arms with two runs or more; a p is not corrected for the number of tests."""
    able = [arm for arm in arms if len(accuracies(arm)) >= 2]
    if importlib.util.find_spec("scipy") is None:
        return []  # a training machine need not have it: the same command elsewhere adds the tests
    return [
        {"a": a["name"], "b": b["name"], **welch(accuracies(a), accuracies(b))}
        for a, b in combinations(able, 2)
    ]


def welch(a: Sequence[float], b: Sequence[float]) -> dict[str, float | None]:
    """Whether two means differ, for samples of unequal spread; no t where neither has any."""
    from scipy import stats  # type: ignore[import-untyped]

    difference = statistics.fmean(a) - statistics.fmean(b)
    if statistics.pvariance(a) == statistics.pvariance(b) == 0:
        return {"difference": difference, "t": None, "df": None, "p": None}
    found = stats.ttest_ind(a, b, equal_var=False)
    t, df, p = (float(v) for v in (found.statistic, found.df, found.pvalue))
    assert math.isfinite(p)
    return {"difference": difference, "t": t, "df": df, "p": p}
