"""Data sets by name: their options, custom ones, and loading them without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unflip import data
from unflip.data import DataError, ImageSet, registry
from unflip.recipes import RecipeError, load_recipe

CELL = """
from unflip.data import register_data

@register_data("mine")
def load_mine(folder, side=4, gray=False):
    return None
"""


@pytest.fixture(autouse=True)
def _forget_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def test_the_shipped_sets() -> None:
    assert data.names() == ["cifar10", "digits", "folder", "images"]
    options = {name: data.option_names(name) for name in data.names()}
    images = ["size", "resize", "scale_min", "jitter", "lighting", "order"]
    folder = ["size", "test_share"]
    assert options == {"cifar10": [], "digits": [], "folder": folder, "images": images}
    for name in data.names():
        registry._check_signature(name, registry._loader(name))


def test_load_by_name() -> None:
    assert len(data.load("digits")) == 1347
    with pytest.raises(ValueError, match=r"unknown data set 'digit'\. Did you mean 'digits'\?"):
        data.load("digit")
    with pytest.raises(ValueError, match=r"unknown data set 'mnist'\..*cifar10, digits, folder"):
        data.load("mnist")
    with pytest.raises(DataError, match="'folder' needs the folder of the images: give --data DIR"):
        data.load("folder")


def test_unknown_options_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"option of data set 'folder' 'siz'\..*mean 'size'"):
        data.load("folder", tmp_path, siz=8)
    with pytest.raises(ValueError, match=r"option of data set 'digits' 'size'\. Known: none"):
        data.load("digits", size=8)


def test_a_recipe_takes_the_options_of_its_set_alone() -> None:
    exec(CELL, {"__name__": "__main__"})
    recipe = load_recipe("digits-dorefa", ["data={name: mine, side: 6, validation: 3}"])
    assert recipe.data.options == {"side": 6}
    assert recipe.plain()["data"] == {"name": "mine", "validation": 3, "side": 6}
    assert str(recipe.data) == "mine (side=6) with 3 images held out"
    assert recipe.data != load_recipe("digits-dorefa", ["data={name: mine, validation: 3}"]).data
    with pytest.raises(RecipeError, match=r"data: unknown option of .*'grey'.*mean 'gray'"):
        load_recipe("digits-dorefa", ["data={name: mine, grey: true}"])
    with pytest.raises(
        RecipeError, match=r"'size'\. Did you mean 'side'\? Known: gray, name, side, validation"
    ):
        load_recipe("digits-dorefa", ["data={name: mine, size: 3}"])


def test_a_cell_that_is_run_again_registers_again() -> None:
    for _ in range(2):
        exec(CELL, {"__name__": "__main__"})
    with pytest.raises(ValueError, match="data set 'mine' is already registered by"):
        exec(CELL, {"__name__": "another_file"})


@pytest.mark.parametrize("name", ["digits", "cifar10", "folder"])
def test_a_shipped_name_is_taken(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is already registered by .*load_{name}"):
        exec(CELL.replace('"mine"', f'"{name}"'), {"__name__": "another_file"})


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("()", "must take folder first"),
        ("(size=3)", "must take folder first"),
        ("(folder, validation=3)", "option 'validation', which means something else"),
        ("(folder, name='a')", "option 'name', which means something else"),
        ("(folder, size)", "option 'size' without a default"),
        ("(folder, **options)", r"option '\*\*options' without a default"),
    ],
)
def test_a_loader_that_recipes_could_not_use_is_refused(signature: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"data set 'mine': its loader load_mine .*{message}"):
        exec(CELL.replace("(folder, side=4, gray=False)", signature), {"__name__": "__main__"})
    assert "mine" not in data.names()


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails, as where it is not installed
import unflip.data
heavy = {"sklearn", "PIL", "pydantic", "unflip.data.cifar", "unflip.data.folders", "unflip.data.digits"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from pathlib import Path
from unflip.data import cifar, load
images = load("folder", Path(sys.argv[1]), size=4)
print(images.spec.plain(), images.fingerprint["test images"], images.split(1).test_labels.tolist())
cifar.LAYOUTS = ()
try:
    load("cifar10", Path(sys.argv[1]))
except IndexError:
    pass  # no layout to look for: the loader ran
print(cifar.BINARY.decode(bytes(3073), "here")[0].shape)
"""


def test_images_are_read_without_torch(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            pixels = random.integers(0, 256, (6, 5, 3), dtype=np.uint8)
            image.fromarray(pixels).save(tmp_path / part / name / "0.png")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    here: Any = data.load("folder", tmp_path, size=4)
    assert isinstance(here, ImageSet)
    lines = f"{here.spec.plain()} {here.fingerprint['test images']} [1]\n(1, 3, 32, 32)\n"
    assert done.stdout == lines
