"""``unflip study compare``: given recipes as the arms of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from unflip.study.compare import compare
from unflip.study.runner import run_study
from unflip.study.summary import Summary
from unflip.train.job import RunOptions

RECIPE = {
    "data": {"name": "digits"},
    "model": {"name": "resnet20", "width": 2},
    "epochs": 1,
    "optimizer": {"lr": 0.1},
}
LNS = {"method": {"name": "lns", "base": "dorefa"}, "start": "base.yaml"}


def write(folder: Path, name: str, **fields: object) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **fields}))
    return path


def test_a_recipe_brings_what_it_starts_from(tmp_path: Path) -> None:
    base = write(tmp_path, "base", method="dorefa", about="the baseline")
    lns, xnor = write(tmp_path, "lns", **LNS), write(tmp_path, "xnor", method="xnor")
    study = compare([xnor, lns, base], tmp_path / "out", 2)
    assert [(arm.name, arm.start) for arm in study.arms] == [
        ("xnor", None),
        ("base", None),
        ("lns", "base"),
    ]
    assert [arm.label for arm in study.arms] == ["xnor", "the baseline", "lns"]
    assert study.reference == "xnor"


def test_overrides_and_scale_reach_every_arm(tmp_path: Path) -> None:
    base, lns = write(tmp_path, "base", method="dorefa"), write(tmp_path, "lns", **LNS)
    study = compare([base, lns], tmp_path, overrides=["epochs=10", "model.width=4"], epochs_scale=2)
    assert {(arm.recipe.epochs, arm.recipe.model.options["width"]) for arm in study.arms} == {
        (20, 4)
    }
    assert "--override epochs=10" in study.command


@pytest.mark.parametrize("override", ["name=x", "start=digits-dorefa"])
def test_name_and_start_of_a_recipe_are_not_overridden(tmp_path: Path, override: str) -> None:
    with pytest.raises(ValueError, match="every recipe has its own"):
        compare(["digits-dorefa"], tmp_path, overrides=[override])


def test_two_recipes_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    recipes = [write(tmp_path, "a"), write(tmp_path / "other", "a")]
    with pytest.raises(ValueError, match="both called 'a'"):
        compare(recipes, tmp_path)


def test_a_circle_of_starts_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path, "a", start="b.yaml")
    write(tmp_path, "b", start="a.yaml")
    with pytest.raises(ValueError, match="recipe a needs itself: a → b → a"):
        compare([first], tmp_path)


def test_another_network_than_its_start_has_is_refused_before_training(tmp_path: Path) -> None:
    write(tmp_path, "base", method="dorefa")
    wider = write(tmp_path, "wider", model={"name": "resnet20", "width": 4}, start="base.yaml")
    with pytest.raises(ValueError, match=r"wider has model.width=4, but recipe base, .* has 2"):
        compare([wider], tmp_path)


def test_the_table_tests_the_others_against_the_first(tmp_path: Path) -> None:
    base = write(tmp_path, "base", method="dorefa", about="baseline", allow_no_flips=True)
    more = write(tmp_path, "more", method="dorefa", start="base.yaml", allow_no_flips=True)
    study = compare([base, more], tmp_path / "out", 2)
    run_study(study, options=RunOptions(device="cpu", quiet=True))
    summary = Summary.read(tmp_path / "out")
    assert [len(arm.runs) for arm in summary.arms] == [2, 2]
    assert summary.paired[0].n == 2
    assert "against baseline" in (tmp_path / "out/table.md").read_text()


def test_recipes_that_say_the_same_about_themselves_are_told_apart(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of one file keep its ``about``; a row of a table is one line, and | is escaped."""
    first, second = (write(tmp_path, name, about="|w|,\nsmall") for name in ("first", "second"))
    third = write(tmp_path, "third", about="another")
    monkeypatch.chdir(tmp_path)
    study = compare([first, second, third], Path("."), 2)
    assert study.name == tmp_path.name, "what every line it prints begins with"
    assert [arm.label for arm in study.arms] == [
        "|w|, small (first)",
        "|w|, small (second)",
        "another",
    ]
    run_study(study)
    _, _, *rows = [row for row in Path("table.md").read_text().splitlines() if row.startswith("|")]
    assert [row.replace("\\|", "").count("|") for row in rows] == [5, 5, 5]
    assert "against \\|w\\|, small (first)" in Path("table.md").read_text()
