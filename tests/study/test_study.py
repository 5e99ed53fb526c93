"""The folder of a study: tables of what is finished, and runs that do not belong in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unflip.runs.files import RunError
from unflip.study.runner import run_study, write_tables
from unflip.study.study import Study
from unflip.study.summary import Summary

OnDigits = Callable[..., Study]


def test_studies_that_make_no_sense_are_refused(on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("ablation", tmp_path)
    baseline, finetune = study.arms[:2]
    with pytest.raises(ValueError, match="starts from 'baseline', which should come before it"):
        replace(study, arms=(finetune, baseline))
    with pytest.raises(ValueError, match="two arms are called 'baseline'"):
        replace(study, arms=(baseline, baseline))
    with pytest.raises(ValueError, match="no arm or no seed"):
        replace(study, seeds=())
    data = finetune.recipe.data.model_copy(update={"validation": 5})
    other = replace(finetune, recipe=finetune.recipe.model_copy(update={"data": data}))
    with pytest.raises(ValueError, match="one table is about one set of images"):
        replace(study, arms=(baseline, other))


def test_another_recipe_in_the_folder_is_refused(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    run_study(on_digits("ablation", tmp_path), only=["baseline"])
    with pytest.raises(RunError, match="batch_size is 128 there and 64 here"):
        run_study(on_digits("ablation", tmp_path, 2, "batch_size=64"))
    assert len(trainer.calls) == 1


def test_another_option_of_the_method_is_another_recipe(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    run_study(on_digits("ablation", tmp_path), only=["lns"])
    saved = tmp_path / "lns" / "seed-0" / "recipe.json"
    run = json.loads(saved.read_text())
    run["recipe"]["method"]["sharpness"] = 3.0
    saved.write_text(json.dumps(run))
    with pytest.raises(RunError, match=r"method\.sharpness is 3\.0 there and 2\.0 here"):
        run_study(on_digits("ablation", tmp_path), only=["lns"])


def test_a_result_without_its_recipe_is_refused(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    study = on_digits("ablation", tmp_path, 1)
    run_study(study, only=["baseline"])
    (tmp_path / "baseline" / "seed-0" / "recipe.json").unlink()
    for again in (lambda: run_study(study), lambda: write_tables(study)):
        with pytest.raises(ValueError, match=r"baseline/seed-0 has a result.json but no recipe"):
            again()
    assert len(trainer.calls) == 1


def test_a_seed_that_was_copied_is_not_counted_as_another(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    study = on_digits("sota", tmp_path)
    run_study(study, only=["tbn"])
    shutil.rmtree(tmp_path / "tbn" / "seed-1")
    shutil.copytree(tmp_path / "tbn" / "seed-0", tmp_path / "tbn" / "seed-1")
    for again in (lambda: run_study(study, only=["tbn"]), lambda: write_tables(study)):
        with pytest.raises(
            ValueError, match=r"recipe.json is of seed 0, but .* for seed 1: .*Delete"
        ):
            again()


def test_an_arm_of_which_all_runs_stopped_stays_in_the_table(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    trainer.stops = {f"mapping/seed-{seed}": "the loss is nan" for seed in (0, 1)}
    study = on_digits("ablation", tmp_path)
    run_study(study, only=["mapping"])
    row = "| mapping without noisy supervision | seed 0 stopped: the loss is nan; seed 1 stopped:"
    summary = run_study(study, only=["lns"])
    assert [arm.name for arm in summary.arms] == ["baseline", "mapping", "lns"]
    assert row in (tmp_path / "table.md").read_text()
    summary = write_tables(study)
    assert [arm.name for arm in summary.arms] == ["baseline", "mapping", "lns"]
    assert row in (tmp_path / "table.md").read_text()


def test_tables_of_what_is_finished_train_nothing(
    tmp_path: Path, trainer: Any, on_digits: OnDigits
) -> None:
    given = on_digits("readings", tmp_path / "given", 2)
    run_study(given, only=["baseline"])
    out = tmp_path / "out"
    run_study(on_digits("readings", out, 1), only=["conv"])
    trained = list(trainer.trained)

    baseline = tmp_path / "given" / "baseline"
    study = on_digits("readings", out, 5, baseline=baseline, tables_only=True)
    summary = write_tables(study)
    assert trainer.trained == trained
    assert {a.name: len(a.runs) for a in summary.arms} == {"baseline": 2, "conv": 1}
    written = (out / "table.md").read_text()
    assert "one shortcut per convolution" in written
    assert ", up to 2 seeds." in written

    with pytest.raises(ValueError, match="seed-2 is not a finished run"):
        on_digits("readings", out, 5, baseline=baseline)  # training needs all seeds
    with pytest.raises(ValueError, match="no finished run"):
        write_tables(on_digits("readings", tmp_path / "nothing", 5))


def test_tables_of_another_recipe_say_the_difference(
    tmp_path: Path, trainer: Any, on_digits: OnDigits
) -> None:
    run_study(on_digits("ablation", tmp_path, 2), only=["baseline"])
    with pytest.raises(RunError, match="batch_size is 128 there and 64 here"):
        write_tables(on_digits("ablation", tmp_path, 2, "batch_size=64"))


def test_arms_that_a_table_leaves_out_are_named(
    tmp_path: Path, trainer: Any, on_digits: OnDigits, capsys: pytest.CaptureFixture[str]
) -> None:
    """An override that one arm does not have, given later: its row is unchanged, the others are of another recipe."""
    run_study(on_digits("ablation", tmp_path, 1))
    assert "not in the table" not in capsys.readouterr().out
    changed = on_digits("ablation", tmp_path, 1, "method.rho_plus=0.1")
    for again in (
        lambda: run_study(changed, only=["finetune-0.01"]),
        lambda: write_tables(changed),
    ):
        names = [arm.name for arm in again().arms]
        assert "lns" not in names
        assert "finetune-0.01" in names
        said = capsys.readouterr().out
        assert (
            f"their runs in {tmp_path} are of another recipe: mapping, lns, lns-frozen, one-mean ("
            in said
        )
        assert "(method.rho_plus is 0.005 there and 0.1 here)" in said


@pytest.mark.parametrize("text", ["", '{"seeds": [0, ', "[]", '{"seeds": null}', "{}", "\0\0"])
def test_a_damaged_summary_is_set_aside_and_written_again(
    tmp_path: Path,
    trainer: Any,
    on_digits: OnDigits,
    capsys: pytest.CaptureFixture[str],
    text: str,
) -> None:
    study = on_digits("ablation", tmp_path, 1)
    undamaged = run_study(study, only=["baseline"])
    path = tmp_path / "study.json"
    for again in (lambda: run_study(study, only=["baseline"]), lambda: write_tables(study)):
        path.write_text(text)
        assert again() == undamaged == Summary.read(tmp_path)
        aside = tmp_path / "study.json.damaged"
        assert aside.read_text() == text
        said = capsys.readouterr().out
        assert f"{path} is damaged" in said
        assert f"written again from the runs; the damaged file is now {aside}" in said


def test_a_table_of_fewer_seeds_than_before_is_announced(
    tmp_path: Path, trainer: Any, on_digits: OnDigits, capsys: pytest.CaptureFixture[str]
) -> None:
    run_study(on_digits("ablation", tmp_path, 3), only=["baseline"])
    run_study(on_digits("ablation", tmp_path, 3), only=["baseline"])
    assert "now shows" not in capsys.readouterr().out
    said = f"the table in {tmp_path} had 3 seeds and now shows 1; --seeds 3 shows them again"
    run_study(on_digits("ablation", tmp_path, 1), only=["baseline"])
    assert said in capsys.readouterr().out
    write_tables(on_digits("ablation", tmp_path, 3))
    write_tables(on_digits("ablation", tmp_path, 1))
    assert said in capsys.readouterr().out


def test_a_finished_run_with_damaged_metrics_is_named_before_anything_is_trained(
    tmp_path: Path, trainer: Any, on_digits: OnDigits
) -> None:
    study = on_digits("ablation", tmp_path, 2)
    run_study(study, only=["baseline"])
    trained = list(trainer.trained)
    path = tmp_path / "baseline" / "seed-1" / "metrics.jsonl"
    first, _, last = path.read_text().splitlines()
    path.write_text(f"{first}\n{last[:9]}\n{last}\n")
    for again in (lambda: run_study(study), lambda: write_tables(study)):
        with pytest.raises(ValueError, match="line 2 should be an object") as caught:
            again()
        assert str(caught.value).startswith(f"{path} is damaged")
    assert trainer.trained == trained
