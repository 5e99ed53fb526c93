"""A custom data set of images of different sizes, decoded on the host batch by batch, through the real loop."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from unflip.data import registry
from unflip.data.source import FinitePictures
from unflip.runs import checkpoint as checkpoints
from unflip.runs.files import RunError
from unflip.train import Recipe, RunOptions, load_recipe, train

Start = Callable[..., Any]
Hash = Callable[[Path], str]
CPU = torch.device("cpu")
QUIET = RunOptions(device="cpu", quiet=True)

# Stripes across or down, of several sizes, one file each. A plan has the image, a box in it (as RandomResizedCrop
# draws it) and a flip; the box is resized to side x side by the nearest pixel.
STRIPES = '''
"""Images of different sizes, read from their files in every step."""
import hashlib
import numpy as np
import torch
from unflip.data import InputSpec, register_data
from unflip.data.source import in_batches, mix, numbers_of_part

class Stripes:
    def __init__(self, train, test, side):
        self.train, self.test, self.side = train, test, side
        self.spec = InputSpec((1, side, side), ("across", "down"), (0.5,), (0.25,))

    @property
    def fingerprint(self):
        def digest(paths):
            return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
        return {"training images": digest(self.train), "test images": digest(self.test), "classes": "across, down"}

    def __len__(self):
        return len(self.train)

    def split(self, validation):
        return Stripes(self.train[:-validation], self.train[-validation:], self.side)

    def source(self, device, workers=None):
        return StripesSource(self, device)

class StripesSource:
    resident = False

    def __init__(self, data, device):
        self.data, self.device, self.spec = data, device, data.spec
        self.test_count = len(data.test)
        self.sizes = torch.tensor([np.load(path, mmap_mode="r").shape for path in data.train])

    def __len__(self):
        return len(self.data.train)

    def plan(self, seed, epoch, batch_size):
        generator = torch.Generator().manual_seed(mix(seed, epoch))
        order = torch.randperm(len(self), generator=generator)
        share = torch.rand(len(self), 5, generator=generator)
        size = self.sizes[order]
        box = (size * (0.5 + 0.5 * share[:, :2])).long()
        corner = ((size - box + 1) * share[:, 2:4]).long()
        flip = (share[:, 4:] < 0.5).long()
        return in_batches(torch.cat([order[:, None], corner, box, flip], dim=1), batch_size)

    def batch(self, plan):
        assert plan.device.type == "cpu"
        return self.decoded([(self.data.train[i], *box) for i, *box in plan.tolist()])

    def test_batches(self, size, part=(0, 1)):
        mine = [self.data.test[i] for i in numbers_of_part(self.test_count, part)]
        for start in range(0, len(mine), size):
            paths = mine[start : start + size]
            yield self.decoded([(path, 0, 0, *np.load(path).shape, 0) for path in paths])

    def decoded(self, boxes):
        side, images = self.data.side, []
        for path, top, left, height, width, flip in boxes:
            rows = top + np.arange(side) * height // side
            columns = left + np.arange(side) * width // side
            image = np.load(path)[rows][:, columns]
            images.append(image[:, ::-1] if flip else image)
        pixels = torch.from_numpy(np.stack(images)[:, None]).to(self.device)
        labels = torch.tensor([int("down" in path.name) for path, *_ in boxes], device=self.device)
        return (pixels.float() / 255 - 0.5) / 0.25, labels

@register_data("stripes")
def load_stripes(folder, side=8):
    return Stripes(sorted(folder.glob("train-*.npy")), sorted(folder.glob("test-*.npy")), side)
'''
RECIPE = {
    "uses": "stripes",
    "data": {"name": "stripes", "side": 10},
    "model": {"name": "resnet20", "width": 4},
    "method": "dorefa",
    "epochs": 2,
    "batch_size": 16,
    "optimizer": {"lr": 0.1},
}


def image(seed: int, down: bool) -> np.ndarray:
    """Bright stripes in noise, 12 to 30 pixels on a side."""
    random = np.random.default_rng(seed)
    height, width = random.integers(12, 31, 2)
    pixels = random.integers(0, 120, (height, width), dtype=np.uint8)
    striped = pixels.T if down else pixels
    striped[np.arange(len(striped)) % 6 < 3] += 130
    return pixels


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for part, count, first in (("train", 71, 0), ("test", 20, 1000)):
        for i in range(count):
            name = f"{part}-{i:03}-{'down' if i % 2 else 'across'}.npy"
            np.save(folder / name, image(first + i, down=bool(i % 2)))
    return folder


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recipe]:
    """Read from a folder with ``stripes.py`` and ``stripes.yaml``; what it registers is forgotten again."""
    (tmp_path / "stripes.py").write_text(STRIPES)
    (tmp_path / "stripes.yaml").write_text(yaml.safe_dump(RECIPE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    yield load_recipe("stripes.yaml")
    sys.modules.pop("stripes", None)


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_killed_and_resumed_it_is_the_same_run(
    recipe: Recipe, images: Path, tmp_path: Path, start: Start, weights_hash: Hash
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed" / "seed-0"
    train(recipe, recipe.data.load(images), whole, options=QUIET)
    command = ["train", tmp_path / "stripes.yaml", "--data", images, "--out", folder.parent]
    process = start(*command, step_seconds=0.2)
    process.wait_for(lambda: len(metrics(folder)) == 1)
    assert process.send(signal.SIGKILL).code == -signal.SIGKILL, process.err
    process = start(*command, step_seconds=0.2)
    process.wait_for(lambda: len(metrics(folder)) == 0)
    process.wait_for(lambda: len(metrics(folder)) == 1)
    assert process.send(signal.SIGINT).code == 130, process.err
    epoch, step = checkpoints.available(folder)[-1]
    assert (epoch, 0 < step < 4) == (1, True), "saved in the middle of the second epoch"
    done = start(*command).wait()
    assert done.code == 0, done.err
    assert weights_hash(folder) == weights_hash(whole / "seed-0")
    assert metrics(folder) == metrics(whole / "seed-0")


def test_a_run_depends_on_its_seed_alone(
    recipe: Recipe, images: Path, tmp_path: Path, weights_hash: Hash
) -> None:
    data = recipe.data.load(images)
    train(recipe, data, tmp_path / "both", seeds=[0, 1], options=QUIET)
    torch.manual_seed(7)
    train(recipe, data, tmp_path / "alone", seeds=[1], options=QUIET)
    alone, both = (weights_hash(tmp_path / out / "seed-1") for out in ("alone", "both"))
    assert alone == both
    assert both != weights_hash(tmp_path / "both" / "seed-0")


def test_it_learns_from_boxes_of_different_sizes(
    recipe: Recipe, images: Path, tmp_path: Path
) -> None:
    more = load_recipe("stripes.yaml", ["method=float", "epochs=6", "optimizer.lr=0.05"])
    [result] = train(more, recipe.data.load(images), tmp_path / "out", options=QUIET)
    assert result["accuracy"] >= 80, result
    plan = recipe.data.load(images).source(CPU).plan(0, 0, 71)[0]
    assert plan.shape == (71, 6)
    assert len(set(map(tuple, plan[:, 3:5].tolist()))) > 50, "sizes of the boxes"


def test_held_out_images_are_tested_on(recipe: Recipe, images: Path, tmp_path: Path) -> None:
    held_out = load_recipe("stripes.yaml", ["data.validation=30", "epochs=1"])
    [result] = train(held_out, recipe.data.load(images), tmp_path / "o", options=QUIET)
    assert result["evaluated_on"] == "validation"
    assert result["accuracy"] * 30 / 100 == pytest.approx(round(result["accuracy"] * 30 / 100))


def test_other_images_are_refused(recipe: Recipe, images: Path, tmp_path: Path) -> None:
    train(recipe, recipe.data.load(images), tmp_path / "out", options=QUIET)
    others = tmp_path / "others"
    shutil.copytree(images, others)
    np.save(others / "train-003-down.npy", image(5000, down=True))
    with pytest.raises(RunError, match="its training images are"):
        train(recipe, recipe.data.load(others), tmp_path / "out", options=QUIET)


def test_a_teacher_runs_in_the_step(recipe: Recipe, images: Path, tmp_path: Path) -> None:
    """There is no table of its logits, because the pictures cannot be counted."""
    data = recipe.data.load(images)
    assert not isinstance(data.source(CPU), FinitePictures)
    float_recipe = load_recipe("stripes.yaml", ["method=float", "epochs=1", "name=teacher"])
    train(float_recipe, data, tmp_path / "teacher", options=QUIET)
    distill = "distill={teacher: stripes.yaml, temperature: 1, weight: 1}"
    student = load_recipe("stripes.yaml", [distill, "epochs=2"])
    [result] = train(
        student, data, tmp_path / "student", teacher=tmp_path / "teacher", options=QUIET
    )
    assert 0 < result["loss"] < 1


def test_packing_needs_no_images_in_memory_and_evaluating_does(
    recipe: Recipe, images: Path, tmp_path: Path, unflip: Start
) -> None:
    train(recipe, recipe.data.load(images), tmp_path / "out", options=QUIET)
    done = unflip("pack", tmp_path / "out", "-o", tmp_path / "a.unflip", "--uses", "stripes")
    assert done.code == 0, done.err
    done = unflip(
        "evaluate", tmp_path / "a.unflip", "stripes", "--data", images, "--uses", "stripes"
    )
    assert "stripes is streamed" in done.err
