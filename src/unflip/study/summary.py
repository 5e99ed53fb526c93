"""``study.json``: every run of a study, mean and standard deviation of each arm, and t-tests of the arms."""

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
from unflip.runs.command import train_command
from unflip.study.arm import Arm

if TYPE_CHECKING:
    from unflip.study.study import Study


def summarize(study: Study) -> dict[str, Any]:
    """The study as JSON values."""
    arms = [_arm(study, arm) for arm in study.arms]
    data = study.arms[0].recipe.data
    welch_tests, paired_tests = tests(arms), paired(arms)
    return {
        "study": study.name,
        "unflip": __version__,
        "title": study.title,
        "data": data.name,
        "evaluated_on": "validation" if data.validation else "test",
        "epochs_note": study.epochs_note,
        "epochs_scale": study.epochs_scale,
        "overrides": list(study.overrides),
        "seeds": list(study.seeds),
        "reference": study.reference,
        "arms": arms,
        "tests": welch_tests,
        "paired": paired_tests,
        "holm": holm(study.reference, welch_tests, paired_tests),
    }


def _arm(study: Study, arm: Arm) -> dict[str, Any]:
    records = [study.record(arm, seed) for seed in study.seeds]
    values = {r.seed: r.accuracy for r in records if r is not None and r.accuracy is not None}
    return {
        "name": arm.name,
        "label": arm.label,
        "folder": os.path.relpath(study.folder(arm), study.out),
        "start": arm.start,
        "command": _command(study, arm, 1 + max(values, default=len(study.seeds) - 1)),
        "recipe": arm.recipe.plain(),
        "paper": dataclasses.asdict(arm.paper) if arm.paper else None,
        "x": arm.x,
        "kept": list(arm.kept),
        "runs": [dataclasses.asdict(r) for r in records if r is not None],
        "mean": statistics.fmean(values.values()) if values else None,
        "std": statistics.stdev(values.values()) if len(values) > 1 else None,
        "best": max(values.values(), default=None),
    }


def _command(study: Study, arm: Arm, seeds: int) -> str:
    """What repeats an arm, with as many seeds as it has where others have more."""
    if arm.trained_otherwise:  # the study's own command would train another
        return train_command(arm.recipe.plain(), list(range(seeds)), {})
    command = study.command.replace(f"--seeds {len(study.seeds)}", f"--seeds {seeds}", 1)
    teacher = " --teacher DIR" if arm.recipe.distill else ""
    return f"{command}{teacher} --only {arm.name}".strip()


def accuracies(arm: dict[str, Any]) -> list[float]:
    """Of the runs of an arm that were finished."""
    return [run["accuracy"] for run in arm["runs"] if run["accuracy"] is not None]


def tests(arms: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Welch's t-test of each two arms with two runs or more; a p is not corrected for the number of tests."""
    able = [arm for arm in arms if len(accuracies(arm)) >= 2]
    if not _scipy():
        return []
    return [
        {"a": a["name"], "b": b["name"], **welch(accuracies(a), accuracies(b))}
        for a, b in combinations(able, 2)
    ]


def paired(arms: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The paired t-test, seed by seed, of each two arms that start from the same runs, or one from the other: those
    share all but the method, and what a seed's first weights were worth is no part of the difference."""
    found = []
    for a, b in combinations(arms, 2) if _scipy() else ():
        seeds = [s for s in _by_seed(a) if s in _by_seed(b)]
        if _related(a, b) and len(seeds) >= 2:
            test = seed_by_seed(*([_by_seed(arm)[s] for s in seeds] for arm in (a, b)))
            found.append({"a": a["name"], "b": b["name"], **test, "n": len(seeds)})
    return found


def difference_in_common(summary: dict[str, Any], arm: str, reference: str) -> float | None:
    """What an arm has more than the reference over the seeds that both have; None where those are all there are, and
    where the two are no pairs."""
    test = next((t for t in summary["paired"] if {t["a"], t["b"]} == {arm, reference}), None)
    if test is None or test["n"] is None:  # a study of an earlier version may not say how many
        return None
    both = (a for a in summary["arms"] if a["name"] in (arm, reference))
    if all(test["n"] == len(accuracies(a)) for a in both):
        return None
    difference: float = test["difference"]
    return difference if test["a"] == arm else -difference


def _related(a: dict[str, Any], b: dict[str, Any]) -> bool:
    same = a["start"] is not None and a["start"] == b["start"]
    return same or a["start"] == b["name"] or b["start"] == a["name"]


def _by_seed(arm: dict[str, Any]) -> dict[int, float]:
    return {r["seed"]: r["accuracy"] for r in arm["runs"] if r["accuracy"] is not None}


def holm(
    reference: str | None, welch_tests: list[dict[str, Any]], paired_tests: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Holm's correction over the comparisons with the reference, smallest p first: each by the test that suits it,
    seed by seed where there is one."""
    family = [
        {"a": found["a"], "b": found["b"], "test": name, "p": found["p"]}
        for name, found in chosen_tests(welch_tests, paired_tests).values()
        if reference in (found["a"], found["b"])
    ]
    family.sort(key=lambda test: test["p"])
    least = 0.0
    for rank, test in enumerate(family):
        least = max(least, min(1.0, (len(family) - rank) * test["p"]))
        test["adjusted"] = least
    return family


def chosen_tests(
    welch_tests: list[dict[str, Any]], paired_tests: list[dict[str, Any]]
) -> dict[tuple[str, str], tuple[str, dict[str, Any]]]:
    """Each pair's test that has a p, and its name; paired before Welch's."""
    chosen = {}
    for name, found in (("welch", welch_tests), ("paired", paired_tests)):
        chosen.update({(t["a"], t["b"]): (name, t) for t in found if t["p"] is not None})
    return chosen


def _scipy() -> bool:
    """A training machine need not have it: the same command elsewhere adds the tests."""
    return importlib.util.find_spec("scipy") is not None


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


def seed_by_seed(a: Sequence[float], b: Sequence[float]) -> dict[str, float | None]:
    """Whether the differences of pairs have a mean other than zero; no t where they are all the same."""
    from scipy import stats

    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean = statistics.fmean(differences)
    if len({round(d, 9) for d in differences}) == 1:  # as percents are: less is rounding
        return {"difference": mean, "t": None, "df": None, "p": None}
    found = stats.ttest_rel(a, b)
    t, df, p = (float(v) for v in (found.statistic, found.df, found.pvalue))
    assert math.isfinite(p)
    return {"difference": mean, "t": t, "df": df, "p": p}
