"""Figures of a study as SVG: curves over epochs, accuracy over a swept value, and differences from the reference.

The same runs give the same bytes: the files have no date and no random names.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unflip.printable import printable
from unflip.runs.run import Run
from unflip.study.arm import Arm
from unflip.study.comparison import chosen_tests
from unflip.study.summary import ArmSummary, Summary

if TYPE_CHECKING:
    from unflip.study.study import Study

CURVES = {
    "loss": ("loss", "training loss", 1.0),
    "accuracy": ("accuracy", "accuracy, %", 1.0),
    "flips": ("flip_rate", "signs flipped in the epoch, %", 100.0),
}


def draw(study: Study, summary: Summary) -> list[Path]:
    """All figures for which the study has finished runs; none without matplotlib, which training does not need.
    The same command draws them on a machine that has it."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    drawn = [_curves(study, name, summary.evaluated_on) for name in CURVES]
    if any(arm.x is not None for arm in study.arms):
        drawn.append(_sweep(study, summary))
    drawn.append(_differences(study, summary))
    return [path for path in drawn if path is not None]


def _curves(study: Study, name: str, images: str) -> Path | None:
    """Mean over the seeds per epoch, and a band of one standard deviation (the paper's Figure 3)."""
    key, title, factor = CURVES[name]
    curves = [(arm, _by_epoch(study, arm, key)) for arm in _compared(study)]
    curves = [(arm, epochs) for arm, epochs in curves if epochs]
    if not curves:
        return None
    figure, axis = _axes()
    for number, (arm, epochs) in enumerate(curves):
        means = [factor * statistics.fmean(values) for values in epochs.values()]
        stds = [factor * statistics.stdev(v) if len(v) > 1 else 0.0 for v in epochs.values()]
        before = _epochs_before(study, arm)
        at, color = [before + epoch for epoch in epochs], f"C{number % 10}"
        style = ("-", "--", ":")[number // 10 % 3]
        axis.plot(at, means, color=color, linestyle=style, linewidth=1.2, label=_text(arm.label))
        below = [m - s for m, s in zip(means, stds, strict=True)]
        above = [m + s for m, s in zip(means, stds, strict=True)]
        axis.fill_between(at, below, above, color=color, alpha=0.15, linewidth=0)
    if name == "flips":
        axis.set_yscale("symlog", linthresh=0.001)
        axis.set_ylim(bottom=0)
    else:
        axis.set_ylim(*_settled([factor * v for _, epochs in curves for v in _late(epochs)]))
    axis.set_xlabel("epoch")
    axis.set_ylabel(f"{images} {title}" if name == "accuracy" else title)
    axis.legend(fontsize="small")
    return _save(figure, study.out / f"{name}.svg")


def _late(epochs: dict[int, list[float]]) -> list[float]:
    """The values after the first tenth: arms differ by less than the beginning spans."""
    return [v for epoch, values in epochs.items() if epoch > max(epochs) / 10 for v in values]


def _settled(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def _compared(study: Study) -> list[Arm]:
    """The arms that start from a baseline, without it because it has other epochs; all arms if fewer than two do."""
    started = [arm for arm in study.arms if arm.start]
    return started if len(started) > 1 else list(study.arms)


def _epochs_before(study: Study, arm: Arm) -> int:
    """Beside the arm it starts from, a curve continues where that one ends."""
    if arm.start is None or study.arm(arm.start) not in _compared(study):
        return 0
    return study.arm(arm.start).recipe.epochs


def _by_epoch(study: Study, arm: Arm, key: str) -> dict[int, list[float]]:
    """The values of the finished runs in each epoch that all of them have. Runs may measure accuracy in different
    epochs, and a mean over other runs than in the epoch before would jump."""
    finished = [run for seed in study.seeds if (run := study.run(arm, seed)).finished]
    found = [values for run in finished if (values := _values(run, key))]
    common = sorted(set.intersection(*map(set, found))) if found else []
    return {epoch: [values[epoch] for values in found] for epoch in common}


def _values(run: Run, key: str) -> dict[int, float]:
    return {line["epoch"]: line[key] for line in run.metrics if line.get(key) is not None}


def _sweep(study: Study, summary: Summary) -> Path | None:
    """Accuracy over the swept value, with bars of one standard deviation (the paper's Figures 4 and 5)."""
    swept = [arm for arm in summary.arms if arm.x is not None and arm.mean is not None]
    if not swept:
        return None
    figure, axis = _axes()
    axis.errorbar(
        range(len(swept)),  # evenly spaced: the values span decades and include zero
        [arm.mean for arm in swept],
        [arm.std or 0.0 for arm in swept],
        marker="o",
        capsize=3,
        color="C0",
    )
    _levels(axis, [arm for arm in summary.arms if arm.x is None and arm.mean is not None])
    axis.set_xticks(range(len(swept)), [f"{arm.x:g}" for arm in swept])
    axis.set_xlabel({"alpha": "α", "rho": "ρ"}.get(study.name, study.name))
    axis.set_ylabel(f"{summary.evaluated_on} accuracy, %")
    return _save(figure, study.out / f"{study.name}.svg")


def _levels(axis: Any, arms: Sequence[ArmSummary]) -> None:
    """Arms beside the sweep (the baseline) as horizontal lines."""
    for number, arm in enumerate(arms):
        axis.axhline(arm.mean, color=f"C{number + 1}", linestyle="--", label=_text(arm.label))
    if arms:
        axis.legend(fontsize="small")


def _differences(study: Study, summary: Summary) -> Path | None:
    """Each arm minus the reference, with the 95 % interval of the test that suits the two."""
    found = {
        _text(arm.label): interval
        for arm in summary.arms
        if (interval := _interval(summary, arm.name))
    }
    if len(found) < 2:
        return None
    figure, axis = _axes(8, 1.2 + 0.26 * len(found))
    labels = list(reversed(found))  # the first arm is drawn at the top
    for at, label in enumerate(labels):
        difference, half = found[label]
        axis.errorbar(difference, at, xerr=half, marker="o", markersize=4, capsize=2, color="C0")
    axis.axvline(0, color="0.4", linewidth=1)
    axis.set_yticks(range(len(labels)), labels)
    assert study.reference is not None
    axis.set_xlabel(f"points above {_text(study.arm(study.reference).label)}, 95 % interval")
    return _save(figure, study.out / "differences.svg")


def _interval(summary: Summary, arm: str) -> tuple[float, float] | None:
    """Mean difference from the reference, and half its 95 % interval; None without a test or without spread."""
    pair = {arm, summary.reference}
    chosen = chosen_tests(summary.tests, summary.paired).values()
    test = next((t for _, t in chosen if {t.a, t.b} == pair), None)
    if test is None or not test.t or test.difference is None:
        return None
    from scipy import stats  # type: ignore[import-untyped]

    sign = 1 if test.a == arm else -1
    half = stats.t.ppf(0.975, test.df) * test.difference / test.t
    return sign * test.difference, float(half)


def _text(label: str) -> str:
    """A label as it is written: matplotlib reads $...$ as a formula, and SVG has no control characters."""
    return printable(label).replace("$", r"\$")


def _axes(width: float = 6, height: float = 4) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(width, height), constrained_layout=True)
    axis.grid(alpha=0.3)
    return figure, axis


def _save(figure: Any, path: Path) -> Path:
    import matplotlib
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "unflip"}):
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
