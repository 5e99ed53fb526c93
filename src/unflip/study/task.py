"""A task: runs that are trained side by side, in this process or in one of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unflip.data import Dataset
from unflip.study import record
from unflip.train.loop import Job, TrainingStopped, train_together


@dataclass(frozen=True)
class Task:
    """Some jobs, with all that another process needs to know to do them."""

    name: str
    jobs: tuple[Job, ...]
    data: Path | None
    device: str | None
    turn: Path | None = None
    evaluate_every: int = 1

    def run(self) -> None:
        images = self.jobs[0].recipe.data.load(self.data)
        train_jobs(self.jobs, images, self.device, self.turn, evaluate_every=self.evaluate_every)


def train_jobs(
    jobs: Sequence[Job],
    images: Dataset,
    device: str | None = None,
    turn: Path | None = None,
    quiet: bool = False,
    evaluate_every: int = 1,
) -> None:
    """Train side by side; a run that stops leaves its reason, and the others go on from their last checkpoint."""
    left = list(jobs)
    while left:
        try:
            train_together(
                left,
                images,
                device=device,
                turn=turn,
                quiet=quiet,
                evaluate_every=evaluate_every,
            )
            return
        except TrainingStopped as stop:
            folder = stop.folder or (left[0].folder if len(left) == 1 else None)
            reason = str(stop)
        if folder is None:  # one of several, and it did not say which
            for job in left:
                train_jobs([job], images, device, turn, quiet, evaluate_every)
            return
        print(f"{folder} stopped: {reason}", flush=True)
        record.note_stop(folder, reason)
        left = [job for job in left if job.folder != folder]
