"""The ``unflip`` command as a person meets it: what it prints, and what it says when something is wrong.

One file of more than 400 lines, because all commands are tested with the same runs and packed file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.core import TyperGroup
from typer.main import get_command

import unflip.cli as unflip_cli
from unflip import __version__, methods, models
from unflip.cli import app
from unflip.data.cifar import load_cifar10
from unflip.recipes.load import load_recipe, recipe_names

Start = Callable[..., Any]

COMMANDS = sorted(
    [c.name or c.callback.__name__ for c in app.registered_commands if c.callback]
    + [g.name for g in app.registered_groups if g.name]
)
TINY = ("digits-dorefa", "model.width=2", "data.validation=1200", "epochs=2")


def one_line_error(command: Any) -> str:
    """What a failed command said: one line on stderr, no traceback, nothing on stdout."""
    assert command.code not in (0, None)
    assert command.out == ""
    assert "Traceback" not in command.err
    lines = [line for line in command.err.splitlines() if not line.startswith("Try 'unflip")]
    assert len(lines) == 1, command.err
    assert lines[0].startswith("unflip: ")
    return lines[0]


def test_python_dash_m_unflip_prints_the_version() -> None:
    """The one test here that pays for a new interpreter: the others fork (conftest.py)."""
    done = subprocess.run(
        [sys.executable, "-m", "unflip", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == __version__


def test_the_installed_command_is_the_same_thing() -> None:
    script = Path(sys.executable).with_name("unflip")
    assert script.exists()
    assert "unflip.__main__" in script.read_text()


def test_help_shows_every_command(unflip: Start) -> None:
    shown = unflip("--help")
    assert {"methods", "recipes", "cost", "train", "runs", "demo"} <= set(COMMANDS)
    assert all(command in shown.out for command in COMMANDS)


def test_no_arguments_say_what_to_do_next(unflip: Start) -> None:
    shown = unflip()
    assert (shown.code, shown.err) == (0, "")
    named = re.findall(r"^  unflip (\w+)", shown.out, re.MULTILINE)
    assert len(named) >= 4
    assert set(named) <= set(COMMANDS)


def test_doctor(unflip: Start) -> None:
    shown = unflip("doctor")
    assert (shown.code, shown.err) == (0, "")
    lines = {line.split()[0]: line for line in shown.out.splitlines() if line.strip()}
    assert "missing" not in lines["runtime"]
    assert torch.__version__ in lines["torch"]
    assert "Ready to train" in shown.out


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(unflip: Start, command: str | None) -> None:
    shown = unflip(*([command] if command else []), "--help")
    assert shown.code == 0
    assert shown.err == ""
    assert f"Usage: unflip {command or '[OPTIONS]'}" in shown.out


def test_a_wrong_use_names_the_help_of_its_command(unflip: Start) -> None:
    shown = unflip("predict", "resnet20-cifar10")
    assert shown.err == "unflip: Missing argument 'images'.\nTry 'unflip predict --help'.\n"
    assert "Try 'unflip study ablation --help'." in unflip("study", "ablation", "--nothing").err
    assert "Try 'unflip --help'." in unflip("nothing").err


def test_an_encoding_without_our_letters_is_no_error() -> None:
    """Windows writes to files and pipes in an encoding of 256 letters."""
    done = subprocess.run(
        [sys.executable, "-m", "unflip", "networks"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "cp1252"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"\\u2500" in done.stdout


def test_methods_lists_them_all(unflip: Start) -> None:
    shown = unflip("methods")
    assert shown.code == 0
    first_words = [line.split()[0] for line in shown.out.splitlines() if line.strip()]
    assert {"binarynet", "bireal", "bwn", "dorefa", "lns", "xnor"} <= set(first_words)
    assert [word for word in first_words if word in methods.names()] == methods.names()


def test_models_lists_them_all_and_describes_one(unflip: Start) -> None:
    shown = unflip("models")
    assert shown.code == 0
    first_words = [line.split()[0] for line in shown.out.splitlines() if line.strip()]
    assert [word for word in first_words if word in models.names()] == models.names()
    shown = unflip("models", "resnet20")
    assert shown.code == 0
    for part in ("shortcut", "conv-prelu-bn", "width = 16"):
        assert part in shown.out


@pytest.mark.parametrize(
    ("name", "formula", "paper", "option"),
    [
        ("lns", "ℓ̃(q̂, q̃) = [(1 − ρ₋q̃) ℓ(q̂, q̃) − ρq̃ ℓ(q̂, −q̃)]", "2010.04871", "rho_plus = 0.005"),
        ("dorefa", "Q = E(|W|) · sign(W)", "1606.06160", "inputs = '01'"),
    ],
)
def test_methods_describes_one(
    unflip: Start, name: str, formula: str, paper: str, option: str
) -> None:
    shown = unflip("methods", name)
    assert shown.code == 0
    for part in (formula, paper, option):
        assert part in shown.out


def test_recipes_lists_all_with_what_they_are(unflip: Start) -> None:
    shown = unflip("recipes")
    assert shown.code == 0
    for name in recipe_names():
        [line] = [line for line in shown.out.splitlines() if line.split()[:1] == [name]]
        assert load_recipe(name).about in line, "a recipe should say what it is about"
        assert len(line.split()) > 4


def test_cost_has_the_papers_numbers(unflip: Start) -> None:
    """Table 1 of the LNS paper: a 1-bit ResNet-18 is 34 Mbit and 1.63 · 10⁸ FLOPs."""
    shown = unflip("cost", "resnet18", "--method", "dorefa", "--json")
    assert shown.code == 0
    found = json.loads(shown.out)
    assert type(found["memory_bits"]) in (int, float)
    assert type(found["flops"]) in (int, float)
    assert found["memory_bits"] / 1e6 == pytest.approx(34, abs=0.6)
    assert found["flops"] / 1e6 == pytest.approx(163, rel=0.03)


def test_cost_as_a_table(unflip: Start) -> None:
    options = ("--option", "input_bits=2", "--model-option", "width=4")
    shown = unflip("cost", "resnet20", "--method", "dorefa", *options)
    assert shown.code == 0
    rows = [line for line in shown.out.splitlines() if "layer3.2.conv2" in line]
    assert len(rows) == 1, "a row is one line where the output is no terminal"
    assert "Mbit" in shown.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["cost", "resnet19"], ["unknown model 'resnet19'", "Did you mean 'resnet18'?"]),
        (["cost", "resnet18", "--method", "dorefaa"], ["'dorefaa'", "Did you mean 'dorefa'?"]),
        (["cost", "resnet18", "--option", "bits"], ["'bits'", "name=value"]),
        (["cost", "resnet18", "--model-option", "widht=3"], ["'widht'", "Did you mean 'width'?"]),
        (["models", "resnet2"], ["unknown model 'resnet2'", "Did you mean 'resnet20'?"]),
        (["methods", "lsn"], ["unknown method 'lsn'", "Did you mean 'lns'?"]),
        (["train", "digits-dorefaa"], ["unknown recipe", "Did you mean 'digits-dorefa'?"]),
        (["train", "nowhere.yaml"], ["no recipe file nowhere.yaml"]),
        (["train", "digits-dorefa", "epoch=3"], ["epoch: unknown field", "'epochs'"]),
        (["train", "digits-dorefa", "optimizer.lr=nan"], ["optimizer.lr", "finite"]),
        (["train", "digits-dorefa", "epochs"], ["'epochs'", "field=value"]),
        (["train", "digits-dorefa", "epochs=["], ["'epochs=['", "not YAML"]),
        (["train", "digits-dorefa", "model.widht=3"], ["'widht'", "Did you mean 'width'?"]),
        (["train", "digits-dorefa", "batch_size=5000"], ["batch_size=5000", "1347"]),
        (["train", "digits-dorefa", "data.validation=1347"], ["validation=1347", "1346"]),
        (["train", "digits-dorefa", "--device", "tpu"], ["device='tpu'", "cpu, cuda or cuda:N"]),
        (["train", "digits-dorefa", "--start", "there"], ["has no start"]),
        (["train", "digits-lns", "--start", "there"], ["digits-dorefa", "there is not one"]),
        (["train", "digits-dorefa", "--sedes", "2"], ["--sedes"]),
        (["train", "digits-dorefa", "--seeds", "0"], ["--seeds", "1"]),
        (["train"], ["Missing argument", "recipe"]),
        (["runs", "nowhere"], ["no runs in nowhere", "unflip train RECIPE"]),
        (["fly"], ["fly"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line_and_leave_nothing(
    unflip: Start, arguments: list[str], says: list[str]
) -> None:
    command = unflip(*arguments)
    line = one_line_error(command)
    for part in says:
        assert part in line
    assert sorted(p.name for p in command.folder.iterdir()) == ["stderr", "stdout"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_said(unflip: Start) -> None:
    command = unflip("train", "digits-dorefa", "--device", "cuda")
    assert "device='cuda'" in one_line_error(command)
    assert not (command.folder / "runs").exists()


def test_no_data_says_what_to_download(unflip: Start) -> None:
    command = unflip("train", "cifar10-resnet20-dorefa", "--data", "nowhere")
    line = one_line_error(command)
    with pytest.raises(ValueError, match="nowhere") as expected:
        load_cifar10(Path("nowhere"))
    assert str(expected.value) in line
    assert "Download cifar-10-binary.tar.gz" in line
    assert "https://www.cs.toronto.edu/~kriz/" in line
    assert sorted(p.name for p in command.folder.iterdir()) == ["stderr", "stdout"]


def test_steps_after_the_last_epoch_are_said(unflip: Start, tmp_path: Path) -> None:
    command = unflip("train", "cifar10-resnet20-dorefa", "epochs=20", "--data", tmp_path)
    assert "never falls, because schedule.at=[120, 240, 320] and epochs=20." in command.out


def test_a_truncated_archive_is_recognised(unflip: Start, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"\x1f\x8b\x08\x00" + bytes(1000))
    command = unflip("train", "cifar10-resnet20-dorefa", "--data", tmp_path)
    assert str(tmp_path / "cifar-10-binary.tar.gz") in one_line_error(command)
    assert sorted(p.name for p in command.folder.iterdir()) == ["stderr", "stdout"]


def test_an_out_that_is_a_file(unflip: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    command = unflip("train", *TINY, "--out", tmp_path / "file")
    assert str(tmp_path / "file") in one_line_error(command)
    assert (tmp_path / "file").read_text() == "mine"


def test_train_then_runs(start: Start, unflip: Start, tmp_path: Path) -> None:
    """A run is running, interrupted, finished; and goes to runs/RECIPE when nothing else is said."""

    def listed() -> list[str]:
        shown = unflip("runs", tmp_path)
        assert shown.code == 0
        [line] = [line for line in shown.out.splitlines() if "digits-dorefa" in line]
        return line.split()[1:]  # less the folder

    out = tmp_path / "out"
    command = start("train", *TINY, "epochs=500", "--out", out, checkpoint_seconds=0)
    metrics = out / "seed-0" / "metrics.jsonl"
    command.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    assert listed()[:3] == ["digits-dorefa", "0", "running"]
    assert command.send(signal.SIGINT).code == 130
    assert "run the same command to resume" in command.err
    assert listed()[2] == "interrupted"
    assert listed()[3].endswith("/500")

    done = unflip("train", *TINY, "--out", tmp_path / "out", "--seeds", "2")
    assert "epochs is 500 there and 2 here" in one_line_error(done)

    for file in (out / "seed-0").iterdir():
        file.unlink()
    done = unflip("train", *TINY, "--out", out, "--seeds", "1")
    assert done.code == 0, done.err
    assert "validation accuracy" in done.out
    result = json.loads((out / "seed-0" / "result.json").read_text())
    assert listed() == [
        "digits-dorefa",
        "0",
        "finished",
        "2/2",
        f"{result['accuracy']:.2f}",
        "%",
    ]


@pytest.mark.parametrize("name", ["[bold]a[/bold]", "b[/]", ":smile:[c"])
def test_folders_are_printed_as_they_are_called(unflip: Start, tmp_path: Path, name: str) -> None:
    """Not as markup or an emoji's name."""
    out = tmp_path / name
    recipe = tmp_path / f"{name}.yaml".replace("/", "")
    recipe.write_text(
        "{data: {name: digits}, model: {name: resnet20, width: 2}, epochs: 1, optimizer: {lr: 0.1}}"
    )
    done = unflip("train", recipe, "method=dorefa", "--out", out)
    assert done.code == 0, done.err
    assert f"in {out}" in done.out
    assert recipe.stem in done.out.splitlines()[-5], "the table's title"
    assert f"{out}/seed-0" in unflip("runs", tmp_path).out
    packed = out / "network.unflip"
    for arguments in (
        ("pack", out, "-o", packed),
        ("show", packed),
        ("bench", packed, "--runs", 1),
    ):
        done = unflip(*arguments)
        assert done.code == 0, done.err
        assert str(packed) in done.out.replace("\n", "")


def test_the_folder_of_a_run_that_is_not_named(unflip: Start) -> None:
    """And a recipe that starts from another trains that first, with the same data and model."""
    shared = ["model.width=2", "data.validation=1200"]
    command = unflip("train", "digits-finetune", *shared, "epochs=1")
    assert command.code == 0, command.err
    runs = command.folder / "runs"
    assert sorted(p.name for p in runs.iterdir()) == ["digits-dorefa", "digits-finetune"]
    for name in ("digits-dorefa", "digits-finetune"):
        saved = json.loads((runs / name / "seed-0" / "recipe.json").read_text())["recipe"]
        assert saved["model"]["width"] == 2
        assert saved["data"]["validation"] == 1200
    assert saved["epochs"] == 1
    assert "which is not finished" in command.out


def write_recipes(folder: Path) -> Path:
    """tune.yaml, which starts from base.yaml beside it."""
    folder.mkdir()
    common = "data: {name: digits, validation: 1200}\nmodel: {name: resnet20, width: 2}\nmethod: dorefa\n"
    common += "epochs: 1\noptimizer: {lr: 0.01}\nallow_no_flips: true\n"
    (folder / "base.yaml").write_text(common)
    (folder / "tune.yaml").write_text(common + "start: base.yaml\n")
    return folder / "tune.yaml"


def test_a_recipe_that_starts_from_a_file_beside_it(unflip: Start, tmp_path: Path) -> None:
    recipe = write_recipes(tmp_path / "mine")
    out = tmp_path / "runs" / "tune"
    done = unflip("train", recipe, "--out", out)  # given from another folder
    assert done.code == 0, done.err
    assert "tune starts from base, which is not finished" in done.out
    assert (tmp_path / "runs" / "base" / "seed-0" / "result.json").exists()
    saved = json.loads((out / "seed-0" / "recipe.json").read_text())["recipe"]
    assert saved["start"] == "base.yaml", "as it was written, wherever the files are moved to"
    page = tmp_path / "page.html"
    assert unflip("report", out, "-o", page).code == 0
    assert '"baseline":"base"' in page.read_text(), "its signs are compared with those of its start"


def test_a_start_that_needs_another_start_is_trained_with_it(unflip: Start, tmp_path: Path) -> None:
    recipe = write_recipes(tmp_path / "mine")
    third = recipe.with_name("third.yaml")
    third.write_text(recipe.read_text().replace("base.yaml", "tune.yaml"))
    done = unflip("train", third)
    assert done.code == 0, done.err
    assert "third starts from tune, which is not finished in runs/tune" in done.out
    assert "tune starts from base, which is not finished in runs/base" in done.out
    runs = done.folder / "runs"
    assert all((runs / n / "seed-0" / "result.json").exists() for n in ("base", "tune", "third"))


def test_a_start_that_is_not_a_file(unflip: Start, tmp_path: Path) -> None:
    recipe = write_recipes(tmp_path / "mine")
    recipe.with_name("base.yaml").unlink()
    line = one_line_error(unflip("train", recipe))
    assert "recipe tune: start names 'base.yaml', but there is no file" in line
    assert "relative to the folder of the recipe that names it" in line
    line = one_line_error(unflip("train", recipe, "start=there.yaml"))
    assert "but there is no file there.yaml" in line, (
        "an override is relative to the current folder"
    )


def test_a_finished_run_needs_its_start_no_more(unflip: Start, tmp_path: Path) -> None:
    recipe = write_recipes(tmp_path / "mine")
    out = tmp_path / "runs" / "tune"
    first = unflip("train", recipe, "--out", out)
    assert first.code == 0, first.err
    (tmp_path / "runs" / "base").rename(tmp_path / "elsewhere")
    recipe.with_name("base.yaml").unlink()
    again = unflip("train", recipe, "--out", out)
    assert again.code == 0, again.err
    assert again.out.splitlines()[-5:] == first.out.splitlines()[-5:], "its table"
    assert not (tmp_path / "runs" / "base").exists()


def test_other_files_do_not_disturb_runs(unflip: Start, tmp_path: Path) -> None:
    for name, text in (("a", "{}"), ("b", "[1"), ("c", '{"recipe": {"name": "soup"}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.json").write_text(text)
    assert "no runs in" in one_line_error(unflip("runs", tmp_path))


# --- what commands import


LOOK = """
import contextlib, io, json, sys
from unflip.cli import app

told = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = app(words, standalone_mode=False, prog_name="unflip")
    imported = sorted({"torch", "rich", "numpy"} & set(sys.modules))
    told[" ".join(words)] = [code or 0, out.getvalue(), imported]
print(json.dumps(told))
"""


def looked(commands: list[list[str]]) -> dict[str, Any]:
    """What commands print, and which large packages are imported afterwards; in one new interpreter."""
    words = [sys.executable, "-c", LOOK, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_help_and_lists_start_without_large_packages() -> None:
    """Importing torch takes seconds. rich and numpy double the time of a help text."""
    helps = [["--help"], ["--version"], *([c, "--help"] for c in COMMANDS if c != "study")]
    for command, (code, text, imported) in looked([*helps, ["recipes"]]).items():
        assert (command, code, imported) == (command, 0, [])
        assert text


def test_help_of_studies_starts_without_torch() -> None:
    from unflip.study.paper import EXPERIMENTS

    names = ["compare", "methods", "autobnn", *EXPERIMENTS]
    shown = looked([["study", "--help"], *(["study", name, "--help"] for name in names)])
    for command, (code, text, imported) in shown.items():
        assert (command, code, "torch" in imported) == (command, 0, False)
        assert text
    assert all(name in shown["study --help"][1] for name in names)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "study"])
def test_help_has_an_example_that_parses(command: str) -> None:
    [words] = examples(get_command(app).commands[command])  # type: ignore[attr-defined]
    assert words[:2] == ["unflip", command]
    parse(words)


@pytest.mark.parametrize("command", ["compare", "methods", "autobnn"])
def test_help_of_a_study_has_an_example_that_parses(command: str) -> None:
    group = get_command(app).commands["study"]  # type: ignore[attr-defined]
    [words] = examples(group.commands[command])
    assert words[:3] == ["unflip", "study", command]
    parse(words)


def examples(command: Any) -> list[list[str]]:
    lines = (command.epilog or "").splitlines()
    return [shlex.split(line.removeprefix("Example: ")) for line in lines if "Example: " in line]


def parse(words: list[str]) -> None:
    """Options and arguments that the command does not have raise."""
    command: Any = get_command(app)
    context = None
    while True:
        name, *rest = words
        context = command.make_context(name, rest, parent=context)
        if not isinstance(command, TyperGroup):
            return
        words = [*context._protected_args, *context.args]
        command = command.commands[words[0]]


def test_the_command_line_names_no_method_of_its_own() -> None:
    """A second method with a preparation step needs no new line here."""
    for path in Path(unflip_cli.__file__).parent.glob("*.py"):
        assert "lns" not in path.read_text().lower(), path.name
