"""The training loop: epochs, evaluation, checkpoints, signals, resuming. ``runs/run.py`` says what a run leaves.

One file of more than 400 lines, because it is the life of a run from its folder to its result, in order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unflip.data import Dataset
from unflip.data.source import Source, closing
from unflip.recipes.build import build_model
from unflip.recipes.load import Field, named_by, needed_recipe, refuse_cycle
from unflip.recipes.schema import STEP_FIELDS, Recipe, is_weights
from unflip.runs import checkpoint as checkpoints
from unflip.runs import provenance
from unflip.runs.folders import locked, new_folders
from unflip.runs.run import Run
from unflip.train import distributed
from unflip.train.engine import Engine
from unflip.train.gpu_lock import hold_gpu
from unflip.train.health import TrainingStopped
from unflip.train.job import Job, RunOptions
from unflip.train.learner import Learner, in_half
from unflip.train.live_run import LiveRun, Position
from unflip.train.progress import Progress
from unflip.train.signals import interrupt, sigterm_as_ctrl_c, stop_signals
from unflip.train.start import load_first_weights
from unflip.train.teacher import Teacher, fits_in_table, load_teacher

__all__ = ["Job", "RunOptions", "TrainingStopped", "train", "train_together"]

LONG_EPOCH_SECONDS = 60.0  # without a checkpoint: then one is written in the middle of the epoch
SAVING_SHARE = 0.02  # of the time at most: many large networks side by side save less often


def train(
    recipe: Recipe,
    data: Dataset,
    out: Path,
    *,
    seeds: Sequence[int] = (0,),
    start: Path | None = None,
    teacher: Path | None = None,
    options: RunOptions | None = None,
) -> list[dict[str, Any]]:
    """Train ``recipe`` on ``data`` for each seed, side by side; returns their results.

    A seed that is finished in ``out`` is not run again, and an interrupted one resumes. Ctrl-C and SIGTERM save before
    they stop. ``start`` is a finished run of the recipe that ``recipe.start`` names, or a .safetensors file of weights;
    ``teacher`` a finished run of the one that ``recipe.distill`` names. Where these are not given, they are looked for
    in the folder beside ``out`` that has that recipe's name, and trained there first if they are not finished.
    """
    options = options or RunOptions()
    _refuse_unused([Job(recipe, 0, Path(out), start, teacher)])
    check_device(options.device)
    start = start or _needed_run(recipe, "start", data, out, seeds, options)
    teacher = teacher or _needed_run(recipe, "distill", data, out, seeds, options)
    jobs = [Job(recipe, seed, Path(out), start, teacher) for seed in seeds]
    return train_together(jobs, data, options)


def _needed_run(
    recipe: Recipe,
    field: Field,
    data: Dataset,
    out: Path,
    seeds: Sequence[int],
    options: RunOptions,
) -> Path | None:
    """The run that ``recipe`` names in ``start`` or ``distill``, trained now if necessary.

    Finished runs do not need it any more: then its folder is returned only if it still exists, to be compared.
    """
    named = named_by(recipe, field)
    if named is None:
        return None
    left = _unfinished(out, seeds, options.device)
    if is_weights(named):
        file = recipe.beside(field) / named
        return file if left or file.exists() else None
    trained, seeds = Run.of_seed(out, seeds[0]), seeds if field == "start" else (0,)
    if not left:  # the recipe it came from may be gone too
        folder = provenance.folder_of(trained, "start" if field == "start" else "teacher")
        return None if folder is None or _unfinished(folder, seeds, options.device) else folder
    needed = needed_recipe(recipe, field)
    beside = Path(out).parent / needed.name
    if _unfinished(beside, seeds, options.device):
        refuse_cycle(needed, (recipe.name,))
        if not options.quiet and distributed.speaks():
            verb = "starts from" if field == "start" else "learns from"
            print(
                f"{recipe.name} {verb} {needed.name}, which is not finished in {beside}: training that first"
            )
        train(needed, data, beside, seeds=seeds, options=options)
    return beside


def _unfinished(out: Path, seeds: Sequence[int], device: str | None) -> bool:
    """Whether a seed has no result; under torchrun, as rank 0 sees the folder."""
    missing = any(not Run.of_seed(out, seed).finished for seed in seeds)
    with distributed.process_group(device):
        return bool(distributed.from_rank_0(missing))


def train_together(
    jobs: Sequence[Job], data: Dataset, options: RunOptions | None = None
) -> list[dict[str, Any]]:
    """Train several runs side by side, of one recipe or of several that take the same steps.

    On a GPU they are branches of one captured graph, which keeps it busy as one small network cannot.
    """
    options = options or RunOptions()
    _refuse_unequal(jobs)
    _refuse_unused(jobs)
    check_device(options.device)
    with distributed.process_group(options.device) as chosen:
        first = distributed.rank() == 0
        here = replace(
            options,
            device=chosen or ("cuda" if torch.cuda.is_available() else "cpu"),
            quiet=options.quiet or not first,
            gpu_lock=options.gpu_lock if first else None,  # the others wait for rank 0
        )
        return _Training(jobs, jobs[0].recipe.data.of(data), here).run()


def check_device(device: str | None) -> None:
    """Refuse a GPU that this machine does not have."""
    if device is not None and device != "cpu" and not torch.cuda.is_available():
        raise ValueError(
            f"device={device!r}, but torch {torch.__version__} finds no GPU here: use cpu"
        )


def _refuse_unequal(jobs: Sequence[Job]) -> None:
    """Runs side by side take their steps together."""
    for job in jobs:
        for field in STEP_FIELDS:
            mine, first = getattr(job.recipe, field), getattr(jobs[0].recipe, field)
            if mine != first:
                raise ValueError(
                    f"{job.recipe.name} cannot be trained beside {jobs[0].recipe.name}: its {field} is "
                    f"{mine!r}, not {first!r}"
                )


def _refuse_unused(jobs: Sequence[Job]) -> None:
    """A start or teacher that the recipe has no use for is a mistake."""
    for job in jobs:
        name = job.recipe.name
        if job.start is not None and job.recipe.start is None:
            hint = f": give start={job.start} instead" if is_weights(job.start) else ""
            raise ValueError(f"recipe {name} has no start, but --start is {job.start}{hint}")
        if job.teacher is not None and job.recipe.distill is None:
            raise ValueError(f"recipe {name} has no teacher, but --teacher is {job.teacher}")


class _Training:
    """Jobs on one device, from their folders to their results."""

    def __init__(self, jobs: Sequence[Job], data: Dataset, options: RunOptions) -> None:
        self.jobs, self.data, self.options = jobs, data, options
        assert options.device is not None
        self.device = _current(torch.device(options.device))
        self.first = distributed.rank() == 0

    def run(self) -> list[dict[str, Any]]:
        results = distributed.from_rank_0([self._finished(job) for job in self.jobs])
        waiting = [i for i, result in enumerate(results) if result is None]
        if not waiting:
            return results
        with closing(self.data.source(self.device, self.options.workers)) as source:
            self._train_waiting(waiting, source, results)
        return results

    def _train_waiting(self, waiting: list[int], source: Source, results: list[Any]) -> None:
        """Train the jobs that have no result yet, and add theirs to ``results``."""
        folders = [self.jobs[i].run.folder for i in waiting] if self.first else []
        with sigterm_as_ctrl_c(), new_folders(folders) as begun, locked(folders):
            groups = distributed.from_rank_0(self._groups(waiting) if self.first else None)
            teachers = self._teachers([self.jobs[i] for i in waiting], source)
            for group, at in groups:
                runs = self._prepare([self.jobs[i] for i in group], source, teachers, at)
                begun()
                with _nan_explained(runs[0].recipe), stop_signals() as stop:
                    finished = self._train(runs, at, stop)
                for i, result in zip(group, finished, strict=True):
                    results[i] = result
                if stop and self.first:  # after the last step: these are finished, no others begin
                    interrupt(stop[0])

    def _say(self, text: str) -> None:
        if not self.options.quiet:
            print(text, flush=True)

    def _finished(self, job: Job) -> dict[str, Any] | None:
        """The result of a finished run. Refused if the folder holds a run of another recipe, or of other images, start
        or teacher."""
        if job.run.is_run():
            job.run.refuse_other_seed()
            job.run.refuse_other_recipe(job.recipe.plain())
            provenance.refuse_another(job.run, self.data.fingerprint, job.origins)
        return job.run.result

    def _groups(self, waiting: list[int]) -> list[tuple[list[int], Position | None]]:
        """Which of the waiting runs are trained together, from a checkpoint that all of them have (None: the start).

        That is one group, unless more seeds are asked for after one was interrupted half-way: then the old one is
        finished first.
        """
        groups: list[tuple[list[int], set[Position]]] = []
        for i in waiting:
            whole, problems = checkpoints.survey(self.jobs[i].run.folder)
            for problem in problems:
                before = "using the checkpoint before it" if whole else "starting again"
                self._say(f"warning: {problem}; {before}")
            for members, common in groups:
                if common & set(whole) or not (common or whole):
                    members.append(i)
                    common &= set(whole)
                    break
            else:
                groups.append(([i], set(whole)))
        return [(members, max(common, default=None)) for members, common in groups]

    def _teachers(self, jobs: Sequence[Job], source: Source) -> dict[Path | None, Teacher]:
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
                run = Run.find(folder)
                half = in_half(job.recipe, self.device)
                if fits_in_table(source, half, job.recipe.epochs):
                    self._say(
                        f"computing the logits of the teacher in {run} for every crop and flip"
                    )
                found[folder] = load_teacher(run, job.recipe, self.data, source, self.device)
        return found

    def _prepare(
        self,
        jobs: Sequence[Job],
        source: Source,
        teachers: Mapping[Path | None, Teacher],
        at: Position | None,
    ) -> list[LiveRun]:
        """Runs that stand at their checkpoint, or at their first weights."""
        # Arms of a sweep begin alike; a run alone need not keep what no other will ask for.
        memo: dict[str, Any] | None = {} if len(jobs) > 1 else None
        runs = [self._prepare_run(job, source, teachers.get(job.teacher), at, memo) for job in jobs]
        for run in runs if self.first else ():
            if self.options.tensorboard:
                run.open_tensorboard()
            lost = run.resume(at)
            if lost:
                which = ", ".join(map(str, lost))
                self._say(
                    f"warning: the metrics of {run.run} have lost the lines of epochs {which}"
                )
        if at is not None and self.first:
            self._say(f"resuming at epoch {at[0] + 1}, step {at[1]}")
        return runs

    def _prepare_run(
        self,
        job: Job,
        source: Source,
        teacher: Teacher | None,
        at: Position | None,
        memo: dict[str, Any] | None,
    ) -> LiveRun:
        model = build_model(job.recipe, source.spec, job.seed).to(self.device)
        if self.first:
            threads = torch.get_num_threads() if self.device.type == "cpu" else None
            if at is None:  # otherwise a checkpoint brings the weights
                load_first_weights(job, model, self.data, self.device, self.options, memo)
                provenance.write(job.run, self.data.fingerprint, job.origins, threads)
            else:
                self._warn_of_changes(job.run, threads)
        logits = None if teacher is None else teacher.logits
        ranks = distributed.together()
        learner = Learner(job.recipe, model, source, self.device, logits, ranks)
        return LiveRun(job, learner)

    def _warn_of_changes(self, run: Run, threads: int | None) -> None:
        """Say what is different from when the run was started."""
        if before := provenance.note_threads(run, threads):
            self._say(
                f"warning: resuming {run} with {threads} CPU threads; it was started with {before}. "
                "Results will differ in the last digits from an uninterrupted run."
            )
        if commit := provenance.note_version(run):
            self._say(f"warning: resuming {run}, which was trained with commit {commit} of unflip")

    def _train(
        self, runs: list[LiveRun], at: Position | None, stop: list[int]
    ) -> list[dict[str, Any]]:
        for run in runs:
            run.learner.take_from_rank_0()
            if not self.first:
                run.flips.remember()
        with self._engine(runs) as engine:
            for run in runs:
                run.flips.capture_next = engine.graph is not None
            _restore_position(runs, *(at or (0, 0)))
            with hold_gpu(self.options.gpu_lock, stop), self._progress(runs, engine) as progress:
                return self._epochs(runs, engine, progress, at or (0, 0), stop)

    def _progress(self, runs: list[LiveRun], engine: Engine) -> Progress:
        names = list(dict.fromkeys(run.recipe.name for run in runs))
        seeds = list(dict.fromkeys(run.seed for run in runs))
        epochs = runs[0].recipe.epochs
        return Progress(", ".join(names), epochs, seeds, engine.mode, self.options.quiet)

    def _epochs(
        self,
        runs: list[LiveRun],
        engine: Engine,
        progress: Progress,
        at: Position,
        stop: list[int],
    ) -> list[dict[str, Any]]:
        (epoch, step), epochs = at, runs[0].recipe.epochs
        lines: list[dict[str, Any]] = []
        saved_at = began = time.monotonic()
        pause = self.options.checkpoint_seconds
        while epoch < epochs:
            epoch_began = time.monotonic()
            saved_at = self._steps(runs, engine, progress, (epoch, step), stop, saved_at)
            self._plan_next(runs, epoch + 1)
            seconds = time.monotonic() - epoch_began
            due = (epoch + 1) % self.options.evaluate_every == 0 or epoch + 1 == epochs
            lines = [_end_epoch(run, runs, epoch, seconds, due) for run in runs]
            self._warn_of_accuracy(runs, lines)
            progress.epoch(epoch, lines)
            epoch, step = epoch + 1, 0
            if epoch == epochs or time.monotonic() - saved_at > pause:
                saving = time.monotonic()
                self._save(runs, epoch, 0)
                saved_at = time.monotonic()
                pause = _pause(self.options.checkpoint_seconds, saved_at - saving)
            if epoch < epochs:
                _start_epoch(runs, epoch)
        total = time.monotonic() - began
        if not lines:  # an earlier process did everything but write the result
            lines = [run.last_line() for run in runs]
        return [run.finish(line, total) for run, line in zip(runs, lines, strict=True)]

    def _warn_of_accuracy(self, runs: list[LiveRun], lines: list[dict[str, Any]]) -> None:
        for run, line in zip(runs, lines, strict=True):
            if behind := run.health.behind(line["epoch"], line["accuracy"]):
                self._say(f"warning: {run.run}: {behind}")

    def _steps(
        self,
        runs: list[LiveRun],
        engine: Engine,
        progress: Progress,
        at: Position,
        stop: list[int],
        saved_at: float,
    ) -> float:
        """The steps of an epoch that are left; returns when a checkpoint was written last."""
        epoch, step = at
        steps = runs[0].learner.steps
        while step < steps:
            engine.step()
            step += 1
            stopping = bool(stop) and self.first
            if stopping or time.monotonic() - saved_at > LONG_EPOCH_SECONDS:
                self._save(runs, epoch, step)
                saved_at = time.monotonic()
            if stopping:
                interrupt(stop[0])
            # Steps of a graph on resident images are launched far ahead of the GPU, and are over soon.
            if engine.graph is None or not runs[0].learner.source.resident:
                progress.step(epoch, step, steps)
        return saved_at

    def _plan_next(self, runs: list[LiveRun], epoch: int) -> None:
        """Plan the next epoch while a GPU is still busy with this one's steps, then wait for them."""
        if self.device.type != "cuda":
            return
        for run in runs if epoch < runs[0].recipe.epochs else ():
            run.learner.plan_ahead(run.seed, epoch)
        torch.cuda.synchronize()

    @contextmanager
    def _engine(self, runs: list[LiveRun]) -> Iterator[Engine]:
        began, eager = time.monotonic(), self.options.eager
        compiles = self.device.type == "cuda" and not eager and self.options.compile
        if compiles:
            self._say("compiling, which takes a minute or two")
        learners = [run.learner for run in runs]
        with Engine(learners, compiled=compiles, captured=not eager) as engine:
            if compiles:
                self._say(f"ready after {time.monotonic() - began:.0f} s")
            yield engine

    def _save(self, runs: list[LiveRun], epoch: int, step: int) -> None:
        for run in runs if self.first else ():
            run.save(epoch, step)


def _current(device: torch.device) -> torch.device:
    """The device with its number, made the current one: streams and graphs are made there."""
    if device.type != "cuda":
        return device
    number = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _end_epoch(
    run: LiveRun, runs: list[LiveRun], epoch: int, seconds: float, evaluate: bool
) -> dict[str, Any]:
    line = run.end_epoch(epoch, seconds, evaluate)
    if run.flips.capture_failed:  # that can harm the captures after it (pytorch#180395)
        for other in runs:
            other.flips.capture_next = False
    return line


def _pause(seconds: float, last: float) -> float:
    """How long to train without a checkpoint if the last one took ``last``: ``seconds``, or up to ten times that."""
    return max(seconds, min(last / SAVING_SHARE, 10 * seconds))


@contextmanager
def _nan_explained(recipe: Recipe) -> Iterator[None]:
    """On a CPU a binary layer refuses a NaN by name; add where it usually comes from."""
    try:
        yield
    except ValueError as error:
        if "NaN" not in str(error):
            raise
        raise TrainingStopped(
            f"{error}. Lower optimizer.lr (now {recipe.optimizer.lr})."
        ) from error


def _restore_position(runs: list[LiveRun], epoch: int, step: int) -> None:
    """Continue in the middle of an epoch's plan; the restored sums must survive ``start_epoch``."""
    if epoch >= runs[0].recipe.epochs:
        return
    sums = [(run.learner.loss_sum.clone(), run.learner.auxiliary_sum.clone()) for run in runs]
    _start_epoch(runs, epoch)
    if step:
        for run, (loss, auxiliary) in zip(runs, sums, strict=True):
            run.learner.position.fill_(step)
            run.learner.loss_sum.copy_(loss)
            run.learner.auxiliary_sum.copy_(auxiliary)


def _start_epoch(runs: list[LiveRun], epoch: int) -> None:
    for run in runs:
        factor = run.recipe.schedule.factor_at(epoch, run.recipe.epochs)
        # On a GPU, dropout draws from the global generator: seeding it per epoch makes that resumable.
        torch.manual_seed(run.seed * 1_000_003 + epoch + (run.learner.ranks.rank << 48))
        run.learner.start_epoch(run.seed, epoch, factor)
