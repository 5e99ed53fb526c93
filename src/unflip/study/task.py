"""A task: runs that are trained side by side, in this process or in another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unflip.data import Dataset
from unflip.train.job import Job, RunOptions
from unflip.train.loop import TrainingStopped, train_together


@dataclass(frozen=True)
class Task:
    """Some jobs, with all that another process needs to do them."""

    name: str
    jobs: tuple[Job, ...]
    data: Path | None
    options: RunOptions

    def run(self) -> None:
        train_jobs(self.jobs, self.jobs[0].recipe.data.load(self.data), self.options)


def train_jobs(jobs: Sequence[Job], images: Dataset, options: RunOptions) -> None:
    """Train side by side. A run that stops keeps its reason, and the others resume from their last checkpoint."""
    left = list(jobs)
    while left:
        try:
            train_together(left, images, options)
            return
        except TrainingStopped as stop:
            run = stop.run or (left[0].run if len(left) == 1 else None)
            reason = str(stop)
        if run is None:  # one of several, and it is not known which
            for job in left:
                train_jobs([job], images, options)
            return
        print(f"{run} stopped: {reason}", flush=True)
        run.stop(reason)
        left = [job for job in left if job.run != run]
