"""What an epoch has moved, counted by hand, and beside a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unflip.layers import BinaryConv2d, binary_layers
from unflip.methods.lns import warm_start
from unflip.train.flips import Counts, Flips


def network(method: Any = "dorefa") -> nn.Sequential:
    torch.manual_seed(0)
    layers = (BinaryConv2d(4, 8, 3, method=method), BinaryConv2d(8, 4, 3, method=method))
    return nn.Sequential(*layers)


def weight(model: nn.Module, layer: int) -> torch.Tensor:
    return list(binary_layers(model))[layer][1].weight.detach()


def test_flips_are_counted_from_the_last_time() -> None:
    model = network()
    moved = Flips(model)
    assert moved.since_the_start() == Counts(0, 0, 0.0, 576)
    weight(model, 1).view(-1)[:3] *= -1
    weight(model, 0).view(-1)[:1] *= -1
    found = moved.since_the_start()
    assert found is not None
    assert (found.flips, found.off_sign) == (4, 0)
    assert moved.since_the_start() == Counts(0, 0, 0.0, 576)
    weight(model, 1).mul_(1.5)
    found = moved.since_the_start()
    assert found is not None
    assert found.flips == 0, "moved, and no sign with it"
    first, second = (weight(model, layer).abs().sum().item() for layer in (0, 1))
    assert found.latent_change == pytest.approx(second / 3 / (first + second))


def test_weights_that_a_mapping_has_turned_are_off_their_sign() -> None:
    model = network({"name": "lns", "base": "dorefa"})
    with pytest.warns(UserWarning, match="agrees with too few labels"):
        warm_start(model, 1)
    moved = Flips(model)
    found = moved.since_the_start()
    assert found is not None
    off = sum(
        (layer.code().signs[0] != torch.where(layer.weight >= 0, 1, -1)).sum().item()
        for _, layer in binary_layers(model)
    )
    assert found.off_sign == off > 0


def test_a_float_network_has_nothing_to_count() -> None:
    assert Flips(nn.Linear(2, 2)).since_the_start() is None


def test_where_nothing_can_be_captured_it_counts_all_the_same() -> None:
    model = network()
    moved = Flips(model)
    moved.capture_next = True
    weight(model, 0).view(-1)[:2] *= -1
    with pytest.warns(UserWarning, match="counting flips without a CUDA graph"):
        found = moved.since_the_start()
    assert found is not None
    assert found.flips == 2
    assert moved.since_the_start() == Counts(0, 0, 0.0, 576), "and asks no second time"
    assert moved.capture_failed, "for the loop, which then captures no other network's counts"
    assert not Flips(model).capture_failed, "no state of the whole process"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("method", ["dorefa", {"name": "lns", "base": "dorefa"}])
def test_captured_it_counts_the_same(method: Any) -> None:
    models = [network(method).cuda() for _ in range(2)]
    eager, captured = (Flips(model) for model in models)
    captured.capture_next = True
    for step in range(4):
        for model in models:
            weight(model, step % 2).view(-1)[: 3 + step] *= -1
        assert eager.since_the_start() == captured.since_the_start()
        assert captured.captured is not None
