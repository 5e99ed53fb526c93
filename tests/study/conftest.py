"""A trainer that only writes what ``train`` would, for studies whose arms matter more than their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from unflip.data import InputSpec
from unflip.recipes.load import load_recipe
from unflip.runs.checkpoint import Checkpoint
from unflip.runs.run import Run
from unflip.study import output, task
from unflip.study.paper import EXPERIMENTS
from unflip.study.study import Study
from unflip.train.health import TrainingStopped
from unflip.train.job import Job, RunOptions

DIGITS = ("data.name=digits", "data.validation=0", "model.width=2", "epochs=1")
INPUTS = InputSpec((1, 8, 8), tuple("0123456789"), (0.3,), (0.4,))


class FakeTrainer:
    """Stands for ``train_together``: remembers which runs it was given to train side by side."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.options: list[RunOptions] = []
        self.before: Callable[[Sequence[Job]], None] = lambda jobs: None
        self.stops: dict[str, str] = {}  # "arm/seed-0": reason
        self.inputs = INPUTS
        self.says_which = True

    @property
    def trained(self) -> list[str]:
        return [name for call in self.calls for name in call]

    def __call__(
        self, jobs: Sequence[Job], images: Any, options: RunOptions
    ) -> list[dict[str, Any]]:
        left = [job for job in jobs if not job.run.finished]
        self.before(left)
        self.calls.append([_name(job) for job in left])
        self.options.append(options)
        for job in left:
            if _name(job) in self.stops:
                self._stop(job)
        return [_finish(job, self.inputs) for job in left]

    def _stop(self, job: Job) -> None:
        _begin(job, self.inputs)
        raise TrainingStopped(self.stops[_name(job)], job.run if self.says_which else None)


def _name(job: Job) -> str:
    return f"{job.out.name}/seed-{job.seed}"


def _begin(job: Job, inputs: InputSpec) -> Run:
    job.run.folder.mkdir(parents=True, exist_ok=True)
    job.run.begin(job.recipe.plain(), job.seed, f"unflip train {job.recipe.name}", inputs)
    return job.run


def _finish(job: Job, inputs: InputSpec = INPUTS) -> dict[str, Any]:
    if job.recipe.start is not None:
        assert job.start is not None
        assert Run.find(job.start, job.seed).finished, "its start comes first"
    if job.recipe.distill is not None:
        assert job.teacher is not None
        assert Run.find(job.teacher).finished, "its teacher comes first"
    run = _begin(job, inputs)
    run.save_checkpoint(Checkpoint(job.recipe.epochs, 0, {}, {}))
    run.cut_metrics(0)
    last = 80 + len(job.out.name) / 10 + job.seed
    for epoch, accuracy in enumerate((last - 9, last + 1, last), 1):
        line = {"epoch": epoch, "loss": 1 / epoch, "accuracy": accuracy}
        run.add_metrics({**line, "flip_rate": 0.01 / epoch, "seconds": 2})
    top5 = 95.0 + job.seed
    result = {"accuracy": last, "top5": top5, "epochs": job.recipe.epochs, "seconds": 6.0}
    run.finish(result)
    return result


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> FakeTrainer:
    """And no figures: they take longer than all else."""
    fake = FakeTrainer()
    monkeypatch.setattr(task, "train_together", fake)
    monkeypatch.setattr(output, "draw", lambda study, summary: [])
    return fake


@pytest.fixture
def teacher_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What looks like a finished teacher's folder."""
    out = tmp_path_factory.mktemp("teacher")
    _finish(Job(load_recipe("cifar10-resnet20-teacher", list(DIGITS)), 0, out))
    return out


@pytest.fixture
def on_digits(teacher_run: Path) -> Callable[..., Study]:
    """``on_digits("ablation", out, seeds, "field=value", ...)``: a shipped experiment on digits, small."""

    def make(name: str, out: Path, seeds: int = 2, *overrides: str, **options: Any) -> Study:
        options.setdefault("teacher", teacher_run if name in ("beyond", "final") else None)
        return EXPERIMENTS[name].study(out, seeds, overrides=[*DIGITS, *overrides], **options)

    return make
