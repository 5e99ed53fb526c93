"""The comparison of methods on a tiny recipe: rows, a method that fails, and resuming."""

import json

import pytest

from unflip.data import load
from unflip.study import methods as study
from unflip.train.loop import TrainingStopped
from unflip.train.recipe import load_recipe

NAMES = ["dorefa", "bireal"]


@pytest.fixture
def recipe():
    overrides = ["epochs=1", "model.width=4", "allow_no_flips=true"]
    return load_recipe("digits-dorefa", overrides)


def test_one_row_a_method_in_json_and_table(recipe, tmp_path, capsys):
    rows = study.study_methods(recipe, load("digits"), tmp_path, names=NAMES, seeds=2)
    assert [row["method"] for row in rows] == NAMES
    assert all(len(row["accuracy"]) == 2 and row["memory_bits"] > 0 for row in rows)
    saved = json.loads((tmp_path / "study.json").read_text())
    assert saved["rows"] == rows
    written = (tmp_path / "table.md").read_text()
    assert written.count("±") == 2
    assert "1 epochs, 2 seeds, test accuracy" in written


def test_finished_runs_are_not_run_again(recipe, tmp_path, monkeypatch):
    first = study.study_methods(recipe, load("digits"), tmp_path, names=NAMES, seeds=1)
    before = (tmp_path / "dorefa" / "seed-0" / "result.json").stat().st_mtime_ns
    again = study.study_methods(recipe, load("digits"), tmp_path, names=NAMES, seeds=1)
    assert again == first
    assert (tmp_path / "dorefa" / "seed-0" / "result.json").stat().st_mtime_ns == before


def test_a_method_that_stops_is_a_row_with_the_reason(recipe, tmp_path, monkeypatch):
    def stops(chosen, *args, **kwargs):
        raise TrainingStopped("the loss is nan")

    monkeypatch.setattr(study, "train", stops)
    [row] = study.study_methods(recipe, load("digits"), tmp_path, names=["dorefa"], seeds=1)
    assert row["stopped"] == "the loss is nan"
    assert "stopped: the loss is nan" in (tmp_path / "table.md").read_text()


def test_lns_is_not_compared_from_scratch():
    assert "lns" not in study.compared()
    assert "dorefa" in study.compared()
