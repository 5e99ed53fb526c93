"""What these tests share: a small task, and the plain loop that the callbacks must equal."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import unflip as package

EPOCHS, PARTS, RATE = 3, 2, 0.1


@dataclass
class Task:
    """``PARTS`` batches are one step. Every method of ``METHODS`` needs another hook."""

    x: Tensor
    y: Tensor

    METHODS = ("irnet", "ovsw", "xnor", "rebnn")

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.x.split(8), self.y.split(8), strict=True))

    def model(self, method: str) -> nn.Module:
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4))
        return package.binarize(layers, method, quiet=True)

    def by_hand(self, model: nn.Module) -> nn.Module:
        """The loop of docs/training.md, with accumulated gradients."""
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=RATE)
        for epoch in range(EPOCHS):
            package.start_epoch(trained, epoch, EPOCHS)
            for number, (x, y) in enumerate(self.batches, 1):
                loss = nn.functional.cross_entropy(trained(x), y) + package.auxiliary_loss(trained)
                (loss / PARTS).backward()
                if number % PARTS == 0:
                    package.before_step(trained)
                    optimizer.step()
                    package.after_step(trained)
                    optimizer.zero_grad()
        return trained


@pytest.fixture
def task() -> Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 6, generator=generator)
    return Task(x, torch.randint(0, 4, (32,), generator=generator))


@pytest.fixture
def check():
    """Two models must be the same, and not the one that both began as."""

    def equal(found: nn.Module, expected: nn.Module, first: nn.Module) -> None:
        for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)
        assert any(
            not torch.equal(a, b)
            for a, b in zip(found.parameters(), first.parameters(), strict=True)
        )

    return equal
