"""Mean and standard deviation over seeds, epoch by epoch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

# name on the page -> field of metrics.jsonl and a factor
CURVES = {
    "loss": ("loss", 1.0),
    "accuracy": ("accuracy", 1.0),
    "flips_percent": ("flip_rate", 100.0),
}
DIGITS = 6  # significant ones; a curve is drawn, not computed with


def curves(runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any] | None:
    """``{"epochs": [...], "loss": {"mean": [...], "std": [...]}, ...}``; None where there is not one line.

    A curve that no run has (a float network flips no signs) is left out. A null is an epoch without
    a value; std is null where fewer than two seeds got that far.
    """
    epochs = sorted({line["epoch"] for lines in runs for line in lines})
    if not epochs:
        return None
    found: dict[str, Any] = {"epochs": epochs}
    lines_at = _by_epoch(runs, epochs)
    for name, (field, factor) in CURVES.items():
        at = [_values(lines, field, factor) for lines in lines_at]
        if any(at):
            found[name] = {
                "mean": [rounded(statistics.fmean(v)) if v else None for v in at],
                "std": [rounded(statistics.stdev(v)) if len(v) > 1 else None for v in at],
            }
    return found


def _by_epoch(
    runs: Sequence[Sequence[dict[str, Any]]], epochs: Sequence[int]
) -> list[list[dict[str, Any]]]:
    by_run = [{line["epoch"]: line for line in lines} for lines in runs]
    return [[lines[epoch] for lines in by_run if epoch in lines] for epoch in epochs]


def _values(lines: Sequence[dict[str, Any]], field: str, factor: float) -> list[float]:
    values = [line.get(field) for line in lines]
    return [factor * v for v in values if isinstance(v, (int, float)) and math.isfinite(v)]


def rounded(value: float, digits: int = DIGITS) -> float:
    """To significant digits, so that the file stays small."""
    return float(f"{value:.{digits}g}")


def mean_and_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Sample standard deviation; None for what the number of values does not allow."""
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None
