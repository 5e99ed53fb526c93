"""``study.json``: the one schema that is both written and read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from unflip.runs.files import DamagedFile, write_json
from unflip.runs.run import Outcome

NAME = "study.json"


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Maybe = Annotated[float | None, BeforeValidator(_finite_or_none)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Paper:
    """Figures that the paper reports for an arm; the standard deviation and the best run only if it gives them."""

    mean: float
    std: float | None = None
    best: float | None = None
    top5: float | None = None


class ArmSummary(_Part):
    """One row of a study. Studies of ImageNet's kind fill in top-5, memory and FLOPs; ``unflip study methods`` the last
    three."""

    name: str
    label: str
    folder: str  # relative to the study's
    start: str | None = None  # the arm that it starts from
    command: str
    recipe: dict[str, Any]
    paper: Paper | None = None
    x: Maybe = None  # the swept value
    kept: tuple[str, ...] = ()  # overrides for which the arm keeps its own value
    runs: tuple[Outcome, ...]
    mean: Maybe = None
    std: Maybe = None
    best: Maybe = None
    top5: Maybe = None  # mean
    top5_std: Maybe = None
    loss: Maybe = None  # mean training loss of the last epoch, without a method's own loss
    loss_std: Maybe = None
    memory_bits: Maybe = None
    flops: Maybe = None
    seconds_per_epoch: Maybe = None

    @property
    def by_seed(self) -> dict[int, float]:
        """Accuracy of each finished run."""
        return {run.seed: run.accuracy for run in self.runs if run.accuracy is not None}

    @property
    def accuracies(self) -> list[float]:
        return list(self.by_seed.values())


class TTest(_Part):
    """A t-test of two arms. t, df and p are None if the runs have no spread. ``n``: the pairs of a paired test."""

    a: str
    b: str
    n: int | None = None
    difference: Maybe = None
    t: Maybe = None
    df: Maybe = None
    p: Maybe = None


class Corrected(_Part):
    """The p of a comparison with the reference, corrected for all of them (Holm)."""

    a: str
    b: str
    test: Literal["welch", "paired"]
    p: float
    adjusted: float


class Summary(_Part):
    """A study: every run, mean and standard deviation per arm, and tests between arms."""

    study: str
    unflip: str
    commit: str | None = None
    dirty: bool | None = None
    title: str
    data: str
    evaluated_on: Literal["test", "validation"]
    epochs_note: str = ""
    epochs_scale: float = 1.0
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...]
    reference: str | None = None  # the arm that the others are compared with
    arms: tuple[ArmSummary, ...]
    tests: tuple[TTest, ...] = ()  # Welch's
    paired: tuple[TTest, ...] = ()
    holm: tuple[Corrected, ...] = ()

    def arm(self, name: str | None) -> ArmSummary | None:
        return next((arm for arm in self.arms if arm.name == name), None)

    def write(self, folder: Path) -> None:
        write_json(folder / NAME, self.model_dump(mode="json"))

    @classmethod
    def read(cls, folder: Path) -> Summary:
        """The summary in a study's folder, checked field by field."""
        path = folder / NAME
        try:
            summary = cls.model_validate_json(path.read_bytes(), strict=True)
        except ValidationError as error:
            raise DamagedFile(path, explain(error)) from None
        names = [arm.name for arm in summary.arms]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DamagedFile(path, f"two arms are called {twice!r}")
        for arm in summary.arms:
            if arm.start is not None and arm.start not in names:
                raise DamagedFile(
                    path, f"arm {arm.name!r} starts from {arm.start!r}, which is not an arm"
                )
        return summary


def explain(error: ValidationError, most: int = 3) -> str:
    """The first problems of a file, each with its place."""
    problems = error.errors()
    shown = [_place(problem["loc"]) + problem["msg"] for problem in problems[:most]]
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "; ".join([*shown, *more])


def _place(location: tuple[int | str, ...]) -> str:
    """Empty for the file as a whole, if it is not even JSON."""
    return f"{'.'.join(map(str, location))}: " if location else ""
