"""Half precision is exact where we use it: integer sums up to 2048 in float16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip.layers import EXACT_IN_HALF, BinaryConv2d, BinaryLayer, BinaryLinear

METHODS: list[Any] = [
    {"name": "dorefa", "inputs": "pm1"},
    {"name": "dorefa", "inputs": "01"},
    "binarynet",
    "bireal",
    {"name": "lns", "base": {"name": "dorefa", "inputs": "pm1"}},
]


def layers(method: Any) -> list[tuple[BinaryLayer, Tensor]]:
    """A layer and an input for it: padding, stride, groups, a linear layer, a bias."""
    return [
        (BinaryConv2d(16, 12, 3, padding=1, bias=False, method=method), torch.randn(3, 16, 9, 9)),
        (BinaryConv2d(8, 12, 5, stride=2, groups=2, method=method), torch.randn(2, 8, 11, 11)),
        (BinaryLinear(2048, 10, bias=False, method=method), torch.randn(4, 2048)),
        (BinaryLinear(33, 10, method=method), torch.randn(4, 33)),
    ]


def in_half(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        out: Tensor = layer(x)
    return out


def integers(layer: BinaryLayer, x: Tensor) -> Tensor:
    """The sums of products of signs, in float64 and by torch's own layer."""
    signs = layer.code().signs[0].detach().double()
    binary = layer.input_binarizer(x).detach().double()
    if isinstance(layer, nn.Linear):
        return F.linear(binary, signs)
    assert isinstance(layer, nn.Conv2d)
    padding = layer.padding
    return F.conv2d(binary, signs, None, layer.stride, padding, layer.dilation, layer.groups)


def test_every_integer_up_to_2048_is_a_half_and_the_next_is_not() -> None:
    whole = torch.arange(-2048, 2049)
    assert torch.equal(whole.to(torch.float16).long(), whole)
    assert torch.tensor(2049).to(torch.float16).item() != 2049
    assert EXACT_IN_HALF == 2048


@pytest.mark.parametrize("count", [2047, 2048])
def test_sums_of_so_many_signs_are_exact(count: int) -> None:
    """All ones, the largest sum there is; and random signs, whose partial sums go up and down."""
    ones = torch.ones(1, count, dtype=torch.float16)
    assert F.linear(ones, ones).item() == count
    a, b = (torch.randint(0, 2, (50, count)) * 2 - 1 for _ in range(2))
    assert torch.equal(F.linear(a.half(), b.half()).long(), a @ b.T)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_layer_is_the_integer_sum_times_its_scale(method: Any) -> None:
    for layer, x in layers(method):
        sums = integers(layer, x)
        assert torch.equal(sums, sums.round())
        scale = layer.code().scales[0].detach()
        expected = sums.float() * layer._output_view(scale.flatten())
        if layer.bias is not None:
            expected = expected + layer._output_view(layer.bias.detach())
        found = in_half(layer, x)
        assert found.dtype == torch.float16
        assert torch.equal(found.detach(), expected.half()), (
            f"{layer}: not the exact sum, rounded once"
        )


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_signs_are_those_of_full_precision(method: Any) -> None:
    """Latent weights and inputs so small that half precision would make zeros of them, whose sign is +1."""
    for layer, x in layers(method):
        with torch.no_grad():
            layer.weight.mul_(1e-9)
            tiny = x * 1e-9
        outside = layer.code().signs
        with torch.autocast("cpu", torch.float16):
            inside = layer.code().signs
        assert torch.equal(inside, outside)
        assert (inside < 0).any()
        if layer.bias is None:
            expected = integers(layer, tiny).float() * layer._output_view(
                layer.code().scales[0].flatten()
            )
            assert torch.equal(in_half(layer, tiny).detach(), expected.half())


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_gradients_are_those_of_float64(method: Any) -> None:
    for layer, x in layers(method):
        twin = copy.deepcopy(layer).double()
        small, large = x.clone().requires_grad_(), x.double().requires_grad_()
        out = in_half(layer, small)
        upstream = torch.randn_like(out, dtype=torch.float32).half().double()
        out.backward(upstream.half())
        twin(large).backward(upstream)
        expected = {n: p.grad for n, p in twin.named_parameters()}
        for name, parameter in layer.named_parameters():
            assert _close(parameter.grad, expected[name]), f"{layer}: {name}"
        assert _close(small.grad, large.grad), f"{layer}: input"


def _close(found: Tensor | None, expected: Tensor | None) -> bool:
    """Within a few roundings of float16, as a share of the whole gradient."""
    if found is None or expected is None:
        return found is expected
    error = (found.double() - expected).norm()
    return bool(error <= 4e-3 * expected.norm())


@pytest.mark.parametrize("method", METHODS[:2], ids=str)
def test_a_wider_layer_stays_in_full_precision_and_is_exact(method: Any) -> None:
    """2049 inputs could add up to 2049, which is no half; 129 · 16 channels neither."""
    wide: list[tuple[BinaryLayer, Tensor]] = [
        (BinaryLinear(2049, 3, bias=False, method=method), torch.ones(2, 2049)),
        (BinaryConv2d(129, 2, 4, bias=False, method=method), torch.ones(1, 129, 4, 4)),
    ]
    for layer, x in wide:
        with torch.no_grad():
            layer.weight.fill_(0.5)  # every sign and input is 1: the largest sum
        found = in_half(layer, x)
        assert found.dtype == torch.float32
        fan_in = layer.weight[0].numel()
        assert fan_in > EXACT_IN_HALF
        assert (found == 0.5 * fan_in).all()


@pytest.mark.parametrize("method", ["bwn", {"name": "dorefa", "input_bits": 2}], ids=str)
def test_values_that_are_no_signs_are_rounded_once(method: Any) -> None:
    """bwn's inputs are floats; with two bits they are thirds, which no half is."""
    layer, x = BinaryLinear(64, 8, bias=False, method=method), torch.rand(5, 64)
    found = in_half(layer, x)
    binary, weight = (
        value.half().double() for value in (layer.input_binarizer(x), layer.binary_weight())
    )
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), binary @ weight.T, rtol=1e-3, atol=1e-4)


def test_the_values_of_adabin_are_rounded_too_with_their_gradients() -> None:
    """Two values that are not ± the same, for weights and for inputs."""
    torch.manual_seed(0)
    layer, x = BinaryConv2d(16, 8, 3, bias=False, method="adabin"), torch.randn(2, 16, 6, 6)
    grads = []
    for half in (True, False):
        y = in_half(layer, x) if half else layer(x)
        assert y.dtype == (torch.float16 if half else torch.float32)
        grads.append(torch.autograd.grad(y.float().square().sum(), layer.weight)[0])
    assert (grads[0] - grads[1]).norm() < 0.01 * grads[1].norm()


def test_bfloat16_is_not_used_for_sums() -> None:
    """It has 8 bits: 257 is no bfloat16."""
    layer = BinaryLinear(300, 2, bias=False, method={"name": "dorefa", "inputs": "pm1"})
    with torch.no_grad():
        layer.weight.abs_()
    x = torch.ones(1, 300)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    torch.testing.assert_close(found.float(), layer(x), rtol=1e-6, atol=0)


def test_a_filter_of_zeros_has_no_nan() -> None:
    layer = BinaryConv2d(4, 3, 3, bias=False, method="bireal")
    with torch.no_grad():
        layer.weight[1] = 0
    out = in_half(layer, torch.randn(1, 4, 5, 5))
    out.sum().backward()
    assert (out[:, 1] == 0).all()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()
