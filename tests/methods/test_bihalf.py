"""Bi-half: the larger half of each filter is +1."""

import math

import pytest
import torch

from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.bihalf import UpperHalf


def test_halves_by_hand() -> None:
    weight = torch.tensor([[5.0, 7, 6, 8], [-1, -4, -3, -2], [0, 0, 0, 0]])
    code = UpperHalf().code(weight)
    expected = [[-1, 1, -1, 1], [1, -1, -1, 1], [-1, -1, 1, 1]]
    assert code.signs.tolist() == [expected]
    assert code.scales.flatten().tolist() == [0.5]


@pytest.mark.parametrize("shape", [(5, 40), (4, 3, 3, 3), (6, 2, 1, 1)])
def test_every_filter_has_as_many_of_both(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape) + 3  # plain signs would all be +1
    signs = UpperHalf().code(weight).signs[0].flatten(1)
    n = weight[0].numel()
    assert (signs == 1).sum(1).tolist() == [n - n // 2] * shape[0]
    for filter_signs, values in zip(signs, weight.flatten(1), strict=True):
        assert values[filter_signs == 1].min() > values[filter_signs == -1].max()


def test_gradient_is_the_identity() -> None:
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(weight)
    out = UpperHalf()(weight)
    torch.testing.assert_close(out.abs(), torch.full_like(out, 1 / math.sqrt(27)))
    assert torch.equal(torch.autograd.grad(out, weight, upstream)[0], upstream)


def test_a_filter_of_one_weight_keeps_its_sign() -> None:
    weight = torch.tensor([-2.0, 3.0, 0.0]).view(3, 1, 1, 1)
    assert UpperHalf().code(weight).signs.flatten().tolist() == [-1, 1, 1]


def test_nan_is_no_bit() -> None:
    weight = torch.tensor([[1.0, math.nan, 3.0, 4.0]])
    signs = UpperHalf().code(weight).signs[0, 0]
    assert signs.isnan().tolist() == [False, True, False, False]


def test_lns_can_wrap_it() -> None:
    layer = BinaryConv2d(4, 6, 3, method={"name": "lns", "base": "bihalf"})
    assert layer(torch.randn(2, 4, 5, 5)).isfinite().all()


def test_a_sign_depends_on_the_other_weights() -> None:
    layer = BinaryLinear(4, 1, method="bihalf")
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        before = layer.code().signs.flatten().tolist()
        layer.weight[0, 3] = 0.0  # falls below the middle, so another weight rises above it
        after = layer.code().signs.flatten().tolist()
    assert before == [-1, -1, 1, 1]
    assert after == [-1, 1, 1, -1]
