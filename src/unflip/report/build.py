"""Everything that the page shows, as one JSON value. The same folders give the same value: the clock is not read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unflip import __version__
from unflip.recipes.command import as_yaml, with_seeds
from unflip.recipes.load import run_name
from unflip.report.curves import curves, mean_and_std
from unflip.report.sign_changes import Pair, SignChanges
from unflip.report.signs_file import CHANNELS
from unflip.report.study_section import (
    is_float,
    made_with,
    method_name,
    run_of_seed,
    study_section,
    trains_a_file,
)
from unflip.runs import provenance
from unflip.runs.run import Run
from unflip.study.summary import NAME as STUDY_FILE
from unflip.study.summary import Summary

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
    """The page's data: a section per study, and one for the runs on each data set.

    ``baseline`` is the run that single runs are compared with. If it is None, a run is compared with the run it
    started from, in the folder where ``unflip train`` puts that. ``filters`` of each layer are shown weight by weight.
    ``date`` is shown as it is. ``keep_signs`` writes the changed signs of each finished run beside its checkpoint, for
    later reports without the checkpoint.
    """
    if not sources:
        raise ValueError("no folder given: a report needs at least one run or study")
    if baseline is not None and not Run.seeds_of(baseline):
        raise ValueError(
            f"baseline {baseline} is not a run: it has neither a recipe.json nor seed-N folders"
        )
    changes = SignChanges(filters, keep_signs)
    singles: list[_Single] = []
    sections = []
    studies = [source for source in sources if (source / STUDY_FILE).is_file()]
    for source in sources:
        if source in studies:
            sections.append(study_section(source, Summary.read(source), changes))
        elif Run.seeds_of(source):
            singles.append(_Single(source, baseline))
        else:
            raise _neither(source)
    if baseline is not None and not singles:
        raise ValueError(
            f"baseline {baseline} is for single runs, but only studies were given, which name their own: leave it out"
        )
    sections += _run_sections(singles, changes)
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
    """Add the data set or the kind of images to titles that several sections share, if these differ."""
    for numbers in _of_one_title(sections):
        same = [sections[i] for i in numbers]
        fields = [f for f in ("data", "evaluated_on") if len({s[f] for s in same}) > 1]
        for section in same if fields else ():
            words = [IMAGES.get(section[field], section[field]) for field in fields]
            section["title"] += f" ({', '.join(words)})"


def _name_folders(sections: Sequence[dict[str, Any]], folders: Sequence[Path]) -> None:
    """Add the folder to titles that several studies share: as little of the path as tells them apart."""
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
    """One or two titles together; for more sections, how many there are."""
    if len(sections) <= 2:
        return "; ".join(section["title"] for section in sections)
    studies = sum(section["kind"] == "study" for section in sections)
    parts = [f"{studies} stud{'y' if studies == 1 else 'ies'}"] if studies else []
    parts += ["runs"] if studies < len(sections) else []
    text = f"{' and '.join(parts)} on {', '.join(dict.fromkeys(s['data'] for s in sections))}"
    return text[0].upper() + text[1:]


class _Single:
    """A run outside a study: a folder of seeds, or one seed's."""

    def __init__(self, source: Path, baseline: Path | None) -> None:
        self.source = source
        self.runs = Run.seeds_of(source)
        self.recipe = self.runs[0].recipe
        self.seeds = [run.seed for run in self.runs]
        self.baseline = baseline or self._beside()
        self.started_there = baseline is None

    def _beside(self) -> Path | None:
        """Where ``unflip train`` puts the run that a recipe starts from; or, if it is not there, the folder that the
        run recorded: the name in a recipe's file may differ from the file's."""
        if not self.recipe.get("start"):
            return None
        seed_itself = Run(self.source).exists
        above = self.source.absolute().parent
        beside = (above.parent if seed_itself else above) / run_name(self.recipe["start"])
        recorded = provenance.folder_of(self.runs[0], "start")
        return recorded if recorded and not Run.seeds_of(beside) else beside

    @property
    def group(self) -> tuple[str, str]:
        validation = self.recipe["data"].get("validation")
        return self.recipe["data"]["name"], "validation" if validation else "test"

    def compared(self) -> list[Pair]:
        """What to compare, seed by seed; empty for a float network or the baseline itself."""
        if self.baseline is None or is_float(self.recipe):
            return []
        base = [run.folder.resolve() for run in Run.seeds_of(self.baseline)]
        return [
            (run.seed, run, run_of_seed(self.baseline, run.seed))
            for run in self.runs
            if run.folder.resolve() not in base
        ]


def _run_sections(singles: list[_Single], changes: SignChanges) -> list[dict[str, Any]]:
    """One section per data set: accuracies on different images do not belong in one table."""
    groups: dict[tuple[str, str], list[_Single]] = {}
    for single in singles:
        groups.setdefault(single.group, []).append(single)
    return [
        _run_section(data, evaluated_on, members, changes)
        for (data, evaluated_on), members in groups.items()
    ]


def _run_section(
    data: str, evaluated_on: str, singles: list[_Single], changes: SignChanges
) -> dict[str, Any]:
    names = [single.recipe["name"] for single in singles]
    changed = []
    for number, single in enumerate(singles):
        pairs = single.compared()
        if pairs:
            assert single.baseline is not None
            found = changes.of_arm(pairs, single.started_there)
            changed.append({"arm": number, "baseline": single.baseline.name, **found})
    return {
        "kind": "runs",
        "study": None,
        "title": "Runs on folders of images" if data == "folder" else f"Runs on {data}",
        "unflip": None,
        "data": data,
        "evaluated_on": evaluated_on,
        "epochs_note": "",
        "changes": [],
        "seeds": sorted({seed for single in singles for seed in single.seeds}),
        "arms": [_run_arm(s, twice=names.count(s.recipe["name"]) > 1) for s in singles],
        "reference": None,
        "reference_arm": None,
        "tests": [],
        "paired": [],
        "signs": changed,
    }


def _run_arm(single: _Single, twice: bool) -> dict[str, Any]:
    recipe = single.recipe
    results = [run.result for run in single.runs]
    accuracies = [result["accuracy"] for result in results if result]
    mean, std = mean_and_std(accuracies)
    command = with_seeds(single.runs[0].command, single.seeds)
    return {
        "name": recipe["name"],
        "label": str(single.source) if twice else recipe["name"],
        "method": method_name(recipe),
        "start": recipe.get("start"),
        "command": command,
        "yaml": as_yaml(recipe),
        "own_recipe": trains_a_file(command, recipe),
        "paper": None,
        "x": None,
        "n": len(accuracies),
        "mean": mean,
        "std": std,
        "best": max(accuracies, default=None),
        "runs": [_run_row(run) for run in single.runs],
        "curves": curves(
            [run.metrics for run in single.runs if run.finished],
            [run.metrics for run in single.runs if not run.finished],
        ),
        "notes": [],
        "against": None,
    }


def _run_row(run: Run) -> dict[str, Any]:
    metrics, result = run.metrics, run.result or {}
    seen = [line["accuracy"] for line in metrics if line.get("accuracy") is not None]
    done = metrics[-1]["epoch"] if metrics else 0
    unfinished = run.stopped or f"not finished: {done} of {run.recipe['epochs']} epochs"
    return {
        "seed": run.seed,
        "accuracy": result.get("accuracy"),
        "best_accuracy": max(seen, default=None),
        "epochs": result.get("epochs", done),
        "seconds": result.get("seconds"),
        "stopped": None if result else unfinished,
        **made_with(run),
    }


def _neither(source: Path) -> ValueError:
    """The error for a folder that is neither a study nor a run; the caller raises it."""
    if not source.exists():
        return ValueError(
            f"folder {source} does not exist: give the folder of a run or a study; 'unflip runs' lists runs"
        )
    if (source / "search.json").is_file():
        return ValueError(
            f"{source} is a search of widths (unflip study autobnn), which a report cannot show: its table is "
            f"{source / 'table.md'}. Give the folders of its candidates instead, which are runs"
        )
    return ValueError(
        f"{source} is neither a study (it has no study.json) nor a run (it has neither a recipe.json nor seed-N "
        "folders). Give the folder that 'unflip train' or 'unflip study' wrote with --out."
    )
