"""Engines with processes of their own: a pool that trains, fails and is killed; Ray where it is installed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unflip.recipes.load import load_recipe
from unflip.runs.files import RunError
from unflip.study import output
from unflip.study.cluster import Cluster
from unflip.study.pool import Pool
from unflip.study.runner import StudyEngine, run_study
from unflip.study.study import Study
from unflip.study.summary import Summary
from unflip.study.task import Task
from unflip.train.job import Job, RunOptions

OnDigits = Callable[..., Study]
POOL, RAY = (StudyEngine(name, workers=2) for name in ("pool", "ray"))
CPU = RunOptions(device="cpu")
SMALL = ("data.validation=1200", "batch_size=64", "allow_no_flips=true")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_two_workers_give_what_one_process_gives(
    on_digits: OnDigits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(output, "draw", lambda study, summary: [])
    arms = ["xnor", "tbn"]
    pooled = on_digits("sota", tmp_path / "pool", 2, *SMALL)
    found = run_study(pooled, only=arms, engine=POOL, options=CPU)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "sota: xnor (seeds 0, 1) begins; 4 of 4 runs left"
    assert said[1] == "sota: tbn (seeds 0, 1) begins; 4 of 4 runs left", "side by side"
    assert "epoch 1/1" in (tmp_path / "pool" / "xnor" / "train.log").read_text()
    alone = run_study(on_digits("sota", tmp_path / "one", 2, *SMALL), only=arms, options=CPU)
    accuracies = [[arm.mean for arm in summary.arms] for summary in (found, alone)]
    assert accuracies[0] == accuracies[1]


def test_an_error_in_a_worker_is_the_studys(tmp_path: Path, on_digits: OnDigits) -> None:
    study = on_digits("ablation", tmp_path, 1, "data.name=folder")
    with pytest.raises(ValueError, match="'folder' needs the folder of the images"):
        run_study(study, engine=POOL, options=CPU)


def test_after_an_error_the_other_arms_are_trained(
    tmp_path: Path, on_digits: OnDigits, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "xnor" / "seed-0"
    blocked.parent.mkdir()
    blocked.write_text("not a folder")  # training fails there, and only there
    study = on_digits("sota", tmp_path, 1, *SMALL)
    with pytest.raises(RunError, match=f"cannot write to {blocked}"):
        run_study(study, only=["xnor", "tbn"], engine=replace(POOL, workers=1), options=CPU)
    assert f"sota: xnor failed: cannot write to {blocked}" in capsys.readouterr().out
    assert {arm.name: len(arm.accuracies) for arm in Summary.read(tmp_path).arms}["tbn"] == 1


def test_sigterm_stops_a_pool_as_ctrl_c_does(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    pool = Pool(tmp_path, 2)
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM"):
        signal.raise_signal(signal.SIGTERM)
    pool.stop()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_killed_pool_leaves_checkpoints_and_no_process(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "unflip", "study", "ablation", "--only", "baseline"]
    words += ["--engine", "pool", "--seeds", "1", "--out", str(tmp_path), "--device", "cpu"]
    for override in ("data.name=digits", "model.width=2", "epochs=500", *SMALL):
        words += ["--override", override]
    study = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = tmp_path / "baseline" / "seed-0"
    _wait_for(lambda: (folder / "metrics.jsonl").exists() and _lines(folder) > 1)
    study.kill()
    study.wait(30)
    _wait_for(lambda: len(list(folder.glob("checkpoint-*.json"))) == 2)  # the first, and now
    time.sleep(0.3)
    lines = _lines(folder)
    time.sleep(0.3)
    assert _lines(folder) == lines < 500, "nothing is still running"


def _lines(folder: Path) -> int:
    return (folder / "metrics.jsonl").read_text().count("\n")


def _wait_for(happened: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_without_ray_it_says_what_to_install(
    on_digits: OnDigits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"--engine ray needs Ray: pip install 'unflip\[ray\]'"):
        run_study(on_digits("ablation", tmp_path / "out"), engine=RAY, options=CPU)
    assert not (tmp_path / "out").exists()


class FakeRay:
    """A cluster that takes tasks and runs none."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {}

    def remote(self, **needed: int) -> Callable[[Any], Any]:
        return lambda work: SimpleNamespace(remote=self.tasks.append)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    return fake


def test_sigterm_stops_a_cluster_as_ctrl_c_does(fake_ray: FakeRay) -> None:
    before = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(1)
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM"):
        signal.raise_signal(signal.SIGTERM)
    cluster.stop()
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_machines_get_whole_paths(fake_ray: FakeRay) -> None:
    """They are in another folder than the one in which the command was given."""
    recipe = load_recipe("digits-dorefa")
    job = Job(recipe, 0, Path("out"), start=Path("base"), teacher=Path("teacher"))
    cluster = Cluster(1)
    cluster.start(Task("one", (job,), Path("data"), RunOptions(gpu_lock=Path("lock"))))
    cluster.running.clear()
    cluster.stop()
    [task] = fake_ray.tasks
    [sent] = task.jobs
    assert task.options.gpu_lock is None, "a task has a GPU of its own there"
    for path in (task.data, sent.out, sent.start, sent.teacher):
        assert path is not None
        assert path.is_absolute()


def test_ray_trains_and_passes_on_an_error(
    on_digits: OnDigits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray: Any = pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    blocked = tmp_path / "finetune-0.01" / "seed-0"
    blocked.parent.mkdir()
    blocked.write_text("not a folder")  # training fails there, and only there
    study = on_digits("ablation", tmp_path, 1, *SMALL)
    with pytest.raises(RunError, match=f"cannot write to {blocked}"):
        run_study(study, only=["finetune-0.01"], engine=RAY, options=CPU)
    assert not ray.is_initialized()
    assert Summary.read(tmp_path).arms[0].accuracies, "the baseline was trained first"
