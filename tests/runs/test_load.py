"""``unflip.load_run``: the network of a run exactly as it was trained."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unflip as package
from unflip.data import ImageSet
from unflip.recipes import RecipeError
from unflip.runs import Run
from unflip.runs import checkpoint as checkpoints
from unflip.runs.load import load_run, model_of, model_state
from unflip.train import RunOptions, load_recipe, train

EPOCHS, HELD_OUT = 2, 1200
TINY = [
    "model={name: vgg_small, width: 4}",
    f"data.validation={HELD_OUT}",
    "batch_size=64",
    f"epochs={EPOCHS}",
    "allow_no_flips=true",
]
OFTEN = RunOptions(device="cpu", quiet=True, checkpoint_seconds=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, digits: ImageSet) -> Path:
    """Two seeds of a baseline, and LNS from it."""
    out = tmp_path_factory.mktemp("runs")
    lns = load_recipe("digits-lns", [*TINY, "method.warm_steps=5"])
    dorefa = load_recipe("digits-dorefa", TINY)
    train(dorefa, digits, out / "digits-dorefa", seeds=range(2), options=OFTEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # five steps teach too little
        train(lns, digits, out / "digits-lns", options=OFTEN)
    return out


def same(model: nn.Module, saved: dict[str, Tensor]) -> bool:
    found = model.state_dict()
    assert found.keys() == saved.keys()
    return all(torch.equal(found[key], value) for key, value in saved.items())


def weights_at(folder: Path, epoch: int) -> dict[str, Tensor]:
    return model_state(checkpoints.load_at(folder, epoch, 0).tensors)


@pytest.mark.parametrize(("name", "seed"), [("digits-dorefa", 1), ("digits-lns", 0)])
def test_a_finished_run_gives_its_trained_weights(
    runs: Path, digits: ImageSet, name: str, seed: int
) -> None:
    """Measured with it, the accuracy is that of the result."""
    run = Run.of_seed(runs / name, seed)
    model = package.load_run(runs / name, seed)
    assert same(model, weights_at(run.folder, EPOCHS))
    assert not any(module.training for module in model.modules())
    assert same(package.load_run(run.folder), model.state_dict()), "a seed's own folder"
    data, spec = digits.split(HELD_OUT), digits.spec
    images = (torch.from_numpy(data.test_images) / 255 - spec.mean[0]) / spec.std[0]
    with torch.no_grad():
        right = (model(images).argmax(1).numpy() == data.test_labels).mean()
    assert run.result is not None
    assert 100 * right == pytest.approx(run.result["accuracy"])


def test_seed_0_is_the_default(runs: Path) -> None:
    zero, one = (weights_at(runs / "digits-dorefa" / f"seed-{seed}", EPOCHS) for seed in (0, 1))
    assert same(load_run(runs / "digits-dorefa"), zero)
    assert not same(load_run(runs / "digits-dorefa"), one)


def test_nothing_random_is_drawn_and_the_mappings_are_taught(runs: Path) -> None:
    """LNS warns when a mapping that learned nothing is trained; these have learned."""
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    model = load_run(runs / "digits-lns")
    assert torch.equal(torch.rand(1), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert package.auxiliary_loss(model.train()).isfinite()


def test_an_unfinished_run_gives_its_last_checkpoint(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(runs / "digits-dorefa", tmp_path / "copy"))
    folder = out / "seed-0"
    first, last = (weights_at(folder, epoch) for epoch in (EPOCHS - 1, EPOCHS))
    (folder / "result.json").unlink()
    assert same(load_run(out), last)
    assert capsys.readouterr().out == ""
    newest = folder / f"checkpoint-{EPOCHS:05d}-000000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert same(load_run(out), first)
    assert "is damaged" in capsys.readouterr().out
    chosen = checkpoints.load_at(folder, EPOCHS - 1, 0)
    assert same(model_of(Run(folder), chosen), first)


def test_a_finished_run_without_its_last_checkpoint_is_refused(runs: Path, tmp_path: Path) -> None:
    """Weights of an earlier epoch do not belong to its result."""
    out = Path(shutil.copytree(runs / "digits-dorefa", tmp_path / "copy"))
    for path in (out / "seed-0").glob(f"checkpoint-{EPOCHS:05d}-*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"finished with 2 epochs, but .* of epoch 1 \(later ones"):
        load_run(out)
    for path in (out / "seed-0").glob("checkpoint-*"):
        path.unlink()
    with pytest.raises(ValueError, match="has no usable checkpoint"):
        load_run(out)


def test_what_is_not_a_run_is_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "notes.txt"):
        with pytest.raises(ValueError, match=rf"{path} is not a run: .*'unflip runs' lists runs"):
            load_run(path)
    with pytest.raises(ValueError, match="digits-dorefa has no run of seed 7, only of 0, 1"):
        load_run(runs / "digits-dorefa", 7)


MODULE = '''
from dataclasses import dataclass
from torch import nn
from unflip.methods import ClippedSign, Method, PlainSign, register
from unflip.models import binary_twin, register_model

@register("custom_sign")
@dataclass(frozen=True)
class CustomSign(Method):
    """A sign."""
    def weight_binarizer(self, layer):
        return PlainSign()

    def input_binarizer(self, layer):
        return ClippedSign()

@register_model("custom_net", input_shape=(1, 8, 8))
def custom_net(method="float", *, num_classes=10, in_channels=1):
    body = [nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)]
    return binary_twin(nn.Sequential(*body, nn.Flatten(), nn.Linear(64, num_classes)), method)
'''
LOAD = """
import json, unflip
import custom_module
model = unflip.load_run("out")
print(json.dumps({
    "method": model[2].method.name,
    "weights": {k: v.tolist() for k, v in model.state_dict().items()},
}))
"""


def test_a_custom_network_and_method_in_another_process(
    tmp_path: Path, unflip: Callable[..., Any]
) -> None:
    """The run names its module in ``uses``; the process that loads it imports it itself."""
    (tmp_path / "custom_module.py").write_text(MODULE)
    recipe = {
        "uses": "custom_module",
        "data": {"name": "digits", "validation": HELD_OUT},
        "model": {"name": "custom_net"},
        "method": "custom_sign",
        "epochs": 1,
        "optimizer": {"lr": 0.1},
        "allow_no_flips": True,
    }
    (tmp_path / "own.yaml").write_text(json.dumps(recipe))
    done = unflip("train", "own.yaml", "--out", "out", "--device", "cpu", inside=tmp_path)
    assert done.code == 0, done.err
    words = [sys.executable, "-c", LOAD]
    loaded = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert loaded.returncode == 0, loaded.stderr
    found = json.loads(loaded.stdout)
    assert found["method"] == "custom_sign"
    expected = weights_at(tmp_path / "out" / "seed-0", 1)
    assert found["weights"] == {key: value.tolist() for key, value in expected.items()}


def test_a_recipe_that_is_wrong_is_named(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "digits-dorefa" / "seed-0", tmp_path / "seed-0"))
    path = folder / "recipe.json"
    path.write_text(path.read_text().replace('"batch_size": 64', '"batch_size": "many"'))
    message = r"recipe of .*seed-0: batch_size: Input should be a valid integer.*'many'"
    with pytest.raises(RecipeError, match=message):
        load_run(folder)


def test_a_checkpoint_that_does_not_fit_is_named(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "seed-0"
    shutil.copytree(runs / "digits-dorefa" / "seed-0", folder)
    path = folder / "recipe.json"
    path.write_text(path.read_text().replace('"width": 4', '"width": 3'))
    with pytest.raises(ValueError, match=r"checkpoint of .*seed-0 does not fit its recipe\.json"):
        load_run(folder)
