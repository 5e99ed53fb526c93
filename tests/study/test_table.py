"""table.md and the figures: their numbers and captions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from scipy import stats

from unflip.study.figures import _by_epoch, _text, draw
from unflip.study.paper import EXPERIMENTS
from unflip.study.runner import run_study, write_tables
from unflip.study.study import Study
from unflip.study.summary import Paper
from unflip.study.table import best_mean_std

OnDigits = Callable[..., Study]


def test_best_mean_and_std_as_the_paper_writes_them() -> None:
    assert best_mean_std(85.78, 85.56, 0.11) == "85.78 (85.56 ± 0.11)"
    assert best_mean_std(None, 85.06, None) == "85.06"


def test_the_table(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    """Accuracies of the fake trainer: 80 + a tenth of the name's length + the seed."""
    study = on_digits("ablation", tmp_path, 3, epochs_scale=2)
    arms = [
        replace(a, paper=Paper(85.56, 0.11, 85.78)) if a.name == "lns" else a for a in study.arms
    ]
    run_study(replace(study, arms=tuple(arms)))
    written = (tmp_path / "table.md").read_text()
    assert "digits, test accuracy of the last epoch, 3 seeds." in written
    assert "Epochs: 2 (from scratch), 2 (from the baseline); 2 × those of the recipes." in written
    assert "| | best (mean ± std), % | runs | paper, % | against fine-tuning, lr 0.01 (p) |" in (
        written.replace("|  |", "| |")
    )
    assert "| LNS | 82.30 (81.30 ± 1.00) | 3 | 85.78 (85.56 ± 0.11) | -1.00 (0.29) |" in written
    assert "| baseline (DoReFa) | 82.80 (81.80 ± 1.00) | 3 |  | -0.50 (0.57) |" in written
    assert "| fine-tuning, lr 0.01 | 83.30 (82.30 ± 1.00) | 3 |  |  |" in written


def test_the_table_counts_accuracies(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    trainer.stops = {"finetune-0.01/seed-1": "the loss is nan"}
    run_study(on_digits("ablation", tmp_path, 3), only=["finetune-0.01"])
    written = (tmp_path / "table.md").read_text()
    assert "last epoch, up to 3 seeds." in written
    row = "83.30 (82.30 ± 1.41); seed 1 stopped: the loss is nan | 2 |"
    assert f"| fine-tuning, lr 0.01 | {row}" in written
    assert "| baseline (DoReFa) | 82.80 (81.80 ± 1.00) | 3 |" in written


def test_one_seed_has_no_p_and_one_comparison_no_correction(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    run_study(on_digits("ablation", tmp_path / "one", 1))
    written = (tmp_path / "one" / "table.md").read_text()
    assert "p: " not in written
    assert "| against fine-tuning, lr 0.01 |" in written
    run_study(on_digits("final", tmp_path / "two", 2), only=["baseline", "alone"])
    assert "p: Welch's t-test, two-sided.\n" in (tmp_path / "two" / "table.md").read_text()


def test_the_table_has_both_tests(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("ablation", tmp_path, 3)
    run_study(study, only=["finetune-0.01", "mapping", "lns"])
    for seed, accuracy in enumerate((60.0, 61.1, 62.0)):
        result = tmp_path / "lns" / f"seed-{seed}" / "result.json"
        result.write_text(json.dumps({**json.loads(result.read_text()), "accuracy": accuracy}))
    summary = write_tables(study)
    [test] = [t for t in summary.paired if {t.a, t.b} == {"finetune-0.01", "lns"}]
    values = [summary.arms[i].accuracies for i in (1, 3)]
    p = stats.ttest_rel(*values).pvalue
    assert test.p == pytest.approx(p)
    written = (tmp_path / "table.md").read_text()
    welch_p = stats.ttest_ind(*values, equal_var=False).pvalue
    assert f"| -21.27 ({welch_p:.2g}; paired {p:.2g}) |" in written
    assert "paired: the paired t-test over seeds" in written
    assert (
        f"correction for all 3 (paired where possible), p < 0.05 remains for LNS ({3 * p:.2g})."
        in (written)
    )


def test_pairs_are_of_the_seeds_in_common(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    """Fine-tuning has a third seed, far above; the mean over pairs leaves it out, and the table says both."""
    study = on_digits("ablation", tmp_path, 3)
    run_study(study, only=["finetune-0.01", "lns"])
    figures = {"finetune-0.01": (70.0, 71.0, 99.0), "lns": (70.1, 71.3)}
    for arm, accuracies in figures.items():
        for seed, accuracy in enumerate(accuracies):
            result = tmp_path / arm / f"seed-{seed}" / "result.json"
            result.write_text(json.dumps({**json.loads(result.read_text()), "accuracy": accuracy}))
    (tmp_path / "lns" / "seed-2" / "result.json").unlink()
    summary = write_tables(study)
    commands = {arm.name: arm.command for arm in summary.arms}
    assert "--seeds 3 " in commands["finetune-0.01"]
    assert "--seeds 2 " in commands["lns"], "as many as its row has"
    written = (tmp_path / "table.md").read_text()
    p = stats.ttest_rel(figures["lns"], figures["finetune-0.01"][:2]).pvalue
    assert f"; paired +0.20, {p:.2g}) |" in written
    assert "| -9.30 (" in written
    assert "(with the mean difference over the seeds that both have, if one has more)" in written


def test_the_caption_names_the_overrides(trainer: Any, on_digits: OnDigits, tmp_path: Path) -> None:
    study = on_digits("ablation", tmp_path, 1, "model.shortcut=conv", epochs_scale=2)
    summary = run_study(study, only=["baseline"])
    assert summary.overrides[-1] == "model.shortcut=conv"
    assert summary.epochs_scale == 2
    said = "`model.width=2`, `epochs=1`, `model.shortcut=conv`."
    assert (tmp_path / "table.md").read_text().splitlines()[0].endswith(said)
    plain = EXPERIMENTS["ablation"].study(tmp_path, 2)
    assert (plain.overrides, plain.epochs_scale) == ((), 1)
    assert plain.command == "unflip study ablation --seeds 2 --data DIR"


def test_the_caption_says_which_arms_kept_their_own_value(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    study = on_digits("ablation", tmp_path, 1, "optimizer.lr=0.01")
    run_study(study, only=["finetune-0.01", "finetune-0.001", "finetune-0.0001", "lns"])
    caption = (tmp_path / "table.md").read_text().splitlines()[0]
    kept = "fine-tuning, lr 0.001; fine-tuning, lr 0.0001"
    assert caption.endswith(f", `epochs=1`, `optimizer.lr=0.01` (own value kept: {kept}).")


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("ablation", ["accuracy", "differences", "flips", "loss"]),
        ("alpha", ["accuracy", "alpha", "differences", "flips", "loss"]),
        ("sota", ["accuracy", "differences", "flips", "loss"]),
    ],
)
def test_figures_are_svg_and_the_same_again(
    trainer: Any, on_digits: OnDigits, tmp_path: Path, name: str, figures: list[str]
) -> None:
    study = on_digits(name, tmp_path)
    summary = run_study(study)
    paths = sorted(draw(study, summary))
    assert [path.name for path in paths] == [f"{name}.svg" for name in figures]
    for path in paths:
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in sorted(draw(study, summary))] == before


def test_labels_in_figures_are_text() -> None:
    """matplotlib would read a formula, and a control character is not allowed in SVG."""
    assert _text("costs $5 \\$x$\x1b[31m") == "costs \\$5 \\\\$x\\$\\x1b[31m"


def test_mean_curves_are_of_all_runs_in_every_epoch(
    trainer: Any, on_digits: OnDigits, tmp_path: Path
) -> None:
    """One run measured accuracy in every epoch, another not in the first."""
    study = on_digits("ablation", tmp_path)
    run_study(study, only=["baseline"])
    path = tmp_path / "baseline" / "seed-1" / "metrics.jsonl"
    first, *others = path.read_text().splitlines()
    unmeasured = json.dumps({**json.loads(first), "accuracy": None})
    path.write_text("\n".join([unmeasured, *others]) + "\n")
    baseline = study.arm("baseline")
    accuracy, loss = (_by_epoch(study, baseline, key) for key in ("accuracy", "loss"))
    assert {epoch: len(values) for epoch, values in accuracy.items()} == {2: 2, 3: 2}
    assert {epoch: len(values) for epoch, values in loss.items()} == {1: 2, 2: 2, 3: 2}
    path.unlink()  # only its result was kept
    assert {e: len(v) for e, v in _by_epoch(study, baseline, "accuracy").items()} == {
        1: 1,
        2: 1,
        3: 1,
    }
