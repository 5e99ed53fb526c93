"""``table.md``: a study for reading."""

from __future__ import annotations

from collections.abc import Sequence

from unflip.study.comparison import difference_in_common
from unflip.study.summary import ArmSummary, Summary


def table(summary: Summary) -> str:
    """One row per arm: "best (mean ± std)" of the last epoch, and the paper's beside it."""
    reference = summary.arm(summary.reference)
    paper = any(arm.paper for arm in summary.arms)
    tested = any(test.p is not None for test in (*summary.tests, *summary.paired))
    heads = ["", "best (mean ± std), %", "runs"]
    heads += ["paper, %"] if paper else []
    heads += [f"against {reference.label}{' (p)' if tested else ''}"] if reference else []
    lines = [caption(summary), "", _row(heads), "|---" * len(heads) + "|"]
    for arm in summary.arms:
        cells = [arm.label, _figures(arm), str(len(arm.accuracies))]
        if paper:
            known = arm.paper
            cells.append(best_mean_std(known.best, known.mean, known.std) if known else "")
        if reference:
            cells.append(_against(reference, arm, summary))
        lines.append(_row(cells))
    if reference and tested:
        lines += ["", _footnote(reference, summary)]
    return "\n".join(lines) + "\n"


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
