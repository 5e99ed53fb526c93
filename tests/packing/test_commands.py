"""``unflip pack`` and ``unflip show``."""

import itertools
import json
import shutil

import numpy as np
import pytest

from unflip.data import load as load_data
from unflip.packing import read
from unflip.packing.file import sha256, write
from unflip.recipes import load_recipe
from unflip.runtime import load
from unflip.train import RunOptions, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "digits"
    recipe = load_recipe("digits-dorefa", ["epochs=1", "model.width=4", "allow_no_flips=true"])
    train(recipe, load_data("digits"), out, seeds=range(2), options=RunOptions(device="cpu"))
    return out


def test_a_run_becomes_a_file(run, unflip, tmp_path):
    packed = unflip("pack", run / "seed-1", "-o", tmp_path / "digits.unflip")
    assert packed.code == 0, packed.err
    size = (tmp_path / "digits.unflip").stat().st_size
    assert f"{size:,} bytes" in packed.out
    graph = read(tmp_path / "digits.unflip").graph
    spec = load_data("digits").spec
    assert graph["labels"] == list(spec.classes)
    assert graph["input"] == {
        "shape": [1, 8, 8],
        "preprocess": {"mean": list(spec.mean), "std": list(spec.std)},
    }
    shown = unflip("show", tmp_path / "digits.unflip")
    assert shown.code == 0, shown.err
    for text in (
        "layer3.2.conv2",
        "16 × 2 × 2",
        "9,216",
        "with preprocessing, 10 labels",
        f"{size:,} bytes",
    ):
        assert text in shown.out
    assert sha256(tmp_path / "digits.unflip") in shown.out


def hostile(packed, path):
    """A network whose names, labels and output would move the cursor, color the text and turn it around."""
    graph = json.loads(json.dumps(packed.graph))
    bad = "\x1b[31m\u202e\r\x9b\u2028"
    for op in graph["ops"]:
        op["name"] += bad
    graph["labels"] = [label + bad for label in graph["labels"]]
    graph["outputs"] = [{"name": bad, "value": graph.pop("output")}]
    graph["structure"] = "dict"
    write(path, packed._replace(graph=graph))
    graph["output"] = graph.pop("outputs")[0]["value"]
    del graph["structure"]
    write(path.with_name("one.unflip"), packed._replace(graph=graph))
    graph["ops"][0]["stride"] = [0, 0]
    write(path.with_name("wrong.unflip"), packed._replace(graph=graph))


def test_control_characters_are_never_printed(run, unflip, tmp_path):
    from PIL import Image

    model, image = tmp_path / "bad.unflip", tmp_path / "\x1b[31ma.png"
    unflip("pack", run / "seed-1", "-o", tmp_path / "good.unflip")
    hostile(read(tmp_path / "good.unflip"), model)
    Image.new("L", (8, 8)).save(image)
    one, wrong = tmp_path / "one.unflip", tmp_path / "wrong.unflip"
    for command, code in (
        (("show", model), 0),
        (("bench", model, "--runs", "1"), 0),
        (("predict", one, image), 0),
        (("predict", one, image, "--json"), 0),
        (("predict", model, image), 1),
        (("show", wrong), 1),
        (("bench", wrong), 1),
    ):
        done = unflip(*command)
        assert done.code == code, done.err
        text = done.out + done.err
        assert text.replace("\n", "").isprintable(), command
        assert "\\x1b[31m" in text or "\\u001b[31m" in text
    folder = tmp_path / "folder"
    folder.mkdir()
    model = model.rename(
        folder / "\x1b[31mred.unflip"
    )  # the only one in a folder is found by itself
    for command in (("show", folder), ("bench", folder, "--runs", "1")):
        done = unflip(*command)
        assert done.out.replace("\n", "").isprintable(), command
    loaded = load(model)
    assert repr(loaded).isprintable()
    profile = str(loaded.profile(np.zeros((1, 1, 8, 8), np.float32), 1))
    assert profile.replace("\n", "").isprintable()


BROKEN = {
    "no inputs": lambda graph: graph["ops"][1].pop("inputs"),
    "a value that does not exist": lambda graph: graph["ops"][1].__setitem__("inputs", [99]),
    "an unknown field": lambda graph: graph["ops"][0].__setitem__("more", 1),
    "deep JSON": lambda graph: graph.__setitem__("labels", json.loads("[" * 900 + "]" * 900)),
    "a pool of nothing": lambda graph: graph["ops"][0].__setitem__("stride", [0, 0]),
    "no labels": lambda graph: graph.pop("labels"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_show_and_export_refuse_what_load_refuses(run, unflip, tmp_path, what):
    path = tmp_path / "broken.unflip"
    unflip("pack", run / "seed-1", "-o", path)
    packed = read(path)
    BROKEN[what](packed.graph)
    write(path, packed)
    with pytest.raises(ValueError, match=r"broken\.unflip") as caught:
        load(path)
    for command in (("show", path), ("export", path, "-o", tmp_path / "x.onnx")):
        done = unflip(*command)
        assert done.code == 1
        assert done.err.strip() == f"unflip: {caught.value}"
    assert not (tmp_path / "x.onnx").exists()


def test_show_prints_the_needs_and_limits_apply(run, unflip, tmp_path):
    path = tmp_path / "digits.unflip"
    unflip("pack", run / "seed-1", "-o", path)
    model = load(path)
    shown = unflip("show", path)
    assert f"needs at most {model.memory_needed:,} bytes of memory" in shown.out
    assert f"{model.work_needed:,} units of work" in shown.out
    for command in (("show", path), ("bench", path), ("export", path, "-o", tmp_path / "x.onnx")):
        for option, limit in (
            ("--max-memory", model.memory_needed),
            ("--max-work", model.work_needed),
        ):
            refused = unflip(*command, option, limit - 1)
            assert refused.code == 1
            assert f"the limit is {limit - 1:,}" in refused.err
            assert option[2:].replace("-", "_") in refused.err


def test_packing_to_a_folder_leaves_nothing_behind(run, unflip, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    done = unflip("pack", run / "seed-1", "-o", folder)
    assert done.code == 1
    assert "is a folder; give the name of a file" in done.err
    assert list(tmp_path.iterdir()) == [folder]


def test_what_is_no_run_is_refused(run, unflip, tmp_path):
    several = unflip("pack", run, "-o", tmp_path / "x.unflip")
    assert several.code == 1
    assert "has several seeds (seed-0, seed-1): name one, such as" in several.err
    nothing = unflip("pack", tmp_path, "-o", tmp_path / "x.unflip")
    assert nothing.code == 1
    assert "is not a run" in nothing.err
    assert not (tmp_path / "x.unflip").exists()
    (tmp_path / "y.unflip").write_bytes(b"12345678")
    broken = unflip("show", tmp_path / "y.unflip")
    assert broken.code == 1
    assert "y.unflip: not a packed network" in broken.err


def test_a_run_is_packed_without_its_images(unflip, tmp_path):
    """The run knows their shape, classes and normalization."""
    pictures = pytest.importorskip("PIL.Image")
    dice = np.random.default_rng(0)
    for part, name in itertools.product(("train", "test"), ("cat", "dog")):
        folder = tmp_path / "images" / part / name
        folder.mkdir(parents=True)
        for i in range(8):
            pixels = dice.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            pictures.fromarray(pixels).save(folder / f"{i}.png")
    spec = load_data("folder", tmp_path / "images", size=8).spec
    recipe = ["data.name=folder", "data.size=8", "model.width=2", "batch_size=8", "epochs=1"]
    given = ["allow_no_flips=true", "--data", tmp_path / "images", "--device", "cpu"]
    done = unflip("train", "digits-dorefa", *recipe, *given, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    shutil.rmtree(tmp_path / "images")
    packed = unflip("pack", tmp_path / "run", "-o", tmp_path / "x.unflip")
    assert packed.code == 0, packed.err
    graph = read(tmp_path / "x.unflip").graph
    assert graph["labels"] == ["cat", "dog"]
    assert graph["input"] == {
        "shape": [3, 8, 8],
        "preprocess": {"mean": list(spec.mean), "std": list(spec.std)},
    }
