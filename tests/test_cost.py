"""cost: bits and multiplications, counted by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip.cost import Cost


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),  # 216 weights, 8 biases, 64 places
        nn.BatchNorm2d(8),  # 16
        nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2, bias=False),  # 576 weights, 16 places
        nn.PReLU(16),  # 16
        nn.Flatten(),
        nn.Linear(256, 10),  # 2560 weights, 10 biases
        nn.Linear(10, 4, bias=False),  # 40 weights
    )


FLOAT = 216 + 8 + 16 + 16 + 10 + 40  # what stays float, BatchNorm's statistics left out
BINARY = 576 + 2560
FLOAT_MACS = 216 * 64 + 40
BINARY_MACS = 576 * 16 + 2560


def spent(method: Any = None, **options: Any) -> Cost:
    model = net() if method is None else unflip.binarize(net(), method, quiet=True, **options)
    return unflip.cost(model, torch.randn(1, 3, 8, 8))


def test_float() -> None:
    cost = spent()
    assert cost.memory_bits == 32 * (FLOAT + BINARY)
    assert cost.flops == FLOAT_MACS + BINARY_MACS
    assert [layer.name for layer in cost.layers] == ["0", "2", "5", "6"]
    assert [layer.macs for layer in cost.layers] == [216 * 64, 576 * 16, 2560, 40]
    assert all(layer.weight_bits == layer.input_bits == 32 for layer in cost.layers)


@pytest.mark.parametrize(
    ("method", "scales", "factor"),
    [
        ("dorefa", 1 + 1, 1 / 64),
        ({"name": "dorefa", "input_bits": 2}, 1 + 1, 2 / 64),
        ("binarynet", 1 + 1, 1 / 64),
        ("bwn", 16 + 10, 1 / 2),
        ("xnor", 16 + 10, 1 / 64),
        ("bireal", 16 + 10, 1 / 64),
        ("lns", 1 + 1, 1 / 64),
        ({"name": "lns", "base": "bwn", "labels": "frozen"}, 16 + 10, 1 / 2),
    ],
    ids=str,
)
def test_binary(method: Any, scales: int, factor: float) -> None:
    cost = spent(method)
    assert cost.memory_bits == BINARY + 32 * (FLOAT + scales)
    assert cost.flops == pytest.approx(FLOAT_MACS + BINARY_MACS * factor)
    layer = cost.layers[2]
    assert layer.kind == "BinaryLinear"
    assert layer.weight_bits == 1
    assert layer.macs == 2560
    assert layer.flops == pytest.approx(2560 * factor)
    assert isinstance(cost.memory_bits, int)


def test_memory_is_what_a_frozen_model_holds() -> None:
    model = unflip.binarize(net(), "xnor", quiet=True)
    state = unflip.freeze(model).state_dict()
    held = sum(8 * v.nbytes for k, v in state.items() if "running" not in k and "num_" not in k)
    assert spent("xnor").memory_bits == held


def test_a_layer_used_twice_multiplies_twice_and_is_kept_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    cost = unflip.cost(Twice(), torch.randn(1, 8))
    assert cost.memory_bits == 32 * 72
    assert cost.flops == 128


def test_a_layer_that_does_not_run_is_kept_and_costs_no_multiplication() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)
            self.unused = nn.Linear(8, 16, bias=False)
            self.last = nn.Linear(8, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    model = unflip.binarize(Unused(), "dorefa", quiet=True)
    for net in (model, unflip.freeze(model)):
        with pytest.warns(UserWarning, match=r"does not call: unused; .* counted as none"):
            cost = unflip.cost(net, torch.randn(1, 8))
        assert cost.memory_bits == 64 + 32 + 128 + 32 + 32 * 16
        assert cost.flops == 64 / 64 + 16


def test_counting_leaves_no_trace() -> None:
    model = unflip.binarize(net(), "lns", quiet=True)
    model[1].eval()  # frozen statistics inside a model that trains
    modes = [module.training for module in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    unflip.cost(model, torch.randn(4, 3, 8, 8))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_counting_that_fails_leaves_no_trace_either() -> None:
    model = net()
    with pytest.raises(RuntimeError):
        unflip.cost(model, torch.randn(1, 5, 8, 8))
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_the_batch_size_does_not_matter() -> None:
    model = net()
    one, many = (unflip.cost(model, torch.randn(n, 3, 8, 8)) for n in (1, 7))
    assert one == many


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(TypeError, match="example_input should be a torch tensor, not ndarray"):
        unflip.cost(net(), torch.randn(1, 3, 8, 8).numpy())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"of shape \(0, 3, 8, 8\) should be a batch of one"):
        unflip.cost(net(), torch.randn(0, 3, 8, 8))


def test_one_layer_alone() -> None:
    cost = unflip.cost(unflip.BinaryLinear(64, 32, method="bwn"), torch.randn(1, 64))
    assert cost.memory_bits == 64 * 32 + 32 * (32 + 32)
    assert cost.flops == 64 * 32 / 2


@pytest.mark.parametrize(
    ("layer", "shape", "macs"),
    [
        (nn.Conv1d(4, 6, 3, groups=2), (1, 4, 10), 8 * 6 * 2 * 3),
        (nn.Conv3d(2, 4, 3), (1, 2, 5, 5, 5), 27 * 4 * 2 * 27),
        (nn.ConvTranspose1d(4, 6, 3, stride=2), (1, 4, 10), 10 * 4 * 6 * 3),
        (nn.ConvTranspose2d(8, 64, 4, 2), (1, 8, 12, 12), 12 * 12 * 8 * 64 * 16),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), (1, 4, 5, 5), 25 * 4 * 3 * 9),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_convolutions(layer: nn.Module, shape: tuple[int, ...], macs: int) -> None:
    cost = unflip.cost(layer, torch.randn(shape))
    assert cost.flops == cost.layers[0].macs == macs
    assert cost.memory_bits == 32 * sum(p.numel() for p in layer.parameters())


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.recurrent(self.attention(x, x, x, need_weights=False)[0])[0])


def test_what_is_not_counted_is_named() -> None:
    model = Attends()
    with pytest.warns(
        UserWarning, match=r"of 'attention' \(MultiheadAttention\), 'recurrent' \(LSTM\)"
    ):
        cost = unflip.cost(model, torch.randn(1, 10, 8))
    assert cost.flops == 10 * 8 * 4
    assert cost.memory_bits == 32 * sum(p.numel() for p in model.parameters())


class Tied(nn.Module):
    def __init__(self, binary_twin: bool) -> None:
        super().__init__()
        self.middle = nn.Linear(16, 16)
        self.embedding = nn.Embedding(16, 16)
        self.out = nn.Linear(16, 16, bias=False)
        (self.middle if binary_twin else self.out).weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(self.embedding(x)))


@pytest.mark.parametrize("binary_twin", [False, True])
def test_tied_weights_are_kept_once(binary_twin: bool) -> None:
    """A binary layer's bits are kept beside the float weight it shares with an embedding."""
    model = unflip.binarize(Tied(binary_twin), "dorefa", quiet=True)
    cost = unflip.cost(model, torch.zeros(1, 4, dtype=torch.long))
    floats = 2 * 256 if binary_twin else 256
    assert cost.memory_bits == 256 + 32 * (floats + 1 + 16)


def test_a_parametrized_layer_is_its_weight() -> None:
    model = net()
    nn.utils.parametrizations.weight_norm(model[0])
    unflip.binarize(model, "dorefa", quiet=True)
    cost = unflip.cost(model, torch.randn(1, 3, 8, 8))
    assert cost == replace_kind(spent("dorefa"), model[0])


def test_a_parametrized_layer_alone() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    assert unflip.cost(layer, torch.randn(1, 4)).memory_bits == 32 * (12 + 3)


def replace_kind(cost: Cost, first: nn.Module) -> Cost:
    layers = (replace(cost.layers[0], kind=type(first).__name__), *cost.layers[1:])
    return replace(cost, layers=layers)
