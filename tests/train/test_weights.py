"""A run may start from a file of weights: they are taken over whole or not at all, and the file is kept in mind."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from unflip.data import ImageSet
from unflip.recipes.build import build_model
from unflip.recipes.load import RecipeError
from unflip.runs import checkpoint as checkpoints
from unflip.runs.files import RunError
from unflip.runs.load import model_state
from unflip.study.compare import compare
from unflip.train import load_recipe, train
from unflip.train.job import RunOptions

SMALL = [
    "model.width=2",
    "data.validation=1200",
    "batch_size=64",
    "epochs=1",
    "allow_no_flips=true",
]


def run(recipe: Any, data: ImageSet, out: Path, **options: Any) -> list[dict[str, Any]]:
    return train(recipe, data, out, options=RunOptions(device="cpu", quiet=True), **options)


def recipe(*overrides: str) -> Any:
    return load_recipe("digits-dorefa", [*SMALL, *overrides])


@pytest.fixture
def state(digits: ImageSet) -> dict[str, Tensor]:
    """Of the float twin, as someone else may have trained it."""
    return build_model(load_recipe("digits-float", SMALL), digits, 7).state_dict()


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
    assert "is of another network than the recipe's" in text
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
    with pytest.raises(ValueError, match=r"starts from the weights in weights.safetensors: give"):
        run(own, digits, tmp_path / "out")
    with pytest.raises(ValueError, match=f"starts from nothing.*: give start={file} instead"):
        run(recipe(), digits, tmp_path / "out", start=file)
    lns = load_recipe("digits-lns", [*SMALL, "method.rates=estimated"])
    with pytest.raises(ValueError, match="is a file of weights: give --start a finished run"):
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
