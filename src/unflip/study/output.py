"""What a study leaves for people to read: ``study.json``, ``table.md`` and, at the end, figures."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unflip.recipes.command import train_command, with_seeds
from unflip.runs.files import write_atomically
from unflip.runs.provenance import unflip_version
from unflip.study.comparison import holm, paired_tests, welch_tests
from unflip.study.figures import draw
from unflip.study.summary import ArmSummary, Summary
from unflip.study.table import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unflip.runs.run import Outcome
    from unflip.study.arm import Arm
    from unflip.study.study import Study


def write_results(study: Study, last: bool) -> Summary:
    """Write everything again from the runs; figures only at the end (``last``)."""
    summary = summarize(study)
    write(study.out, summary, table(summary))
    if last:
        draw(study, summary)
    return summary


def write(out: Path, summary: Summary, text: str) -> None:
    summary.write(out)
    write_atomically(out / "table.md", text.encode())


def summarize(study: Study) -> Summary:
    arms = tuple(_summarize_arm(study, arm) for arm in study.arms)
    data = study.arms[0].recipe.data
    tests, paired = welch_tests(arms), paired_tests(arms)
    return Summary(
        study=study.name,
        **unflip_version(),
        title=study.title,
        data=data.name,
        evaluated_on="validation" if data.validation else "test",
        epochs_note=study.epochs_note,
        epochs_scale=study.epochs_scale,
        overrides=study.overrides,
        seeds=study.seeds,
        reference=study.reference,
        arms=arms,
        tests=tuple(tests),
        paired=tuple(paired),
        holm=tuple(holm(study.reference, tests, paired)),
    )


def _summarize_arm(study: Study, arm: Arm) -> ArmSummary:
    found = [study.outcome(arm, seed) for seed in study.seeds_of(arm)]
    runs = tuple(outcome for outcome in found if outcome is not None)
    values = {run.seed: run.accuracy for run in runs if run.accuracy is not None}
    seeds = 1 + max(values, default=len(study.seeds_of(arm)) - 1)
    summary = ArmSummary(
        name=arm.name,
        label=arm.label,
        folder=os.path.relpath(study.folder(arm), study.out),
        start=arm.start,
        command=_command(study, arm, seeds),
        recipe=arm.recipe.plain(),
        paper=arm.paper,
        x=arm.x,
        kept=arm.kept,
        runs=runs,
        mean=statistics.fmean(values.values()) if values else None,
        std=statistics.stdev(values.values()) if len(values) > 1 else None,
        best=max(values.values(), default=None),
    )
    if study.losses:
        summary = summary.model_copy(update=_losses(study, arm, list(values)))
    return summary.model_copy(update=_more(study, arm, runs)) if study.pack else summary


def _losses(study: Study, arm: Arm, seeds: Sequence[int]) -> dict[str, float | None]:
    """The training loss in the last epoch of the finished runs."""
    results = [study.run(arm, seed).result or {} for seed in seeds]
    found = [float(result["loss"]) for result in results if result.get("loss") is not None]
    return {
        "loss": statistics.fmean(found) if found else None,
        "loss_std": statistics.stdev(found) if len(found) > 1 else None,
    }


def _more(study: Study, arm: Arm, runs: Sequence[Outcome]) -> dict[str, Any]:
    """Further columns of a study of ImageNet's kind. Published figures are left out beside other classes."""
    from unflip.study.counting import count  # needs torch

    assert study.pack is not None
    top5 = [run.top5 for run in runs if run.top5 is not None]
    found: dict[str, Any] = {
        "top5": statistics.fmean(top5) if top5 else None,
        "top5_std": statistics.stdev(top5) if len(top5) > 1 else None,
    }
    inputs = study.inputs
    if inputs is not None:
        spent = count(arm.recipe, inputs)
        found |= {"memory_bits": spent.memory_bits, "flops": spent.flops}
        found |= {"paper": None} if len(inputs.classes) != study.pack.classes else {}
    return found


def _command(study: Study, arm: Arm, seeds: int) -> str:
    """The command that repeats an arm, with as many seeds as the arm has."""
    if arm.trained_otherwise:  # the study's own command would train another recipe
        return with_seeds(train_command(arm.recipe), range(seeds))
    command = study.command.replace(f"--seeds {len(study.seeds)}", f"--seeds {seeds}", 1)
    given = arm.recipe.distill and not arm.teacher
    teacher = " --teacher DIR" if given else ""
    return f"{command}{teacher} --only {arm.name}".strip()
