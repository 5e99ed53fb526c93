"""``unflip pack`` and ``unflip show``."""

import itertools
import shutil

import numpy as np
import pytest

from unflip.data import load as load_data
from unflip.packing import read
from unflip.packing.file import sha256
from unflip.recipes import load_recipe
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
