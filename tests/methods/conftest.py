"""Networks that several tests of LNS share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unflip

Net = Callable[..., nn.Module]


def _float_net() -> nn.Sequential:
    """A small residual-free network as one would train on small images."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.PReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.PReLU(),
        nn.Conv2d(32, 32, 1, groups=2),
        nn.BatchNorm2d(32),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 24),
        nn.BatchNorm1d(24),
        nn.Linear(24, 10),
    )


@pytest.fixture
def float_net() -> Net:
    return _float_net


@pytest.fixture
def lns_net() -> Net:
    """A function from options of LNS to a network with random weights."""

    def build(**options: Any) -> nn.Module:
        return unflip.binarize(_float_net(), "lns", quiet=True, **options)

    return build


@pytest.fixture
def same_net(lns_net: Net) -> Net:
    """As ``lns_net``, with the same weights every time."""

    def build(**options: Any) -> nn.Module:
        torch.manual_seed(0)
        return lns_net(**options)

    return build
