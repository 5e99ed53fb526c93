"""Custom methods and networks, in a file outside the package: every command takes them."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import unflip as package
from unflip import models
from unflip.data import ImageSet
from unflip.methods import registry as methods_registry
from unflip.models import base as models_base
from unflip.recipes.load import load_recipe
from unflip.train import Job, RunOptions, train, train_together
from unflip.uses import CodeRefused, ModuleMissing, use

Start = Callable[..., Any]
# A learned threshold for each filter; a tanh that grows steeper by epochs, with a loss of its own; an optimizer.
MINE = '''
"""Methods of a person's own."""
from dataclasses import dataclass
import torch
from torch import nn
from unflip.methods import BinaryWeight, ClippedSign, Method, PlainSign, WeightBinarizer, register
from unflip.models import binary_twin, register_model
from unflip.ste import sign

class LearnedThreshold(WeightBinarizer):
    def __init__(self, layer):
        super().__init__()
        self.threshold = nn.Parameter(torch.zeros(len(layer.weight), *[1] * (layer.weight.dim() - 1)))

    def code(self, weight):
        centred = weight - self.threshold
        scale = centred.abs().mean(dim=tuple(range(1, weight.dim())), keepdim=True)
        return BinaryWeight(sign(centred)[None], scale[None])

    def surrogate(self, weight):
        return weight - self.threshold

class Steeper(WeightBinarizer):
    def __init__(self, layer):
        super().__init__()
        self.hold("temperature", 1.0, layer.weight)

    def code(self, weight):
        return BinaryWeight(sign(weight)[None], weight.abs().mean().view(1, *[1] * weight.dim()))

    def surrogate(self, weight):
        return torch.tanh(self.temperature * weight)

    def start_epoch(self, epoch, epochs):
        self.set_number("temperature", 1.0 + epoch)

    def auxiliary_loss(self, weight):
        return 0.01 * weight.square().mean()

class SignInputs(Method):
    def input_binarizer(self, layer):
        return ClippedSign()

@register("threshold")
@dataclass(frozen=True)
class ThresholdMethod(SignInputs):
    """A learned threshold for each filter."""
    def weight_binarizer(self, layer):
        return LearnedThreshold(layer)

@register("steeper")
@dataclass(frozen=True)
class SteeperMethod(SignInputs):
    """tanh."""
    def weight_binarizer(self, layer):
        return Steeper(layer)

class Late(torch.optim.Optimizer):
    """Makes its state in the first step, as torch's own do."""
    def __init__(self, parameters, value):
        super().__init__(parameters, {})
        self.value = value

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["average"] = self.value
            weight.sub_(weight.grad)

@register("late")
@dataclass(frozen=True)
class LateMethod(SignInputs):
    """An optimizer whose state cannot be saved."""
    whole: bool = True
    def weight_binarizer(self, layer):
        return PlainSign()

    def latent_optimizer(self, parameters):
        return Late(parameters, torch.zeros(1) if self.whole else 1)

@register_model("own_net", input_shape=(1, 8, 8))
def own_net(method="float", *, width=4, num_classes=10, in_channels=1):
    model = nn.Sequential(
        nn.Conv2d(in_channels, width, 3), nn.BatchNorm2d(width), nn.Conv2d(width, width, 3), nn.BatchNorm2d(width),
        nn.Flatten(), nn.Linear(16 * width, num_classes),
    )
    return binary_twin(model, method)
'''
RECIPE = {
    "uses": "mine",
    "data": {"name": "digits"},
    "model": {"name": "own_net"},
    "method": "threshold",
    "epochs": 1,
    "batch_size": 64,
    "optimizer": {"lr": 0.1, "latent_lr": 1.0},
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that commands are given in, with ``mine.py`` and ``own.yaml``. What is registered is forgotten."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(RECIPE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    registries: list[dict[str, Any]] = [methods_registry._REGISTRY, models_base._REGISTRY]  # type: ignore[list-item]
    methods_registry.load_shipped()  # once per process: what it registers must stay
    before = [dict(registry) for registry in registries]
    yield tmp_path
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)
    sys.modules.pop("mine", None)


def test_every_command_takes_a_custom_method_and_network(mine: Path, unflip: Start) -> None:
    """As the ``unflip`` script runs, which does not look for modules in the folder it is started in."""
    for command in (
        "train own.yaml",
        "pack runs/own -o own.unflip --uses mine",
        "push runs/own ada/own --dry-run --uses mine",
        "report runs/own -o own.html --baseline runs/own --uses mine",
    ):
        done = unflip(*command.split(), inside=mine)
        assert done.code == 0, done.err
    assert (mine / "own.unflip").exists()
    assert (mine / "own.html").exists()
    shown = unflip("methods", "threshold", "--uses", "mine", inside=mine)
    assert "Methods of a person's own" in shown.out


def test_reading_a_run_executes_no_code_that_nobody_named(
    mine: Path, unflip: Start, digits: ImageSet
) -> None:
    """A run may be a stranger's, with the module beside it."""
    for name in ("own", "other"):
        recipe = load_recipe("own.yaml").model_copy(update={"name": name})
        train(recipe, digits, mine / name, options=RunOptions(device="cpu", quiet=True))
    message = "uses mine: reading the run would execute that code. .* add --uses mine; in Python, first import mine"
    assert isinstance(package.load_run(mine / "own")[2], package.BinaryConv2d)
    del sys.modules["mine"]
    (mine / "mine.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    with pytest.raises(CodeRefused, match=message):
        package.load_run(mine / "own")
    for command in (
        "pack own -o own.unflip",
        "push own ada/published --dry-run",
        "report own -o own.html --baseline other",
    ):
        done = unflip(*command.split(), inside=mine)
        assert done.code == 1
        assert re.search(message, done.err)
        assert "Traceback" not in done.err
    assert not (mine / "executed").exists()


def test_a_start_that_gets_a_custom_network_gets_its_module(mine: Path, unflip: Start) -> None:
    """The baseline is of a recipe without ``uses``, trained with the network of the recipe that starts from it."""
    base = {**RECIPE, "model": {"name": "resnet20"}, "method": "dorefa"}
    (mine / "base.yaml").write_text(yaml.safe_dump({k: v for k, v in base.items() if k != "uses"}))
    (mine / "own.yaml").write_text(
        yaml.safe_dump({**RECIPE, "start": "base.yaml", "allow_no_flips": True})
    )
    for command in (
        "train own.yaml",
        "pack runs/base -o a.unflip --uses mine",
        "pack runs/own -o b.unflip --uses mine",
    ):
        done = unflip(*command.split(), inside=mine)
        assert done.code == 0, done.err


def test_the_three_kinds_of_method_train(mine: Path, digits: ImageSet) -> None:
    for method, epochs in (("threshold", 1), ("steeper", 2)):
        recipe = load_recipe("own.yaml", [f"method={method}", f"epochs={epochs}"])
        train(recipe, digits, mine / method, options=RunOptions(device="cpu", quiet=True))
    line = json.loads((mine / "steeper/seed-0/metrics.jsonl").read_text().splitlines()[-1])
    assert set(line["auxiliary_loss"]) == {"2"}


def test_lns_wraps_a_custom_method(mine: Path) -> None:
    use("mine")
    model = models.create("own_net", {"name": "lns", "base": "threshold"})
    package.methods.lns.warm_start(model, steps=5)
    assert isinstance(model[2], package.BinaryConv2d)


def test_a_recipe_brings_its_modules_into_another_process(mine: Path) -> None:
    """The workers of a study get recipes by pickle, and have read no file."""
    data = pickle.dumps(load_recipe("own.yaml"))
    (mine / "recipe.pickle").write_bytes(data)
    program = (
        "import pickle; recipe = pickle.load(open('recipe.pickle', 'rb')); from unflip import models; "
        "print(models.create(recipe.model.name, recipe.method)[2].method.name)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=mine)
    assert done.stdout.strip() == "threshold", done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "uses: module 'nowhere' was not found in .*PYTHONPATH"),
        ("mine.py", "for mine.py write 'mine'"),
        ("../mine.py", "for mine.py write 'mine'"),
    ],
)
def test_a_module_that_is_not_there_is_the_only_complaint(
    mine: Path, name: str, message: str
) -> None:
    with pytest.raises(ModuleMissing, match=message) as raised:
        load_recipe("own.yaml", [f"uses={name}"])
    assert "unknown method" not in str(raised.value)


def test_an_error_in_a_custom_module_shows_its_line(mine: Path) -> None:
    (mine / "broken.py").write_text("raise ValueError('no such thing')\n")
    with pytest.raises(ImportError, match="'broken' fails when it is imported: no such thing"):
        use("broken")
    (mine / "lacking.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_installed_anywhere'"):
        use("lacking")


def test_only_recipes_with_modules_have_the_field(mine: Path) -> None:
    assert "uses" not in load_recipe("digits-dorefa").plain()
    assert load_recipe("own.yaml").plain()["uses"] == ["mine"]


def test_a_run_tells_that_its_code_has_changed(mine: Path, digits: ImageSet) -> None:
    recipe = load_recipe("own.yaml")
    train(recipe, digits, mine / "runs", options=RunOptions(device="cpu", quiet=True))
    (mine / "mine.py").write_text(MINE + "# another method, or none\n")
    with pytest.warns(UserWarning, match="began with other code in 'mine'"):
        train_together(
            [Job(recipe, 0, mine / "runs")], digits, options=RunOptions(device="cpu", quiet=True)
        )


def test_a_cell_that_is_run_again_registers_again(mine: Path) -> None:
    for _ in range(2):
        exec(MINE, {"__name__": "__main__"})
    with pytest.raises(ValueError, match="'threshold' is already registered by"):
        exec(MINE, {"__name__": "another_file"})


@pytest.mark.parametrize(
    ("whole", "message"),
    [("true", "made optimizer.2.weight.average during a step"), ("false", "must be a tensor")],
)
def test_an_optimizer_whose_state_no_checkpoint_has_is_refused(
    mine: Path, digits: ImageSet, whole: str, message: str
) -> None:
    """Otherwise it would train to its end, but an interrupted run could not resume."""
    recipe = load_recipe("own.yaml", ["method=late", f"method.whole={whole}"])
    with pytest.raises(ValueError, match=message):
        train(recipe, digits, mine / "runs", options=RunOptions(device="cpu", quiet=True))
