"""Every method side by side: the same recipe and seeds, one table.

LNS is left out: it corrects a network that another method has trained, so it has no schedule of its own to compare.
"""

from __future__ import annotations

import functools
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unflip import methods
from unflip.cost import cost
from unflip.data import ImageSet, load
from unflip.study import record
from unflip.study.arm import Arm, options
from unflip.study.report import write
from unflip.study.study import Study, run_study
from unflip.study.summary import accuracies, summarize
from unflip.study.table import caption
from unflip.train.learner import build_model
from unflip.train.recipe import Recipe


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
    """The recipe with each method in place of its own; ``overrides`` are in it already, and said. ``source`` is what
    ``load_recipe`` was given, for the command that repeats it: a file of one's own is not found by its name.

    Beside the methods asked for there are all others: what an earlier command trained in ``out`` stays in the table.
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
    """A table must not say that something was changed which every method replaces."""
    instead = {
        "method": "each method stands in its place; choose some with --only",
        "epochs": "give --epochs",
        "name": "each run is called after its method",
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
    engine: str = "together",
    workers: int = 2,
    device: str | None = None,
    overrides: Sequence[str] = (),
    source: str | None = None,
) -> dict[str, Any]:
    """Train each method, its seeds side by side and no other beside them, so that its seconds are its own.

    Returns what study.json has: as of every study, and memory, FLOPs and seconds of each method besides.
    """
    study = methods_study(recipe, out, names, seeds, overrides, source)
    images = load(recipe.data.name, data, recipe.data.size)
    cost_of = functools.cache(lambda arm: _cost(study.arm(arm), images))

    def report(study: Study, last: bool) -> dict[str, Any]:
        summary = summarize(study)
        for arm, found in zip(study.arms, summary["arms"], strict=True):
            found.update(cost_of(arm.name), seconds_per_epoch=_seconds(study, arm))
        write(out, summary, table(summary))
        return summary

    return run_study(
        study, data, only=names, engine=engine, workers=workers, device=device, report=report
    )


def _cost(arm: Arm, images: ImageSet) -> dict[str, float]:
    with torch.device("meta"):  # shapes are all that counts
        model = build_model(arm.recipe, images, seed=0)
        spent = cost(model, torch.empty(1, *images.test_images.shape[1:]))
    return {"memory_bits": spent.memory_bits, "flops": spent.flops}


def _seconds(study: Study, arm: Arm) -> float | None:
    """Of an epoch and a seed: the median of the epochs, shared by the seeds that ran side by side.

    Those have the same seconds; seeds that were asked for later ran in a group of their own.
    """
    runs = [record.metrics_of(study.run_folder(arm, seed)) for seed in study.seeds]
    groups = [tuple(line["seconds"] for line in run) for run in runs if run]
    if not groups:
        return None
    return sum(statistics.median(group) for group in set(groups)) / len(groups)


def table(summary: dict[str, Any]) -> str:
    """The methods as Markdown, best accuracy first."""
    lines = [
        f"{caption(summary)}\n",
        "| method | accuracy, % | memory, Kbit | FLOPs, M | s per epoch and seed |",
        "|---|---|---|---|---|",
    ]
    for arm in sorted(summary["arms"], key=lambda a: -(a["mean"] or 0)):
        seconds = arm["seconds_per_epoch"]
        lines.append(
            f"| `{arm['name']}` | {_accuracy(arm)} | {arm['memory_bits'] / 1e3:,.0f} "
            f"| {arm['flops'] / 1e6:,.2f} | {'' if seconds is None else f'{seconds:.2f}'} |"
        )
    return "\n".join(lines) + "\n"


def _accuracy(arm: dict[str, Any]) -> str:
    values = accuracies(arm)
    parts = []
    if values:
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        parts.append(f"{statistics.fmean(values):.2f}{spread}")
    stops = [run["stopped"] for run in arm["runs"] if run["stopped"]]
    parts += [f"stopped: {reason}" for reason in dict.fromkeys(stops)]
    return "; ".join(parts)
