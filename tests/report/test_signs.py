"""Changed signs, from checkpoints and from kept files."""

import gzip
import json
import math
import shutil

import pytest
import torch
from torch import nn

from unflip import BinaryConv2d, BinaryLinear, flips_by_layer, signs
from unflip.layers import binary_layers
from unflip.report import report_data
from unflip.report.sign_changes import SignChanges
from unflip.report.signs import _kernels, _layer_kernels, compare
from unflip.report.signs_file import CHANNELS, NoWeights
from unflip.runs import checkpoint as checkpoints
from unflip.runs.load import load_run as network
from unflip.runs.run import Run
from unflip.ste import sign

AGAIN = "write it again with 'unflip report --keep-signs' where the checkpoints are"


def refused(*sources, **options):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - callers check the message
        report_data(list(sources), **options)
    return str(caught.value)


def rewritten(path, change):
    saved = json.loads(gzip.decompress(path.read_bytes()))
    change(saved)
    path.write_bytes(gzip.compress(json.dumps(saved).encode()))


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


def test_kept_signs_do_not_grow_without_limit(kept, tmp_path):
    shutil.copytree(kept, tmp_path / "study")
    path = tmp_path / "study" / "digits-lns" / "seed-0" / "signs.json.gz"
    path.write_bytes(gzip.compress(bytes(70 << 20)))
    assert "it holds more than 67,108,864 bytes" in refused(tmp_path / "study")
