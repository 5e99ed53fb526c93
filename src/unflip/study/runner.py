"""Training a study until nothing is left: in this process, in several, or on a Ray cluster."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from unflip.data import Dataset
from unflip.hints import known
from unflip.runs import provenance
from unflip.runs.run import Run
from unflip.study.arm import Arm
from unflip.study.output import write_results
from unflip.study.study import Study
from unflip.study.summary import NAME, Summary
from unflip.study.task import Task, train_jobs
from unflip.train.job import Job, RunOptions
from unflip.train.loop import check_device
from unflip.train.signals import sigterm_as_ctrl_c

ENGINES = ("together", "pool", "ray")
GPU_AT_ONCE = 10  # runs in one captured graph: enough to keep a large GPU busy with small networks
Output = Callable[[Study, bool], Summary]  # True: nothing is left to train
Batch = list[tuple[Arm, list[int]]]  # arms and seeds that are trained side by side


@dataclass(frozen=True)
class StudyEngine:
    """Where the runs of a study are trained.

    together  in this process, ``at_once`` runs side by side (None: the seeds of one arm; on a GPU 10, if images are
              small)
    pool      in ``workers`` processes, each with ``at_once`` runs
    ray       the same on a Ray cluster
    """

    name: str = "together"
    workers: int = 2
    at_once: int | None = None

    def __post_init__(self) -> None:
        known(self.name, ENGINES, "engine")
        if self.at_once is not None and self.at_once < 1:
            raise ValueError(f"at-once={self.at_once} should be at least 1")
        if self.workers < 1:
            raise ValueError(f"workers={self.workers} should be at least 1")


class Workers(Protocol):
    """Where tasks run beside each other."""

    capacity: int

    def start(self, task: Task) -> None: ...

    def wait(self) -> tuple[str, Exception | None]:
        """Wait until a task ends; return its name, and the error that ended it, if any."""
        ...

    def stop(self) -> None:
        """End the tasks that still run; they save first."""
        ...


@sigterm_as_ctrl_c()  # also between two runs
def run_study(
    study: Study,
    data: Path | None = None,
    *,
    only: Sequence[str] = (),
    engine: StudyEngine | None = None,
    options: RunOptions | None = None,
    output: Output = write_results,
) -> Summary:
    """Train every run that is not over yet, of all arms or ``only`` of some.

    ``data`` is the folder of the images, as for ``unflip.data.load``. The table is written whenever a run ends, and
    also when the study is interrupted.
    """
    engine, options = engine or StudyEngine(), options or RunOptions()
    chosen = study.only(only) if only else study
    check_device(options.device)
    chosen.check_folders()
    images = functools.cache(lambda: study.arms[0].recipe.data.load(data))
    refuse_others = functools.partial(_refuse_others, images=images if data else None)
    refuse_others(study.shown(only), resuming=chosen)
    _warn_of_fewer_seeds(study)
    _warn_of_other_recipes(study)

    def tell(last: bool = False) -> Summary:
        return output(study.shown(only), last)

    try:
        if chosen.left():
            if engine.name == "together":
                _in_this_process(chosen, images(), engine, options, tell)
            else:
                _beside_each_other(chosen, data, engine, options, tell)
            refuse_others(study.shown(only))  # starts that were resumed have their weights now
    except BaseException:
        if study.out.exists():
            _tell_anyway(tell)
        raise
    study.out.mkdir(parents=True, exist_ok=True)
    return tell(last=True)


def write_tables(study: Study, output: Output = write_results) -> Summary:
    """Tables and figures of the finished runs; trains nothing."""
    done = study.with_runs()
    if not done:
        for arm in study.arms:
            for seed in study.seeds_of(arm):
                study.run(arm, seed).refuse_other_recipe(arm.recipe.plain())
        raise ValueError(f"study {study.name}: {study.out} has no finished run")
    _warn_of_fewer_seeds(study)
    _warn_of_other_recipes(study)
    return output(study.only(done), True)


def _tell_anyway(tell: Callable[[], object]) -> None:
    """Write the table of what is finished. If that fails, the error that ended the study matters more: a signal may
    have interrupted an import, and then nothing that needs it works any more."""
    try:
        tell()
    except Exception as error:
        print(f"warning: the table could not be written again: {error}", flush=True)


def _refuse_others(
    study: Study, images: Callable[[], Dataset] | None, resuming: Study | None = None
) -> None:
    """Refuse finished runs that had other images, another start or another teacher: they do not belong in this table.

    Images are loaded only if a run recorded its own. Without a data folder (None) they are not compared. A start that
    is about to resume in ``resuming`` has no weights yet.
    """
    over = study.jobs_over()
    for job in over:
        _ = job.run.outcome  # a damaged file is named now, not after training
    over = [job for job in over if provenance.read(job.run)]
    over = [job for job in over if not (resuming and _start_resumes(resuming, job))]
    if not over:
        return
    seen = over[0].recipe.data.of(images()).fingerprint if images else None
    for job in over:
        provenance.refuse_another(job.run, seen, job.origins)


def _start_resumes(study: Study, job: Job) -> bool:
    """Whether a run that a job started from or learned from is the study's own and resumes: someone deleted its
    damaged result.json, as the error message says."""
    own = [study.folder(arm) for arm in study.arms]
    seeds = ((job.start, job.seed), (job.teacher, study.seeds[0]))
    runs = [
        Run.find(folder, seed)
        for folder, seed in seeds
        if folder and (folder in own or folder.parent in own)
    ]
    return any(not run.finished and bool(run.checkpoints) for run in runs)


def _say(study: Study, text: str) -> None:
    print(f"{study.name}: {text}; {study.left()} of {study.size} runs left", flush=True)


def _warn_of_fewer_seeds(study: Study) -> None:
    """The table is about to be replaced by one of fewer seeds; the runs stay."""
    before, now = _seeds_before(study.out / NAME), len(study.seeds)
    if before > now:
        print(
            f"{study.name}: the table in {study.out} had {before} seeds and now shows {now}; "
            f"--seeds {before} shows them again",
            flush=True,
        )


def _warn_of_other_recipes(study: Study) -> None:
    """A table does not mix recipes, but rows that someone has seen in it must not vanish silently."""
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
    """The number of seeds of the last table. All of it comes from the runs, so a damaged file is put aside."""
    try:
        return len(json.loads(path.read_text())["seeds"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        aside = path.with_name(f"{path.name}.damaged")
        path.replace(aside)
        print(
            f"warning: {path} is damaged ({error!r}). It is written again from the runs; the damaged file is now "
            f"{aside}",
            flush=True,
        )
        return 0


def _in_this_process(
    study: Study,
    images: Dataset,
    engine: StudyEngine,
    options: RunOptions,
    tell: Callable[[], object],
) -> None:
    small = study.pack is None  # networks for large images fill a GPU alone
    at_once = engine.at_once or (GPU_AT_ONCE if small and _on_gpu(options) else None)
    while batch := next_batch(study.ready(), at_once):
        _say(study, ", ".join(f"{arm.name} ({_seeds(seeds)})" for arm, seeds in batch))
        train_jobs(_jobs(study, batch), images, options)
        tell()
        _free_gpu()


def _jobs(study: Study, batch: Batch) -> list[Job]:
    return [job for arm, seeds in batch for job in study.jobs(arm, seeds)]


def next_batch(ready: Batch, at_once: int | None) -> Batch:
    """What to train next side by side: the first arm that is ready, and other arms that fit beside it whole."""
    if not ready or at_once is None:
        return ready[:1]
    (arm, seeds), *others = ready
    batch = [(arm, seeds[:at_once])]
    room = at_once - len(batch[0][1])
    for other, its_seeds in others:
        same = arm.recipe.steps_together == other.recipe.steps_together
        if len(its_seeds) <= room and same:
            batch.append((other, its_seeds))
            room -= len(its_seeds)
    return batch


def _on_gpu(options: RunOptions) -> bool:
    return options.device != "cpu" and torch.cuda.is_available()


def _free_gpu() -> None:
    """Compiled and captured code of one batch is of no use to the next."""
    if torch.cuda.is_available():
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _workers(engine: StudyEngine, study: Study) -> Workers:
    if engine.name == "pool":
        from unflip.study.pool import Pool

        return Pool(study.out, engine.workers)
    from unflip.study.cluster import Cluster

    return Cluster(engine.workers)


def _beside_each_other(
    study: Study,
    data: Path | None,
    engine: StudyEngine,
    options: RunOptions,
    tell: Callable[[], object],
) -> None:
    """A task is an arm's seeds, or ``at_once`` runs of several arms; it begins when its starts are finished. After an
    error in one, those that do not need it are trained; then the error is raised."""
    if _on_gpu(options):
        options = replace(options, gpu_lock=study.out / ".gpu-lock")
    workers = _workers(engine, study)
    running: dict[str, list[str]] = {}  # a task has the name of its first arm
    failed: dict[str, Exception] = {}

    def waiting() -> Batch:
        busy = [*failed, *(name for names in running.values() for name in names)]
        return [(arm, seeds) for arm, seeds in study.ready() if arm.name not in busy]

    try:
        while True:
            while len(running) < workers.capacity and (
                batch := next_batch(waiting(), engine.at_once)
            ):
                for arm, seeds in batch:
                    _say(study, f"{arm.name} ({_seeds(seeds)}) begins")
                names = [arm.name for arm, _ in batch]
                workers.start(Task(names[0], tuple(_jobs(study, batch)), data, options))
                running[names[0]] = names
            if not running:
                break
            name, error = workers.wait()
            done = running.pop(name)
            tell()
            if error is None:
                _say(study, f"{', '.join(done)} {'is' if len(done) == 1 else 'are'} done")
                continue
            failed |= dict.fromkeys(done, error)
            _say(study, f"{', '.join(done)} failed: {error}")
    finally:
        workers.stop()
    for error in failed.values():
        raise error


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
