"""Every method side by side: the same recipe and seeds, one table.

Methods that correct an already trained network are left out: they cannot be trained from scratch.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

from unflip import methods
from unflip.recipes.schema import Recipe
from unflip.study.arm import Arm, options
from unflip.study.counting import count
from unflip.study.output import summarize, write
from unflip.study.runner import StudyEngine, run_study
from unflip.study.study import Study
from unflip.study.summary import ArmSummary, Summary
from unflip.study.table import caption
from unflip.train.job import RunOptions


def compared() -> list[str]:
    """The methods that can be trained from scratch on one recipe."""
    return [name for name in methods.names() if methods.config_class(name).from_scratch]


def methods_study(
    recipe: Recipe,
    out: Path,
    names: Sequence[str],
    seeds: int,
    overrides: Sequence[str] = (),
    source: str | None = None,
) -> Study:
    """The recipe with each method in place of its own; it has the ``overrides`` already, and the table names them.
    ``source`` is the argument of ``load_recipe``, for the command that repeats the study.

    All other methods are arms too: runs that an earlier command trained in ``out`` stay in the table.
    """
    _refuse_replaced(overrides)
    named = shlex.quote(source or recipe.name)
    words = ["unflip study methods", f"--recipe {named}", f"--epochs {recipe.epochs}"]
    command = " ".join([*words, *options(recipe.data.name, seeds, overrides)])
    return Study(
        "methods",
        tuple(_arm(recipe, name) for name in dict.fromkeys([*names, "float", *compared()])),
        out,
        tuple(range(seeds)),
        f"{recipe.model.name}, method by method",
        command,
        f"{recipe.epochs} epochs.",
        overrides=tuple(overrides),
    )


def _refuse_replaced(overrides: Sequence[str]) -> None:
    """Refuse overrides of fields that every method replaces: the table would claim a change that did not happen."""
    instead = {
        "method": "each method replaces it; choose some with --only",
        "epochs": "give --epochs",
        "name": "each run is named after its method",
    }
    for override in overrides:
        field = override.partition("=")[0].partition(".")[0]
        if field in instead:
            raise ValueError(f"override {override!r} would change nothing here: {instead[field]}")


def _arm(recipe: Recipe, name: str) -> Arm:
    method = "float" if name == "float" else methods.get(name).options()
    changed = {"name": f"{recipe.name}-{name}", "method": method}
    return Arm(name, name, recipe.model_copy(update=changed))


def study_methods(
    recipe: Recipe,
    data: Path | None,
    out: Path,
    *,
    names: Sequence[str],
    seeds: int,
    engine: StudyEngine | None = None,
    run_options: RunOptions | None = None,
    overrides: Sequence[str] = (),
    source: str | None = None,
) -> Summary:
    """Train each method, its seeds side by side and no other method beside them, so that the seconds are comparable.

    The summary also has memory, FLOPs and seconds of each method.
    """
    study = methods_study(recipe, out, names, seeds, overrides, source)
    spec = recipe.data.load(data).spec

    def output(study: Study, last: bool) -> Summary:
        summary = summarize(study)
        arms = tuple(
            found.model_copy(
                update={
                    "memory_bits": count(arm.recipe, spec).memory_bits,
                    "flops": count(arm.recipe, spec).flops,
                    "seconds_per_epoch": _seconds(study, arm),
                }
            )
            for arm, found in zip(study.arms, summary.arms, strict=True)
        )
        summary = summary.model_copy(update={"arms": arms})
        write(out, summary, table(summary))
        return summary

    return run_study(study, data, only=names, engine=engine, options=run_options, output=output)


def _seconds(study: Study, arm: Arm) -> float | None:
    """Seconds per epoch and seed: the median over epochs, shared by the seeds that ran side by side.

    Those have the same seconds; seeds that were asked for later ran in another group.
    """
    runs = [study.run(arm, seed).metrics for seed in study.seeds]
    groups = [tuple(line["seconds"] for line in run) for run in runs if run]
    if not groups:
        return None
    return sum(statistics.median(group) for group in set(groups)) / len(groups)


def table(summary: Summary) -> str:
    """The methods as Markdown, best accuracy first."""
    lines = [
        f"{caption(summary)}\n",
        "| method | accuracy, % | memory, Kbit | FLOPs, M | s per epoch and seed |",
        "|---|---|---|---|---|",
    ]
    for arm in sorted(summary.arms, key=lambda arm: -(arm.mean or 0)):
        assert arm.memory_bits is not None
        assert arm.flops is not None
        seconds = "" if arm.seconds_per_epoch is None else f"{arm.seconds_per_epoch:.2f}"
        lines.append(
            f"| `{arm.name}` | {_accuracy(arm)} | {arm.memory_bits / 1e3:,.0f} | {arm.flops / 1e6:,.2f} | {seconds} |"
        )
    return "\n".join(lines) + "\n"


def _accuracy(arm: ArmSummary) -> str:
    values = arm.accuracies
    parts = []
    if values:
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        parts.append(f"{statistics.fmean(values):.2f}{spread}")
    stops = [run.stopped for run in arm.runs if run.stopped]
    parts += [f"stopped: {reason}" for reason in dict.fromkeys(stops)]
    return "; ".join(parts)
