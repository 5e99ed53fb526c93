"""A study: arms and seeds in one folder, trained until nothing is left.

    OUT/ARM/seed-N/...     as of ``train``; stopped.json where a run gave up, with the reason
    OUT/study.json         every run, means, tests
    OUT/table.md           the same for reading
    OUT/*.svg              figures

All state is in these files: a study that is killed is run again and goes on.
"""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from unflip.data import Dataset
from unflip.hints import known
from unflip.runs import checkpoint as checkpoints
from unflip.runs import provenance
from unflip.study import given, record
from unflip.study.arm import Arm
from unflip.study.record import Record
from unflip.study.report import write_report
from unflip.study.task import Task, train_jobs
from unflip.train.loop import Job, check_device
from unflip.train.signals import sigterm_as_ctrl_c

ENGINES = ("together", "pool", "ray")
Report = Callable[["Study", bool], dict[str, Any]]  # True: nothing is left
SIDE_BY_SIDE = ("data", "epochs", "batch_size", "precision")  # what train_together wants equal


@dataclass(frozen=True)
class Study:
    """What is to be run, and what is said about it. ``command`` repeats it, and with ``--only ARM`` one arm."""

    name: str
    arms: tuple[Arm, ...]
    out: Path
    seeds: tuple[int, ...]
    title: str = ""
    command: str = ""
    epochs_note: str = ""
    reference: str | None = None  # the arm that the table compares the others with
    teacher: Path | None = None  # of the arms that distill
    overrides: tuple[str, ...] = ()  # what the person changed, to be said beside the figures
    epochs_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.arms or not self.seeds:
            raise ValueError(f"study {self.name}: there is no arm or no seed to train")
        for i, arm in enumerate(self.arms):
            earlier = [a.name for a in self.arms[:i]]
            if arm.name in earlier:
                raise ValueError(f"study {self.name}: two arms are called {arm.name!r}")
            if arm.start is not None and arm.start not in earlier:
                raise ValueError(
                    f"study {self.name}: arm {arm.name!r} starts from {arm.start!r}, which should come before it"
                )
            if arm.recipe.data != self.arms[0].recipe.data:
                raise ValueError(
                    f"study {self.name}: {arm.name} has data {arm.recipe.data}, {self.arms[0].name} has "
                    f"{self.arms[0].recipe.data}; one table is about one set of images"
                )

    def arm(self, name: str) -> Arm:
        return {arm.name: arm for arm in self.arms}[known(name, (a.name for a in self.arms), "arm")]

    def folder(self, arm: Arm) -> Path:
        return arm.finished_in or self.out / arm.name

    def run_folder(self, arm: Arm, seed: int) -> Path:
        return self.folder(arm) / f"seed-{seed}"

    def only(self, names: Sequence[str]) -> Study:
        """These arms, and those they start from."""
        wanted: set[str] = set()
        for name in names:
            arm: Arm | None = self.arm(name)
            while arm is not None:
                wanted.add(arm.name)
                arm = self.arm(arm.start) if arm.start else None
        return replace(self, arms=tuple(arm for arm in self.arms if arm.name in wanted))

    def shown(self, only: Sequence[str] = ()) -> Study:
        """The arms of a table: all, or those asked for and others that have runs to show."""
        if not only:
            return self
        return self.only([*only, *self.with_runs()])

    def with_runs(self) -> list[str]:
        """The arms with a run that is over: finished, or stopped by itself, for that is a finding too."""
        return [arm.name for arm in self.arms if self._has_runs(arm)]

    def _has_runs(self, arm: Arm) -> bool:
        return bool(self._done(arm)) and not self.another_recipe(arm)

    def _done(self, arm: Arm) -> list[Path]:
        folders = [self.run_folder(arm, seed) for seed in self.seeds]
        return [f for f in folders if record.finished(f) or record.stop_reason(f) is not None]

    def another_recipe(self, arm: Arm) -> list[str]:
        """How the recipe of the arm's runs that are over differs from its own."""
        mine = arm.finished_in is None  # another folder's runs were looked at when they were given
        differ = [record.difference(f, arm.recipe) for f in self._done(arm)] if mine else []
        return next((lines for lines in differ if lines), [])

    def record(self, arm: Arm, seed: int) -> Record | None:
        """What came of a run; None while it is not over. It is over, too, where what it starts from has stopped."""
        blocked = self._blocked(arm, seed)
        if blocked:
            return Record(seed, None, None, 0, 0.0, blocked)
        return record.read(self.run_folder(arm, seed), seed)

    def _over(self, arm: Arm, seed: int) -> bool:
        folder = self.run_folder(arm, seed)
        stopped = record.stop_reason(folder) or self._blocked(arm, seed)
        return record.finished(folder) or stopped is not None

    def _blocked(self, arm: Arm, seed: int) -> str | None:
        if arm.start is None:
            return None
        start = self.arm(arm.start)
        reason = record.stop_reason(self.run_folder(start, seed)) or self._blocked(start, seed)
        return f"{start.name}, which it starts from, stopped: {reason}" if reason else None

    def left(self) -> int:
        """How many runs are not over."""
        return sum(not self._over(arm, seed) for arm in self.arms for seed in self.seeds)

    def ready(self) -> list[tuple[Arm, list[int]]]:
        """Arms with the seeds that can be trained now: not over, and what they start from is finished."""
        found = []
        for arm in self.arms:
            seeds = [s for s in self.seeds if not self._over(arm, s) and self._can_start(arm, s)]
            if seeds:
                found.append((arm, seeds))
        return found

    def _can_start(self, arm: Arm, seed: int) -> bool:
        if arm.start is None:
            return True
        return record.finished(self.run_folder(self.arm(arm.start), seed))

    def jobs(self, arm: Arm, seeds: Sequence[int]) -> list[Job]:
        start = self.folder(self.arm(arm.start)) if arm.start else None
        teacher = self.teacher if arm.recipe.distill else None
        return [Job(arm.recipe, seed, self.folder(arm), start, teacher) for seed in seeds]

    def jobs_over(self) -> list[Job]:
        """The runs that are not trained any more."""
        arms = [(arm, [s for s in self.seeds if self._over(arm, s)]) for arm in self.arms]
        return [job for arm, seeds in arms for job in self.jobs(arm, seeds)]

    def check_folders(self) -> None:
        """Refuse what is in the folders and does not belong there, before anything is trained."""
        for arm in self.arms:
            for seed in self.seeds:
                folder = self.run_folder(arm, seed)
                if arm.finished_in is None:
                    record.refuse_another_recipe(folder, arm.recipe)
                elif not record.finished(folder):
                    raise ValueError(
                        f"{folder} is not a finished run; {self.name} has {len(self.seeds)} seeds and "
                        f"starts from seed {seed} of {arm.name}"
                    )
        for arm in self.arms:
            self._check_given(arm)

    def _check_given(self, arm: Arm) -> None:
        """What the arm's runs need that the study does not train; those that are over need nothing any more."""
        left = [seed for seed in self.seeds if not self._over(arm, seed)]
        if not left:
            return
        if arm.recipe.distill:
            given.check_teacher(self.teacher, arm)
        start = self.arm(arm.start) if arm.start else None
        if start is not None:
            runs = [self.run_folder(start, seed) for seed in left]
            given.check_weights(start, [run for run in runs if record.finished(run)])


class Workers(Protocol):
    """Where tasks run beside each other."""

    capacity: int

    def start(self, task: Task) -> None: ...

    def wait(self) -> str:
        """Until a task is done: its name. What it raised is raised here."""
        ...

    def stop(self) -> None:
        """End what still runs; it saves first."""
        ...


@sigterm_as_ctrl_c()  # between two runs too
def run_study(
    study: Study,
    data: Path | None = None,
    *,
    only: Sequence[str] = (),
    engine: str = "together",
    device: str | None = None,
    workers: int = 2,
    at_once: int | None = None,
    evaluate_every: int = 1,
    report: Report = write_report,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train what is not over yet, of all arms or ``only`` of some; returns what study.json has.

    ``data`` is the folder of the images, as of ``unflip.data.load``. Engines: ``together``, this process, ``at_once``
    runs side by side (None: the seeds of one arm); ``pool``, so many ``workers`` processes, each with ``at_once`` runs;
    ``ray``, the same on a Ray cluster. ``evaluate_every`` is as of ``train``. The table is written whenever
    there is news, and whatever ends the study.
    """
    known(engine, ENGINES, "engine")
    if at_once is not None and at_once < 1:
        raise ValueError(f"at-once={at_once} should be at least 1")
    chosen = study.only(only) if only else study
    check_device(device)
    chosen.check_folders()
    wanted = study.arms[0].recipe.data
    images = functools.cache(lambda: wanted.load(data))
    others = functools.partial(_refuse_others, images=images if data else None)
    others(study.shown(only), going_on=chosen)
    _say_fewer_seeds(study)
    _say_left_out(study)

    def tell(last: bool = False) -> dict[str, Any]:
        return report(study.shown(only), last)

    try:
        if chosen.left():
            if engine == "together":
                _in_this_process(chosen, images(), device, at_once, evaluate_every, tell, quiet)
            else:
                running = _workers(engine, chosen, workers)
                _beside_each_other(chosen, data, device, at_once, evaluate_every, running, tell)
            others(study.shown(only))  # what went on has its weights now
    except BaseException:
        if study.out.exists():
            _tell_all_the_same(tell)
        raise
    study.out.mkdir(parents=True, exist_ok=True)
    return tell(last=True)


def _tell_all_the_same(tell: Callable[[], object]) -> None:
    """The table of what there is. Whatever ended the study is what the person should hear of: a signal may have come
    in the middle of an import, and then nothing that needs it works any more."""
    try:
        tell()
    except Exception as error:
        print(f"warning: the table is not written anew: {error}", flush=True)


def _refuse_others(
    study: Study, images: Callable[[], Dataset] | None, going_on: Study | None = None
) -> None:
    """Runs that are over are shown as they are, so they must be of the images, start and teacher that are given.

    ``images`` are read where a run is over and says what it saw. Without a folder (None) there is nothing to compare:
    digits and CIFAR-10 are the same everywhere. A start that is about to go on in ``going_on`` has no weights yet.
    """
    over = study.jobs_over()
    for job in over:
        record.read(job.folder, job.seed)  # what is damaged is named now, not after the training
    over = [job for job in over if provenance.read(job.folder)]
    over = [job for job in over if not (going_on and _start_goes_on(going_on, job))]
    if not over:
        return
    seen = over[0].recipe.data.of(images()) if images else None
    for job in over:
        provenance.refuse_another(job, seen)


def _start_goes_on(study: Study, job: Job) -> bool:
    """Whether the run that a job started from is the study's own, and goes on from a checkpoint: someone has deleted
    its damaged result.json, as the error told them to."""
    if job.start not in [study.folder(arm) for arm in study.arms]:
        return False
    run = job.start / f"seed-{job.seed}"
    return not record.finished(run) and bool(checkpoints.available(run))


def write_tables(study: Study, report: Report = write_report) -> dict[str, Any]:
    """Tables and figures of what is finished, and no training."""
    done = study.with_runs()
    if not done:
        for arm in study.arms:
            for seed in study.seeds:
                record.refuse_another_recipe(study.run_folder(arm, seed), arm.recipe)
        raise ValueError(f"study {study.name}: no finished run in {study.out}")
    _say_fewer_seeds(study)
    _say_left_out(study)
    return report(study.only(done), True)


def _say(study: Study, text: str) -> None:
    total = len(study.arms) * len(study.seeds)
    print(f"{study.name}: {text}; {study.left()} of {total} runs left", flush=True)


def _say_fewer_seeds(study: Study) -> None:
    """The table is about to be written over by one of fewer seeds; their runs stay."""
    before = _seeds_before(study.out / "study.json")
    now = len(study.seeds)
    if before > now:
        print(
            f"{study.name}: the table in {study.out} was of {before} seeds and now shows {now}; "
            f"--seeds {before} shows them again",
            flush=True,
        )


def _say_left_out(study: Study) -> None:
    """A table does not mix recipes; rows that someone has seen in it are not dropped without a word."""
    because: dict[str, list[str]] = {}
    for arm in study.arms:
        differs = study.another_recipe(arm)
        if differs:
            because.setdefault("; ".join(differs), []).append(arm.name)
    for difference, names in because.items():
        print(
            f"{study.name}: not in the table, because their runs in {study.out} are of another recipe: "
            f"{', '.join(names)} ({difference})",
            flush=True,
        )


def _seeds_before(path: Path) -> int:
    """Of the table that is there. All in it comes from the runs, so a damaged one stops nobody: it is put aside."""
    try:
        return len(json.loads(path.read_text())["seeds"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        aside = path.with_name(f"{path.name}.damaged")
        path.replace(aside)
        print(
            f"warning: {path} is damaged ({error!r}). It is written anew from the runs; the damaged one is now {aside}",
            flush=True,
        )
        return 0


def _in_this_process(
    study: Study,
    images: Dataset,
    device: str | None,
    at_once: int | None,
    evaluate_every: int,
    tell: Callable[[], object],
    quiet: bool,
) -> None:
    while batch := next_batch(study.ready(), at_once):
        _say(study, ", ".join(f"{arm.name} ({_seeds(seeds)})" for arm, seeds in batch))
        jobs = [job for arm, seeds in batch for job in study.jobs(arm, seeds)]
        train_jobs(jobs, images, device, quiet=quiet, evaluate_every=evaluate_every)
        tell()
        _free_gpu()


def next_batch(
    ready: list[tuple[Arm, list[int]]], at_once: int | None
) -> list[tuple[Arm, list[int]]]:
    """What to train next, side by side: the first arm that is ready, and others that fit beside it whole."""
    if not ready or at_once is None:
        return ready[:1]
    (arm, seeds), *others = ready
    batch = [(arm, seeds[:at_once])]
    room = at_once - len(batch[0][1])
    for other, its_seeds in others:
        if len(its_seeds) <= room and _side_by_side(arm, other):
            batch.append((other, its_seeds))
            room -= len(its_seeds)
    return batch


def _side_by_side(a: Arm, b: Arm) -> bool:
    return all(getattr(a.recipe, field) == getattr(b.recipe, field) for field in SIDE_BY_SIDE)


def _free_gpu() -> None:
    """What was compiled and captured for one batch is of no use to the next."""
    if torch.cuda.is_available():
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _workers(engine: str, study: Study, workers: int) -> Workers:
    if workers < 1:
        raise ValueError(f"workers={workers} should be at least 1")
    if engine == "pool":
        from unflip.study.pool import Pool

        return Pool(study.out, workers)
    from unflip.study.cluster import Cluster

    return Cluster(workers)


def _beside_each_other(
    study: Study,
    data: Path | None,
    device: str | None,
    at_once: int | None,
    evaluate_every: int,
    workers: Workers,
    tell: Callable[[], object],
) -> None:
    """A task is an arm's seeds, or ``at_once`` runs of several arms, started when what they start from is finished."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    turn = study.out / ".gpu-turn" if on_gpu else None
    running: dict[str, list[str]] = {}  # a task has the name of its first arm

    def waiting() -> list[tuple[Arm, list[int]]]:
        busy = [name for names in running.values() for name in names]
        return [(arm, seeds) for arm, seeds in study.ready() if arm.name not in busy]

    try:
        while True:
            while len(running) < workers.capacity and (batch := next_batch(waiting(), at_once)):
                for arm, seeds in batch:
                    _say(study, f"{arm.name} ({_seeds(seeds)}) begins")
                names = [arm.name for arm, _ in batch]
                jobs = tuple(job for arm, seeds in batch for job in study.jobs(arm, seeds))
                workers.start(Task(names[0], jobs, data, device, turn, evaluate_every))
                running[names[0]] = names
            if not running:
                return
            done = running.pop(workers.wait())
            tell()
            _say(study, f"{', '.join(done)} {'is' if len(done) == 1 else 'are'} done")
    finally:
        workers.stop()


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
