"""A study: arms and seeds in one folder, and which runs are left to train.

    OUT/ARM/seed-N/...     the runs, as ``unflip train`` leaves them
    OUT/study.json         every run, means, tests
    OUT/table.md           the same for reading
    OUT/*.svg              figures

All state is in these files: a study that was killed resumes when it is run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unflip.data.spec import InputSpec
from unflip.hints import known
from unflip.runs.run import Outcome, Run
from unflip.study import needs
from unflip.study.arm import Arm
from unflip.study.pack import Pack
from unflip.train.job import Job


@dataclass(frozen=True)
class Study:
    """The runs to train, and the texts about them. ``command`` repeats the study; with ``--only ARM``, one arm."""

    name: str
    arms: tuple[Arm, ...]
    out: Path
    seeds: tuple[int, ...]
    title: str = ""
    command: str = ""
    epochs_note: str = ""
    reference: str | None = None  # the arm that the table compares the others with
    teacher: Path | None = None  # of the arms that distill
    overrides: tuple[str, ...] = ()  # changes by the user, shown beside the figures
    epochs_scale: float = 1.0
    pack: Pack | None = None  # of ImageNet's kind: the table has more columns
    losses: bool = False  # the table has a column with the training loss

    def __post_init__(self) -> None:
        if not self.arms or not self.seeds:
            raise ValueError(f"study {self.name}: it has no arm or no seed to train")
        for i, arm in enumerate(self.arms):
            earlier = [a.name for a in self.arms[:i]]
            if arm.name in earlier:
                raise ValueError(f"study {self.name}: two arms are called {arm.name!r}")
            for needed, how in ((arm.start, "starts"), (arm.teacher, "learns")):
                if needed is not None and needed not in earlier:
                    raise ValueError(
                        f"study {self.name}: arm {arm.name!r} {how} from {needed!r}, which should come before it"
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

    def run(self, arm: Arm, seed: int) -> Run:
        return Run.of_seed(self.folder(arm), seed)

    @property
    def inputs(self) -> InputSpec | None:
        """The inputs that its runs recorded; None before the first run. All arms have the same."""
        runs = (self.run(arm, seed) for arm in self.arms for seed in self.seeds_of(arm))
        return next((run.inputs for run in runs if run.exists), None)

    def seeds_of(self, arm: Arm) -> tuple[int, ...]:
        return self.seeds[:1] if arm.once else self.seeds

    @property
    def size(self) -> int:
        """How many runs it has, over or not."""
        return sum(len(self.seeds_of(arm)) for arm in self.arms)

    def only(self, names: Sequence[str]) -> Study:
        """These arms, and those they start from and learn from."""
        wanted: set[str] = set()
        left = [self.arm(name).name for name in names]
        while left:
            arm = self.arm(left.pop())
            wanted.add(arm.name)
            left += [name for name in (arm.start, arm.teacher) if name]
        return replace(self, arms=tuple(arm for arm in self.arms if arm.name in wanted))

    def shown(self, only: Sequence[str] = ()) -> Study:
        """The arms of a table: all, or those asked for and others that have runs to show."""
        if not only:
            return self
        return self.only([*only, *self.with_runs()])

    def with_runs(self) -> list[str]:
        """The arms with a run that is over: finished, or stopped, which is a finding too."""
        return [arm.name for arm in self.arms if self._done(arm) and not self.another_recipe(arm)]

    def _done(self, arm: Arm) -> list[Run]:
        runs = [self.run(arm, seed) for seed in self.seeds_of(arm)]
        return [run for run in runs if run.finished or run.stopped is not None]

    def another_recipe(self, arm: Arm) -> list[str]:
        """How the recipe of the arm's runs that are over differs from its own."""
        mine = arm.finished_in is None  # runs of another folder were checked when it was given
        differ = [run.difference(arm.recipe.plain()) for run in self._done(arm)] if mine else []
        return next((lines for lines in differ if lines), [])

    def outcome(self, arm: Arm, seed: int) -> Outcome | None:
        """None while the run is not over. A run is also over if one that it needs has stopped."""
        blocked = self._blocked(arm, seed)
        return Outcome(seed, stopped=blocked) if blocked else self.run(arm, seed).outcome

    def over(self, arm: Arm, seed: int) -> bool:
        run = self.run(arm, seed)
        return run.finished or run.stopped is not None or self._blocked(arm, seed) is not None

    def _blocked(self, arm: Arm, seed: int) -> str | None:
        for needed, its_seed, how in self._needed(arm, seed):
            reason = self.run(needed, its_seed).stopped or self._blocked(needed, its_seed)
            if reason:
                return f"{needed.name}, which it {how} from, stopped: {reason}"
        return None

    def _needed(self, arm: Arm, seed: int) -> list[tuple[Arm, int, str]]:
        """The arms and seeds whose runs must be finished before this one begins."""
        found = []
        if arm.start:
            start = self.arm(arm.start)
            found = [(start, self.seeds[0] if start.once else seed, "starts")]
        return found + [(self.arm(t), self.seeds[0], "learns") for t in (arm.teacher,) if t]

    def left(self) -> int:
        """How many runs are not over."""
        return sum(len(self._not_over(arm)) for arm in self.arms)

    def _not_over(self, arm: Arm) -> list[int]:
        return [seed for seed in self.seeds_of(arm) if not self.over(arm, seed)]

    def ready(self) -> list[tuple[Arm, list[int]]]:
        """Arms with the seeds that can be trained now: not over, and the runs that they need are finished."""
        found = [
            (arm, [s for s in self._not_over(arm) if self._can_start(arm, s)]) for arm in self.arms
        ]
        return [(arm, seeds) for arm, seeds in found if seeds]

    def _can_start(self, arm: Arm, seed: int) -> bool:
        return all(self.run(needed, its).finished for needed, its, _ in self._needed(arm, seed))

    def jobs(self, arm: Arm, seeds: Sequence[int]) -> list[Job]:
        start = self._start(arm)
        teacher = self._teacher(arm)
        return [Job(arm.recipe, seed, self.folder(arm), start, teacher) for seed in seeds]

    def _start(self, arm: Arm) -> Path | None:
        """The folder of the arm that it starts from; that of one run if all seeds start from it."""
        if arm.start is None:
            return None
        start = self.arm(arm.start)
        return self.run(start, self.seeds[0]).folder if start.once else self.folder(start)

    def _teacher(self, arm: Arm) -> Path | None:
        """The folder of the arm that it learns from, or the one that the user gave."""
        if arm.recipe.distill is None:
            return None
        return self.folder(self.arm(arm.teacher)) if arm.teacher else self.teacher

    def jobs_over(self) -> list[Job]:
        """The runs that are over."""
        arms = [(arm, [s for s in self.seeds_of(arm) if self.over(arm, s)]) for arm in self.arms]
        return [job for arm, seeds in arms for job in self.jobs(arm, seeds)]

    def check_folders(self) -> None:
        """Refuse folders that hold something else, before anything is trained."""
        for arm in self.arms:
            for seed in self.seeds_of(arm):
                run = self.run(arm, seed)
                if arm.finished_in is None:
                    run.refuse_other_recipe(arm.recipe.plain())
                elif not run.finished:
                    raise ValueError(
                        f"{run} is not a finished run, but study {self.name} needs seed {seed} of {arm.name}: give "
                        f"another --baseline, or fewer --seeds than {len(self.seeds)}"
                    )
        for arm in self.arms:
            self._check_needs(arm)

    def _check_needs(self, arm: Arm) -> None:
        """Check what the arm's runs need and the study does not train; runs that are over need nothing any more."""
        left = self._not_over(arm)
        if not left:
            return
        trained_here = arm.teacher and not self.run(self.arm(arm.teacher), self.seeds[0]).finished
        if arm.recipe.distill and not trained_here:
            needs.check_teacher(self._teacher(arm), arm)
        start = self.arm(arm.start) if arm.start else None
        if start is not None:
            runs = [
                self.run(start, seed) for seed in self.seeds_of(start) if start.once or seed in left
            ]
            needs.check_weights(start, [run for run in runs if run.finished])
