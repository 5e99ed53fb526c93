"""The training loop: epochs, evaluation, one JSON line an epoch, checkpoints, signals, resuming.

A run lives in a folder ``OUT/seed-N``:

    recipe.json       the recipe with every default filled in, and the seed
    provenance.json   images, start, teacher and threads (see provenance.py)
    metrics.jsonl     one line an epoch
    checkpoint-*      the last two checkpoints (see checkpoint.py)
    result.json       written last: the run is finished
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unflip import methods, models
from unflip.data import ImageSet
from unflip.data.source import Images
from unflip.runs import checkpoint as checkpoints
from unflip.runs import provenance
from unflip.runs.checkpoint import CheckpointError
from unflip.runs.files import read_saved, refuse_other_seed
from unflip.runs.run import leave_nothing_behind, lock, recipe_difference, seed_folder
from unflip.train import distributed
from unflip.train.branches import train_branches
from unflip.train.engine import Engine
from unflip.train.gpu_lock import take_turn
from unflip.train.health import TrainingStopped
from unflip.train.learner import Learner, build_model, load_start
from unflip.train.live_run import Seed
from unflip.train.progress import Progress
from unflip.train.recipe import Recipe, recipe_in
from unflip.train.signals import interrupt, sigterm_as_ctrl_c, stop_signals
from unflip.train.teacher import Teacher, load_teacher
from unflip.train.weights import ACCEPTED, HOW, is_weights, load_weights

__all__ = ["Job", "TrainingStopped", "train", "train_together"]

LONG_EPOCH_SECONDS = 60.0  # without a checkpoint: then one is written in the middle of the epoch
SAVING_SHARE = 0.02  # of the time, at most: many large networks side by side save less often


@dataclass(frozen=True)
class Job:
    """One run: a recipe and a seed, the folder of the recipe's seeds, and the finished runs that it starts from (or a
    file of weights) and learns from."""

    recipe: Recipe
    seed: int
    out: Path
    start: Path | None = None
    teacher: Path | None = None

    @property
    def folder(self) -> Path:
        return self.out / f"seed-{self.seed}"


@dataclass(frozen=True)
class How:
    """What does not change the result: where and how loudly a run is trained."""

    device: torch.device
    eager: bool
    tensorboard: bool
    checkpoint_seconds: float
    quiet: bool
    turn: Path | None
    evaluate_every: int


def train(
    recipe: Recipe,
    data: ImageSet,
    out: Path,
    *,
    seeds: Sequence[int] = (0,),
    start: Path | None = None,
    teacher: Path | None = None,
    device: str | None = None,
    eager: bool = False,
    tensorboard: bool = False,
    checkpoint_seconds: float = 20.0,
    quiet: bool = False,
    turn: Path | None = None,
    evaluate_every: int = 1,
) -> list[dict[str, Any]]:
    """Train ``recipe`` on ``data`` for each seed, side by side; returns their results.

    A seed that is finished in ``out`` is not run again, one that was interrupted goes on. ``start`` is the
    run folder of the recipe named by ``recipe.start``, or a .safetensors file of weights, ``teacher`` the run folder of
    the one that ``recipe.distill`` names. Ctrl-C and SIGTERM save before they stop. ``turn`` is a file that processes
    sharing a GPU have in common: they compile side by side, and one at a time runs its epochs. Accuracy is measured
    every ``evaluate_every`` epochs and after the last; between, it is null in the metrics.
    """
    return train_together(
        [Job(recipe, seed, out, start, teacher) for seed in seeds],
        data,
        device=device,
        eager=eager,
        tensorboard=tensorboard,
        checkpoint_seconds=checkpoint_seconds,
        quiet=quiet,
        turn=turn,
        evaluate_every=evaluate_every,
    )


def train_together(
    jobs: Sequence[Job],
    data: ImageSet,
    *,
    device: str | None = None,
    eager: bool = False,
    tensorboard: bool = False,
    checkpoint_seconds: float = 20.0,
    quiet: bool = False,
    turn: Path | None = None,
    evaluate_every: int = 1,
) -> list[dict[str, Any]]:
    """Train several runs side by side, of one recipe or of several that take the same steps.

    On a GPU they are branches of one captured graph, which keeps it busy as one small network cannot.
    """
    _refuse_unequal(jobs)
    _refuse_unused(jobs)
    check_device(device)
    if evaluate_every < 1:
        raise ValueError(f"evaluate_every={evaluate_every} should be at least 1")
    with distributed.process_group(device) as chosen:
        how = How(
            torch.device(chosen or ("cuda" if torch.cuda.is_available() else "cpu")),
            # Several GPUs talk between kernels: their steps are neither compiled nor captured.
            eager or distributed.launched(),
            tensorboard,
            checkpoint_seconds,
            quiet or distributed.rank() > 0,
            turn if distributed.rank() == 0 else None,  # the others wait for rank 0
            evaluate_every,
        )
        return _train_in_group(jobs, jobs[0].recipe.data.of(data), how)


def check_device(device: str | None) -> None:
    """Refuse a device that is not there (None: whichever is)."""
    if device is not None and device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} should be cpu or cuda")
    if device is not None and device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch {torch.__version__} finds no GPU here")


def _refuse_unequal(jobs: Sequence[Job]) -> None:
    """Runs side by side take their steps together."""
    for job in jobs:
        for field in ("data", "epochs", "batch_size", "precision"):
            mine, first = getattr(job.recipe, field), getattr(jobs[0].recipe, field)
            if mine != first:
                raise ValueError(
                    f"{job.recipe.name} cannot be trained beside {jobs[0].recipe.name}: its {field} is "
                    f"{mine!r}, not {first!r}"
                )


def _refuse_unused(jobs: Sequence[Job]) -> None:
    """Where nothing starts from a run or learns from it, naming one is a mistake."""
    for job in jobs:
        name = job.recipe.name
        if job.start is not None and job.recipe.start is None:
            hint = f": give start={job.start} instead" if is_weights(job.start) else ""
            raise ValueError(f"recipe {name} starts from nothing, but --start is {job.start}{hint}")
        if job.teacher is not None and job.recipe.distill is None:
            raise ValueError(f"recipe {name} has no teacher, but --teacher is {job.teacher}")


def _train_in_group(jobs: Sequence[Job], data: ImageSet, how: How) -> list[dict[str, Any]]:
    results = distributed.from_rank_0([_finished(job, data) for job in jobs])
    waiting = [i for i, result in enumerate(results) if result is None]
    if not waiting:
        return results
    images = Images(data, how.device)
    first = distributed.rank() == 0
    folders = [jobs[i].folder for i in waiting] if first else []
    with sigterm_as_ctrl_c(), leave_nothing_behind(folders) as begun, lock(folders):
        groups = distributed.from_rank_0(_side_by_side(jobs, waiting, how.quiet) if first else None)
        teachers = _teachers([jobs[i] for i in waiting], data, images, how)
        for group, at in groups:
            runs = _prepare([jobs[i] for i in group], data, images, teachers, at, how)
            if how.tensorboard and first:
                for run in runs:
                    run.open_tensorboard()
            if first:
                _resume(runs, at, how.quiet)
            begun()
            with _nan_explained(runs[0].recipe), stop_signals() as stop:
                finished = _run(runs, at, stop, how)
            for i, result in zip(group, finished, strict=True):
                results[i] = result
            if stop and first:  # after the last step: these are finished, and no others are begun
                interrupt(stop[0])
    return results


def _side_by_side(
    jobs: Sequence[Job], waiting: list[int], quiet: bool
) -> list[tuple[list[int], tuple[int, int] | None]]:
    """Which of the waiting runs go on together from a checkpoint all of them have whole (None: from the start).

    That is one group, unless someone asks for more seeds after one was interrupted half-way: the old one
    is finished first, then the new ones begin.
    """
    groups: list[tuple[list[int], set[tuple[int, int]]]] = []
    for i in waiting:
        whole, problems = checkpoints.survey(jobs[i].folder)
        for problem in problems if not quiet else ():
            before = "using the checkpoint before it" if whole else "starting again"
            print(f"warning: {problem}; {before}", flush=True)
        for members, common in groups:
            if common & set(whole) or not (common or whole):
                members.append(i)
                common &= set(whole)
                break
        else:
            groups.append(([i], set(whole)))
    return [(members, max(common, default=None)) for members, common in groups]


def _finished(job: Job, data: ImageSet) -> dict[str, Any] | None:
    """The result of a finished run; an error if the folder holds another recipe's, or one of other images, start or
    teacher."""
    saved = job.folder / "recipe.json"
    if saved.exists():
        refuse_other_seed(job.folder, job.seed)
        there = read_saved(saved, "recipe")["recipe"]
        difference = recipe_difference(there, job.recipe)
        if difference:
            raise CheckpointError(
                f"{job.folder} holds a run of another recipe: {'; '.join(difference)}. "
                "Choose another --out, or delete that folder."
            )
        provenance.refuse_another(job, data)
    path = job.folder / "result.json"
    return read_saved(path, "accuracy", "epochs") if path.exists() else None


def _teachers(
    jobs: Sequence[Job], data: ImageSet, images: Images, how: How
) -> dict[Path | None, Teacher]:
    """One teacher for all runs that learn from it."""
    found: dict[Path | None, Teacher] = {}
    for job in jobs:
        distill, folder = job.recipe.distill, job.teacher
        if distill is None:
            continue
        if folder is None:
            raise ValueError(
                f"recipe {job.recipe.name} learns from a run of {distill.teacher}: give --teacher"
            )
        if folder not in found:
            seed = seed_folder(folder, 0)
            if not how.quiet:
                print(f"asking the teacher in {seed} about every crop and flip", flush=True)
            found[folder] = load_teacher(seed, job.recipe, data, images, how.device)
    return found


def _prepare(
    jobs: Sequence[Job],
    data: ImageSet,
    images: Images,
    teachers: Mapping[Path | None, Teacher],
    at: tuple[int, int] | None,
    how: How,
) -> list[Seed]:
    # Arms that differ in α begin alike; one run alone need not keep what no other asks for.
    memo: dict[str, Any] | None = {} if len(jobs) > 1 else None
    return [
        _prepare_run(job, data, images, teachers.get(job.teacher), at, how, memo) for job in jobs
    ]


def _prepare_run(
    job: Job,
    data: ImageSet,
    images: Images,
    teacher: Teacher | None,
    at: tuple[int, int] | None,
    how: How,
    memo: dict[str, Any] | None,
) -> Seed:
    model = build_model(job.recipe, data, job.seed).to(how.device)
    if distributed.rank() == 0:
        threads = torch.get_num_threads() if how.device.type == "cpu" else None
        if at is None:  # otherwise a checkpoint brings the weights
            _first_weights(job, model, data, how, memo)
            # Not later: what earlier epochs saw is known to no one.
            provenance.write(job, data, threads)
        elif (before := provenance.keep_threads(job.folder, threads)) and not how.quiet:
            print(
                f"warning: {job.folder} goes on with torch's threads at {threads}, and had {before}: its last digits "
                "will be others than without a stop",
                flush=True,
            )
        saved = {"recipe": job.recipe.plain(), "seed": job.seed}
        data_bytes = json.dumps(saved, indent=1).encode() + b"\n"
        checkpoints.write_atomically(job.folder / "recipe.json", data_bytes)
    answers = None if teacher is None else teacher.answers
    learner = Learner(job.recipe, model, images, how.device, answers)
    return Seed(job.recipe, job.seed, job.folder, learner, len(data.classes))


def _first_weights(
    job: Job, model: nn.Module, data: ImageSet, how: How, memo: dict[str, Any] | None
) -> None:
    """Bring the model to the state its first epoch starts from."""
    folder = _start_folder(job)
    if folder is not None and is_weights(folder):
        load_weights(model, folder)
    elif folder is not None:
        _refuse_other_start(job.recipe, folder, data)
        load_start(model, checkpoints.load_usable(folder).tensors)
    if job.recipe.method != "float":
        preparation = _Preparation(job, folder, data, how, memo)
        methods.resolve(job.recipe.method).prepare(model, preparation)


@dataclass(frozen=True)
class _Preparation:
    """What a run offers its method before the first epoch; a ``methods.Preparation``."""

    job: Job
    start: Path | None
    data: ImageSet
    how: How
    memo: dict[str, Any] | None

    def say(self, text: str) -> None:
        if not self.how.quiet:
            print(f"seed {self.job.seed}: {text}", flush=True)

    def branches(self, count: int, epochs: int, rate: float) -> tuple[nn.Module, list[nn.Module]]:
        if self.start is None or is_weights(self.start):
            raise ValueError(
                f"recipe {self.job.recipe.name}: its method trains copies of the run it starts from, and "
                f"{self.start} is not a finished run: give --start the folder of one"
            )
        there = read_saved(self.start / "recipe.json", "recipe", "seed")
        recipe = Recipe.model_validate(there["recipe"])
        baseline = build_model(recipe, self.data, there["seed"])
        load_start(baseline, checkpoints.load_usable(self.start).tensors)
        baseline.to(self.how.device)
        return baseline, train_branches(
            baseline,
            recipe,
            self.data,
            count,
            epochs,
            rate,
            seed=there["seed"],
            device=self.how.device,
            eager=self.how.eager,
        )


def _refuse_other_start(recipe: Recipe, folder: Path, data: ImageSet) -> None:
    """Weights of other images, or of another network: those may fit its tensors and mean nothing."""
    differ = provenance.other_images(folder, recipe, data)
    if differ:
        raise ValueError(
            f"recipe {recipe.name} has data {differ[1]}, the run it starts from in {folder} has "
            f"{differ[0]}, and may have seen images that are held out here"
        )
    refuse_other_network(recipe, recipe_in(folder), f"the run it starts from in {folder}")


def refuse_other_network(recipe: Recipe, start: Recipe, what: str) -> None:
    """``what`` the recipe ``start`` is of, for the message."""
    theirs, mine = (
        {"name": m.name, **models.all_options(m.name, m.options)}
        for m in (start.model, recipe.model)
    )
    for option in sorted(theirs.keys() & mine.keys()):
        if theirs[option] != mine[option]:
            raise ValueError(
                f"recipe {recipe.name} has model.{option}={mine[option]}, {what} has {theirs[option]}: it is another "
                "network's"
            )


def _start_folder(job: Job) -> Path | None:
    """The finished run that ``recipe.start`` names, or a file of weights in its place."""
    recipe, start, seed = job.recipe, job.start, job.seed
    if recipe.start is None:
        return None
    if start is None:
        what = "the weights in" if is_weights(recipe.start) else "a run of"
        raise ValueError(f"recipe {recipe.name} starts from {what} {recipe.start}: give --start")
    if is_weights(start):
        return start
    folder = seed_folder(start, seed)
    if folder.is_file():
        raise ValueError(f"--start {start} should be a finished run's folder, or {ACCEPTED}; {HOW}")
    if not (folder / "result.json").exists():
        raise ValueError(
            f"recipe {recipe.name} starts from a finished run of {recipe.start}, seed {seed}; "
            f"{folder} is not one. Run: unflip train {recipe.start}"
        )
    return folder


def _run(
    runs: list[Seed], at: tuple[int, int] | None, stop: list[int], how: How
) -> list[dict[str, Any]]:
    epoch, step = at or (0, 0)
    for run in runs:
        run.learner.take_from_rank_0()
        if distributed.rank() > 0:
            run.moved.remember()
    engine = _engine(runs, how)
    for run in runs:
        run.moved.capture_next = engine.graph is not None
    _restore_position(runs, epoch, step)
    names = list(dict.fromkeys(run.recipe.name for run in runs))
    seeds = list(dict.fromkeys(run.seed for run in runs))
    epochs, steps = runs[0].recipe.epochs, runs[0].learner.steps
    lines: list[dict[str, Any]] = []
    with (
        take_turn(how.turn, stop),
        Progress(", ".join(names), epochs, seeds, engine.mode, how.quiet) as progress,
    ):
        saved_at = began = time.monotonic()
        pause = how.checkpoint_seconds
        while epoch < epochs:
            epoch_began = time.monotonic()
            while step < steps:
                engine.step()
                step += 1
                stopping = bool(stop) and distributed.rank() == 0
                if stopping or time.monotonic() - saved_at > LONG_EPOCH_SECONDS:
                    _save(runs, epoch, step)
                    saved_at = time.monotonic()
                if stopping:
                    interrupt(stop[0])
                if engine.graph is None:
                    progress.step(epoch, step, steps)
            if how.device.type == "cuda":
                # The epoch's steps are still on their way.
                for run in runs if epoch + 1 < epochs else ():
                    run.learner.plan_ahead(run.seed, epoch + 1)
                torch.cuda.synchronize()
            seconds = time.monotonic() - epoch_began
            due = (epoch + 1) % how.evaluate_every == 0 or epoch + 1 == epochs
            lines = [_end_epoch(run, epoch, seconds, due) for run in runs]
            progress.epoch(epoch, lines)
            epoch, step = epoch + 1, 0
            if epoch == epochs or time.monotonic() - saved_at > pause:
                saving = time.monotonic()
                _save(runs, epoch, 0)
                saved_at = time.monotonic()
                pause = _pause(how.checkpoint_seconds, saved_at - saving)
            if epoch < epochs:
                _start_epoch(runs, epoch)
    total = time.monotonic() - began
    if not lines:  # everything was done but for the last file
        lines = [run.last_line() for run in runs]
    return [run.finish(line, total) for run, line in zip(runs, lines, strict=True)]


def _engine(runs: list[Seed], how: How) -> Engine:
    began = time.monotonic()
    slow = how.device.type == "cuda" and not how.eager and not how.quiet
    if slow:
        print("compiling, which takes a minute or two", flush=True)
    engine = Engine([run.learner for run in runs], compiled=not how.eager, captured=not how.eager)
    if slow:
        print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
    return engine


def _pause(seconds: float, last: float) -> float:
    """How long to go on without a checkpoint if the last one took ``last``: ``seconds``, or up to ten times that."""
    return max(seconds, min(last / SAVING_SHARE, 10 * seconds))


def _end_epoch(run: Seed, epoch: int, seconds: float, evaluate: bool) -> dict[str, Any]:
    try:
        return run.end_epoch(epoch, seconds, evaluate)
    except TrainingStopped as stop:
        stop.folder = run.folder  # of those side by side
        raise


@contextmanager
def _nan_explained(recipe: Recipe) -> Iterator[None]:
    """On a CPU a binary layer refuses a NaN by name; say where it comes from."""
    try:
        yield
    except ValueError as error:
        if "NaN" not in str(error):
            raise
        raise TrainingStopped(
            f"{error}. Lower optimizer.lr (now {recipe.optimizer.lr})."
        ) from error


def _resume(runs: list[Seed], at: tuple[int, int] | None, quiet: bool) -> None:
    """Bring every seed to the checkpoint they have in common, and drop what lies beyond it.

    A new run begins with a checkpoint: a warm start is not repeated, and a disk that takes none is found
    out before the training, not after it.
    """
    for run in runs:
        checkpoints.drop_after(run.folder, at)
        lost = run.cut_metrics(at[0] if at else 0)
        if lost and not quiet:
            which = ", ".join(map(str, lost))
            print(f"warning: {run.metrics} has lost its lines of epochs {which}", flush=True)
        if at is None:
            checkpoints.save(run.folder, run.checkpoint(0, 0))
        else:
            run.restore(checkpoints.load_at(run.folder, *at))
    if at is not None and not quiet:
        print(f"resuming at epoch {at[0] + 1}, step {at[1]}", flush=True)


def _restore_position(runs: list[Seed], epoch: int, step: int) -> None:
    """Where in the epoch's plan to go on; sums were restored and must survive ``start_epoch``."""
    if epoch >= runs[0].recipe.epochs:
        return
    sums = [(run.learner.loss_sum.clone(), run.learner.auxiliary_sum.clone()) for run in runs]
    _start_epoch(runs, epoch)
    if step:
        for run, (loss, auxiliary) in zip(runs, sums, strict=True):
            run.learner.position.fill_(step)
            run.learner.loss_sum.copy_(loss)
            run.learner.auxiliary_sum.copy_(auxiliary)


def _start_epoch(runs: list[Seed], epoch: int) -> None:
    for run in runs:
        factor = run.recipe.schedule.factor_at(epoch, run.recipe.epochs)
        # On a GPU, dropout draws from the global generator: make that resumable by epochs.
        torch.manual_seed(run.seed * 1_000_003 + epoch)
        run.learner.start_epoch(run.seed, epoch, factor)


def _save(runs: list[Seed], epoch: int, step: int) -> None:
    if distributed.rank() > 0:
        return
    for run in runs:
        run.keep_metrics()
        checkpoints.save(run.folder, run.checkpoint(epoch, step))
