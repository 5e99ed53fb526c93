"""The parts that methods share: scales, gradients, and that no two classes have one name."""

import importlib
import inspect
import pkgutil
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

from unflip import methods
from unflip.methods.base import InputBinarizer, WeightBinarizer
from unflip.methods.pieces import (
    ApproxSign,
    ClippedFilterMeanSign,
    ClippedSign,
    FilterMeanSign,
    LayerMeanSign,
    PlainSign,
    at_least_float32,
    centered,
    filter_mean,
    layer_mean,
    sample_dims,
)

SHAPES = [(4, 3, 3, 3), (5, 7), (1, 2, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_means_are_shaped_as_scales(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    ones = (1,) * (len(shape) - 1)
    assert layer_mean(weight).shape == (1, 1, *ones)
    assert filter_mean(weight).shape == (1, shape[0], *ones)
    assert layer_mean(weight).item() == pytest.approx(weight.abs().mean().item())
    for found, one in zip(filter_mean(weight)[0], weight, strict=True):
        assert found.item() == pytest.approx(one.abs().mean().item())


def test_centered_filters_have_mean_zero() -> None:
    weight = torch.randn(4, 3, 3, 3)
    torch.testing.assert_close(centered(weight).mean((1, 2, 3)), torch.zeros(4), atol=1e-6, rtol=0)
    single = torch.randn(4, 1, 1, 1)
    assert torch.equal(centered(single), single), "a filter of one weight would become 0"


def test_dimensions_and_dtypes() -> None:
    assert sample_dims(nn.Conv2d(1, 1, 1)) == (-3, -2, -1)
    assert sample_dims(nn.Linear(1, 1)) == (-1,)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert at_least_float32(torch.zeros(1, dtype=dtype)).dtype == torch.float32
    assert at_least_float32(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


X = torch.tensor([-3, -1, -0.5, 0, 0.25, 1, 1.5])
INSIDE = torch.tensor([0, 1, 1, 1, 1, 1, 0.0])
GRADIENTS: dict[type[WeightBinarizer | InputBinarizer], Tensor] = {
    PlainSign: torch.ones(7),
    LayerMeanSign: torch.ones(7),
    FilterMeanSign: torch.ones(7),
    ClippedFilterMeanSign: INSIDE,
    ClippedSign: INSIDE,
    ApproxSign: torch.tensor([0, 0, 1, 2, 1.5, 0, 0]),
}


@pytest.mark.parametrize("binarizer", GRADIENTS, ids=lambda cls: cls.__name__)
def test_gradients(binarizer: type[WeightBinarizer | InputBinarizer]) -> None:
    x = X[None].clone().requires_grad_()
    upstream = torch.arange(1.0, 8)[None]
    value = binarizer()(x)
    value.backward(upstream)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, upstream * GRADIENTS[binarizer])
    assert torch.equal(value >= 0, x >= 0)
    assert len(value.abs().unique()) == 1


def test_no_two_classes_have_one_name() -> None:
    """Two classes of one name and with different gradients are easily taken for each other."""
    homes = defaultdict(set)
    for module in pkgutil.iter_modules(methods.__path__):
        found = importlib.import_module(f"unflip.methods.{module.name}")
        for name, cls in inspect.getmembers(found, inspect.isclass):
            if cls.__module__.startswith("unflip."):
                homes[name].add(cls.__module__)
    assert {name: sorted(places) for name, places in homes.items() if len(places) > 1} == {}
