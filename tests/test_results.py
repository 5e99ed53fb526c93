"""What is committed under results/: figures that are said twice agree, and each comes from a run that is there."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import statistics
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from unflip.cli import app
from unflip.cli import study as cli
from unflip.recipes.load import load_recipe
from unflip.recipes.schema import Recipe
from unflip.report import render, report_data
from unflip.runs.run import recipe_difference
from unflip.study import methods
from unflip.study import study as studies
from unflip.study.study import Study

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
STUDIES = sorted(path.relative_to(RESULTS) for path in RESULTS.rglob("study.json"))


def test_the_readmes_tables_are_those_of_the_results() -> None:
    command = [sys.executable, RESULTS / "headline.py"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    readme = (ROOT / "README.md").read_text()
    for table in shown.strip().split("\n\n"):
        assert table in readme, "python results/headline.py --write"


def test_the_methods_table_is_that_of_its_study() -> None:
    table = (RESULTS / "methods" / "table.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == 22
    text = (RESULTS / "README.md").read_text()
    assert [line for line in text.splitlines() if line in rows] == rows


@pytest.fixture(scope="module")
def headline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("headline", RESULTS / "headline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _study(folder: Path, arms: dict[str, tuple[str, float | None]], **more: Any) -> None:
    """A summary of arms with two runs each: name -> (folder of the runs, mean)."""
    written = [
        {
            "name": name,
            "label": f"{folder.name} {name}",
            "folder": runs,
            "command": f"unflip study {folder.name} --only {name}",
            "paper": None,
            "runs": [{"seed": seed, "accuracy": mean} for seed in (0, 1)],
            "mean": mean,
            "std": None if mean is None else 0.25,
        }
        for name, (runs, mean) in arms.items()
    ]
    folder.mkdir()
    study = {"study": folder.name, "evaluated_on": "test", "arms": written, "tests": [], **more}
    (folder / "study.json").write_text(json.dumps(study))


def test_the_headline_shows_each_run_once_and_compares_it_within_its_study(
    headline: ModuleType, tmp_path: Path
) -> None:
    test = {"a": "lns", "b": "finetune-0.01", "p": 0.0123}
    _study(tmp_path / "readings", {"baseline": ("old", 84.0), "conv": ("conv", 85.5)})
    ablation = {name: (name, 85.0) for name in ("finetune-0.01", "finetune-0.001", "mapping")}
    ablation["lns"] = ("lns", 84.25)
    _study(
        tmp_path / "ablation", {"baseline": ("../readings/conv", 85.5), **ablation}, tests=[test]
    )
    _study(
        tmp_path / "sota",
        {"baseline": ("../readings/conv", 85.5), "tbn": ("tbn", 86.0), "dsq": ("dsq", None)},
    )
    _study(tmp_path / "controls", {"slow": ("slow", 80.0)})
    rows = [line.split(" | ") for line in headline.accuracy_table(tmp_path).splitlines()[2:]]
    assert [row[0].removeprefix("| ") for row in rows] == [
        "baseline, readings baseline",
        "baseline, readings conv",
        "ablation finetune-0.01",
        "ablation finetune-0.001",
        "ablation mapping",
        "ablation lns",
        "sota tbn",  # its baseline is above; dsq has no finished run; controls are no headline
    ]
    assert {row[1] for row in rows} == {"2"}
    assert rows[-1][2] == "86.00 ± 0.25"
    assert [row[4] for row in rows] == [
        "",
        "+1.50 against readings baseline",
        "",
        "+0.00 against ablation finetune-0.01",
        "+0.00 against ablation finetune-0.01",
        "−0.75 (0.012) against ablation finetune-0.01",
        "+0.50 against sota baseline",
    ]


def test_the_methods_times_are_those_of_their_file() -> None:
    """Methods that are not named in the table are the fast ones."""
    rows = json.loads((RESULTS / "inference/methods.json").read_text())["rows"]
    text = (RESULTS / "README.md").read_text()
    section = text.split("### By method")[1].split("\n## ")[0]
    for row in rows:
        shown = f"| `{row['method']}` | {row['ms']:.2f} | {row['bytes']:,} |"
        assert shown in section or 0.095 <= row["ms"] < 0.115


@pytest.mark.parametrize("path", STUDIES, ids=str)
def test_every_figure_of_a_study_is_that_of_its_runs(path: Path) -> None:
    check_figures(RESULTS / path)


@pytest.mark.parametrize("path", STUDIES, ids=str)
def test_every_test_of_a_study_is_of_its_runs(path: Path) -> None:
    check_tests(json.loads((RESULTS / path).read_text()))


@pytest.mark.parametrize("path", STUDIES, ids=str)
def test_the_command_of_every_row_trains_its_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recipe and its seeds; nothing is trained."""
    study = json.loads((RESULTS / path).read_text())
    folder = (RESULTS / path).parent
    starts = {arm["folder"] for arm in study["arms"] if arm["name"] == "baseline"}
    for arm in study["arms"]:
        words = shlex.split(arm["command"])[1:]
        assert words[words.index("--data") + 1] == "DIR"
        if "--baseline" in words:
            words[words.index("--baseline") + 1] = str(folder / "".join(starts))
        assert words[0] == "train" or words[-2:] == ["--only", arm["name"]]
        recipe, seeds = trained_by(words, arm["name"], monkeypatch)
        assert seeds == list(_accuracies(arm))
        for seed in seeds:
            saved = json.loads((folder / arm["folder"] / f"seed-{seed}/recipe.json").read_text())
            differs = recipe_difference(saved["recipe"], recipe)
            assert [line for line in differs if not line.startswith("name ")] == []
        assert recipe_difference(arm["recipe"], recipe) == []


def trained_by(
    words: list[str], arm: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Recipe, list[int]]:
    """The recipe and the seeds that a command would train of an arm."""
    if words[0] == "train":
        name, *more = words[1:]
        seeds = int(more[more.index("--seeds") + 1]) if "--seeds" in more else 1
        return load_recipe(name, [word for word in more if "=" in word]), list(range(seeds))
    with monkeypatch.context() as patched:
        study = study_of(tuple(words[:-2]), patched)
    return study.arm(arm).recipe, list(study.seeds)


KNOWN: dict[tuple[str, ...], Study] = {}


def study_of(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Study:
    """What a command would train; the rows of a study share most of theirs."""
    if words in KNOWN:
        return KNOWN[words]
    for module in (studies, methods):
        monkeypatch.setattr(
            module, "run_study", lambda study, *_, **__: KNOWN.update({words: study})
        )
    monkeypatch.setattr(methods, "load", lambda *_: None)
    monkeypatch.setattr(cli, "_show", lambda _: None)
    done = CliRunner().invoke(app, words)
    assert done.exception is None, (words, done.exception)
    return KNOWN[words]


def check_figures(path: Path) -> None:
    study = json.loads(path.read_text())
    for arm in study["arms"]:
        folder = path.parent / arm["folder"]
        for run in arm["runs"]:
            check_run(folder / f"seed-{run['seed']}", run)
        finished = [s for s in study["seeds"] if (folder / f"seed-{s}" / "result.json").exists()]
        found = _accuracies(arm)
        assert list(found) == finished  # no seed left out, none twice
        values = list(found.values())
        assert arm["mean"] == (pytest.approx(statistics.fmean(values)) if values else None)
        assert arm["std"] == (pytest.approx(statistics.stdev(values)) if len(values) > 1 else None)
        assert arm["best"] == max(values, default=None)


def check_run(folder: Path, run: dict[str, Any]) -> None:
    if run["stopped"]:
        assert run["accuracy"] is None
        assert not (folder / "result.json").exists()
        return
    result = json.loads((folder / "result.json").read_text())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert result["accuracy"] == run["accuracy"] == metrics[-1]["accuracy"]
    recipe = json.loads((folder / "recipe.json").read_text())["recipe"]
    assert len(metrics) == run["epochs"] == recipe["epochs"]
    seen = [line["accuracy"] for line in metrics if line["accuracy"] is not None]
    assert run["best_accuracy"] == max(seen)


def _accuracies(arm: dict[str, Any]) -> dict[int, float]:
    """Of the finished runs, by seed."""
    return {r["seed"]: r["accuracy"] for r in arm["runs"] if r["accuracy"] is not None}


def check_tests(study: dict[str, Any]) -> None:
    stats = pytest.importorskip("scipy.stats")
    runs = {arm["name"]: _accuracies(arm) for arm in study["arms"]}
    able = [name for name, found in runs.items() if len(found) > 1]
    pairs = [frozenset(pair) for pair in combinations(able, 2)]
    assert sorted(map(sorted, pairs)) == sorted(sorted((t["a"], t["b"])) for t in study["tests"])
    for test in study["tests"]:
        a, b = (list(runs[test[key]].values()) for key in "ab")
        assert test["difference"] == pytest.approx(statistics.fmean(a) - statistics.fmean(b))
        if test["p"] is not None:  # without any spread there is none
            found = stats.ttest_ind(a, b, equal_var=False)
            assert (test["t"], test["p"]) == pytest.approx((found.statistic, found.pvalue))
    for test in study.get("paired", []):
        a, b = runs[test["a"]], runs[test["b"]]
        common = sorted(a.keys() & b.keys())
        assert test["n"] == len(common)
        if test["p"] is not None:
            found = stats.ttest_rel([a[s] for s in common], [b[s] for s in common])
            assert test["p"] == pytest.approx(found.pvalue)


@pytest.fixture
def ablation(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of the ablation that a test may spoil, and its summary."""
    shutil.copytree(RESULTS / "cifar10", tmp_path / "cifar10")
    path = tmp_path / "cifar10" / "ablation" / "study.json"
    return path, json.loads(path.read_text())


def test_a_stopped_run_is_no_fault_of_the_figures(ablation: tuple[Path, dict[str, Any]]) -> None:
    path, study = ablation
    arm = study["arms"][-1]
    arm["runs"][0].update(accuracy=None, stopped="the loss is not finite")
    (path.parent / arm["folder"] / "seed-0" / "result.json").unlink()
    values = list(_accuracies(arm).values())
    arm.update(mean=statistics.fmean(values), std=statistics.stdev(values), best=max(values))
    path.write_text(json.dumps(study))
    check_figures(path)


@pytest.mark.parametrize("field", ["mean", "std", "best"])
def test_a_figure_that_is_not_of_the_runs_is_found(
    ablation: tuple[Path, dict[str, Any]], field: str
) -> None:
    path, study = ablation
    study["arms"][-1][field] += 0.01
    path.write_text(json.dumps(study))
    with pytest.raises(AssertionError):
        check_figures(path)


def test_a_seed_or_a_p_that_is_not_of_the_runs_is_found(
    ablation: tuple[Path, dict[str, Any]],
) -> None:
    path, study = ablation
    check_tests(study)
    study["tests"][3]["p"] *= 1.01
    with pytest.raises(AssertionError):
        check_tests(study)
    [*_, arm] = study["arms"]
    best = max(arm["runs"], key=lambda run: run["accuracy"])
    arm["runs"].remove(best)  # the others' mean is a fair figure, and not that of the runs
    values = list(_accuracies(arm).values())
    arm.update(mean=statistics.fmean(values), std=statistics.stdev(values), best=max(values))
    path.write_text(json.dumps(study))
    with pytest.raises(AssertionError):
        check_figures(path)


def test_the_page_is_what_the_results_give_now() -> None:
    names = "readings ablation sota controls corrections alpha rho first-controls first-alpha first-rho beyond final"
    sources = [*(RESULTS / "cifar10" / name for name in names.split()), RESULTS / "methods"]
    page = (RESULTS / "cifar10" / "report.html").read_text(encoding="utf-8")
    command = f"unflip report {' '.join(str(s.relative_to(ROOT)) for s in sources)}"
    command += " -o results/cifar10/report.html"
    assert command in (RESULTS / "README.md").read_text()
    same = render(report_data(sources)) == page  # pytest would look for the difference of megabytes
    assert same, command
