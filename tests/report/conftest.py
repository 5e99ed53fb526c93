"""What the tests of the report share: small real runs, a study of them, and a browser."""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from unflip.data import load as load_data
from unflip.recipes.load import load_recipe
from unflip.recipes.schema import Recipe
from unflip.report import report_data
from unflip.runs.run import Run
from unflip.train.job import RunOptions
from unflip.train.loop import train

SMALL = ["model.width=4", "batch_size=128", "allow_no_flips=true"]
EVIL = "LNS </script><img src=x onerror=\"document.title='broken'\"> & <b>α</b> \u2028"


def _train(root: Path, name: str, seeds: int, *overrides: str) -> Recipe:
    recipe = load_recipe(name, [*SMALL, *overrides])
    start = root / recipe.start if recipe.start else None
    train(
        recipe, load_data("digits"), root / name, seeds=range(seeds), start=start,
        options=RunOptions(device="cpu", quiet=True),
    )  # fmt: skip
    return recipe


@contextmanager
def _one_thread() -> Iterator[None]:
    """As every test has it; fixtures of a session are made before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a baseline of two seeds, and fine-tuning and LNS from it; read only."""
    root = tmp_path_factory.mktemp("runs")
    with _one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such a short warm start does not reach its agreement
        _train(root, "digits-dorefa", 2, "epochs=2")
        _train(root, "digits-finetune", 1, "epochs=1")
        _train(root, "digits-lns", 2, "epochs=2", "method.warm_steps=10")
    return root


def arm(root: Path, name: str, label: str, **more: Any) -> dict[str, Any]:
    """An arm of study.json, from a run's own files."""
    folder = more.pop("folder", name)
    runs = Run.seeds_of(root / folder)
    found = [asdict(outcome) for run in runs if (outcome := run.outcome)]
    values = [run["accuracy"] for run in found]
    return {
        "name": name,
        "label": label,
        "folder": folder,
        "start": None,
        "command": f"unflip train {folder} {' '.join(SMALL)}",
        "recipe": runs[0].recipe,
        "paper": None,
        "x": None,
        "runs": found,
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "best": max(values),
        **more,
    }


def summary(root: Path) -> dict[str, Any]:
    """study.json: the three runs, and a sweep (the same LNS run under other names)."""
    arms = [
        arm(root, "digits-dorefa", "baseline", paper={"mean": 85.06, "std": None}),
        arm(root, "digits-finetune", "fine-tuning", start="digits-dorefa"),
        arm(root, "digits-lns", EVIL, start="digits-dorefa", paper={"mean": 85.56, "std": 0.11}),
        *(
            arm(root, f"alpha-{x}", f"LNS, α = {x}", folder="digits-lns", x=x)
            for x in (0, 0.1, 1, 10)
        ),
    ]
    stopped = {"seed": 7, "accuracy": None, "best_accuracy": None, "epochs": 0, "seconds": 0.1}
    arms[1]["runs"].append({**stopped, "stopped": "the loss is not finite"})
    test = {"a": "digits-lns", "b": "digits-dorefa", "difference": -1.234}
    return {
        "study": "ablation",
        "unflip": "0.1.0",
        "title": "A study of digits",
        "data": "digits",
        "evaluated_on": "test",
        "epochs_note": "2 epochs, then 1 or 2 more",
        "seeds": [0, 1],
        "arms": arms,
        "tests": [{**test, "t": -0.512, "df": 1.93, "p": 0.00042}],
    }


@pytest.fixture(scope="session")
def study(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study's folder, with its runs; read only."""
    folder = tmp_path_factory.mktemp("study") / "study"
    shutil.copytree(runs, folder)
    (folder / "study.json").write_text(json.dumps(summary(folder)))
    return folder


@pytest.fixture(scope="session")
def study_data(study: Path) -> dict[str, Any]:
    """The report of that study; read only."""
    with _one_thread():
        return report_data([study])


@pytest.fixture(scope="session")
def kept(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study after --keep-signs, and without its checkpoints; read only."""
    whole = tmp_path_factory.mktemp("kept") / "study"
    shutil.copytree(study, whole)
    result = whole / "digits-lns" / "seed-1" / "result.json"
    saved = result.read_bytes()
    result.unlink()  # not finished: nothing is kept
    with _one_thread():
        report_data([whole], keep_signs=True)
    result.write_bytes(saved)
    for path in whole.rglob("checkpoint-*"):
        path.unlink()
    return whole


@pytest.fixture(scope="session")
def browser_module() -> ModuleType:
    path = Path(__file__).with_name("browser.py")
    spec = importlib.util.spec_from_file_location("report_browser", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(browser_module: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A tab of a real browser."""
    if browser_module.CHROMIUM is None:
        pytest.skip("there is no chromium here (Debian: apt-get install chromium)")
    with browser_module.browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab
