"""``table.md``: a study for reading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unflip.study.summary import accuracies, difference_in_common

if TYPE_CHECKING:
    from unflip.study.study import Study


def table(study: Study, summary: dict[str, Any]) -> str:
    """A row an arm; "best (mean ± std)" of the last epoch, as the LNS paper has it, ours beside the paper's."""
    reference = _reference(study, summary)
    paper = any(arm.paper for arm in study.arms)
    heads = ["", "best (mean ± std), %", "runs"]
    heads += ["paper, %"] if paper else []
    tested = any(test["p"] is not None for test in [*summary["tests"], *summary["paired"]])
    heads += [f"against {reference['label']}{' (p)' if tested else ''}"] if reference else []
    lines = [caption(summary), "", _row(heads), "|---" * len(heads) + "|"]
    for arm, found in zip(study.arms, summary["arms"], strict=True):
        cells = [arm.label, _figures(found), str(len(accuracies(found)))]
        if paper:
            known = arm.paper
            cells.append(best_mean_std(known.best, known.mean, known.std) if known else "")
        if reference:
            cells.append(_against(reference, found, summary))
        lines.append(_row(cells))
    if reference and tested:
        lines += ["", _footnote(reference, summary)]
    return "\n".join(lines) + "\n"


def caption(summary: dict[str, Any]) -> str:
    text = f"{summary['data']}, {summary['evaluated_on']} accuracy of the last epoch"
    text += f", {_seeds(summary)}"
    title = f"{summary['title']}: " if summary["title"] else ""
    changes = ", ".join(override_words(text, summary["arms"], "`") for text in summary["overrides"])
    parts = [f"{title}{text}.", summary["epochs_note"], f"With {changes}." if changes else ""]
    return " ".join(part for part in parts if part)


def override_words(override: str, arms: list[dict[str, Any]], mark: str = "") -> str:
    """What was changed, and the arms that are about that and kept their own value."""
    kept = "; ".join(arm["label"] for arm in arms if override in arm["kept"])
    return f"{mark}{override}{mark}" + (f" (own value kept: {kept})" if kept else "")


def _seeds(summary: dict[str, Any]) -> str:
    """How many seeds the means are of, which need not be as many as were asked for."""
    counts = {len(accuracies(arm)) for arm in summary["arms"]}
    most = max(counts) or len(summary["seeds"])
    text = f"{most} seed{'s' if most > 1 else ''}"
    return f"up to {text}" if len(counts) > 1 else text


def best_mean_std(best: float | None, mean: float, std: float | None) -> str:
    """``85.78 (85.56 ± 0.11)``, or what of it there is."""
    middle = f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"
    return middle if best is None else f"{best:.2f} ({middle})"


def _figures(arm: dict[str, Any]) -> str:
    parts = []
    if arm["mean"] is not None:
        several = arm["std"] is not None
        parts.append(best_mean_std(arm["best"] if several else None, arm["mean"], arm["std"]))
    stops = [f"seed {run['seed']} stopped: {run['stopped']}" for run in arm["runs"]]
    parts += [text for text, run in zip(stops, arm["runs"], strict=True) if run["stopped"]]
    return "; ".join(parts)


def _reference(study: Study, summary: dict[str, Any]) -> dict[str, Any] | None:
    found = [arm for arm in summary["arms"] if arm["name"] == study.reference]
    return found[0] if found else None


def _against(reference: dict[str, Any], arm: dict[str, Any], summary: dict[str, Any]) -> str:
    """``-0.63 (0.0045; paired 0.0021)``, or what of it there is."""
    if arm["mean"] is None or reference["mean"] is None or arm is reference:
        return ""
    pair = {arm["name"], reference["name"]}
    shown = [
        f"{before}{test['p']:.2g}"
        for before, tests in (
            ("", summary["tests"]),
            (f"paired {_in_common(reference, arm, summary)}", summary["paired"]),
        )
        for test in tests
        if {test["a"], test["b"]} == pair and test["p"] is not None
    ]
    text = f"{arm['mean'] - reference['mean']:+.2f}"
    return f"{text} ({'; '.join(shown)})" if shown else text


def _in_common(reference: dict[str, Any], arm: dict[str, Any], summary: dict[str, Any]) -> str:
    """``+0.20, ``: the mean over the seeds that both have, where that is not the difference of the means."""
    difference = difference_in_common(summary, arm["name"], reference["name"])
    return "" if difference is None else f"{difference:+.2f}, "


def _footnote(reference: dict[str, Any], summary: dict[str, Any]) -> str:
    text = "p: Welch's t-test, two-sided"
    if any(test["p"] is not None for test in summary["paired"]):
        text += "; paired: the t-test seed by seed, of arms that start from the same runs"
    arms = (arm for arm in summary["arms"] if arm is not reference)
    if any(_in_common(reference, arm, summary) for arm in arms):
        text += " (with its mean over the seeds that both have, where one has more)"
    if len(summary["holm"]) < 2:  # one comparison needs no correction
        return f"{text}."
    text += "; not corrected for the number of comparisons."
    labels = {arm["name"]: arm["label"] for arm in summary["arms"]}
    left = [
        f"{labels[({test['a'], test['b']} - {reference['name']}).pop()]} ({test['adjusted']:.2g})"
        for test in summary["holm"]
        if test["adjusted"] < 0.05
    ]
    return (
        f"{text} With Holm's correction for all {len(summary['holm'])} (paired where there is one), "
        f"p < 0.05 remains for {', '.join(left) or 'none'}."
    )


def _row(cells: list[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
