"""The report's data against the files it was made of, and what it refuses.

One file of more than 400 lines, because all tests share one trained study.
"""

import gzip
import json
import math
import re
import shutil
import statistics
import subprocess
import sys

import pytest
import torch
from torch import nn

from unflip import BinaryConv2d, BinaryLinear, flips_by_layer, signs
from unflip.layers import binary_layers
from unflip.recipes.load import load_recipe
from unflip.report import render, report_data, write_report
from unflip.report.curves import curves
from unflip.report.page import embedded
from unflip.report.sign_changes import CHANNELS, NoWeights, SignChanges
from unflip.report.signs import _kernels, _layer_kernels, compare
from unflip.runs import checkpoint as checkpoints
from unflip.runs.files import REMEDIES
from unflip.runs.load import load_run as network
from unflip.runs.run import Run
from unflip.ste import sign


@pytest.fixture(scope="module")
def study_data(study):
    return report_data([study])


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_study_keeps_its_figures(study, study_data):
    [section] = study_data["sections"]
    written = json.loads((study / "study.json").read_text())
    for shown, given in zip(section["arms"], written["arms"], strict=True):
        assert {k: shown[k] for k in ("label", "command", "mean", "std", "best", "x")} == {
            k: given[k] for k in ("label", "command", "mean", "std", "best", "x")
        }
    assert [arm["n"] for arm in section["arms"][:3]] == [2, 1, 2]  # one of fine-tuning's stopped
    assert section["tests"][0]["b"] == "baseline"
    assert section["arms"][0]["runs"][0]["torch"] == torch.__version__


def with_tests(study, folder, reference=None, **more):
    """The study with a test of each two of its arms; Welch's are not paired and have no ``n``."""
    shutil.copytree(study, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    saved = json.loads((folder / "study.json").read_text())
    names = [arm["name"] for arm in saved["arms"]]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    numbers = {"t": 2.5, "df": 3.0, "p": 0.04}
    tests = [{"a": a, "b": b, "difference": 1.5, **numbers} for a, b in pairs]
    saved.update(tests=tests, reference=reference, **more)
    (folder / "study.json").write_text(json.dumps(saved))
    return folder


def test_tests_with_the_reference_are_differences_from_it(study, tmp_path):
    folder = with_tests(study, tmp_path / "study", "digits-finetune")
    [section] = report_data([folder])["sections"]
    assert section["reference"] == "fine-tuning"
    found = [test for test in section["tests"] if test["with_reference"]]
    assert len(found) == 6
    assert {test["b"] for test in found} == {"fine-tuning"}
    # The first was baseline against fine-tuning, the others fine-tuning against something.
    assert [test["difference"] for test in found] == [1.5] + 5 * [-1.5]
    assert [test["t"] for test in found] == [2.5] + 5 * [-2.5]
    assert {(test["p"], test["df"]) for test in section["tests"]} == {(0.04, 3.0)}
    others = [test for test in section["tests"] if not test["with_reference"]]
    assert len(others) == 15
    assert {test["difference"] for test in others} == {1.5}


def test_holms_correction_is_that_of_the_summary(study, tmp_path):
    """The summary has it beside its tests, for the one of each pair that counts."""
    folder = with_tests(study, tmp_path / "study")
    path = folder / "study.json"
    saved = json.loads(path.read_text())
    first, *others = saved["tests"]
    entry = {"a": first["b"], "b": first["a"], "p": 0.01, "adjusted": 0.03}
    path.write_text(json.dumps({**saved, "holm": [{**entry, "test": "welch"}]}))
    found = [test["holm"] for test in report_data([folder])["sections"][0]["tests"]]
    assert found == [0.03] + [None] * len(others)
    path.write_text(json.dumps({**saved, "holm": [{**entry, "test": "paired"}]}))
    found = [test["holm"] for test in report_data([folder])["sections"][0]["tests"]]
    assert found == [None] * len(saved["tests"])


def test_a_reference_that_is_not_among_the_arms_is_left_out(study, tmp_path):
    """As after --only: the table has some arms of the study."""
    folder = with_tests(study, tmp_path / "study", "finetune-0.1")
    [section] = report_data([folder])["sections"]
    assert (section["reference"], section["reference_arm"]) == (None, None)
    assert not any(test["with_reference"] for test in section["tests"])
    assert {arm["against"] for arm in section["arms"]} == {None}


def test_overrides_are_listed_with_the_arms_that_ignore_them(study, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(study, folder)
    saved = json.loads((folder / "study.json").read_text())
    saved["overrides"] = ["model.shortcut=conv", "batch=64"]
    saved["arms"][2]["kept"] = ["model.shortcut=conv"]
    (folder / "study.json").write_text(json.dumps(saved))
    [section] = report_data([folder])["sections"]
    kept = f"model.shortcut=conv (own value kept: {saved['arms'][2]['label']})"
    assert section["changes"] == [kept, "batch=64"]


def test_an_arm_has_its_difference_from_the_reference(study, tmp_path):
    """With the p of each test, as in table.md; without tests (one seed), only the difference."""
    pair = {"a": "digits-dorefa", "b": "digits-lns", "difference": -1.5, "p": 0.2}
    folder = with_tests(study, tmp_path / "study", "digits-dorefa", paired=[{**pair, "n": 2}])
    path = folder / "study.json"
    [section] = report_data([folder])["sections"]
    assert section["reference_arm"] == 0
    reference = section["arms"][0]["mean"]
    for i, arm in enumerate(section["arms"]):
        if i == 0:
            assert arm["against"] is None
        else:
            more = {"p": 0.04, "paired_p": 0.2 if i == 2 else None, "paired_difference": None}
            assert arm["against"] == {"difference": arm["mean"] - reference, **more}
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "paired": [{**pair, "n": 1}]}))  # each arm has two seeds
    [section] = report_data([folder])["sections"]
    assert section["arms"][2]["against"]["paired_difference"] == 1.5, "from the reference"
    path.write_text(json.dumps({**saved, "tests": [], "paired": []}))
    [section] = report_data([folder])["sections"]
    assert [arm["against"] and arm["against"]["p"] for arm in section["arms"]] == [None] * 7
    assert section["arms"][2]["against"]["difference"] == section["arms"][2]["mean"] - reference
    saved["arms"][0]["mean"] = None  # it stopped, so there is nothing to compare with
    path.write_text(json.dumps(saved))
    assert {arm["against"] for arm in report_data([folder])["sections"][0]["arms"]} == {None}


def retitled(study, folder, **changes):
    """The study's summary alone, changed."""
    folder.mkdir(parents=True)
    saved = json.loads((study / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps({**saved, **changes}))
    return folder


def test_the_title_of_many_studies_is_short(study, runs, tmp_path):
    a, b, c = (retitled(study, tmp_path / x, title=f"Study {x}") for x in "abc")
    other = retitled(study, tmp_path / "other", title="Another", data="cifar10")
    assert report_data([a, b])["title"] == "Study a; Study b"
    assert report_data([a, b, c])["title"] == "3 studies on digits"
    assert report_data([a, b, c], title="Mine")["title"] == "Mine"
    several = report_data([a, other, runs / "digits-dorefa"])
    assert several["title"] == "2 studies and runs on digits, cifar10"


def test_a_study_without_a_title_has_its_name(study, tmp_path):
    """As one of given recipes: an empty heading and link would lead nowhere."""
    name = json.loads((study / "study.json").read_text())["study"]
    data = report_data([retitled(study, tmp_path / "mine", title="")])
    assert [data["title"], data["sections"][0]["title"]] == [name, name]


def test_a_study_without_runs_has_no_notes_about_weights(study, tmp_path):
    saved = json.loads((study / "study.json").read_text())
    nothing = {"runs": [], "mean": None, "std": None, "best": None}
    arms = [{**arm, **nothing} for arm in saved["arms"]]
    [section] = report_data([retitled(study, tmp_path / "new", arms=arms, tests=[])])["sections"]
    assert section["signs"] == []


def test_sections_of_one_title_are_told_apart(study, runs, tmp_path):
    def titles(*sources):
        return [section["title"] for section in report_data(sources)["sections"]]

    held_out = retitled(study, tmp_path / "held-out", evaluated_on="validation")
    cifar = retitled(study, tmp_path / "cifar", data="cifar10")
    own = retitled(study, tmp_path / "own", title="Its own")
    title = "A study of digits"
    assert titles(study, held_out, own) == [
        f"{title} (test images)",
        f"{title} (held-out images)",
        "Its own",
    ]
    assert titles(study, cifar) == [f"{title} (digits)", f"{title} (cifar10)"]
    assert titles(study, cifar, held_out)[2] == f"{title} (digits, held-out images)"
    assert titles(study, own) == [title, "Its own"]
    again = retitled(study, tmp_path / "again")
    assert titles(study, again, own) == [f"{title} ({study.name})", f"{title} (again)", "Its own"]
    below = retitled(study, tmp_path / "below" / "again")
    assert titles(again, below) == [f"{title} ({tmp_path.name}/again)", f"{title} (below/again)"]
    assert titles(study, study) == [title, title]  # nothing tells them apart


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


def measured(epochs, accuracy=None):
    return [{"epoch": e, "loss": float(e), "accuracy": (accuracy or {}).get(e)} for e in epochs]


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


def test_changed_signs_are_those_of_the_two_networks(study, study_data):
    changed = {entry["arm"]: entry for entry in study_data["sections"][0]["signs"]}
    assert set(changed) == {1, 2}  # the sweep's arms start from nothing
    for arm, name in ((1, "digits-finetune"), (2, "digits-lns")):
        for seed in changed[arm]["seeds"]:
            folder = f"seed-{seed['seed']}"
            flips = flips_by_layer(
                network(study / "digits-dorefa" / folder), network(study / name / folder)
            )
            found = {x["name"]: (x["changed"], x["weights"]) for x in seed["layers"]}
            assert found == flips
            assert seed["changed"] == sum(f for f, _ in flips.values())
            assert seed["percent"] == pytest.approx(100 * seed["changed"] / seed["weights"], 1e-5)
    assert [seed["seed"] for seed in changed[2]["seeds"]] == [0, 1]
    assert changed[2]["seeds"][0]["changed"] > 0
    assert changed[1]["notes"] == [
        "Seed 7: the baseline has no run of that seed."
    ]  # it stopped before its first step


def test_filters_are_the_networks_own(study, study_data):
    entry = study_data["sections"][0]["signs"][1]
    before = dict(binary_layers(network(study / "digits-dorefa" / "seed-0")))
    after = dict(binary_layers(network(study / "digits-lns" / "seed-0")))
    assert [layer["name"] for layer in entry["kernels"]["layers"]] == list(after)
    for layer in entry["kernels"]["layers"]:
        now = after[layer["name"]]
        weight, bits = now.weight.detach(), now.code().signs[0]
        was = before[layer["name"]].code().signs[0]
        predicted = now.weight_binarizer.predict(weight).detach()
        differs = (bits != was).flatten(1).sum(1)
        assert len(layer["filters"]) == min(8, len(weight))
        shown = [filter_["index"] for filter_ in layer["filters"]]
        hidden = [i for i in range(len(weight)) if i not in shown]
        assert min(differs[shown]) >= max(differs[hidden], default=0)
        for one in layer["filters"]:
            i = one["index"]
            assert one["w"] == pytest.approx(weight[i].flatten().tolist(), rel=5e-3)
            assert one["f"] == pytest.approx(predicted[i].flatten().tolist(), rel=5e-3)
            for text, values in (("before", was), ("after", bits)):
                assert one[text] == "".join("+" if v > 0 else "-" for v in values[i].flatten())
            assert one["changed"] == differs[i]
            assert one["off_sign"] == int((bits[i] != sign(weight[i])).sum())
            # sign(W) is drawn from the rounded weights
            assert [v < 0 for v in one["w"]] == (sign(weight[i]) < 0).flatten().tolist()


def test_a_wide_filter_shows_the_channels_with_most_changes():
    layer = BinaryConv2d(100, 3, 3)
    before = layer.code().signs[0].clone()
    before[1, 90] *= -1
    [one, two] = _layer_kernels("wide", layer, before, 2)["filters"]
    assert (one["index"], two["index"]) == (0, 1)
    assert one["channels"] == list(range(CHANNELS))
    assert two["channels"] == [*range(CHANNELS - 1), 90]
    assert two["changed"] == 9
    assert two["before"][-9:] != two["after"][-9:]
    linear = _layer_kernels("linear", BinaryLinear(5, 4), torch.ones(4, 5), 1)
    assert linear["kernel"] == [1, 1]
    assert len(linear["filters"][0]["w"]) == 5


def test_a_baseline_that_is_another_network_is_a_note(runs):
    run = Run.of_seed(runs / "digits-lns", 0)
    with pytest.raises(NoWeights, match="the baseline is another network"):
        compare({"0": torch.ones(1, 4, 2, 3, 3)}, run, 8)


def test_a_weight_of_several_signs_is_counted_but_not_drawn():
    model = nn.Sequential(BinaryConv2d(2, 3, 3, method="abc"))
    assert _kernels(signs(model), model, 8) == []
    assert flips_by_layer(signs(model), signs(model)) == {"0": (0, 54 * len(signs(model)["0"]))}


def test_a_baseline_that_several_arms_share_is_read_once(runs, monkeypatch):
    read = []
    whole = Run.load_checkpoint
    monkeypatch.setattr(Run, "load_checkpoint", lambda run: read.append(run) or whole(run))
    changes, base = SignChanges(8), Run.of_seed(runs / "digits-dorefa", 0)
    for name in ("digits-finetune", "digits-lns"):
        run = Run.of_seed(runs / name, 0)
        assert changes.of_arm([(0, run, base)])["notes"] == []
    assert [run.folder.parent.name for run in read] == [
        "digits-dorefa",
        "digits-finetune",
        "digits-lns",
    ]


def test_as_many_filters_as_asked_for(study):
    layers = report_data([study], filters=2)["sections"][0]["signs"][1]["kernels"]["layers"]
    assert {len(layer["filters"]) for layer in layers} == {2}
    assert report_data([study], filters=0)["sections"][0]["signs"][1]["kernels"] is None


def test_single_runs_find_their_start(runs):
    data = report_data([runs / "digits-dorefa", runs / "digits-lns" / "seed-1"])
    [section] = data["sections"]
    assert section["title"] == "Runs on digits"
    assert [arm["n"] for arm in section["arms"]] == [2, 1]
    [entry] = section["signs"]
    assert entry["baseline"] == "digits-dorefa"
    assert [seed["seed"] for seed in entry["seeds"]] == [1]
    given = report_data([runs / "digits-lns"], baseline=runs / "digits-finetune" / "seed-0")
    [entry] = given["sections"][0]["signs"]
    other = network(runs / "digits-finetune" / "seed-0")
    flips = flips_by_layer(other, network(runs / "digits-lns" / "seed-0"))
    assert entry["seeds"][0]["changed"] == sum(f for f, _ in flips.values())
    itself = report_data([runs / "digits-dorefa"], baseline=runs / "digits-dorefa")
    assert itself["sections"][0]["signs"] == []


def test_command_and_recipe_repeat_the_run(runs, tmp_path):
    [section] = report_data([runs / "digits-lns"])["sections"]
    [arm] = section["arms"]
    words = arm["command"].split()
    assert words[:3] == ["unflip", "train", "digits-lns"]
    assert words[-4:] == ["--start", str(runs / "digits-dorefa"), "--seeds", "2"]
    for row in arm["runs"]:
        assert row["given"].startswith("training images 1,347 of 1 × 8 × 8 (")
        assert row["given"].endswith(f", start {runs / 'digits-dorefa'}")
    saved = json.loads((runs / "digits-lns" / "seed-0" / "recipe.json").read_text())["recipe"]
    assert load_recipe("digits-lns", words[3:-4]).plain() == saved
    (tmp_path / "own.yaml").write_text(arm["yaml"])
    assert load_recipe(tmp_path / "own.yaml").plain() == saved


def test_the_command_of_a_recipe_file(runs, tmp_path):
    shutil.copytree(runs / "digits-lns", tmp_path / "mine")
    for seed in (0, 1):
        path = tmp_path / "mine" / f"seed-{seed}" / "recipe.json"
        saved = json.loads(path.read_text())
        saved["recipe"]["name"] = "mine"
        saved["command"] = "unflip train mine.yaml"
        path.write_text(json.dumps(saved))
    [arm] = report_data([tmp_path / "mine"])["sections"][0]["arms"]
    assert arm["command"] == "unflip train mine.yaml --seeds 2"
    assert arm["own_recipe"] is True


def test_two_runs_of_one_recipe_are_told_apart(runs, tmp_path):
    shutil.copytree(runs / "digits-dorefa", tmp_path / "again")
    data = report_data([runs / "digits-dorefa", tmp_path / "again"])
    labels = [arm["label"] for arm in data["sections"][0]["arms"]]
    assert labels == [str(runs / "digits-dorefa"), str(tmp_path / "again")]


def test_without_checkpoints_there_is_a_note_and_everything_else(study, tmp_path):
    kept = tmp_path / "study"
    shutil.copytree(study, kept, ignore=shutil.ignore_patterns("checkpoint-*"))
    [section] = report_data([kept])["sections"]
    assert section["arms"][2]["curves"] is not None
    entry = section["signs"][1]
    assert entry["seeds"] == []
    assert entry["kernels"] is None
    assert entry["notes"] == [
        "Seeds 0, 1: digits-dorefa has no checkpoint: only its metrics were kept."
    ]


def test_arms_that_lack_their_checkpoints_say_the_same(study, tmp_path):
    for name in ("digits-finetune", "digits-lns"):
        shutil.copytree(study / name, tmp_path / "study" / name)
        for path in (tmp_path / "study" / name).rglob("checkpoint-*"):
            path.unlink()
    shutil.copytree(study / "digits-dorefa", tmp_path / "study" / "digits-dorefa")
    shutil.copy(study / "study.json", tmp_path / "study")
    finetune, lns = report_data([tmp_path / "study"])["sections"][0]["signs"]
    said = "the run has no checkpoint: only its metrics were kept."
    assert lns["notes"] == [f"Seeds 0, 1: {said}"]
    assert finetune["notes"][0] == f"Seed 0: {said}"


@pytest.fixture(scope="module")
def kept(study, tmp_path_factory):
    """The study after --keep-signs, and without its checkpoints; read only."""
    whole = tmp_path_factory.mktemp("kept") / "study"
    shutil.copytree(study, whole)
    (whole / "digits-lns" / "seed-1" / "result.json").unlink()  # not finished: nothing is kept
    report_data([whole], keep_signs=True)
    (whole / "digits-lns" / "seed-1" / "result.json").write_bytes(
        (study / "digits-lns" / "seed-1" / "result.json").read_bytes()
    )
    for path in whole.rglob("checkpoint-*"):
        path.unlink()
    return whole


def test_kept_signs_stand_in_for_the_checkpoints(kept, study_data):
    files = sorted(str(path.relative_to(kept)) for path in kept.rglob("signs.json.gz"))
    assert files == [f"digits-{name}/seed-0/signs.json.gz" for name in ("finetune", "lns")]
    [section], [given] = report_data([kept])["sections"], study_data["sections"]
    finetune, lns = section["signs"]
    assert finetune == given["signs"][0]
    assert lns["seeds"] == given["signs"][1]["seeds"][:1]
    assert lns["kernels"] == given["signs"][1]["kernels"]
    assert lns["notes"] == ["Seed 1: digits-dorefa has no checkpoint: only its metrics were kept."]
    assert section["arms"] == given["arms"]


def test_a_report_keeps_nothing_unasked(study):
    report_data([study])
    assert list(study.rglob("signs.json.gz")) == []


def test_the_same_run_keeps_the_same_bytes_however_often(study, kept, tmp_path):
    shutil.copytree(study, tmp_path / "again")
    report_data([tmp_path / "again"], keep_signs=True)
    name = "digits-lns/seed-0/signs.json.gz"
    assert (tmp_path / "again" / name).read_bytes() == (kept / name).read_bytes()


def test_fewer_filters_than_were_kept(study, kept):
    for count in (0, 1, 3):
        whole, left = (
            report_data([x], filters=count)["sections"][0]["signs"][1] for x in (study, kept)
        )
        assert left["kernels"] == whole["kernels"]
    more = report_data([kept], filters=99)["sections"][0]["signs"][1]["kernels"]
    assert more["filters"] == 8  # as many as were kept
    assert max(len(layer["filters"]) for layer in more["layers"]) == 8


def test_a_checkpoint_is_preferred_to_what_was_kept(study, kept, tmp_path, study_data):
    shutil.copytree(study, tmp_path / "study")
    stale = tmp_path / "study" / "digits-lns" / "seed-0" / "signs.json.gz"
    stale.write_bytes(b"not even gzip")
    assert report_data([tmp_path / "study"])["sections"][0] == study_data["sections"][0]


def rewritten(path, change):
    saved = json.loads(gzip.decompress(path.read_bytes()))
    change(saved)
    path.write_bytes(gzip.compress(json.dumps(saved).encode()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s.update(format=2), "format"),
        (lambda s: s.pop("layers"), "layers: Field required"),
        (lambda s: s["layers"][0].update(changed="<b>"), "layers.0.changed"),
        (lambda s: s["layers"][0].update(weights=0), "layers.0.weights"),
        (lambda s: s["kernels"][0]["filters"][0]["w"].pop(), "should have"),
        (lambda s: s["kernels"][0]["filters"][0].update(after="+?"), "after"),
        (lambda s: s["kernels"][0]["filters"][0]["f"].__setitem__(0, math.nan), "finite"),
        (lambda s: s["kernels"][0].update(extra=1), "kernels.0.extra"),
    ],
)
def test_kept_signs_that_are_broken_are_refused_by_name(kept, tmp_path, change, named):
    shutil.copytree(kept, tmp_path / "study")
    path = tmp_path / "study" / "digits-lns" / "seed-0" / "signs.json.gz"
    rewritten(path, change)
    message = refused(tmp_path / "study")
    assert message.startswith(f"{path} is damaged")
    assert named in message
    assert message.endswith(AGAIN)


@pytest.mark.parametrize("cut", [0, 5, 200, -4])
def test_kept_signs_that_are_cut_are_refused_by_name(kept, tmp_path, cut):
    shutil.copytree(kept, tmp_path / "study")
    path = tmp_path / "study" / "digits-lns" / "seed-0" / "signs.json.gz"
    path.write_bytes(path.read_bytes()[:cut])
    for _ in range(2):
        message = refused(tmp_path / "study")
        assert message.startswith(f"{path} is damaged")
        assert message.endswith(AGAIN)
        path.write_bytes(b"not gzip")


def test_kept_signs_of_another_run_or_baseline_are_refused(kept, tmp_path):
    shutil.copytree(kept, tmp_path / "study")
    lns, finetune = (tmp_path / "study" / f"digits-{x}" / "seed-0" for x in ("lns", "finetune"))
    message = refused(lns, baseline=finetune)
    assert message.startswith(f"{lns / 'signs.json.gz'} belongs to another baseline than")
    shutil.copy(finetune / "signs.json.gz", lns)
    message = refused(tmp_path / "study")
    assert message.startswith(f"{lns / 'signs.json.gz'} belongs to another run than {lns}")


def test_a_damaged_checkpoint_is_a_note(study, tmp_path):
    broken = tmp_path / "study"
    shutil.copytree(study, broken)
    for path in (broken / "digits-lns" / "seed-0").glob("checkpoint-*.safetensors"):
        path.write_bytes(path.read_bytes()[:-3])
    entry = report_data([broken])["sections"][0]["signs"][1]
    [note] = entry["notes"]
    folder = broken / "digits-lns" / "seed-0"
    assert note.startswith(
        f"Seed 0: the checkpoint of the run cannot be used: {folder} has no usable checkpoint"
    )
    assert entry["kernels"]["seed"] == 1


def test_signs_of_an_earlier_epoch_are_not_shown_for_a_finished_run(study, tmp_path):
    broken = tmp_path / "study"
    shutil.copytree(study, broken)
    folder = broken / "digits-lns" / "seed-0"
    last = sorted(folder.glob("checkpoint-*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-3])
    assert len(checkpoints.survey(folder)[0]) == 1
    [note] = report_data([broken])["sections"][0]["signs"][1]["notes"]
    assert "is finished with 2 epochs, but its last undamaged checkpoint is of epoch" in note


def test_a_baseline_beside_that_is_not_what_a_run_started_from(runs, tmp_path):
    copied = tmp_path / "runs"
    shutil.copytree(runs, copied)
    [same] = report_data([copied / "digits-finetune"])["sections"][0]["signs"]
    assert [seed["seed"] for seed in same["seeds"]] == [0]
    shutil.rmtree(copied / "digits-dorefa" / "seed-0")
    another = copied / "digits-dorefa" / "seed-0"
    shutil.copytree(copied / "digits-dorefa" / "seed-1", another)
    for name in ("recipe.json", "result.json"):  # as if seed 0 had been trained again
        saved = json.loads((another / name).read_text())
        (another / name).write_text(json.dumps({**saved, "seed": 0}))
    [other] = report_data([copied / "digits-finetune"])["sections"][0]["signs"]
    assert other["seeds"] == []
    assert "the baseline is not what the run started from" in other["notes"][0]
    chosen = report_data([copied / "digits-finetune"], baseline=copied / "digits-dorefa")
    assert len(chosen["sections"][0]["signs"][0]["seeds"]) == 1, "a person chose that one"


def test_a_run_that_was_interrupted(runs, tmp_path):
    folder = tmp_path / "digits-dorefa" / "seed-0"
    shutil.copytree(runs / "digits-dorefa" / "seed-0", folder)
    (folder / "result.json").unlink()
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[:-20])  # a kill in the middle of a line
    [arm] = report_data([folder])["sections"][0]["arms"]
    assert (arm["n"], arm["mean"], arm["best"]) == (0, None, None)
    assert arm["runs"][0]["stopped"] == "not finished: 1 of 2 epochs"
    (folder / "stopped.json").write_text('{"reason": "no sign flips"}')
    [arm] = report_data([folder])["sections"][0]["arms"]
    assert arm["runs"][0]["stopped"] == "no sign flips"


def test_the_same_folders_give_the_same_bytes(study, tmp_path):
    first, second = tmp_path / "a.html", tmp_path / "b.html"
    size = write_report(report_data([study]), first)
    write_report(report_data([study]), second)
    assert first.read_bytes() == second.read_bytes()
    assert len(first.read_bytes()) == size
    assert "2031-05-06" in render(report_data([study], date="2031-05-06"))


def test_what_is_embedded_cannot_leave_its_element(study_data):
    text = render(study_data)
    [inside] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert json.loads(inside) == study_data
    assert text.count("</script>") == 2
    assert "<img" not in text
    for odd in ("<!--", "<script", "\u2029", "/*DATA*/", "/*SCRIPT*/", "\ud800"):
        escaped = embedded({"label": odd})
        assert json.loads(escaped) == {"label": odd}
        assert not re.search("[<>&\u2028\u2029]", escaped)
        assert escaped in render({"label": odd})


def test_the_page_names_nothing_outside_itself(study_data):
    text = render({**study_data, "sections": []})
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b", text)
    assert not re.search(r"<(link|img|iframe)|src=|@import|url\((?!#)", text)


def test_numbers_that_are_not_finite(study, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(study, folder)
    saved = json.loads((folder / "study.json").read_text())
    saved["arms"][0].update(mean=math.nan, std=math.inf, best=None)
    (folder / "study.json").write_text(json.dumps(saved))
    data = report_data([folder])
    assert data["sections"][0]["arms"][0]["mean"] is None
    assert "NaN" not in embedded(data)


AGAIN = "write it again with 'unflip report --keep-signs' where the checkpoints are"


def refused(*sources, **options):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - callers check the message
        report_data(list(sources), **options)
    return str(caught.value)


def test_what_is_neither_run_nor_study_is_refused_by_name(runs, tmp_path):
    assert "no folder given" in refused()
    assert str(tmp_path / "none") in refused(tmp_path / "none")
    message = refused(runs / "digits-lns", tmp_path)
    assert message.startswith(f"{tmp_path} is neither a study")
    (tmp_path / "search.json").write_text("{}")  # which 'unflip study autobnn' wrote with --out
    assert f"a report cannot show: its table is {tmp_path / 'table.md'}" in refused(tmp_path)
    (tmp_path / "search.json").unlink()
    assert "neither a recipe.json nor seed-N folders" in message
    assert "is not a run" in refused(runs / "digits-lns", baseline=tmp_path)


def test_a_result_without_its_recipe_is_not_passed_over(runs, tmp_path):
    shutil.copytree(runs / "digits-dorefa", tmp_path / "run")
    (tmp_path / "run" / "seed-0" / "recipe.json").unlink()
    message = refused(tmp_path / "run")
    assert message.startswith(f"{tmp_path / 'run' / 'seed-0'} has a result.json but no recipe.json")


def test_a_baseline_that_nothing_would_be_compared_with_is_refused(study, runs):
    assert "leave it out" in refused(study, baseline=runs / "digits-finetune")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ('{"recipe": {}, "rows": []}', "title: Field required; and 6 more"),
        ('{"study": "s", "unflip": "1", "title": "t", "data": "d", "evaluated_on": "test", '
         '"seeds": [0], "arms": [{"name": "a"}]}', "arms.0.label: Field required"),
    ],
)  # fmt: skip
def test_a_broken_summary_is_named(tmp_path, text, named):
    (tmp_path / "study.json").write_text(text)
    message = refused(tmp_path)
    assert message.startswith(str(tmp_path / "study.json"))
    assert named in message
    assert message.endswith("it rewrites the file from the runs")


def test_arms_of_one_name_or_from_nowhere_are_refused(study, tmp_path):
    saved = json.loads((study / "study.json").read_text())
    saved["arms"][1]["start"] = "nowhere"
    (tmp_path / "study.json").write_text(json.dumps(saved))
    assert "starts from 'nowhere'" in refused(tmp_path)
    saved["arms"][1]["name"] = saved["arms"][0]["name"]
    (tmp_path / "study.json").write_text(json.dumps(saved))
    assert "two arms are called 'digits-dorefa'" in refused(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("recipe.json", "{}", "it has no recipe"),
        ("recipe.json", "nothing", "Expecting value"),
        ("result.json", "{}", "it has no accuracy, epochs, seconds"),
        ("metrics.jsonl", '\n{"ep\n{"epoch": 3}\n', "line 2"),
        ("provenance.json", '{"images": {}}', "misstates 'training images'"),
    ],
)
def test_a_broken_file_of_a_run_is_named(runs, tmp_path, file, text, named):
    folder = tmp_path / "seed-0"
    shutil.copytree(runs / "digits-dorefa" / "seed-0", folder)
    (folder / file).write_text(text)
    message = refused(folder)
    assert str(folder / file) in message
    assert named in message
    assert message.endswith(REMEDIES[file])


def test_the_command(unflip, study, tmp_path):
    out = tmp_path / "page.html"
    done = unflip("report", study, "-o", out, "--filters", 1, "--title", "Mine")
    assert done.code == 0, done.err
    assert str(out) in done.out
    assert '"title":"Mine"' in out.read_text()
    shutil.copytree(study, tmp_path / "mine")
    done = unflip("report", tmp_path / "mine", "-o", out, "--keep-signs")
    assert done.code == 0, done.err
    assert str(tmp_path / "mine" / "digits-lns" / "seed-0" / "signs.json.gz") in done.out
    failed = unflip("report", tmp_path, "-o", out)
    assert failed.code == 1
    assert failed.err.startswith(f"unflip: {tmp_path} is neither")


def test_a_report_without_checkpoints_does_not_import_torch(kept, tmp_path):
    """A laptop without torch can show results; signs come from the kept files."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from unflip.report import report_data, write_report\n"
        "data = report_data([Path(sys.argv[1]), Path(sys.argv[1]) / 'digits-lns' / 'seed-0'])\n"
        "assert [len(section['signs'][-1]['seeds']) for section in data['sections']] == [1, 1]\n"
        "write_report(data, Path(sys.argv[2]))\n"
    )
    words = [sys.executable, "-c", script, str(kept), str(tmp_path / "page.html")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000
