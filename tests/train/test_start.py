"""Where first weights come from: files of weights, branches for a method's preparation, and what is trained first."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from torch import Tensor, nn

from unflip.data import ImageSet
from unflip.layers import binary_layers
from unflip.methods.flip_rates import FlipRates, compare_branches
from unflip.recipes.build import build_model
from unflip.recipes.load import RecipeError, needed_recipe
from unflip.recipes.schema import Recipe
from unflip.runs import checkpoint as checkpoints
from unflip.runs.files import RunError
from unflip.runs.load import load_run, model_state
from unflip.runs.run import Run
from unflip.study.compare import compare
from unflip.train import Job, RunOptions, load_recipe, train, train_together
from unflip.train.learner import Learner
from unflip.train.start import Preparation, train_branches

CPU = torch.device("cpu")

SMALL = [
    "model.width=2",
    "data.validation=1200",
    "batch_size=64",
    "epochs=1",
    "allow_no_flips=true",
]


def run(recipe: Any, data: ImageSet, out: Path, **given: Any) -> list[dict[str, Any]]:
    return train(recipe, data, out, options=RunOptions(device="cpu", quiet=True), **given)


def recipe(*overrides: str) -> Any:
    return load_recipe("digits-dorefa", [*SMALL, *overrides])


@pytest.fixture
def state(digits: ImageSet) -> dict[str, Tensor]:
    """Of the float twin, as someone else may have trained it."""
    return build_model(load_recipe("digits-float", SMALL), digits.spec, 7).state_dict()


@pytest.fixture
def file(tmp_path: Path, state: dict[str, Tensor]) -> Path:
    safetensors.torch.save_file(state, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def test_a_run_starts_from_the_weights_and_says_which(
    tmp_path: Path, digits: ImageSet, file: Path, state: dict[str, Tensor]
) -> None:
    own = recipe("start=weights.safetensors")
    run(own, digits, tmp_path / "out", start=file, seeds=range(2))
    for seed in range(2):
        folder = tmp_path / "out" / f"seed-{seed}"
        first = model_state(checkpoints.load_at(folder, 0, 0).tensors)
        assert all(torch.equal(first[key], value) for key, value in state.items())
        given = json.loads((folder / "provenance.json").read_text())["start"]
        assert given == {
            "folder": str(file),
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
    moved = file.rename(tmp_path / "same.safetensors")
    run(own, digits, tmp_path / "out", start=moved)
    safetensors.torch.save_file({k: v + 1 for k, v in state.items()}, file)
    with pytest.raises(RunError, match=r"it had the weights of .*, .* has others"):
        run(own, digits, tmp_path / "out", start=file)


def test_another_networks_weights_are_named(
    tmp_path: Path, digits: ImageSet, state: dict[str, Tensor]
) -> None:
    path = tmp_path / "w.safetensors"
    own = recipe("start=w.safetensors")

    def refused(tensors: dict[str, Tensor]) -> str:
        safetensors.torch.save_file(tensors, path)
        with pytest.raises(ValueError, match="start ") as caught:
            run(own, digits, tmp_path / "out", start=path)
        assert str(caught.value).startswith(f"start {path}")
        assert len(str(caught.value).splitlines()) == 1
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    less = {k: v for k, v in state.items() if k != "conv1.weight"}
    text = refused({**less, "stem.weight": torch.zeros(1)})
    assert "holds the weights of another network than the recipe's" in text
    assert 'Missing key(s) in state_dict: "conv1.weight"' in text
    assert 'Unexpected key(s) in state_dict: "stem.weight"' in text
    assert "size mismatch for conv1.weight" in refused({**state, "conv1.weight": torch.zeros(1)})
    assert "every name in state_dict begins with 'module.'" in refused(
        {f"module.{k}": v for k, v in state.items()}
    )
    run(recipe(), digits, tmp_path / "base")
    checkpoint = max((tmp_path / "base" / "seed-0").glob("*.safetensors"))
    assert "give the run's folder" in refused(safetensors.torch.load_file(checkpoint))


def test_what_is_no_such_file_is_refused_with_what_would_do(
    tmp_path: Path, digits: ImageSet, file: Path, state: dict[str, Tensor]
) -> None:
    own, path = recipe("start=weights.safetensors"), tmp_path / "weights.pt"
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"a finished run's folder, or a .safetensors file"):
        run(own, digits, tmp_path / "out", start=path)
    with pytest.raises(RecipeError, match=r"start: should name a recipe, or a .safetensors file"):
        recipe(f"start={path}")
    with pytest.raises(ValueError, match="No such file"):
        run(own, digits, tmp_path / "out", start=tmp_path / "none.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(
        ValueError, match=r"should be a .safetensors file of the network's weights: "
    ):
        run(own, digits, tmp_path / "out", start=file)
    alone = [Job(own, 0, tmp_path / "out")]
    with pytest.raises(ValueError, match=r"starts from the weights in weights.safetensors: give"):
        train_together(alone, digits, RunOptions(device="cpu", quiet=True))
    with pytest.raises(
        ValueError, match=f"has no start, but --start .*: give start={file} instead"
    ):
        run(recipe(), digits, tmp_path / "out", start=file)
    safetensors.torch.save_file(state, file)
    lns = load_recipe("digits-lns", [*SMALL, "method.rates=estimated"])
    with pytest.raises(ValueError, match="which is not a run: give --start a finished run"):
        run(lns, digits, tmp_path / "out", start=file)
    assert not (tmp_path / "out").exists()


def test_the_command_finds_it_beside_the_recipe(unflip: Any, tmp_path: Path, file: Path) -> None:
    (tmp_path / "own.yaml").write_text(json.dumps(recipe("start=weights.safetensors").plain()))
    out = tmp_path / "runs" / "own"
    command = ["train", tmp_path / "own.yaml", "--out", out, "--device", "cpu"]
    for _ in range(2):
        done = unflip(*command)
        assert done.code == 0, done.err
    assert json.loads((out / "seed-0" / "provenance.json").read_text())["start"]["folder"] == str(
        file
    )
    file.unlink()
    assert unflip(*command).code == 0, "a finished run needs it no more"
    with pytest.raises(
        ValueError, match=r"starts from the weights in weights.safetensors: a study"
    ):
        compare([tmp_path / "own.yaml"], tmp_path / "study")


# Copies of the network that a run starts from, for a method's preparation


def trained(digits: ImageSet) -> tuple[Recipe, nn.Module]:
    own = load_recipe(
        "digits-dorefa", ["model={name: vgg_small, width: 8}", "batch_size=128", "epochs=1"]
    )
    model = build_model(own, digits.spec, seed=0)
    learner = Learner(own, model, digits.source(CPU), CPU)
    learner.start_epoch(0, 0, 1.0)
    for _ in range(learner.steps):
        learner.step()
    return own, model.eval()


def test_branches_of_a_trained_network(digits: ImageSet) -> None:
    own, model = trained(digits)
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def rates(seed: int) -> FlipRates:
        copies = train_branches(
            model,
            own,
            digits,
            count=3,
            epochs=1,
            rate=0.5,
            seed=seed,
            device=CPU,
            options=RunOptions(),
        )
        return compare_branches(model, copies, bins=4)

    found = rates(seed=0)
    assert not model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "left as it is"
    assert list(found.bins) == [name for name, _ in binary_layers(model)]
    assert all(len(bins) == 4 for bins in found.bins.values())
    small = sum(bins[0].disagreement for bins in found.bins.values())
    large = sum(bins[-1].disagreement for bins in found.bins.values())
    assert small > 2 * large, "small weights flip more"
    assert 0 < found.whole["layer5.conv"].rho < 0.5
    assert rates(seed=0) == found, "the same seeds, the same branches"
    assert rates(seed=1) != found


def test_what_a_preparation_gets(
    tmp_path: Path, digits: ImageSet, capsys: pytest.CaptureFixture[str]
) -> None:
    """The network of the run that this one starts from, and copies that have moved on from it, each elsewhere."""
    run(recipe(), digits, tmp_path / "base", seeds=[3])
    capsys.readouterr()
    start = Run.of_seed(tmp_path / "base", 3)
    job = Job(load_recipe("digits-lns", SMALL), 3, tmp_path / "lns", tmp_path / "base")
    data = digits.split(1200)
    asked = Preparation(job, start, data, CPU, RunOptions(eager=True), None)
    baseline, copies = asked.branches(2, 1, 0.5)
    expected = model_state(start.load_checkpoint().tensors)
    assert all(torch.equal(v, expected[k]) for k, v in baseline.state_dict().items())
    weights = [m.get_parameter("layer1.0.conv1.weight") for m in (baseline, *copies)]
    assert len(weights) == 3
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(weights, 2))
    asked.say("hello")
    Preparation(job, start, data, CPU, RunOptions(quiet=True), None).say("quiet")
    assert capsys.readouterr().out == "seed 3: hello\n"
    with pytest.raises(
        ValueError, match=r"trains copies of the run .* start is None, which is not"
    ):
        Preparation(job, None, data, CPU, RunOptions(quiet=True), None).branches(2, 1, 0.5)
    taught = recipe("distill={teacher: digits-float}")
    with pytest.raises(ValueError, match="has a teacher: copies of its network would have to"):
        train_branches(
            baseline,
            taught,
            data,
            count=2,
            epochs=1,
            rate=1,
            seed=0,
            device=CPU,
            options=RunOptions(),
        )


# What a recipe starts or learns from is trained first


TINY = {
    "data": {"name": "digits", "validation": 1200},
    "model": {"name": "vgg_small", "width": 4},
    "method": {"name": "dorefa", "inputs": "pm1"},
    "epochs": 1,
    "batch_size": 64,
    "optimizer": {"lr": 0.1, "latent_lr": 1.0},
    "allow_no_flips": True,
}


def write_recipe(folder: Path, name: str, **fields: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**TINY, **fields}))
    return path


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A recipe that starts from one that starts from another, and learns from a third."""
    write_recipe(tmp_path, "base", model={"name": "vgg_small", "width": 32})  # not the width used
    write_recipe(tmp_path, "middle", start="base.yaml")
    write_recipe(tmp_path, "teacher", method="float", model={"name": "vgg_small", "width": 2})
    taught = {"teacher": "teacher.yaml", "weight": 0.5}
    return write_recipe(tmp_path, "top", start="middle.yaml", distill=taught)


def folders(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.glob("*/seed-*")}


def test_what_a_recipe_needs_is_trained_first(
    tmp_path: Path, digits: ImageSet, top: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, own = tmp_path / "runs", load_recipe(top)
    options = RunOptions(device="cpu")
    results = train(own, digits, runs / "mine", seeds=range(2), options=options)
    started = {f"{name}/seed-{seed}" for name in ("base", "middle", "mine") for seed in (0, 1)}
    assert folders(runs) == {*started, "teacher/seed-0"}, "a teacher has one seed for all"
    said = capsys.readouterr().out
    assert said.count("training that first") == 3
    assert f"top starts from middle, which is not finished in {runs / 'middle'}" in said
    assert f"top learns from teacher, which is not finished in {runs / 'teacher'}" in said
    for later, earlier, seed in (("mine", "middle", 1), ("middle", "base", 0)):
        first = model_state(checkpoints.load_at(runs / later / f"seed-{seed}", 0, 0).tensors)
        last = load_run(runs / earlier, seed).state_dict()
        assert all(torch.equal(first[key], value) for key, value in last.items())
        about = json.loads((runs / later / f"seed-{seed}" / "provenance.json").read_text())
        assert about["start"]["folder"] == str(runs / earlier)
    assert Run.of_seed(runs / "base", 0).recipe["model"]["width"] == 4
    assert Run.of_seed(runs / "teacher", 0).recipe["model"]["width"] == 2, "a teacher is its own"

    for name in ("base", "middle", "teacher"):
        shutil.rmtree(runs / name)
        (tmp_path / f"{name}.yaml").unlink()
    assert train(own, digits, runs / "mine", seeds=range(2), options=options) == results
    assert {name.split("/")[0] for name in folders(runs)} == {"mine"}, "finished: nothing is needed"


def test_a_start_that_is_finished_or_given_is_not_trained(
    tmp_path: Path, digits: ImageSet, top: Path
) -> None:
    runs, middle = tmp_path / "runs", load_recipe(tmp_path / "middle.yaml")
    run(load_recipe(tmp_path / "base.yaml", ["model.width=4"]), digits, tmp_path / "elsewhere")
    run(middle, digits, runs / "middle", start=tmp_path / "elsewhere")
    assert folders(runs) == {"middle/seed-0"}
    began = (runs / "middle" / "seed-0" / "result.json").read_bytes()
    (tmp_path / "base.yaml").unlink()
    run(load_recipe(top), digits, runs / "top")
    assert folders(runs) == {"middle/seed-0", "teacher/seed-0", "top/seed-0"}, "no base"
    assert (runs / "middle" / "seed-0" / "result.json").read_bytes() == began


def test_mistakes_are_found_before_the_start_is_trained(tmp_path: Path, digits: ImageSet) -> None:
    own = load_recipe(write_recipe(tmp_path, "own", start="digits-dorefa"))
    with pytest.raises(ValueError, match="recipe own has no teacher"):
        run(own, digits, tmp_path / "runs" / "own", teacher=tmp_path / "nowhere")
    assert not (tmp_path / "runs").exists()


def test_a_start_gets_the_network_of_the_recipe_that_needs_it(tmp_path: Path) -> None:
    """Also options that the other one leaves out."""
    write_recipe(tmp_path, "base", model={"name": "resnet20", "width": 2, "shortcut": "conv"})
    own = load_recipe(
        write_recipe(tmp_path, "own", start="base.yaml", model={"name": "resnet20", "width": 2})
    )
    assert needed_recipe(own, "start").model.options == {"width": 2}


def test_checkpoints_of_another_recipe_are_refused_without_their_recipe_file(
    tmp_path: Path, digits: ImageSet
) -> None:
    first = recipe()
    run(first, digits, tmp_path / "run")
    for name in ("recipe.json", "result.json"):
        (tmp_path / "run" / "seed-0" / name).unlink()
    with pytest.raises(RunError, match=r"of another recipe or seed: epochs is 1 there and 3 here"):
        run(recipe("epochs=3"), digits, tmp_path / "run")
    (tmp_path / "run" / "seed-0" / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has a result.json but no recipe.json"):
        run(first, digits, tmp_path / "run")


def test_recipes_that_need_themselves_are_refused(tmp_path: Path, digits: ImageSet) -> None:
    own = load_recipe(write_recipe(tmp_path, "own", start="own.yaml"))
    with pytest.raises(ValueError, match=r"recipe own needs itself: own → own\. Change start"):
        run(own, digits, tmp_path / "runs" / "own")
    write_recipe(tmp_path, "a", start="b.yaml")
    write_recipe(tmp_path, "b", distill={"teacher": "a.yaml"})
    with pytest.raises(ValueError, match=r"recipe a needs itself: a → b → a\. Change start"):
        run(load_recipe(tmp_path / "a.yaml"), digits, tmp_path / "runs" / "a")
    assert not (tmp_path / "runs").exists()
