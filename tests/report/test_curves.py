"""Curves: mean and standard deviation of the metrics, epoch by epoch."""

import json
import shutil
import statistics

import pytest

from unflip.report import report_data
from unflip.report.curves import curves


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def measured(epochs, accuracy=None):
    return [{"epoch": e, "loss": float(e), "accuracy": (accuracy or {}).get(e)} for e in epochs]


def test_curves_are_mean_and_std_of_the_metrics(study, study_data):
    arm = study_data["sections"][0]["arms"][0]
    seeds = [lines(study / "digits-dorefa" / f"seed-{n}") for n in (0, 1)]
    assert arm["curves"]["epochs"] == [1, 2]
    for name, field, factor in (
        ("loss", "loss", 1),
        ("accuracy", "accuracy", 1),
        ("flips_percent", "flip_rate", 100),
    ):
        for k in (0, 1):
            values = [factor * seed[k][field] for seed in seeds]
            curve = arm["curves"][name]
            assert curve["mean"][k] == pytest.approx(statistics.fmean(values), rel=1e-5)
            assert curve["std"][k] == pytest.approx(statistics.stdev(values), rel=1e-5)


def test_a_mean_is_over_the_same_seeds_in_every_epoch():
    often = measured(range(1, 5), {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0})
    seldom = measured(range(1, 5), {2: 22.0, 4: 44.0})
    drawn = curves([often, seldom])
    assert drawn["epochs"] == [1, 2, 3, 4]
    assert drawn["loss"]["mean"] == [1.0, 2.0, 3.0, 4.0]
    assert drawn["accuracy"]["mean"] == [None, 21.0, None, 42.0]
    stds = [statistics.stdev(pair) for pair in ((20.0, 22.0), (40.0, 44.0))]
    assert drawn["accuracy"]["std"][1::2] == pytest.approx(stds, rel=1e-5)
    assert drawn["accuracy"]["std"][::2] == [None, None]


def test_a_run_that_stopped_bends_no_curve():
    long, short = measured((1, 2)), [{"epoch": 1, "loss": 9.0}]
    alone = {"epochs": [1, 2], "loss": {"mean": [1.0, 2.0], "std": [None, None]}}
    assert curves([long], [short]) == alone
    assert curves([], [long, []]) == alone  # while nothing is finished
    assert curves([], [long, short])["epochs"] == [1]
    assert curves([[], []]) is None
    assert curves([], []) is None


def test_the_curves_of_a_run_are_of_its_finished_seeds(runs, tmp_path):
    for seed in (0, 1):
        folder = tmp_path / "digits-dorefa" / f"seed-{seed}"
        shutil.copytree(runs / "digits-dorefa" / f"seed-{seed}", folder)
    (folder / "result.json").unlink()
    [arm] = report_data([tmp_path / "digits-dorefa"])["sections"][0]["arms"]
    losses = [line["loss"] for line in lines(tmp_path / "digits-dorefa" / "seed-0")]
    assert arm["curves"]["loss"]["mean"] == pytest.approx(losses, rel=1e-5)
