"""The memory and FLOPs columns of the LNS paper's ImageNet tables, from our networks and counter.

On the meta device: nothing is computed, so the full-size networks take no time.
"""

from typing import Any

import pytest
import torch

from unflip import models
from unflip.cost import Cost, cost

MBIT = 10**6  # the ResNet-18 table
MEBIT = 2**20  # the AlexNet table: 60,965,224 × 32 bits are its 1860 only in this unit


def count(model: str, method: Any, **options: Any) -> Cost:
    with torch.device("meta"):
        network = models.create(model, method, **options)
        return cost(network, torch.empty(1, *models.input_shape(model)))


@pytest.mark.parametrize(
    ("method", "options", "memory", "flops"),
    [
        ("float", {}, 374, 1810),
        ("dorefa", {}, 34, 163),
        ("xnor", {}, 34, 163),
        ("bireal", {"variant": "bireal"}, 34, 163),
        ("bireal", {"variant": "bireal-prelu"}, 34, 163),
        ("lns", {}, 34, 163),  # the mapping networks are not part of what is shipped
        ("binarynet", {}, 28, 149),  # its 1×1 convolutions are binary
        ("bwn", {}, 34, 975),  # half of a multiplication remains: the addition
        ({"name": "dorefa", "input_bits": 2}, {}, 34, 193),
    ],
    ids=str,
)
def test_resnet18(method: Any, options: dict[str, Any], memory: float, flops: float) -> None:
    found = count("resnet18", method, **options)
    assert found.memory_bits / MBIT == pytest.approx(memory, abs=0.6)
    assert found.flops / 1e6 == pytest.approx(flops, rel=0.03)


@pytest.mark.parametrize(
    ("method", "memory"),
    [
        ("float", 1860),  # 1860.51: the paper truncates, or leaves the biases out (1860.19)
        ("dorefa", 180),
        ("lns", 180),
    ],
)
def test_alexnet(method: str, memory: float) -> None:
    """The paper's 180 fits DoReFa-Net's layout without BatchNorm's scales and shifts; with them it is 181.1."""
    found = count("alexnet", method)
    norms = 0 if method == "float" else 32 * 2 * (256 + 384 + 384 + 256 + 4096 + 4096)
    assert (found.memory_bits - norms) / MEBIT == pytest.approx(memory, abs=0.6)


def test_xnors_alexnet_does_not_have_the_papers_memory() -> None:
    """Without groups it has more weights, so the paper's column supports two groups."""
    found = count("alexnet", "dorefa", layout="xnor")
    norms = 32 * 2 * (96 + 96 + 256 + 384 + 384 + 256 + 4096 + 4096)
    assert (found.memory_bits - norms) / MEBIT > 181
