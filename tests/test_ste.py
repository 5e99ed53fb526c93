"""Sign and the straight-through gradient: values, gradient, dtypes, and what compile makes of them."""

import math

import pytest
import torch
from torch import Tensor

from unflip.ste import clipped_sign, sign, straight_through

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sign_of_zero_is_plus_one_and_nan_stays_nan(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([0.0, -0.0, tiny, -tiny, math.inf, -math.inf, 3, -3, math.nan], dtype=dtype)
    expected = torch.tensor([1, 1, 1, -1, 1, -1, 1, -1, math.nan], dtype=dtype)
    assert sign(x).dtype == dtype
    assert torch.equal(sign(x).nan_to_num(99), expected.nan_to_num(99))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sign_on_a_cpu_is_where(dtype: torch.dtype) -> None:
    bits = torch.int32 if dtype is torch.float32 else torch.int64
    info = torch.iinfo(bits)
    x = torch.randint(info.min, info.max, (100_000,), dtype=bits).view(dtype)  # any bit pattern
    expected = torch.where(x >= 0, 1.0, torch.where(x < 0, -1.0, x))
    torch.testing.assert_close(sign(x), expected.to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(sign(x[::3]), sign(x)[::3], rtol=0, atol=0, equal_nan=True)
    assert not sign(x.clone().requires_grad_()).requires_grad


def test_sign_keeps_shape_and_leaves_its_input() -> None:
    x = torch.randn(2, 3, 0, 5)
    assert sign(x).shape == x.shape
    y = torch.tensor([-2.0, 2.0])
    sign(y)
    assert y.tolist() == [-2, 2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_straight_through_is_exactly_hard_with_the_gradient_of_soft(dtype: torch.dtype) -> None:
    hard = torch.tensor([1, -1, 0.1, -0.3], dtype=dtype)
    # values of soft that would swallow hard if they were added before being taken away again
    x = torch.tensor([30000, -1e-7, 7.5, 0], dtype=dtype, requires_grad=True)
    y = straight_through(hard, x * x)
    if dtype is torch.float16:  # 30000² overflows: soft has to be finite
        x = torch.tensor([200, -1e-7, 7.5, 0], dtype=dtype, requires_grad=True)
        y = straight_through(hard, x * x)
    assert y.dtype == dtype
    assert torch.equal(y, hard)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_hard_gets_no_gradient() -> None:
    x = torch.randn(5, requires_grad=True)
    straight_through(x * 100, x * 3).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((5,), 3.0))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager(backend: str) -> None:
    def step(x: Tensor) -> Tensor:
        return straight_through(sign(x), x.clamp(-1, 1))

    torch._dynamo.reset()
    x = torch.tensor([-2, -1, -0.5, -0.0, 0, 0.5, 1, 2, math.nan])
    upstream = torch.arange(1.0, 10)
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend=backend)):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.backward(upstream)
        assert leaf.grad is not None
        results.append((y.detach(), leaf.grad))
    eager, compiled = results
    assert eager[0][:8].tolist() == [-1, -1, -1, 1, 1, 1, 1, 1]
    assert eager[1][:8].tolist() == [0, 2, 3, 4, 5, 6, 7, 0]
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0, equal_nan=True)
    assert compiled[0][8].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipped_sign_is_sign_with_the_gradient_of_clamp(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    ends = [1 - eps, 1.0, 1 + eps, 1 + 2 * eps, 0.0, 1e-4, math.inf]
    x = torch.tensor([*ends, *(-end for end in ends)], dtype=dtype)
    upstream = torch.arange(1, len(x) + 1).to(dtype)
    found = []
    for function in (clipped_sign, lambda v: straight_through(sign(v), v.clamp(-1, 1))):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.backward(upstream)
        assert leaf.grad is not None
        found.append((y.detach(), leaf.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(clipped_sign(x), sign(x))  # without a gradient
