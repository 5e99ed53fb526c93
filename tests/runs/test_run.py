"""A run on disk: where runs are found, what is read of one, what is refused; and that reading needs no torch."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from unflip.cli.train import runs
from unflip.data import InputSpec
from unflip.report import report_data
from unflip.runs import DamagedFile, Outcome, Run, RunError
from unflip.runs.run import differences
from unflip.study.compare import compare
from unflip.study.runner import run_study
from unflip.train import RunOptions

SPEC = InputSpec((1, 8, 8), ("cat", "dog"), (0.5,), (0.25,))
RECIPE = {
    "name": "mine",
    "about": "a test",
    "data": {"name": "digits", "validation": 0},
    "model": {"name": "vgg_small"},
    "method": {"name": "lns", "base": {"name": "dorefa", "inputs": "pm1"}},
    "epochs": 3,
}


def begin(out: Path, seed: int = 0) -> Run:
    run = Run.of_seed(out, seed)
    run.folder.mkdir(parents=True)
    run.begin(RECIPE, seed, "unflip train mine.yaml", SPEC)
    return run


def epoch(number: int, accuracy: float | None, seconds: float = 2.0) -> dict[str, Any]:
    return {"epoch": number, "loss": 1.0, "accuracy": accuracy, "seconds": seconds}


def finish(run: Run, accuracy: float = 90.0) -> Run:
    seed = int(run.folder.name.removeprefix("seed-"))
    run.finish({"seed": seed, "accuracy": accuracy, "epochs": 3, "seconds": 6.5})
    return run


# Where runs are


def test_a_seeds_run_is_found_below_its_recipes_folder_or_in_its_own(tmp_path: Path) -> None:
    two = begin(tmp_path, 2)
    assert Run.find(tmp_path, 2) == two
    assert Run.find(two.folder) == Run.find(str(two.folder), 7) == two
    assert Run.find(tmp_path) == Run(tmp_path), "seed 0 has no folder"
    assert not Run.find(tmp_path).exists
    assert str(two) == str(tmp_path / "seed-2")


def test_seeds_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    runs = [begin(tmp_path, seed) for seed in (10, 2, 0)]
    for other in ("seed-3", "seed-x", "notes"):
        (tmp_path / other).mkdir()
    assert Run.seeds_of(tmp_path) == runs[::-1]
    assert Run.seeds_of(runs[0].folder) == [runs[0]]
    assert Run.seeds_of(tmp_path / "seed-3") == Run.seeds_of(tmp_path / "nowhere") == []


def test_a_result_without_its_recipe_is_an_error(tmp_path: Path) -> None:
    """Left out, a mean would silently miss a seed."""
    begin(tmp_path, 0)
    run = finish(begin(tmp_path, 1))
    (run.folder / "recipe.json").unlink()
    for read in (lambda: Run.seeds_of(tmp_path), lambda: run.difference(RECIPE)):
        with pytest.raises(ValueError, match=r"seed-1 has a result.json but no recipe.json"):
            read()


def test_the_only_run_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a run: it has neither .* 'unflip runs' lists"):
        Run.only_one(tmp_path)
    one = begin(tmp_path, 1)
    assert Run.only_one(tmp_path) == Run.only_one(one.folder) == one
    begin(tmp_path, 4)
    with pytest.raises(ValueError, match=rf"\(seed-1, seed-4\): name one, such as {one}"):
        Run.only_one(tmp_path)


def test_all_runs_below_a_folder(tmp_path: Path) -> None:
    runs = [begin(tmp_path / name, seed) for name, seed in (("a", 0), ("b/c", 1), ("b/c", 2))]
    (tmp_path / "npm").mkdir()
    (tmp_path / "npm" / "recipe.json").write_text('{"recipe": "soup"}')
    assert Run.below(tmp_path) == runs
    (runs[1].folder / "recipe.json").write_text("{")
    assert Run.below(tmp_path) == [runs[0], runs[2]], "without metrics it may be anything"
    runs[1].add_metrics(epoch(1, 50))
    assert Run.below(tmp_path) == runs, "one damaged run must not be hidden"
    assert Run.below(tmp_path / "nowhere") == []


# What is read


def test_what_was_begun_is_read_back(tmp_path: Path) -> None:
    run = begin(tmp_path, 5)
    assert run.exists
    assert (run.recipe, run.seed, run.command) == (RECIPE, 5, "unflip train mine.yaml")
    assert run.inputs == SPEC
    assert (run.metrics, run.result, run.stopped, run.outcome) == ([], None, None, None)
    assert run.position == (0, None)
    assert run.checkpoints == []


def test_what_is_not_a_run_is_named(tmp_path: Path) -> None:
    reads: list[Callable[[Run], object]] = [
        lambda run: run.recipe,
        lambda run: run.seed,
        lambda run: run.inputs,
    ]
    for read in reads:
        with pytest.raises(ValueError, match=f"{tmp_path} is not a run: it has no recipe.json"):
            read(Run(tmp_path))


def test_a_state_for_each_stage(tmp_path: Path) -> None:
    run = begin(tmp_path)
    assert run.state == "interrupted"
    with open(run.folder / ".lock", "w") as file:
        assert run.state == "interrupted", "a lock that nobody holds"
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run.state == "running"
    assert run.state == "interrupted"
    run.stop("the loss is nan")
    assert (run.state, run.stopped) == ("stopped", "the loss is nan")
    finish(run)
    assert (run.state, run.stopped) == ("finished", None), "it was trained again"
    (run.folder / "result.json").write_text("{}")
    assert run.state == "damaged"
    (run.folder / "result.json").unlink()
    (run.folder / "stopped.json").write_text("")
    assert run.state == "damaged"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"recipe": None}, "its recipe is None, not an object"),
        ({"recipe": {"name": "x", "epochs": 1, "data": "digits", "method": "float"}}, "misstates"),
        ({"recipe": {"name": "x", "epochs": 1, "data": {"name": "digits"}}}, "lacks .* 'method'"),
        ({"seed": "0"}, "its seed is '0', not a whole number"),
        ({"seed": True}, "its seed is True, not a whole number"),
    ],
)
def test_a_recipe_that_says_too_little(
    tmp_path: Path, changed: dict[str, Any], problem: str
) -> None:
    run = begin(tmp_path)
    path = run.folder / "recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(DamagedFile, match=problem) as caught:
        _ = run.recipe, run.seed
    assert str(caught.value).startswith(f"{path} is damaged: ")
    assert "run the same command again" in str(caught.value)
    assert run.state == "damaged"


@pytest.mark.parametrize("changed", [None, [], {}, {"mean": "0.5"}, {"shape": [1, 8]}])
def test_inputs_that_say_too_little(tmp_path: Path, changed: Any) -> None:
    run = begin(tmp_path)
    path = run.folder / "recipe.json"
    about = json.loads(path.read_text())
    about["input"] = about["input"] | changed if changed else changed
    path.write_text(json.dumps(about))
    with pytest.raises(DamagedFile, match=r"recipe\.json is damaged: its input: "):
        _ = run.inputs


def test_the_position_is_the_results_or_the_last_epochs(tmp_path: Path) -> None:
    run = begin(tmp_path)
    run.add_metrics(epoch(1, 40))
    run.add_metrics(epoch(2, None))
    assert run.position == (2, 40), "measured last"
    finish(run, 91.5)
    assert run.position == (3, 91.5)
    (run.folder / "result.json").write_text("{")
    assert run.position == (2, 40), "from what can be read"


def test_the_outcome_of_a_finished_run(tmp_path: Path) -> None:
    run = begin(tmp_path, 3)
    for number, accuracy in ((1, 80.0), (2, 95.0), (3, None)):
        run.add_metrics(epoch(number, accuracy))
    assert run.outcome is None
    finish(run, 90.0)
    assert run.outcome == Outcome(3, 90.0, 95.0, 3, 6.5)
    (run.folder / "metrics.jsonl").unlink()
    assert run.outcome == Outcome(3, 90.0, 90.0, 3, 6.5), "where only the result was kept"


def test_the_outcome_of_a_run_that_stopped(tmp_path: Path) -> None:
    run = begin(tmp_path)
    run.stop("it unlearns")
    assert run.outcome == Outcome(0, stopped="it unlearns")
    run.add_metrics(epoch(1, 30, seconds=1.25))
    run.add_metrics(epoch(2, 20, seconds=1.5))
    assert run.outcome == Outcome(0, None, 30, 2, 2.75, "it unlearns")


@pytest.mark.parametrize("name", ["recipe.json", "result.json"])
def test_a_run_of_another_seed_is_refused(tmp_path: Path, name: str) -> None:
    """Copied from another seed, it would be counted twice."""
    one, two = finish(begin(tmp_path, 1)), finish(begin(tmp_path, 2))
    shutil.copy(one.folder / name, two.folder)
    with pytest.raises(ValueError, match=f"{name} is of seed 1, but the folder is for seed 2"):
        _ = two.seed
    with pytest.raises(ValueError, match=rf"copied or renamed\. Delete {two} and run"):
        _ = two.outcome
    assert two.state == "damaged"
    renamed = Run(one.folder.rename(tmp_path / "kept"))
    assert (renamed.seed, renamed.state) == (1, "finished"), "another name says nothing of a seed"


def test_the_difference_of_two_recipes(tmp_path: Path) -> None:
    run = begin(tmp_path)
    assert run.difference(RECIPE) == []
    assert run.difference({**RECIPE, "about": "said better"}) == []
    base = {"name": "dorefa", "inputs": "01"}
    other = {**RECIPE, "epochs": 4, "method": {"name": "lns", "base": base, "alpha": 1}}
    assert run.difference(other) == [
        "epochs is 3 there and 4 here",
        "method.alpha is None there and 1 here",
        "method.base.inputs is 'pm1' there and '01' here",
    ]
    assert Run(tmp_path / "nowhere").difference(other) == []
    run.refuse_other_recipe(RECIPE)
    with pytest.raises(RunError, match=r"seed-0 holds a run of another recipe: epochs is 3 .* 4"):
        run.refuse_other_recipe(other)


# What is written


def test_metrics_are_cut_to_the_epochs_of_a_checkpoint(tmp_path: Path) -> None:
    run = begin(tmp_path)
    for number in (1, 2, 4, 5):
        run.add_metrics(epoch(number, float("nan") if number == 2 else 50))
    path = run.folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"epoch": 6, "lo')
    kept, lost = run.cut_metrics(4)
    assert ([line["epoch"] for line in kept], lost) == ([1, 2, 4], [3])
    assert run.metrics == kept
    assert kept[1]["accuracy"] is None, "JSON has no NaN"
    run.add_metrics(epoch(4, 60))
    kept, lost = run.cut_metrics(4)
    assert [line["accuracy"] for line in kept] == [50, None, 60], "one line per epoch, the last"
    assert run.cut_metrics(0) == ([], [])
    assert path.read_bytes() == b""


# Without torch

BLOCKED = """
import json, sys
from pathlib import Path

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch was imported")

sys.meta_path.insert(0, NoTorch())
study = Path(sys.argv[1])

import unflip
from unflip.report import report_data
from unflip.runs import Run, provenance
from unflip.study.summary import Summary

runs = Run.below(study)
print(json.dumps({
    "report": report_data([study]),
    "outcomes": [[str(run), run.state, run.position, run.outcome.accuracy] for run in runs],
    "metrics": [run.metrics for run in runs],
    "recipes": [run.recipe for run in runs],
    "classes": [run.inputs.classes for run in runs],
    "images": [provenance.read(run)["images"]["classes"] for run in runs],
    "arms": [arm.name for arm in Summary.read(study).arms],
}))
try:
    unflip.load_run(study / "tuned")
except ImportError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms as they are kept: without checkpoints, with the signs that the report shows."""
    folder = tmp_path_factory.mktemp("recipes")
    common = {
        "data": {"name": "digits", "validation": 1200},
        "model": {"name": "vgg_small", "width": 4},
        "method": "dorefa",
        "epochs": 1,
        "optimizer": {"lr": 0.1},
        "allow_no_flips": True,
    }
    for name, start in (("base", None), ("tuned", "base.yaml")):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**common, "start": start}))
    out = folder / "study"
    compared = compare([folder / "base.yaml", folder / "tuned.yaml"], out, seeds=1)
    run_study(compared, options=RunOptions(device="cpu", quiet=True))
    report_data([out], keep_signs=True)
    for path in out.rglob("checkpoint-*"):
        path.unlink()
    return out


def test_reading_needs_no_torch(study: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(study)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text, last = done.stdout.splitlines()
    assert last == "torch was imported", "what needs it is blocked"
    found = json.loads(text)
    runs = Run.below(study)
    assert [run.folder.parent.name for run in runs] == ["base", "tuned"]
    assert found["report"] == json.loads(json.dumps(report_data([study])))
    [section] = found["report"]["sections"]
    assert [shown["baseline"] for shown in section["signs"]] == ["base"], "the page has its signs"
    accuracies = [run.result["accuracy"] for run in runs if run.result]
    assert found["outcomes"] == [
        [str(run), "finished", [1, accuracy], accuracy]
        for run, accuracy in zip(runs, accuracies, strict=True)
    ]
    assert found["metrics"] == [run.metrics for run in runs]
    assert found["recipes"] == [run.recipe for run in runs]
    assert found["classes"] == [list("0123456789")] * 2
    assert found["images"][0].startswith("10: 0, 1, 2")
    assert found["arms"] == ["base", "tuned"]


def test_the_names_of_other_fields_are_printable() -> None:
    assert differences({"\x1b[2J": 1}, {}) == [r"\x1b[2J is 1 there and None here"]


def test_the_list_of_runs_prints_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "\x1b[31mred" / "seed-0"
    folder.mkdir(parents=True)
    recipe = {"name": "\x1b]0;title\x07\u202e", "epochs": "\x1b[2J"}
    (folder / "recipe.json").write_text(json.dumps({"recipe": recipe, "seed": 0}))
    (folder / "metrics.jsonl").write_text("")
    runs(tmp_path)
    assert capsys.readouterr().out.replace("\n", "").isprintable()
