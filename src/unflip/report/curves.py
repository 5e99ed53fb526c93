"""Mean and standard deviation over seeds, epoch by epoch."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

# name on the page -> field of metrics.jsonl and a factor
CURVES = {
    "loss": ("loss", 1.0),
    "accuracy": ("accuracy", 1.0),
    "flips_percent": ("flip_rate", 100.0),
}
LARGEST = sys.float_info.max  # a whole number may be larger
DIGITS = 6  # significant digits: a curve is only drawn


def curves(
    finished: Sequence[Sequence[dict[str, Any]]],
    unfinished: Sequence[Sequence[dict[str, Any]]] = (),
) -> dict[str, Any] | None:
    """``{"epochs": [...], "loss": {"mean": [...], "std": [...]}, ...}``; None if there are no metrics.

    Only finished runs count, or all if none is finished. An epoch that was not measured in every run is null: a mean
    over other seeds than in the epoch before would jump. A curve without any value (a float network flips no signs)
    is left out. std is null for a single run.
    """
    runs = [lines for lines in finished if lines] or [lines for lines in unfinished if lines]
    by_run = [{line["epoch"]: line for line in lines} for lines in runs]
    epochs = sorted(set.intersection(*map(set, by_run))) if runs else []
    if not epochs:
        return None
    found: dict[str, Any] = {"epochs": epochs}
    for name, (field, factor) in CURVES.items():
        at = [_values([lines[epoch] for lines in by_run], field, factor) for epoch in epochs]
        at = [values if len(values) == len(runs) else [] for values in at]
        if any(at):
            found[name] = {
                "mean": [rounded(statistics.fmean(v)) if v else None for v in at],
                "std": [rounded(statistics.stdev(v)) if len(v) > 1 else None for v in at],
            }
    return found


def _values(lines: Sequence[dict[str, Any]], field: str, factor: float) -> list[float]:
    values = [line.get(field) for line in lines]
    return [factor * v for v in values if isinstance(v, (int, float)) and abs(v) <= LARGEST]


def rounded(value: float, digits: int = DIGITS) -> float:
    """To significant digits, so that the file stays small."""
    return float(f"{value:.{digits}g}")


def mean_and_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation; None if there are too few values."""
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None
