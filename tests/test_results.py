"""What is committed under results/: every number on the pages comes from a run whose files are there."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import statistics
import sys
import tarfile
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unflip.report import render, report_data

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
ARCHIVES = sorted(RESULTS.rglob("raw.tar.xz"))
PAGES = [ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_FILES = 60
MAX_BYTES = 6_000_000
MEAN_STD = re.compile(r"\b\d\d\.\d\d ± \d\.\d\d\b")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", RESULTS / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tables"] = module  # a dataclass asks for the module that it is in
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def raw() -> dict[str, bytes]:
    """Every file of all archives."""
    files = {}
    for archive in ARCHIVES:
        with tarfile.open(archive) as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None
                assert member.name not in files
                files[member.name] = content.read()
    return files


def all_rows() -> Iterator[dict[str, str]]:
    """Each with the folder of its run in the archives."""
    for path in sorted(RESULTS.glob("*/runs.csv")):
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                yield {**row, "raw": f"{path.parent.name}/{row['raw']}"}


def test_there_are_few_files_and_they_are_small() -> None:
    files = [p for p in RESULTS.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert len(files) <= MAX_FILES
    assert sum(path.stat().st_size for path in files) < MAX_BYTES


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.parent.name)
def test_an_archive_holds_plain_files_and_nothing_of_the_machine_that_made_it(
    archive: Path,
) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            assert member.isfile()
            assert re.fullmatch(r"[\w.-]+(/[\w.-]+)+", member.name)
            assert ".." not in member.name.split("/")
            owner = (member.uid, member.gid, member.uname, member.gname)
            assert (member.mtime, member.mode, *owner) == (0, 0o644, 0, 0, "", "")


def test_the_tables_of_both_pages_are_current(tables: ModuleType) -> None:
    for page, made in tables.pages().items():
        text = page.read_text(encoding="utf-8")
        assert text == tables.with_tables(text, made), "run: python results/tables.py --write"


def int8_ends() -> set[str]:
    """The means of the runs in a log, which are not a study: of each training, over seeds in the last epoch."""
    text = (RESULTS / "inference" / "int8-ends.log").read_text(encoding="utf-8")
    runs: dict[str, list[float]] = {}
    line = r"^((?:lr=[\d.]+ )?ends=\w+) seed \d(?: epoch 2)?: accuracy ([\d.]+) %"
    for kind, accuracy in re.findall(line, text, re.M):
        runs.setdefault(kind, []).append(float(accuracy))
    assert {len(own) for own in runs.values()} == {5}
    assert len(runs) == 6  # two kinds of ends, in three trainings
    return {f"{statistics.mean(own):.2f} ± {statistics.stdev(own):.2f}" for own in runs.values()}


def test_every_mean_on_the_pages_is_that_of_some_runs(tables: ModuleType) -> None:
    known = int8_ends()
    for arms in tables.read_studies().values():
        for arm in arms.values():
            known |= {f.mean_std() for f in (arm.figures, arm.top5, arm.paper) if f is not None}
    for page in PAGES:
        unknown = set(MEAN_STD.findall(page.read_text(encoding="utf-8"))) - known
        assert not unknown, f"{page.name}: no arm in results/*/runs.csv has {unknown}"


def test_links_into_the_results_lead_somewhere() -> None:
    """Also their anchors, which are made of headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", (RESULTS / "README.md").read_text(encoding="utf-8"), re.M)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve()
            if not target.startswith("http") and RESULTS in (there, *there.parents):
                assert there.exists(), f"{page.name} links to {target}"
                assert not anchor or anchor in anchors, f"{page.name} links to {target}"


def test_every_figure_is_shown_by_a_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for figure in RESULTS.rglob("*.svg"):
        assert str(figure.relative_to(ROOT)) in text


def test_every_row_is_that_of_its_run(raw: dict[str, bytes]) -> None:
    for row in all_rows():
        check_row(row, raw)


def check_row(row: dict[str, str], raw: dict[str, bytes]) -> None:
    folder = row["raw"]
    saved = json.loads(raw[f"{folder}/recipe.json"])
    assert saved["seed"] == int(row["seed"])
    assert folder.endswith(f"/seed-{row['seed']}")
    metrics = [json.loads(line) for line in raw[f"{folder}/metrics.jsonl"].splitlines()]
    assert int(row["epochs"]) == len(metrics)
    seen = [line["accuracy"] for line in metrics if line["accuracy"] is not None]
    assert float(row["best_accuracy"]) == max(seen)
    held_out = saved["recipe"]["data"]["validation"] > 0
    assert row["evaluated_on"] == ("validation" if held_out else "test")
    if row["stopped"]:
        assert not row["accuracy"]
        assert f"{folder}/result.json" not in raw
        assert json.loads(raw[f"{folder}/stopped.json"])["reason"] == row["stopped"]
        return
    assert len(metrics) == saved["recipe"]["epochs"]
    result = json.loads(raw[f"{folder}/result.json"])
    assert float(row["accuracy"]) == result["accuracy"] == metrics[-1]["accuracy"]
    assert row["top5"] == str(result.get("top5") or "")
    assert float(row["seconds"]) == result["seconds"]
    assert row["dirty"] == {True: "true", False: "false", None: ""}[result["dirty"]]
    for key in ("device", "torch", "unflip", "commit", "precision", "finished"):
        assert row[key] == (result[key] or "")


@pytest.mark.parametrize(
    ("field", "value"),
    [("accuracy", "99.0"), ("best_accuracy", "99.0"), ("seed", "7"), ("commit", "0" * 40)],
)
def test_a_row_that_is_not_of_its_run_is_found(
    raw: dict[str, bytes], field: str, value: str
) -> None:
    row = next(all_rows())
    check_row(row, raw)
    with pytest.raises(AssertionError):
        check_row({**row, field: value}, raw)


def test_no_run_is_left_out_and_none_is_in_a_study_twice(raw: dict[str, bytes]) -> None:
    rows = list(all_rows())
    runs = {str(Path(path).parent) for path in raw if path.endswith("/recipe.json")}
    assert {row["raw"] for row in rows} == runs
    keys = [(row["study"], row["arm"], row["seed"]) for row in rows]
    assert len(set(keys)) == len(keys)


def summaries(raw: dict[str, bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, data in raw.items():
        if path.endswith("/study.json"):
            yield path.split("/")[1], json.loads(data)


def test_every_summary_is_of_the_same_runs(raw: dict[str, bytes], tables: ModuleType) -> None:
    studies = tables.read_studies()
    names = [name for name, _ in summaries(raw)]
    assert {*names, "first-lns"} == set(studies)
    for name, summary in summaries(raw):
        for arm in summary["arms"]:
            check_arm(arm, studies[name][arm["name"]])


def check_arm(summary: dict[str, Any], arm: Any) -> None:
    values = list(arm.accuracies.values())
    found = {r["seed"]: r["accuracy"] for r in summary["runs"] if r["accuracy"] is not None}
    assert found == arm.accuracies
    assert summary["label"] == arm.label
    assert summary["mean"] == pytest.approx(statistics.fmean(values))
    assert summary["best"] == max(values)
    spread = statistics.stdev(values) if len(values) > 1 else None
    assert summary["std"] == (spread if spread is None else pytest.approx(spread))


def test_the_tests_of_a_summary_are_those_of_its_table(
    raw: dict[str, bytes], tables: ModuleType
) -> None:
    """Two programs, one p: ``unflip study`` wrote the summaries, ``tables.py`` the pages."""
    studies = tables.read_studies()
    for name, summary in summaries(raw):
        arms = {arm["name"]: studies[name][arm["name"]] for arm in summary["arms"]}
        able = [a for a, arm in arms.items() if len(arm.accuracies) > 1]
        assert [(t["a"], t["b"]) for t in summary["tests"]] == list(combinations(able, 2))
        for test in summary["tests"]:
            assert test["p"] == close(tables.welch_p(arms[test["a"]], arms[test["b"]]))
        pairs = {(a, b) for a, b in combinations(arms, 2) if tables.paired(arms[a], arms[b])}
        assert {(t["a"], t["b"]) for t in summary["paired"]} == pairs
        for test in summary["paired"]:
            difference, p = tables.paired(arms[test["a"]], arms[test["b"]])
            assert (test["difference"], test["p"]) == (close(difference), close(p))
        family = {f"{t['a']} {t['b']}": t["p"] for t in summary["holm"]}
        corrected = [t["adjusted"] for t in summary["holm"]]
        assert corrected == pytest.approx(list(tables.holm(family).values()))


def close(value: float | None) -> Any:
    return None if value is None else pytest.approx(value)


def test_the_report_is_made_from_the_archives_alone(tmp_path: Path) -> None:
    """As ``make report`` does, with the same studies."""
    for archive in ARCHIVES:
        with tarfile.open(archive) as tar:
            tar.extractall(tmp_path, filter="data")
    makefile = (ROOT / "Makefile").read_text()
    lists = re.findall(r"^(CIFAR10|IMAGENETTE|DIGITS) :=(.*)$", makefile, re.M)
    sources = [
        tmp_path / images.lower() / name for images, names in lists for name in names.split()
    ]
    assert sorted(sources) == sorted(path.parent for path in tmp_path.rglob("study.json"))
    data = report_data(sources)
    page = render(data)
    assert len(data["sections"]) == len(sources)
    assert not [arm["notes"] for s in data["sections"] for arm in s["arms"] if arm["notes"]]
    [ablation] = [s for s in data["sections"] if s["study"] == "ablation"]
    shown = [s for s in ablation["signs"] if s["seeds"]]
    assert len(shown) == 2  # the two arms whose changed signs were kept
    assert "Mapping and noisy supervision" in page


RUNS = """\
study,arm,label,seed,accuracy,stopped,start,paper_best,paper_mean,paper_std,command
toy,base,the base,0,80.0,,,,79.5,,unflip study toy --only base
toy,base,the base,1,81.0,,,,79.5,,unflip study toy --only base
toy,base,the base,2,82.0,,,,79.5,,unflip study toy --only base
toy,more,more | of it,0,82.0,,base,85.78,85.56,0.11,unflip study toy --only more
toy,more,more | of it,1,82.5,,base,85.78,85.56,0.11,unflip study toy --only more
toy,more,more | of it,2,83.0,,base,85.78,85.56,0.11,unflip study toy --only more
toy,more,more | of it,3,83.5,,base,85.78,85.56,0.11,unflip study toy --only more
toy,few,two runs,0,90.0,,base,,,,unflip study toy --only few
toy,few,two runs,1,91.5,,base,,,,unflip study toy --only few
toy,bad,bad,0,,the loss is nan,,,,,unflip study toy --only bad
toy,teacher,a teacher,0,99.0,,,,,,unflip train teacher
"""


def test_a_table_has_what_its_runs_have(tables: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "runs.csv").write_text(RUNS)
    table = tables.study_table(tables.read_studies(tmp_path)["toy"], "base", {})
    assert table.splitlines() == [
        "|  | best (mean ± std), % | runs | paper, % | against the base (p) |",
        "|---|---|---|---|---|",
        "| the base | 82.00 (81.00 ± 1.00) | 3 | 79.50 |  |",
        # Welch: t = 1.75 / √(1/3 + 0.4167/4) = 2.6458, 3.23 degrees of freedom; paired: 2, 1.5 and 1, t = 5.196
        "| more \\| of it | 83.50 (82.75 ± 0.65) | 4 | 85.78 (85.56 ± 0.11) | +1.75 (0.071; paired +1.50, 0.035) |",
        "| two runs | 91.50 (90.75 ± 1.06) | 2 |  | +9.75 |",
        "| bad | seed 0 stopped: the loss is nan | 0 |  |  |",
        "",
        "With Holm's correction for 2 comparisons, paired where possible, p < 0.05 remains for more | of it (0.035).",
    ]


def test_8_bit_shortcuts_are_a_column_if_they_were_measured(
    tables: ModuleType, tmp_path: Path
) -> None:
    found = json.loads((RESULTS / "inference/avx512.json").read_text())
    rows = [row for row in found["rows"] if row["peer"] != "unflip-int8-shortcuts"]
    sizes = {k: v for k, v in found["compression"].items() if "shortcuts" not in k}
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({**found, "rows": rows, "compression": sizes}))
    assert "shortcuts" not in tables.inference_table(path)
    one = next(r for r in rows if (r["network"], r["peer"]) == ("resnet18", "unflip-int8"))
    rows.append(
        {**one, "peer": "unflip-int8-shortcuts", "batch": 1, "threads": 1, "median_ms": 1.25}
    )
    sizes["resnet18, 8-bit ends and shortcuts"] = 21.94
    path.write_text(json.dumps({**found, "rows": rows, "compression": sizes}))
    heads, _, resnet18, resnet20 = (
        [cell.strip() for cell in line.split("|")]
        for line in tables.inference_table(path).splitlines()
    )
    place = heads.index("ours, 8-bit ends and shortcuts")
    assert (resnet18[place], resnet20[place]) == ("1.2 ms", "")
    assert resnet18[-2].endswith(", 21.9 with 8-bit ends and shortcuts")
    assert "shortcuts" not in resnet20[-2]


def test_holms_correction(tables: ModuleType) -> None:
    found = tables.holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.5})
    assert found == pytest.approx({"b": 0.04, "c": 0.09, "a": 0.09, "d": 0.5})


def test_the_methods_times_are_those_of_their_file() -> None:
    """Methods that are not named in the table are the fast ones."""
    rows = json.loads((RESULTS / "inference/methods.json").read_text())["rows"]
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    section = text.split("### By method")[1].split("\n## ")[0]
    for row in rows:
        shown = f"| `{row['method']}` | {row['ms']:.2f} | {row['bytes']:,} |"
        assert shown in section or 0.095 <= row["ms"] < 0.115


def test_the_networks_sizes_are_those_of_the_files() -> None:
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    networks = sorted(RESULTS.glob("*/network/*.unflip"))
    assert len(networks) == 3
    for path in networks:
        assert f"({path.relative_to(RESULTS)}) | {path.stat().st_size:,} |" in text


def test_the_figures_are_current() -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("figure", RESULTS / "figure.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, draw in module.FIGURES.items():
        drawn = (module.DOCS / name).read_text(encoding="utf-8")
        assert drawn == draw(), f"{name}: run python results/figure.py --write"
