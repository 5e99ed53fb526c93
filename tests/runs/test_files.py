"""Damaged JSON files: the error names the file, and the remedy in the message works."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unflip.data import ImageSet
from unflip.hints import NotInstalled
from unflip.runs import checkpoint as checkpoints
from unflip.runs.files import (
    REMEDIES,
    DamagedFile,
    RunError,
    read_json,
    read_metrics,
    whole_metrics,
    write_json,
)
from unflip.runs.load import load_run
from unflip.runs.run import Run
from unflip.train import RunOptions, TrainingStopped, load_recipe, train

TINY = [
    "model={name: vgg_small, width: 4}",
    "data.validation=1200",
    "batch_size=64",
    "epochs=2",
    "allow_no_flips=true",
]
BASE, TUNED = (load_recipe(name, TINY) for name in ("digits-dorefa", "digits-finetune"))
QUIET = RunOptions(device="cpu", quiet=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, digits: ImageSet) -> Path:
    out = tmp_path_factory.mktemp("finished")
    train(BASE, digits, out, options=RunOptions(quiet=True, device="cpu", checkpoint_seconds=0))
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A finished run to damage."""
    return Path(shutil.copytree(finished, tmp_path / "base"))


@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b'{"recipe": {', "Expecting property name"),
        (b"[1]", "holds list, not an object"),
        (b'{"recipe": 1}', "it has no seed"),
        (b"\xff\xfe", "can't decode byte"),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(
    tmp_path: Path, name: str, data: bytes, why: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged") as caught:
        read_json(path, "recipe", "seed")
    message = str(caught.value)
    assert message.startswith(f"{path} is damaged: ")
    assert why in message
    assert message.endswith(REMEDIES[name])


def test_an_undamaged_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"epochs": 3, "accuracy": 90}')
    assert read_json(tmp_path / "result.json", "epochs") == {"epochs": 3, "accuracy": 90}


@pytest.mark.parametrize("copied", ["", "result.json"], ids=["all of it", "its result"])
def test_a_seed_that_was_copied_is_not_another(run: Path, digits: ImageSet, copied: str) -> None:
    """Two seeds with the same figures would be one run, counted twice."""
    seeds: dict[str, Any] = {"seeds": (0, 1), "options": QUIET}
    if copied:
        train(BASE, digits, run, **seeds)
        shutil.copy(run / "seed-0" / copied, run / "seed-1")
    else:
        shutil.copytree(run / "seed-0", run / "seed-1")
    said = rf"{copied or 'recipe.json'} is of seed 0, but the folder is for seed 1: .*Delete"
    with pytest.raises(ValueError, match=said):
        train(BASE, digits, run, **seeds)
    for read in (lambda: Run(run / "seed-1").outcome, lambda: load_run(run, 1)):
        with pytest.raises(ValueError, match=said):
            read()
    assert Run(run / "seed-1").state == "damaged"
    shutil.rmtree(run / "seed-1")  # as it says
    zero, one = train(BASE, digits, run, **seeds)
    assert (zero["seed"], one["seed"]) == (0, 1)
    assert zero["loss"] != one["loss"]


@pytest.mark.parametrize("name", ["recipe.json", "result.json"])
def test_a_start_with_a_damaged_file(
    run: Path, tmp_path: Path, digits: ImageSet, name: str
) -> None:
    path = run / "seed-0" / name
    path.write_text('{"reci')
    with pytest.raises(ValueError, match="is damaged") as caught:
        train(
            TUNED,
            digits,
            tmp_path / "tuned",
            start=run,
            options=QUIET,
        )
    assert str(path) in str(caught.value)
    assert "run the same command again" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
@pytest.mark.parametrize("name", ["recipe.json", "result.json", "stopped.json"])
def test_whoever_reads_it_names_it(run: Path, digits: ImageSet, name: str, text: str) -> None:
    path = run / "seed-0" / name
    path.write_text(text)
    readers: dict[str, list[Callable[[], object]]] = {
        "recipe.json": [
            lambda: train(BASE, digits, run, options=QUIET),
            lambda: Run(path.parent).difference(BASE.plain()),
            lambda: Run(path.parent).outcome,
            lambda: load_run(run),
        ],
        "result.json": [
            lambda: train(BASE, digits, run, options=QUIET),
            lambda: Run(path.parent).outcome,
            lambda: load_run(run),
        ],
        "stopped.json": [lambda: Run(path.parent).stopped, lambda: Run(path.parent).outcome],
    }
    if name == "stopped.json":
        (path.parent / "result.json").unlink()
    for reads in readers[name]:
        with pytest.raises(ValueError, match="is damaged") as caught:
            reads()
        assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("name", ["recipe.json", "result.json"])
def test_what_the_message_says_brings_it_back(run: Path, digits: ImageSet, name: str) -> None:
    folder = run / "seed-0"
    before = {f: json.loads((folder / f).read_text()) for f in ("recipe.json", "result.json")}
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / name).unlink()
    (folder / "result.json").unlink(missing_ok=True)
    [result] = train(BASE, digits, run, options=QUIET)
    assert result["accuracy"] == before["result.json"]["accuracy"]
    assert json.loads((folder / "recipe.json").read_text()) == before["recipe.json"]
    assert (folder / "metrics.jsonl").read_text() == metrics


def test_a_damaged_last_line_of_a_run_that_lacks_its_result(run: Path, digits: ImageSet) -> None:
    folder = run / "seed-0"
    path, result = folder / "metrics.jsonl", folder / "result.json"
    first, last = path.read_text().splitlines()
    result.unlink()

    path.write_text(f"{first}\n{last[:9]}\n")
    with pytest.raises(RunError) as caught:
        train(BASE, digits, run, options=QUIET)
    assert f"metrics.jsonl in {folder} has no line of epoch 2" in str(caught.value)
    epoch, step = checkpoints.available(folder)[-1]
    for newest in folder.glob(f"checkpoint-{epoch:05d}-{step:06d}.*"):
        newest.unlink()
    train(BASE, digits, run, options=QUIET)  # what the message says
    assert result.exists()
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [1, 2]


def line(epoch: int, **others: object) -> bytes:
    return json.dumps({"epoch": epoch, "loss": 1, "accuracy": 9, "seconds": 1} | others).encode()


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("cut", [b"{", b'{"epoch": 3, "lo', b"\0\0\0", b"\xff", b'{"epoch": 3}'])
def test_a_last_line_cut_short_is_left_out(tmp_path: Path, cut: bytes, end: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([line(1), line(2), cut]) + end)
    assert [found["epoch"] for found in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("cut", [b"{", b"[]", b"2", b"\0\0\0", b"\xff", b'{"epoch": 2}'])
def test_a_damaged_line_before_the_last_is_named(run: Path, cut: bytes) -> None:
    """By all who speak of the run; a list of runs shows it with what is left."""
    folder = run / "seed-0"
    path = folder / "metrics.jsonl"
    path.write_bytes(b"\n".join([line(1, accuracy=50), cut, line(3)]) + b"\n")
    says = f"{path} is damaged: line 2 should be an object with epoch, loss, accuracy, seconds. Restore"
    for read in (lambda: Run(folder).outcome, lambda: Run(folder).metrics):
        with pytest.raises(ValueError, match="is damaged") as caught:
            read()
        assert str(caught.value).startswith(says)
    (folder / "result.json").rename(run / "aside")  # otherwise the position is the result's
    assert [found.position for found in Run.below(run)] == [(3, 9)]
    (run / "aside").rename(folder / "result.json")
    path.write_bytes(b"\n".join([line(1, accuracy=50), line(3)]) + b"\n")  # as the message says
    found = Run(folder).outcome
    assert found is not None
    assert found.best_accuracy is not None
    assert found.best_accuracy >= 50


def test_a_run_with_a_damaged_line_resumes_and_names_the_epoch_that_is_lost(
    run: Path, digits: ImageSet, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "seed-0"
    path, result = folder / "metrics.jsonl", folder / "result.json"
    last = path.read_bytes().splitlines()[-1]
    result.unlink()
    path.write_bytes(b'{"epoch": 1, "lo\n' + last + b"\n")
    assert Run(folder).outcome is None, "it is not over: nobody needs the damaged line yet"
    train(BASE, digits, run, options=RunOptions(device="cpu"))
    said = f"warning: the metrics of {folder} have lost the lines of epochs 1\n"
    assert said in capsys.readouterr().out
    assert [found["epoch"] for found in read_metrics(path)] == [2]


@pytest.mark.parametrize(
    ("accuracy", "problem"),
    [
        ("null", "its accuracy is None, not a number"),
        ("NaN", "it holds NaN, which is not JSON"),
        ("1e999", "its accuracy is inf, not a number"),
    ],
)
def test_a_result_without_a_number_is_damaged(run: Path, accuracy: str, problem: str) -> None:
    folder = run / "seed-0"
    path = folder / "result.json"
    text = json.dumps({**json.loads(path.read_text()), "accuracy": "ACCURACY"})
    path.write_text(text.replace('"ACCURACY"', accuracy))
    with pytest.raises(ValueError, match=rf"damaged: {problem}\. Delete it"):
        _ = Run(folder).outcome
    assert [found.state for found in Run.below(run)] == ["damaged"]


def test_a_list_of_runs_shows_one_whose_recipe_is_damaged(run: Path) -> None:
    (run / "seed-0/recipe.json").write_text("{")
    [found] = Run.below(run)
    assert (found.folder, found.state) == (run / "seed-0", "damaged")
    (run / "seed-0/metrics.jsonl").unlink()
    assert Run.below(run) == [], "something else's recipe.json"


@pytest.mark.parametrize(
    "error",
    [
        DamagedFile(Path("a/result.json"), "it holds list, not an object"),
        NotInstalled("training", "torch"),
        RunError("cannot write"),
        TrainingStopped("the loss is nan", Run("a/seed-0")),
    ],
)
def test_errors_survive_the_way_from_another_process(error: Exception) -> None:
    """A worker of a study sends them; otherwise a person would see a traceback."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("key", ["epoch", "loss", "accuracy", "seconds"])
@pytest.mark.parametrize("value", ["x", True, [1]])
def test_a_metrics_line_of_another_type_is_damaged(tmp_path: Path, key: str, value: object) -> None:
    line = {"epoch": 1, "loss": 0.5, "accuracy": None, "seconds": 2}
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({**line, key: value}) + "\n" + json.dumps(line) + "\n")
    assert whole_metrics(path) == ([line], [1])


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / ".out.json.part").symlink_to(victim)
    write_json(tmp_path / "out.json", {"a": 1})
    assert victim.read_text() == "untouched"
    assert not (tmp_path / "out.json").is_symlink()
    assert read_json(tmp_path / "out.json", "a") == {"a": 1}


def test_a_number_of_a_thousand_digits_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(f'{{"accuracy": {10**400}}}')
    with pytest.raises(DamagedFile, match="its accuracy is 1000"):
        read_json(path, "accuracy")
    line = {"epoch": 1, "loss": 10**400, "accuracy": 1.0, "seconds": 1.0}
    lines = tmp_path / "metrics.jsonl"
    lines.write_text(f"{json.dumps(line)}\n{json.dumps({**line, 'loss': 1.0})}\n")
    with pytest.raises(DamagedFile, match="line 1 should be"):
        read_metrics(lines)
