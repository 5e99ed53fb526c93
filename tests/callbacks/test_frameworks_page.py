"""The snippets of docs/frameworks.md run with the real libraries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unflip as package

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def snippet(library: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [found] = [block for block in blocks if re.search(rf"^(import|from) {library}\b", block, re.M)]
    return found


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)
    )


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.chdir(tmp_path)  # the snippets write files
    images, labels = torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))
    rows = [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]
    loader = DataLoader(TensorDataset(images, labels), batch_size=4)
    given = {"torch": torch, "my_model": small(), "example_input": images[:1]}
    return {**given, "rows": rows, "loader": loader}


@pytest.mark.filterwarnings("ignore")
def test_the_snippet_for_lightning_runs(scope: dict) -> None:
    pytest.importorskip("lightning.pytorch", reason="needs lightning")
    before = scope["my_model"][2].weight.detach().clone()
    exec(snippet("lightning"), scope)
    assert not torch.equal(scope["classifier"].model[2].weight, before)
    assert package.load("model.unflip").output_shape == (4,)


@pytest.mark.filterwarnings("ignore")
def test_the_snippet_for_trainer_runs(scope: dict) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    before = scope["my_model"][2].weight.detach().clone()
    exec(snippet("transformers"), scope)
    assert not torch.equal(scope["classifier"].model[2].weight, before)


def test_the_snippet_for_timm_runs(scope: dict) -> None:
    pytest.importorskip("timm", reason="needs timm")
    x = torch.randn(1, 3, 32, 32)
    exec(snippet("timm"), {**scope, "example_input": x})
    assert package.load("model.unflip").output_shape == (10,)
    assert Path("model.unflip").stat().st_size < 1_600_000  # 11.2 million weights
