"""Steps on streamed images: the same as on batches decoded one by one, shared where plans are equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from unflip import data
from unflip.recipes.build import build_model
from unflip.recipes.schema import Recipe
from unflip.train.engine import Engine
from unflip.train.learner import Learner

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 2)):
        for label in ("a", "b"):
            (folder / part / label).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (12 + number, 14, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / label / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def source(folder: Path) -> Iterator[Any]:
    source = data.load("images", folder, size=8).source(CPU, workers=1)
    yield source
    source.close()


def recipe(**more: Any) -> Recipe:
    fields = {
        "name": "fed",
        "data": {"name": "images", "size": 8},
        "model": {"name": "resnet20", "width": 4},
        "method": "dorefa",
        "epochs": 2,
        "batch_size": 8,
        "optimizer": {"lr": 0.1},
    }
    return Recipe.model_validate({**fields, **more})


class WithoutStream:
    """The same source, with nothing that decodes ahead."""

    def __init__(self, source: Any) -> None:
        self.resident, self.spec, self.test_count = False, source.spec, source.test_count
        self.plan, self.batch = source.plan, source.batch
        self.count = len(source)

    def __len__(self) -> int:
        return self.count


def trained(learners: list[Learner], seeds: list[int], epochs: int = 2, first: int = 0) -> None:
    with Engine(learners, compiled=True, captured=True) as engine:
        for epoch in range(epochs):
            for learner, seed in zip(learners, seeds, strict=True):
                learner.start_epoch(seed, epoch, 1.0)
                learner.position.fill_(first)
            for _ in range(first, learners[0].steps):
                engine.step()


def learner(source: Any, seed: int = 0) -> Learner:
    chosen = recipe()
    return Learner(chosen, build_model(chosen, source.spec, seed), source, CPU)


def assert_same_weights(a: Learner, b: Learner) -> None:
    for (name, left), right in zip(a.state().items(), b.state().values(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("first", [0, 1])
def test_training_on_a_stream_is_training_on_batches(source: Any, first: int) -> None:
    streamed, plain = learner(source), learner(WithoutStream(source))
    trained([streamed], [0], first=first)
    trained([plain], [0], first=first)
    assert_same_weights(streamed, plain)
    assert int(streamed.position) == streamed.steps


def count_streams(source: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    opened: list[int] = []
    stream = source.stream

    def counting(plan: Any, first: int = 0) -> Any:
        opened.append(first)
        return stream(plan, first)

    monkeypatch.setattr(source, "stream", counting)
    return opened


def test_seeds_with_one_order_share_what_was_decoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source: Any = data.load("images", folder, size=8, order=7).source(CPU, workers=1)
    try:
        together = [learner(source, seed) for seed in (0, 1)]
        opened = count_streams(source, monkeypatch)
        trained(together, [0, 1])
        assert len(opened) == 2  # one per epoch
        alone = learner(source, 1)
        trained([alone], [1])
        assert_same_weights(together[1], alone)
    finally:
        source.close()


def test_seeds_with_orders_of_their_own_have_a_stream_each(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = [learner(source, seed) for seed in (0, 1)]
    opened = count_streams(source, monkeypatch)
    trained(together, [0, 1], epochs=1)
    assert len(opened) == 2
    monkeypatch.undo()
    alone = learner(source, 1)
    trained([alone], [1], epochs=1)
    assert_same_weights(together[1], alone)
