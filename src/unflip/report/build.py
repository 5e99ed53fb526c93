"""Everything the page shows, as one JSON value. The same folders give the same value: nothing is asked of the clock."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from unflip import __version__
from unflip.report.curves import curves, mean_and_std
from unflip.report.read import (
    ReportError,
    Run,
    Study,
    StudyArm,
    TTest,
    is_study,
    read_run,
    read_study,
    refuse,
    run_folders,
)
from unflip.report.signs import CHANNELS, Comparison, seed_list
from unflip.runs.command import as_yaml, train_command
from unflip.runs.provenance import PARTS
from unflip.study.paper import reference_of
from unflip.study.summary import difference_in_common
from unflip.study.table import override_words
from unflip.train.recipe import run_name

FORMAT = 1
IMAGES = {"test": "test images", "validation": "held-out images"}


def report_data(
    sources: Sequence[Path],
    *,
    baseline: Path | None = None,
    filters: int = 8,
    title: str | None = None,
    date: str | None = None,
    keep_signs: bool = False,
) -> dict[str, Any]:
    """The page's data: a section for each study, and one for the runs of each data set.

    ``baseline`` is the run that single runs are compared with; without it, the folder beside a run that is
    called what its recipe starts from, which is where ``unflip train`` puts it. ``filters`` of each layer are
    shown weight by weight. ``date`` is shown as it is. ``keep_signs`` writes what was found of changed signs into
    the folder of each finished run that has its checkpoint, for reports without it.
    """
    if not sources:
        raise ReportError("no folder given: a report is made of at least one run or study")
    if baseline is not None and not run_folders(baseline):
        raise ReportError(f"baseline {baseline} is not a run: no recipe.json and no seed-N folder")
    comparison = Comparison(filters, keep_signs)
    singles: list[_Single] = []
    sections = []
    studies = [source for source in sources if is_study(source)]
    for source in sources:
        if source in studies:
            sections.append(_study_section(source, read_study(source), comparison))
        elif run_folders(source):
            singles.append(_Single(source, baseline))
        else:
            raise refuse(source)
    if baseline is not None and not singles:
        raise ReportError(
            f"baseline {baseline} is for runs given by themselves, and here are studies alone, which know their own: "
            "leave it out"
        )
    sections += _run_sections(singles, comparison)
    _tell_apart(sections)
    _name_folders(sections[: len(studies)], studies)
    return {
        "format": FORMAT,
        "unflip": __version__,
        "title": title or _title(sections),
        "date": date,
        "filters": filters,
        "channels": CHANNELS,
        "sections": sections,
    }


def _tell_apart(sections: Sequence[dict[str, Any]]) -> None:
    """Sections of one title say in it what they were evaluated on, as far as that differs."""
    for numbers in _of_one_title(sections):
        same = [sections[i] for i in numbers]
        fields = [f for f in ("data", "evaluated_on") if len({s[f] for s in same}) > 1]
        for section in same if fields else ():
            words = [IMAGES.get(section[field], section[field]) for field in fields]
            section["title"] += f" ({', '.join(words)})"


def _name_folders(sections: Sequence[dict[str, Any]], folders: Sequence[Path]) -> None:
    """Studies of one title on the same images are told apart by their folders: by as little of the path as it takes."""
    for numbers in _of_one_title(sections):
        paths = [folders[i].resolve().parts for i in numbers]
        depths = range(1, max(map(len, paths)) + 1)
        enough = next((n for n in depths if len({p[-n:] for p in paths}) == len(paths)), None)
        for i, path in zip(numbers, paths, strict=True):
            if enough:  # else one folder, given twice
                sections[i]["title"] += f" ({'/'.join(path[-enough:])})"


def _of_one_title(sections: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The numbers of sections that share a title with another."""
    by_title: dict[str, list[int]] = {}
    for number, section in enumerate(sections):
        by_title.setdefault(section["title"], []).append(number)
    return [numbers for numbers in by_title.values() if len(numbers) > 1]


def _title(sections: Sequence[dict[str, Any]]) -> str:
    """Two titles make one. Of more it would be a paragraph, which the links below it say again."""
    if len(sections) <= 2:
        return "; ".join(section["title"] for section in sections)
    studies = sum(section["kind"] == "study" for section in sections)
    parts = [f"{studies} stud{'y' if studies == 1 else 'ies'}"] if studies else []
    parts += ["runs"] if studies < len(sections) else []
    text = f"{' and '.join(parts)} on {', '.join(dict.fromkeys(s['data'] for s in sections))}"
    return text[0].upper() + text[1:]


def _study_section(folder: Path, study: Study, comparison: Comparison) -> dict[str, Any]:
    by_name = {arm.name: arm for arm in study.arms}
    numbers = {arm.name: number for number, arm in enumerate(study.arms)}
    changed = []
    for arm in study.arms:
        if arm.start is None or _is_float(arm.recipe) or _is_float(by_name[arm.start].recipe):
            continue
        if not arm.runs:  # none is over: nothing to compare, and nothing missing
            continue
        base = by_name[arm.start]
        pairs = [
            (seed, folder / arm.folder / f"seed-{seed}", _seed_of(folder / base.folder, seed))
            for seed in (run.seed for run in arm.runs)
        ]
        found = comparison.arm(pairs)
        changed.append({"arm": numbers[arm.name], "baseline": base.label, **found})
    reference, plain = _reference(study, by_name), study.model_dump()
    labels = {arm.name: arm.label for arm in study.arms}  # as everywhere on the page
    return {
        "kind": "study",
        "study": study.study,
        "title": study.title or study.study,  # recipes of one's own have no title
        "unflip": study.unflip,
        "data": study.data,
        "evaluated_on": study.evaluated_on,
        "epochs_note": study.epochs_note,
        "changes": [override_words(o, plain["arms"]) for o in study.overrides],
        "seeds": study.seeds,
        "arms": [
            {**_study_arm(folder, arm, by_name), "against": _against(study, plain, arm, reference)}
            for arm in study.arms
        ],
        "reference": labels.get(reference or ""),
        "reference_arm": numbers.get(reference or ""),
        "tests": _tests(study.tests, reference, labels, _corrected(study, "welch")),
        "paired": _tests(study.paired, reference, labels, _corrected(study, "paired")),
        "signs": changed,
    }


def _reference(study: Study, arms: Collection[str]) -> str | None:
    name = reference_of(study.study, study.reference)
    return name if name in arms else None


def _against(
    study: Study, plain: dict[str, Any], arm: StudyArm, name: str | None
) -> dict[str, Any] | None:
    """What an arm has more than the reference, and the p of each test of the two, as ``table.md`` has it.

    ``plain`` is the study as JSON values.
    """
    reference = next((other for other in study.arms if other.name == name), None)
    if reference is None or arm is reference or arm.mean is None or reference.mean is None:
        return None
    pair = {arm.name, name}
    p, paired_p = (
        next((test.p for test in tests if {test.a, test.b} == pair), None)
        for tests in (study.tests, study.paired)
    )
    in_common = difference_in_common(plain, arm.name, reference.name)
    return {
        "difference": arm.mean - reference.mean,
        "p": p,
        "paired_p": paired_p,
        "paired_difference": in_common,
    }


def _corrected(study: Study, test: str) -> dict[frozenset[str], float]:
    return {frozenset((h.a, h.b)): h.adjusted for h in study.holm if h.test == test}


def _tests(
    tests: Sequence[TTest],
    reference: str | None,
    labels: dict[str, str],
    corrected: dict[frozenset[str], float],
) -> list[dict[str, Any]]:
    """Arms by their labels; the reference is what the other is compared *with*, so it comes second."""
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


def _study_arm(folder: Path, arm: StudyArm, by_name: dict[str, StudyArm]) -> dict[str, Any]:
    """The summary's figures as they are; curves, device and versions from the runs' folders."""
    finished: list[list[dict[str, Any]]] = []
    unfinished: list[list[dict[str, Any]]] = []
    runs, missing = [], []
    for row in arm.runs:
        where = folder / arm.folder / f"seed-{row.seed}"
        run = read_run(where) if (where / "recipe.json").is_file() else None
        if run is None or not run.metrics:
            missing.append(row.seed)
        else:
            (unfinished if row.accuracy is None else finished).append(run.metrics)
        runs.append({**row.model_dump(), **_made_with(run)})
    return {
        "name": arm.name,
        "label": arm.label,
        "start": by_name[arm.start].label if arm.start else None,
        "command": arm.command,
        "yaml": as_yaml(arm.recipe),
        "own_recipe": _trains_a_file(arm.command, arm.recipe),
        "paper": arm.paper.model_dump() if arm.paper else None,
        "x": arm.x,
        "n": sum(run.accuracy is not None for run in arm.runs),
        "mean": arm.mean,
        "std": arm.std,
        "best": arm.best,
        "runs": runs,
        "curves": curves(finished, unfinished),
        "notes": [f"{arm.label}. {seed_list(missing)}: no metrics in {arm.folder}."]
        if missing
        else [],
    }


def _made_with(run: Run | None) -> dict[str, Any]:
    """Where a run was trained, with what, when, and what it was given, as far as it says so."""
    result = (run and run.result) or {}
    given = {key: result.get(key) for key in ("device", "torch", "unflip", "finished")}
    return {**given, "given": _given(run.given) if run and run.given else None}


def _given(given: dict[str, Any]) -> str:
    parts = [f"{part} {given[part]['folder']}" for part in PARTS if part in given]
    return ", ".join([f"training images {given['images']['training images']}", *parts])


class _Single:
    """A run given by itself: a folder of seeds, or one seed's."""

    def __init__(self, source: Path, baseline: Path | None) -> None:
        self.source = source
        self.runs = [read_run(folder) for folder in run_folders(source)]
        self.recipe = self.runs[0].recipe
        self.baseline = baseline or self._beside()
        self.started_there = baseline is None

    def _beside(self) -> Path | None:
        """Where ``unflip train`` puts what a recipe starts from."""
        if not self.recipe.get("start"):
            return None
        seed_itself = (self.source / "recipe.json").is_file()
        above = self.source.absolute().parent
        return (above.parent if seed_itself else above) / run_name(self.recipe["start"])

    @property
    def group(self) -> tuple[str, str]:
        validation = self.recipe["data"].get("validation")
        return self.recipe["data"]["name"], "validation" if validation else "test"

    def compared(self) -> list[tuple[int, Path, Path | None]]:
        """What to compare, seed by seed; nothing for a float network or the baseline itself."""
        if self.baseline is None or _is_float(self.recipe):
            return []
        base = {r: r.resolve() for r in run_folders(self.baseline)}
        return [
            (run.seed, run.folder, _seed_of(self.baseline, run.seed))
            for run in self.runs
            if run.folder.resolve() not in base.values()
        ]


def _run_sections(singles: list[_Single], comparison: Comparison) -> list[dict[str, Any]]:
    """Accuracies on different images are not put into one table."""
    groups: dict[tuple[str, str], list[_Single]] = {}
    for single in singles:
        groups.setdefault(single.group, []).append(single)
    return [
        _run_section(data, evaluated_on, members, comparison)
        for (data, evaluated_on), members in groups.items()
    ]


def _run_section(
    data: str, evaluated_on: str, singles: list[_Single], comparison: Comparison
) -> dict[str, Any]:
    names = [single.recipe["name"] for single in singles]
    changed = []
    for number, single in enumerate(singles):
        pairs = single.compared()
        if pairs:
            assert single.baseline is not None
            found = comparison.arm(pairs, single.started_there)
            changed.append({"arm": number, "baseline": single.baseline.name, **found})
    return {
        "kind": "runs",
        "study": None,
        "title": f"Runs on {data}",
        "unflip": None,
        "data": data,
        "evaluated_on": evaluated_on,
        "epochs_note": "",
        "changes": [],
        "seeds": sorted({run.seed for single in singles for run in single.runs}),
        "arms": [_run_arm(s, twice=names.count(s.recipe["name"]) > 1) for s in singles],
        "reference": None,
        "reference_arm": None,
        "tests": [],
        "paired": [],
        "signs": changed,
    }


def _trains_a_file(command: str, recipe: dict[str, Any]) -> bool:
    """Whether the command takes the recipe from a file, which the reader then has to save first."""
    return shlex.split(command)[1:3] == ["train", f"{recipe['name']}.yaml"]


def _run_arm(single: _Single, twice: bool) -> dict[str, Any]:
    recipe = single.recipe
    accuracies = [run.result["accuracy"] for run in single.runs if run.result]
    mean, std = mean_and_std(accuracies)
    command = train_command(recipe, [run.seed for run in single.runs], single.runs[0].given or {})
    return {
        "name": recipe["name"],
        "label": str(single.source) if twice else recipe["name"],
        "start": recipe.get("start"),
        "command": command,
        "yaml": as_yaml(recipe),
        "own_recipe": _trains_a_file(command, recipe),
        "paper": None,
        "x": None,
        "n": len(accuracies),
        "mean": mean,
        "std": std,
        "best": max(accuracies, default=None),
        "runs": [_run_row(run) for run in single.runs],
        "curves": curves(
            [run.metrics for run in single.runs if run.result],
            [run.metrics for run in single.runs if not run.result],
        ),
        "notes": [],
        "against": None,
    }


def _run_row(run: Run) -> dict[str, Any]:
    seen = [line["accuracy"] for line in run.metrics if line.get("accuracy") is not None]
    done = run.metrics[-1]["epoch"] if run.metrics else 0
    result = run.result or {}
    unfinished = run.stopped or f"not finished: {done} of {run.recipe['epochs']} epochs"
    return {
        "seed": run.seed,
        "accuracy": result.get("accuracy"),
        "best_accuracy": max(seen, default=None),
        "epochs": result.get("epochs", done),
        "seconds": result.get("seconds"),
        "stopped": None if run.result else unfinished,
        **_made_with(run),
    }


def _is_float(recipe: dict[str, Any]) -> bool:
    return recipe.get("method", "float") in ("float", {"name": "float"})


def _seed_of(folder: Path, seed: int) -> Path | None:
    """The run of that seed in a folder of seeds, or the folder itself where it is a run: as ``train`` starts."""
    for candidate in (folder / f"seed-{seed}", folder):
        if (candidate / "recipe.json").is_file():
            return candidate
    return None
