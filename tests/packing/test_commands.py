"""``unflip pack`` and ``unflip show``."""

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
