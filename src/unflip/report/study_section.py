"""A study as the page shows it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unflip.recipes.command import as_yaml
from unflip.report.curves import curves
from unflip.report.sign_changes import SignChanges, seed_list
from unflip.runs import provenance
from unflip.runs.run import Run
from unflip.study.comparison import difference_in_common
from unflip.study.summary import ArmSummary, Summary, TTest
from unflip.study.table import override_words


def study_section(folder: Path, summary: Summary, changes: SignChanges) -> dict[str, Any]:
    by_name = {arm.name: arm for arm in summary.arms}
    numbers = {arm.name: number for number, arm in enumerate(summary.arms)}
    reference = summary.arm(summary.reference)
    labels = {arm.name: arm.label for arm in summary.arms}  # as everywhere on the page
    name = reference.name if reference else None
    return {
        "kind": "study",
        "study": summary.study,
        "title": summary.title or summary.study,  # a comparison of given recipes has no title
        "unflip": summary.unflip,
        "data": summary.data,
        "evaluated_on": summary.evaluated_on,
        "epochs_note": summary.epochs_note,
        "changes": [override_words(override, summary.arms) for override in summary.overrides],
        "seeds": list(summary.seeds),
        "arms": [
            {**_arm(folder, arm, by_name), "against": _against(summary, arm, reference)}
            for arm in summary.arms
        ],
        "reference": reference.label if reference else None,
        "reference_arm": numbers[reference.name] if reference else None,
        "tests": _tests(summary.tests, name, labels, _corrected(summary, "welch")),
        "paired": _tests(summary.paired, name, labels, _corrected(summary, "paired")),
        "signs": [
            {"arm": numbers[arm.name], **found}
            for arm in summary.arms
            if (found := _changed_signs(folder, arm, by_name, changes))
        ],
    }


def _changed_signs(
    folder: Path, arm: ArmSummary, by_name: dict[str, ArmSummary], changes: SignChanges
) -> dict[str, Any] | None:
    """None for arms without a baseline, float networks, and arms without a run that is over."""
    if arm.start is None or is_float(arm.recipe) or is_float(by_name[arm.start].recipe):
        return None
    if not arm.runs:
        return None
    base = by_name[arm.start]
    pairs = [
        (seed, Run.of_seed(folder / arm.folder, seed), run_of_seed(folder / base.folder, seed))
        for seed in (run.seed for run in arm.runs)
    ]
    return {"baseline": base.label, **changes.of_arm(pairs)}


def _against(
    summary: Summary, arm: ArmSummary, reference: ArmSummary | None
) -> dict[str, Any] | None:
    """The difference of an arm from the reference, and the p of each test of the two, as ``table.md`` has them."""
    if reference is None or arm is reference or arm.mean is None or reference.mean is None:
        return None
    pair = {arm.name, reference.name}
    p, paired_p = (
        next((test.p for test in tests if {test.a, test.b} == pair), None)
        for tests in (summary.tests, summary.paired)
    )
    return {
        "difference": arm.mean - reference.mean,
        "p": p,
        "paired_p": paired_p,
        "paired_difference": difference_in_common(summary, arm.name, reference.name),
    }


def _corrected(summary: Summary, test: str) -> dict[frozenset[str], float]:
    return {frozenset((h.a, h.b)): h.adjusted for h in summary.holm if h.test == test}


def _tests(
    tests: Sequence[TTest],
    reference: str | None,
    labels: dict[str, str],
    corrected: dict[frozenset[str], float],
) -> list[dict[str, Any]]:
    """Arms by their labels; the reference comes second, because the other arm is compared with it."""
    rows = []
    for test in tests:
        found = {**test.model_dump(), "holm": corrected.get(frozenset((test.a, test.b)))}
        if test.a == reference:
            found.update(a=test.b, b=test.a)
            found.update({k: None if found[k] is None else -found[k] for k in ("difference", "t")})
        found["with_reference"] = reference is not None and found["b"] == reference
        found.update({k: labels.get(found[k], found[k]) for k in "ab"})
        rows.append(found)
    return rows


def _arm(folder: Path, arm: ArmSummary, by_name: dict[str, ArmSummary]) -> dict[str, Any]:
    """The summary's figures as they are; curves, device and versions from the runs' folders."""
    finished: list[list[dict[str, Any]]] = []
    unfinished: list[list[dict[str, Any]]] = []
    rows, missing = [], []
    for row in arm.runs:
        run = Run.of_seed(folder / arm.folder, row.seed)
        metrics = run.metrics if run.exists else []
        if metrics:
            (unfinished if row.accuracy is None else finished).append(metrics)
        else:
            missing.append(row.seed)
        rows.append({**asdict(row), **made_with(run if run.exists else None)})
    return {
        "name": arm.name,
        "label": arm.label,
        "method": method_name(arm.recipe),
        "start": by_name[arm.start].label if arm.start else None,
        "command": arm.command,
        "yaml": as_yaml(arm.recipe),
        "own_recipe": trains_a_file(arm.command, arm.recipe),
        "paper": asdict(arm.paper) if arm.paper else None,
        "x": arm.x,
        "n": len(arm.accuracies),
        "mean": arm.mean,
        "std": arm.std,
        "best": arm.best,
        "runs": rows,
        "curves": curves(finished, unfinished),
        "notes": [f"{arm.label}. {seed_list(missing)}: no metrics in {arm.folder}."]
        if missing
        else [],
    }


def made_with(run: Run | None) -> dict[str, Any]:
    """Device, versions, date and origins of a run; None for what is not known."""
    result = (run and run.result) or {}
    keys = ("device", "precision", "torch", "unflip", "commit", "dirty", "finished")
    saved = provenance.read(run) if run else None
    return {**{key: result.get(key) for key in keys}, "given": _origins(saved) if saved else None}


def _origins(saved: dict[str, Any]) -> str:
    parts = [f"{part} {saved[part]['folder']}" for part in provenance.PARTS if part in saved]
    return ", ".join([f"training images {saved['images']['training images']}", *parts])


def trains_a_file(command: str, recipe: dict[str, Any]) -> bool:
    """Whether the command takes the recipe from a file, which the reader has to save first."""
    return shlex.split(command)[1:3] == ["train", f"{recipe.get('name')}.yaml"]


def method_name(recipe: dict[str, Any]) -> str:
    method = recipe.get("method", "float")
    return str(method.get("name") if isinstance(method, dict) else method)


def is_float(recipe: dict[str, Any]) -> bool:
    return method_name(recipe) == "float"


def run_of_seed(folder: Path, seed: int) -> Run | None:
    """The run of that seed in a folder of seeds, or the folder itself if it is a run: as ``train`` finds a start."""
    run = Run.find(folder, seed)
    return run if run.exists else None
