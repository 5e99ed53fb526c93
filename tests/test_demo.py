"""The demo, with shorter recipes: what it prints, what it leaves, and that a second run starts again."""

import io
import json
import shutil
from contextlib import redirect_stdout

import pytest
import safetensors.torch
import torch

from unflip import demo, freeze
from unflip.packing.file import read
from unflip.recipes.build import build_model
from unflip.recipes.load import load_recipe
from unflip.runs.run import Run


@pytest.fixture(scope="module")
def short_recipes():
    def short(name):
        warm = ["method.warm_steps=20"] if name == "digits-lns" else []
        return load_recipe(name, ["epochs=2", "model.width=4", "allow_no_flips=true", *warm])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "load_recipe", short)
        patch.setattr(demo, "SEEDS", (0, 1))
        yield short


@pytest.fixture(scope="module")
def finished(short_recipes, tmp_path_factory):
    """The folder of a demo, and what it printed; read only."""
    out, printed = tmp_path_factory.mktemp("demo"), io.StringIO()
    with redirect_stdout(printed), pytest.warns(UserWarning, match="warm start"):
        demo.run_demo(out)
    return out, printed.getvalue()


def test_demo_trains_four_networks_and_leaves_model_and_picture(finished):
    out, printed = finished
    for word in (
        "mean ± std of 2 seeds",
        "from the same 2 baselines",
        "float network",
        "fine-tuning",
        "LNS",
        "Kbit",
        "layer3.2.conv2",
        "curves.png",
    ):
        assert word in printed
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    state = safetensors.torch.load_file(out / "digits-lns.safetensors")
    assert any(name.endswith(".bits") for name in state)
    assert not any("mapping" in name or "layer1.0.conv1.weight" in name for name in state)
    small = (out / "digits-lns.safetensors").stat().st_size
    assert small < (out / "digits-float.safetensors").stat().st_size
    names = [run.folder.parent.name for run in Run.below(out) if run.finished]
    assert sorted(names) == sorted(2 * demo.RECIPES)

    packed = out / "digits-lns.unflip"
    assert read(packed).graph["labels"] == [str(digit) for digit in range(10)]
    assert f"{packed.stat().st_size:,} bytes" in printed
    assert "float twin, in torch" in printed


def test_the_frozen_file_loads_into_a_frozen_network(finished, short_recipes):
    out, _ = finished
    data = demo.load_digits()
    frozen = freeze(build_model(short_recipes("digits-lns"), data.spec, seed=5))
    frozen.load_state_dict(safetensors.torch.load_file(out / "digits-lns.safetensors"))
    images = (torch.from_numpy(data.test_images) / 255 - data.mean[0]) / data.std[0]
    with torch.no_grad():
        right = frozen(images).argmax(1).numpy() == data.test_labels
    accuracy = 100 * right.mean()
    result = json.loads((out / "digits-lns" / "seed-0" / "result.json").read_text())
    assert accuracy == pytest.approx(result["accuracy"], abs=0.5)


def test_an_interrupted_demo_resumes_and_a_finished_one_starts_again(finished, tmp_path):
    out = tmp_path / "again"
    shutil.copytree(finished[0], out)

    def results():
        return {str(run.folder.relative_to(out)): run.result for run in Run.below(out)}

    first = results()
    lns = Run.of_seed(out / "digits-lns", 0)
    (lns.folder / "result.json").unlink()
    demo.run_demo(out)
    resumed = results()
    assert [name for name in first if resumed[name] != first[name]] == ["digits-lns/seed-0"]
    assert resumed["digits-lns/seed-0"]["accuracy"] == first["digits-lns/seed-0"]["accuracy"]

    demo._forget_finished(out)
    assert not any((out / name).exists() for name in demo.RECIPES)


def test_what_a_difference_means():
    """Student's t: the half interval of 0.9, 1.0, 1.1 is 4.303 · 0.1 / √3 = 0.248; of 0, 1, 2 it is 2.48."""
    base = [90.0, 91.0, 92.0]
    clear = demo.difference([90.9, 92.0, 93.1], base)
    assert clear.startswith(
        "LNS over fine-tuning, from the same 3 baselines: +1.0 ± 0.1 points. Zero is outside"
    )
    assert "LNS is better" in clear
    assert "LNS is worse" in demo.difference(base, [90.9, 92.0, 93.1])
    chance = demo.difference([90.0, 92.0, 94.0], base)
    assert "+1.0 ± 1.0 points. Zero is within" in chance
    assert "+0.0 ± 0.0 points. Zero is within" in demo.difference(base, base)
