"""Reads run folders and ``study.json``; what is broken is named, with what was expected."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from unflip.runs import provenance
from unflip.runs.files import WHAT_TO_DO, read_metrics, refuse_other_seed
from unflip.runs.provenance import PARTS

SEED_FOLDER = re.compile(r"seed-(\d+)")


class ReportError(ValueError):
    """Something a report cannot be made of; the message names the file and what was expected."""


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Python's json writes NaN where nothing could be computed (the std of one seed).
Maybe = Annotated[float | None, BeforeValidator(_finite_or_none)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Paper(_Part):
    """What the paper reports."""

    mean: float
    std: Maybe = None


class StudyRun(_Part):
    """One seed as the study's summary has it; ``accuracy`` is None where it stopped."""

    seed: int
    accuracy: Maybe = None
    best_accuracy: Maybe = None
    epochs: int | None = None
    seconds: Maybe = None
    stopped: str | None = None


class StudyArm(_Part):
    """One row of a study."""

    name: str
    label: str
    folder: str
    start: str | None = None
    command: str
    recipe: dict[str, Any]
    paper: Paper | None = None
    x: Maybe = None
    kept: list[str] = []  # overrides that it has a value of its own for
    runs: list[StudyRun]
    mean: Maybe = None
    std: Maybe = None
    best: Maybe = None


class TTest(_Part):
    """A t-test of two arms; no t where there are too few seeds. ``n`` pairs, where it is of pairs."""

    a: str
    b: str
    n: int | None = None
    difference: Maybe = None
    t: Maybe = None
    df: Maybe = None
    p: Maybe = None


class Corrected(_Part):
    """The p of a test with the reference, corrected for all of them (Holm)."""

    a: str
    b: str
    test: Literal["welch", "paired"]
    adjusted: float


class Study(_Part):
    """``study.json``."""

    study: str
    unflip: str
    title: str
    data: str
    evaluated_on: str
    epochs_note: str = ""
    overrides: list[str] = []
    seeds: list[int]
    arms: list[StudyArm]
    reference: str | None = None
    tests: list[TTest] = []  # Welch's
    paired: list[TTest] = []  # of runs with the same seed
    holm: list[Corrected] = []


@dataclass(frozen=True)
class Run:
    """One ``seed-N`` folder: recipe, a line an epoch, and the result if it is finished."""

    folder: Path
    recipe: dict[str, Any]
    seed: int
    metrics: list[dict[str, Any]] = field(repr=False)
    result: dict[str, Any] | None
    stopped: str | None = None  # why, where a study wrote it down
    given: dict[str, Any] | None = None  # images, start and teacher, where they were written down


def read_study(folder: Path) -> Study:
    """The study's summary, checked field by field."""
    path = folder / "study.json"
    try:
        study = Study.model_validate(read_json(path))
    except ValidationError as error:
        raise ReportError(
            f"{path} is not a study's summary: {explain(error)}. {WHAT_TO_DO[path.name]}"
        ) from None
    names = [arm.name for arm in study.arms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ReportError(f"{path}: two arms are called {twice!r}")
    for arm in study.arms:
        if arm.start is not None and arm.start not in names:
            raise ReportError(f"{path}: arm {arm.name!r} starts from {arm.start!r}, which is none")
    return study


def explain(error: ValidationError, most: int = 3) -> str:
    problems = error.errors()
    shown = [f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in problems[:most]]
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "; ".join([*shown, *more])


def is_study(folder: Path) -> bool:
    return (folder / "study.json").is_file()


def run_folders(source: Path) -> list[Path]:
    """The ``seed-N`` folders of a run, or the folder itself if it is one; ordered by seed."""
    if (source / "recipe.json").is_file():
        return [source]
    if not source.is_dir():
        return []
    seeds = {p: SEED_FOLDER.fullmatch(p.name) for p in source.iterdir()}
    found = [(int(m[1]), p) for p, m in seeds.items() if m and _is_run(p)]
    return [path for _, path in sorted(found)]


def _is_run(folder: Path) -> bool:
    """A result that lost its recipe is not passed over: the mean would be of other seeds than the run has."""
    if (folder / "recipe.json").is_file():
        return True
    if (folder / "result.json").is_file():
        raise ReportError(
            f"{folder} has a result.json and no recipe.json, so nothing tells what it is the result of. "
            "Put recipe.json back, or take that folder out to do without that seed"
        )
    return False


def refuse(source: Path) -> ReportError:
    """The error for a folder that is neither; the caller raises it."""
    if not source.exists():
        return ReportError(f"there is no folder {source}")
    if (source / "search.json").is_file():
        return ReportError(
            f"{source} is a search of widths (unflip study autobnn), which has no page: its table is "
            f"{source / 'table.md'}. The folders of its candidates are runs, and have one"
        )
    return ReportError(
        f"{source} is neither a study (no study.json in it) nor a run (no recipe.json, and no seed-N folder "
        "with one). Give the folder that 'unflip train' or 'unflip study' wrote with --out."
    )


def read_run(folder: Path) -> Run:
    """A run's folder; the last line of its metrics may be cut short by a kill."""
    saved = read_json(folder / "recipe.json")
    try:
        recipe, seed = dict(saved["recipe"]), int(saved["seed"])
        _ = recipe["name"], recipe["epochs"], recipe["data"]["name"], recipe["method"]
    except (KeyError, TypeError, ValueError) as error:
        raise ReportError(
            f"{folder / 'recipe.json'} should hold a recipe and a seed, as 'unflip train' writes them: {error!r}. "
            f"{WHAT_TO_DO['recipe.json']}"
        ) from None
    result = _result(folder / "result.json")
    _refuse_copied(folder)
    metrics, stopped = _metrics(folder / "metrics.jsonl"), _stop_reason(folder)
    return Run(folder, recipe, seed, metrics, result, stopped, _given(folder / provenance.NAME))


def _refuse_copied(folder: Path) -> None:
    """A seed's folder holds that seed; one by another name may hold any."""
    named = SEED_FOLDER.fullmatch(folder.name)
    try:
        if named:
            refuse_other_seed(folder, int(named[1]))
    except ValueError as error:
        raise ReportError(str(error)) from None


def _given(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    given = read_json(path)
    try:
        _ = given["images"]["training images"], [given[p]["folder"] for p in PARTS if p in given]
    except (KeyError, TypeError) as error:
        raise ReportError(
            f"{path} should hold what a run was given, as 'unflip train' writes it: {error!r}. "
            f"{WHAT_TO_DO[path.name]}"
        ) from None
    return dict(given)


def _result(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    result = read_json(path)
    if not isinstance(result, dict) or not isinstance(result.get("accuracy"), (int, float)):
        raise ReportError(
            f"{path} should be a run's result with an accuracy. {WHAT_TO_DO[path.name]}"
        )
    return result


def _stop_reason(folder: Path) -> str | None:
    path = folder / "stopped.json"
    if not path.exists():
        return None
    note = read_json(path)
    return str(note.get("reason")) if isinstance(note, dict) else None


def _metrics(path: Path) -> list[dict[str, Any]]:
    try:
        return read_metrics(path)
    except ValueError as error:
        raise ReportError(str(error)) from None


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReportError(
            f"{path} cannot be read as JSON: {error}. {WHAT_TO_DO[path.name]}"
        ) from None
