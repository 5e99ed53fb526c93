"""The comparison of methods on a tiny recipe: rows, a method that fails, and resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unflip.recipes.load import load_recipe
from unflip.recipes.schema import Recipe
from unflip.study import methods as study
from unflip.study.summary import Summary
from unflip.train.job import RunOptions

NAMES = ["dorefa", "bireal"]


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits-dorefa", ["epochs=1", "model.width=2", "allow_no_flips=true"])


def compare(recipe: Recipe, out: Path, seeds: int, *names: str) -> Summary:
    options = RunOptions(device="cpu", quiet=True)
    return study.study_methods(recipe, None, out, names=names, seeds=seeds, run_options=options)


def test_one_row_per_method_in_json_and_table(recipe: Recipe, tmp_path: Path) -> None:
    summary = compare(recipe, tmp_path, 2, *NAMES)
    assert [arm.name for arm in summary.arms] == NAMES
    for arm in summary.arms:
        assert [run.seed for run in arm.runs] == [0, 1]
        assert arm.memory_bits
        assert arm.flops
        assert arm.seconds_per_epoch
        assert min(arm.memory_bits, arm.flops, arm.seconds_per_epoch) > 0
    assert Summary.read(tmp_path) == summary
    written = (tmp_path / "table.md").read_text()
    assert written.count("±") == 2
    assert "test accuracy of the last epoch, 2 seeds. 1 epochs." in written
    assert "| method | accuracy, % | memory, Kbit | FLOPs, M | s per epoch and seed |" in written
    best = max(summary.arms, key=lambda arm: arm.mean or 0)
    assert written.splitlines()[4].startswith(f"| `{best.name}` | {best.mean:.2f} ±")


def test_finished_runs_are_not_run_again(recipe: Recipe, trainer: Any, tmp_path: Path) -> None:
    first = compare(recipe, tmp_path, 1, *NAMES)
    assert compare(recipe, tmp_path, 1, *NAMES) == first
    assert trainer.calls == [["dorefa/seed-0"], ["bireal/seed-0"]]


def test_methods_that_were_run_before_stay_in_the_table(
    recipe: Recipe, trainer: Any, tmp_path: Path
) -> None:
    compare(recipe, tmp_path, 1, "dorefa")
    trainer.stops = {"bireal/seed-0": "the loss is nan"}
    compare(recipe, tmp_path, 1, "bireal")
    summary = compare(recipe, tmp_path, 1, "float")
    assert [arm.name for arm in summary.arms] == ["float", "bireal", "dorefa"]
    assert all(arm.memory_bits for arm in summary.arms)
    assert Summary.read(tmp_path) == summary
    rows = (tmp_path / "table.md").read_text()
    assert all(f"| `{name}` |" in rows for name in ("float", "bireal", "dorefa"))
    assert trainer.calls == [["dorefa/seed-0"], ["bireal/seed-0"], ["float/seed-0"]]


def test_the_table_has_no_method_of_another_recipe(
    recipe: Recipe, trainer: Any, tmp_path: Path
) -> None:
    compare(recipe.model_copy(update={"epochs": 2}), tmp_path, 1, "dorefa")
    summary = compare(recipe, tmp_path, 1, "bireal")
    assert [arm.name for arm in summary.arms] == ["bireal"]


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("method=xnor", "--only"),
        ("method.inputs=01", "--only"),
        ("epochs=3", "give --epochs"),
        ("name=mine", "named after its method"),
    ],
)
def test_what_every_method_replaces_is_not_overridden(
    recipe: Recipe, tmp_path: Path, override: str, instead: str
) -> None:
    with pytest.raises(ValueError, match=f"override '{override}' would change nothing") as caught:
        study.methods_study(recipe, tmp_path, ["dorefa"], 1, [override])
    assert instead in str(caught.value)


def test_seconds_are_medians_shared_by_the_seeds_side_by_side(
    recipe: Recipe, trainer: Any, tmp_path: Path
) -> None:
    """Two seeds at 2 s per epoch together, then one alone at 3 s: (2 + 3) / 3 each."""
    compare(recipe, tmp_path, 2, "dorefa")
    metrics = tmp_path / "dorefa" / "seed-2" / "metrics.jsonl"
    compare(recipe, tmp_path, 3, "dorefa")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line, seconds in zip(lines, (3, 90, 1), strict=True):
        line["seconds"] = seconds
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [arm] = compare(recipe, tmp_path, 3, "dorefa").arms
    assert arm.seconds_per_epoch == pytest.approx(5 / 3)


def test_a_method_that_stops_is_a_row_with_the_reason(
    recipe: Recipe, trainer: Any, tmp_path: Path
) -> None:
    trainer.stops = {"dorefa/seed-0": "the loss is nan"}
    summary = compare(recipe, tmp_path, 1, *NAMES)
    assert summary.arms[0].runs[0].stopped == "the loss is nan"
    written = (tmp_path / "table.md").read_text()
    assert "| `dorefa` | stopped: the loss is nan |" in written
    assert written.index("`bireal`") < written.index("`dorefa`")


def test_lns_is_not_compared_from_scratch() -> None:
    assert "lns" not in study.compared()
    assert "dorefa" in study.compared()


def test_the_command_and_the_caption_say_what_was_changed(recipe: Recipe, tmp_path: Path) -> None:
    cifar = load_recipe("cifar10-resnet20-dorefa", ["model.width=4", "epochs=2"])
    found = study.methods_study(cifar, tmp_path, ["dorefa"], 3, ["model.width=4"])
    assert found.command == (
        "unflip study methods --recipe cifar10-resnet20-dorefa --epochs 2 --seeds 3 --data DIR "
        "--override model.width=4"
    )
    assert found.overrides == ("model.width=4",)
    assert "--data" not in study.methods_study(recipe, tmp_path, ["dorefa"], 1).command
