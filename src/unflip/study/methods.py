"""Every method side by side: the same recipe and seeds, one table.

LNS is left out: it corrects a network that another method has trained, so it has no schedule of its own to compare.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unflip import methods
from unflip.cost import cost
from unflip.data import ImageSet
from unflip.train import checkpoint as checkpoints
from unflip.train.learner import build_model
from unflip.train.loop import TrainingStopped, train
from unflip.train.recipe import Recipe

NOT_FROM_SCRATCH = ("lns",)


def compared() -> list[str]:
    """The methods that can be trained from scratch on one recipe."""
    return [name for name in methods.names() if name not in NOT_FROM_SCRATCH]


def study_methods(
    recipe: Recipe,
    data: ImageSet,
    out: Path,
    *,
    names: Sequence[str],
    seeds: int,
    device: str | None = None,
) -> list[dict[str, Any]]:
    """Train each method; returns a row for each. Finished runs are not run again.

    A method that stops (it diverges, say) is a row with the reason, not the end of the study.
    """
    rows = []
    for name in names:
        rows.append(_row(name, recipe, data, out, seeds, device))
        _write(rows, recipe, out)
    return rows


def _row(
    name: str, recipe: Recipe, data: ImageSet, out: Path, seeds: int, device: str | None
) -> dict[str, Any]:
    method = "float" if name == "float" else methods.get(name).options()
    chosen = recipe.model_copy(update={"name": f"{recipe.name}-{name}", "method": method})
    model = build_model(chosen, data, seed=0)
    counted = cost(model, data.test_images[:1].float())
    row: dict[str, Any] = {
        "method": name,
        "memory_bits": counted.memory_bits,
        "flops": counted.flops,
        "accuracy": [],
    }
    try:
        results = train(chosen, data, out / name, seeds=range(seeds), device=device)
    except TrainingStopped as stop:
        return {**row, "stopped": str(stop)}
    row["accuracy"] = [result["accuracy"] for result in results]
    row["seconds_per_epoch"] = statistics.median(_seconds(out / name)) / seeds
    return row


def _seconds(folder: Path) -> list[float]:
    lines = (folder / "seed-0" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"] for line in lines]


def _write(rows: list[dict[str, Any]], recipe: Recipe, out: Path) -> None:
    summary = {"recipe": recipe.plain(), "rows": rows}
    checkpoints.write_atomically(out / "study.json", json.dumps(summary, indent=1).encode() + b"\n")
    checkpoints.write_atomically(out / "table.md", table(rows, recipe).encode())


def table(rows: list[dict[str, Any]], recipe: Recipe) -> str:
    """The rows as Markdown, best accuracy first."""
    seeds = max((len(row["accuracy"]) for row in rows), default=0)
    where = "validation" if recipe.data.validation else "test"
    lines = [
        f"{recipe.model.name} on {recipe.data.name}, {recipe.epochs} epochs, {seeds} seeds, "
        f"{where} accuracy of the last epoch.\n",
        "| method | accuracy, % | memory, Kbit | FLOPs, M | s per epoch and seed |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: -statistics.fmean(r["accuracy"] or [0])):
        lines.append(
            f"| `{row['method']}` | {_accuracy(row)} | {row['memory_bits'] / 1e3:,.0f} "
            f"| {row['flops'] / 1e6:,.2f} | {row.get('seconds_per_epoch', 0):.2f} |"
        )
    return "\n".join(lines) + "\n"


def _accuracy(row: dict[str, Any]) -> str:
    values = row["accuracy"]
    if not values:
        return f"stopped: {row['stopped']}"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"
