"""The demo, with shorter recipes: what it prints, what it leaves, and that a second run is not confused."""

import json

import pytest
import safetensors.torch
import torch

from unflip import demo, freeze
from unflip.packing.file import read
from unflip.recipes.load import load_recipe


@pytest.fixture
def short_recipes(monkeypatch):
    def short(name, overrides=None):
        return load_recipe(name, ["epochs=2", "model.width=4", "allow_no_flips=true"])

    monkeypatch.setattr(demo, "load_recipe", short)


def test_demo_trains_four_networks_and_leaves_model_and_picture(short_recipes, tmp_path, capsys):
    demo.run_demo(tmp_path)
    printed = capsys.readouterr().out
    for word in ("float network", "fine-tuning", "LNS", "Kbit", "layer3.2.conv2", "curves.png"):
        assert word in printed
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    state = safetensors.torch.load_file(tmp_path / "digits-lns.safetensors")
    assert any(name.endswith(".bits") for name in state)
    assert not any("mapping" in name or "layer1.0.conv1.weight" in name for name in state)
    small = (tmp_path / "digits-lns.safetensors").stat().st_size
    assert small < (tmp_path / "digits-float.safetensors").stat().st_size

    packed = tmp_path / "digits-lns.unflip"
    assert read(packed).graph["labels"] == [str(digit) for digit in range(10)]
    assert f"{packed.stat().st_size:,} bytes" in printed
    assert "float twin, in torch" in printed

    results = {p.parent.parent.name: p.stat().st_mtime for p in tmp_path.rglob("result.json")}
    assert results.keys() == set(demo.RECIPES)
    demo.run_demo(tmp_path)  # a finished demo runs afresh
    again = {p.parent.parent.name: p.stat().st_mtime for p in tmp_path.rglob("result.json")}
    assert all(again[name] > results[name] for name in results)


def test_the_frozen_file_loads_into_a_frozen_network(short_recipes, tmp_path):
    demo.run_demo(tmp_path)
    recipe = demo.load_recipe("digits-lns")
    data = demo.load_digits()
    frozen = freeze(demo.build_model(recipe, data, seed=5))
    frozen.load_state_dict(safetensors.torch.load_file(tmp_path / "digits-lns.safetensors"))
    images = (torch.from_numpy(data.test_images) / 255 - data.mean[0]) / data.std[0]
    with torch.no_grad():
        right = frozen(images).argmax(1).numpy() == data.test_labels
    accuracy = 100 * right.mean()
    result = json.loads((tmp_path / "digits-lns" / "seed-0" / "result.json").read_text())
    assert accuracy == pytest.approx(result["accuracy"], abs=0.5)
