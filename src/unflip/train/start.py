"""Where a run's first weights come from: a finished run, a file of weights, and its method's preparation."""

from __future__ import annotations

import copy
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from unflip import models
from unflip.binarize import load_twin
from unflip.data import Dataset
from unflip.data.source import closing, mix
from unflip.kernels import prediction_kernels
from unflip.recipes.load import checked
from unflip.recipes.schema import MAKE_WEIGHTS, WEIGHTS, Recipe, Schedule, is_weights
from unflip.runs import provenance
from unflip.runs.load import model_of, model_state
from unflip.runs.run import Run
from unflip.train.engine import Engine
from unflip.train.job import Job, RunOptions
from unflip.train.learner import Learner


def load_first_weights(
    job: Job,
    model: nn.Module,
    data: Dataset,
    device: torch.device,
    options: RunOptions,
    memo: dict[str, Any] | None,
) -> None:
    """Bring the model to where its first epoch starts. ``memo`` is shared by runs that are prepared side by side."""
    start = _start_of(job)
    if isinstance(start, Path):
        _load_weights(model, start)
    elif start is not None:
        _refuse_other_start(job.recipe, start, data)
        load_twin(model, model_state(start.load_checkpoint().tensors))
    if job.recipe.method != "float":
        preparation = Preparation(job, start, data, device, options, memo)
        with nullcontext() if options.eager else prediction_kernels(model, device):
            job.recipe.resolved_method().prepare(model, preparation)


class Preparation:
    """What a method's ``prepare`` may ask of training (``methods.base.Preparation``)."""

    def __init__(
        self,
        job: Job,
        start: Run | Path | None,
        data: Dataset,
        device: torch.device,
        options: RunOptions,
        memo: dict[str, Any] | None,
    ) -> None:
        self.job, self.start, self.data, self.device = job, start, data, device
        self.options, self.memo = options, memo

    def say(self, text: str) -> None:
        if not self.options.quiet:
            print(f"seed {self.job.seed}: {text}", flush=True)

    def branches(self, count: int, epochs: int, rate: float) -> tuple[nn.Module, list[nn.Module]]:
        """The network this run started from, and ``count`` copies of it, trained for ``epochs`` more at ``rate`` times
        its learning rates with other orders of the data."""
        if not isinstance(self.start, Run):
            raise ValueError(
                f"method {self.job.recipe.resolved_method()} trains copies of the run that recipe "
                f"{self.job.recipe.name} starts from, but start is {self.start}, which is not a run: give --start a "
                "finished run"
            )
        recipe = checked(self.start.recipe, f"of {self.start}")
        baseline = model_of(self.start, trusted=True)
        models = train_branches(
            baseline.to(self.device),
            recipe,
            self.data,
            count=count,
            epochs=epochs,
            rate=rate,
            seed=self.start.seed,
            device=self.device,
            options=self.options,
        )
        return baseline, models


def train_branches(
    baseline: nn.Module,
    recipe: Recipe,
    data: Dataset,
    *,
    count: int,
    epochs: int,
    rate: float,
    seed: int,
    device: torch.device,
    options: RunOptions,
) -> list[nn.Module]:
    """Copies of ``baseline``, trained for ``epochs`` at ``rate`` times the recipe's learning rates, constant, each with
    another order of the data. ``recipe`` is the one that trained the baseline, which is left as it is."""
    if recipe.distill is not None:
        raise ValueError(
            f"recipe {recipe.name} has a teacher: copies of its network would have to learn from it too, which is not "
            "supported"
        )
    short = recipe.model_copy(update={"epochs": epochs, "schedule": Schedule()})
    compiled, captured = options.compile and not options.eager, not options.eager
    with closing(data.source(device, options.workers)) as source:
        learners = [
            Learner(short, copy.deepcopy(baseline).train(), source, device) for _ in range(count)
        ]
        with Engine(learners, compiled=compiled, captured=captured) as engine:
            for epoch in range(epochs):
                for branch, learner in enumerate(learners):
                    learner.start_epoch(mix(seed, branch), epoch, rate)
                for _ in range(learners[0].steps):
                    engine.step()
    return [learner.model for learner in learners]


def _load_weights(model: nn.Module, path: Path) -> None:
    """Take over the weights of the same network, float or of another method; all names must fit.

    unflip cannot know which images produced them.
    """
    try:
        state = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"start {path} should be {WEIGHTS}: {error}") from None
    if "sums.loss" in state:
        raise ValueError(
            f"start {path} is a checkpoint of a run, which holds more than weights: give the run's folder"
        )
    try:
        load_twin(model, state)
    except ValueError as error:
        raise ValueError(f"start {path}: {error}") from None
    except (
        RuntimeError
    ) as error:  # torch lists names that are missing, unexpected or of another shape
        lines = [textwrap.shorten(line, 300) for line in str(error).splitlines()[1:6]]
        raise ValueError(
            f"start {path} holds the weights of another network than the recipe's: {' '.join(lines)}"
        ) from None


def _start_of(job: Job) -> Run | Path | None:
    """The finished run that ``recipe.start`` names, or a file of weights in its place."""
    recipe, start, seed = job.recipe, job.start, job.seed
    if recipe.start is None:
        return None
    if start is None:
        what = "the weights in" if is_weights(recipe.start) else "a run of"
        raise ValueError(f"recipe {recipe.name} starts from {what} {recipe.start}: give --start")
    if is_weights(start):
        return start
    run = Run.find(start, seed)
    if run.folder.is_file():
        raise ValueError(
            f"--start {start} should be a finished run's folder, or {WEIGHTS}; {MAKE_WEIGHTS}"
        )
    if not run.finished:
        raise ValueError(
            f"recipe {recipe.name} starts from a finished run of {recipe.start}, seed {seed}; {run} is not one. "
            f"Run: unflip train {recipe.start}"
        )
    return run


def _refuse_other_start(recipe: Recipe, run: Run, data: Dataset) -> None:
    """Refuse weights of other images or of another network, which may fit its tensors and mean nothing."""
    differ = provenance.other_images(run, recipe.plain()["data"], data.fingerprint)
    if differ:
        raise ValueError(
            f"recipe {recipe.name} has data {differ[1]}; the run it starts from in {run} has {differ[0]}, and may have "
            "seen images that are held out here. Start from a run on the same data"
        )
    there = checked(run.recipe, f"of {run}")
    refuse_other_network(recipe, there, f"the run it starts from in {run}")


def refuse_other_network(recipe: Recipe, start: Recipe, what: str) -> None:
    """``what`` names the origin of ``start`` in the message."""
    theirs, mine = (
        {"name": m.name, **models.all_options(m.name, m.options)}
        for m in (start.model, recipe.model)
    )
    for option in sorted(theirs.keys() & mine.keys()):
        if theirs[option] != mine[option]:
            raise ValueError(
                f"recipe {recipe.name} has model.{option}={mine[option]}, but {what} has {theirs[option]}: that is "
                "another network"
            )
