"""``table.md``: a study for reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unflip.study.comparison import difference_in_common
from unflip.study.summary import ArmSummary, Summary

COUNTING = (
    "Memory: 1 bit per binary weight and base, 32 bits per other number, without BatchNorm's running statistics. "
    "FLOPs: multiplications for one image; a 1-bit one counts 1/64 per bit of its input, one of a binary weight and "
    "a float input 1/2."
)


def table(summary: Summary) -> str:
    """One row per arm: "best (mean ± std)" of the last epoch, and the paper's beside it."""
    reference = summary.arm(summary.reference)
    tested = any(test.p is not None for test in (*summary.tests, *summary.paired))
    columns = _columns(summary, reference, tested)
    heads = ["", *columns]
    lines = [caption(summary), "", _row(heads), "|---" * len(heads) + "|"]
    for arm in summary.arms:
        lines.append(_row([arm.label, *(cell(arm) for cell in columns.values())]))
    if reference and tested:
        lines += ["", _footnote(reference, summary)]
    if _counted(summary):
        lines += ["", COUNTING]
    return "\n".join(lines) + "\n"


def _columns(
    summary: Summary, reference: ArmSummary | None, tested: bool
) -> dict[str, Callable[[ArmSummary], str]]:
    """Head -> what it shows of an arm."""
    top5 = any(arm.top5 is not None for arm in summary.arms)
    columns: dict[str, Callable[[ArmSummary], str]] = {
        f"{'top-1, ' if top5 else ''}best (mean ± std), %": _figures
    }
    if top5:
        columns["top-5, %"] = _top5
    columns["runs"] = lambda arm: str(len(arm.accuracies))
    if any(arm.loss is not None for arm in summary.arms):
        columns["training loss"] = _loss
    if any(arm.paper for arm in summary.arms):
        counted = _counted(summary)
        columns["published, %" if counted else "paper, %"] = _top_figures if counted else _paper
    if _counted(summary):
        columns["memory, Mbit"] = lambda arm: f"{(arm.memory_bits or 0) / 1e6:,.1f}"
        columns["FLOPs, M"] = lambda arm: f"{(arm.flops or 0) / 1e6:,.0f}"
    if reference:
        against = f"against {reference.label}{' (p)' if tested else ''}"
        columns[against] = lambda arm: _against(reference, arm, summary)
    return columns


def _counted(summary: Summary) -> bool:
    return any(arm.flops is not None for arm in summary.arms)


def _paper(arm: ArmSummary) -> str:
    known = arm.paper
    return best_mean_std(known.best, known.mean, known.std) if known else ""


def _top_figures(arm: ArmSummary) -> str:
    """``53.1 / 77.0``: top-1 and, if it is known, top-5, with the decimals that papers give for ImageNet."""
    known = (arm.paper.mean, arm.paper.top5) if arm.paper else ()
    return " / ".join(f"{value:.1f}" for value in known if value is not None)


def _top5(arm: ArmSummary) -> str:
    return "" if arm.top5 is None else best_mean_std(None, arm.top5, arm.top5_std)


def _loss(arm: ArmSummary) -> str:
    if arm.loss is None:
        return ""
    return f"{arm.loss:.3f}" if arm.loss_std is None else f"{arm.loss:.3f} ± {arm.loss_std:.3f}"


def caption(summary: Summary) -> str:
    text = f"{summary.data}, {summary.evaluated_on} accuracy of the last epoch, {_seeds(summary)}"
    title = f"{summary.title}: " if summary.title else ""
    changes = ", ".join(override_words(text, summary.arms, "`") for text in summary.overrides)
    parts = [f"{title}{text}.", summary.epochs_note, f"With {changes}." if changes else ""]
    return " ".join(part for part in parts if part)


def override_words(override: str, arms: Sequence[ArmSummary], mark: str = "") -> str:
    """An override, and the arms that keep their own value because they are about it."""
    kept = "; ".join(arm.label for arm in arms if override in arm.kept)
    return f"{mark}{override}{mark}" + (f" (own value kept: {kept})" if kept else "")


def _seeds(summary: Summary) -> str:
    """How many seeds the means are of, which may be fewer than were asked for."""
    counts = {len(arm.accuracies) for arm in summary.arms}
    most = max(counts) or len(summary.seeds)
    text = f"{most} seed{'s' if most > 1 else ''}"
    return f"up to {text}" if len(counts) > 1 else text


def best_mean_std(best: float | None, mean: float, std: float | None) -> str:
    """``85.78 (85.56 ± 0.11)``, as far as the figures are known."""
    middle = f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"
    return middle if best is None else f"{best:.2f} ({middle})"


def _figures(arm: ArmSummary) -> str:
    parts = []
    if arm.mean is not None:
        several = arm.std is not None
        parts.append(best_mean_std(arm.best if several else None, arm.mean, arm.std))
    parts += [f"seed {run.seed} stopped: {run.stopped}" for run in arm.runs if run.stopped]
    return "; ".join(parts)


def _against(reference: ArmSummary, arm: ArmSummary, summary: Summary) -> str:
    """``-0.63 (0.0045; paired 0.0021)``, as far as the figures are known."""
    if arm.mean is None or reference.mean is None or arm is reference:
        return ""
    pair = {arm.name, reference.name}
    shown = [
        f"{before}{test.p:.2g}"
        for before, tests in (
            ("", summary.tests),
            (f"paired {_in_common(reference, arm, summary)}", summary.paired),
        )
        for test in tests
        if {test.a, test.b} == pair and test.p is not None
    ]
    text = f"{arm.mean - reference.mean:+.2f}"
    return f"{text} ({'; '.join(shown)})" if shown else text


def _in_common(reference: ArmSummary, arm: ArmSummary, summary: Summary) -> str:
    """``+0.20, ``: the mean difference over common seeds, if it is not the difference of the means."""
    difference = difference_in_common(summary, arm.name, reference.name)
    return "" if difference is None else f"{difference:+.2f}, "


def _footnote(reference: ArmSummary, summary: Summary) -> str:
    text = "p: Welch's t-test, two-sided"
    if any(test.p is not None for test in summary.paired):
        text += "; paired: the paired t-test over seeds, for arms that start from the same runs"
    others = (arm for arm in summary.arms if arm is not reference)
    if any(_in_common(reference, arm, summary) for arm in others):
        text += " (with the mean difference over the seeds that both have, if one has more)"
    if len(summary.holm) < 2:  # one comparison needs no correction
        return f"{text}."
    text += "; not corrected for the number of comparisons."
    labels = {arm.name: arm.label for arm in summary.arms}
    left = [
        f"{labels[({test.a, test.b} - {reference.name}).pop()]} ({test.adjusted:.2g})"
        for test in summary.holm
        if test.adjusted < 0.05
    ]
    return (
        f"{text} With Holm's correction for all {len(summary.holm)} (paired where possible), "
        f"p < 0.05 remains for {', '.join(left) or 'none'}."
    )


def _row(cells: list[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
