"""What is committed under results/: figures that are said twice agree, and each comes from a run that is there."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("path", STUDIES, ids=str)
def test_every_figure_of_a_study_is_that_of_its_runs(path: Path) -> None:
    study = json.loads((RESULTS / path).read_text())
    for arm in study["arms"]:
        folder = (RESULTS / path).parent / arm["folder"]
        found = []
        for run in arm["runs"]:
            result = json.loads((folder / f"seed-{run['seed']}" / "result.json").read_text())
            metrics = (folder / f"seed-{run['seed']}" / "metrics.jsonl").read_text().splitlines()
            assert result["accuracy"] == run["accuracy"] == json.loads(metrics[-1])["accuracy"]
            assert len(metrics) == run["epochs"] == arm["recipe"]["epochs"]
            found.append(run["accuracy"])
        assert arm["mean"] == pytest.approx(statistics.fmean(found))
        assert arm["std"] == (pytest.approx(statistics.stdev(found)) if len(found) > 1 else None)
