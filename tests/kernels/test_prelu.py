"""The gradient of PReLU on a CPU, compared with torch's own."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from unflip.kernels.prelu import vectorized


def gradients(module: nn.PReLU, x: Tensor, upstream: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    y = module(leaf)
    y.backward(upstream)
    assert leaf.grad is not None
    assert module.weight.grad is not None
    return [y.detach(), leaf.grad, module.weight.grad.clone()]


@pytest.mark.parametrize("slopes", [1, 6])
@pytest.mark.parametrize("shape", [(4, 6), (2, 6, 5), (3, 6, 5, 4), (0, 6, 2, 2)])
def test_equals_torch(slopes: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = nn.PReLU(slopes).double()
    nn.init.normal_(module.weight)
    x, upstream = torch.randn(2, *shape, dtype=torch.float64)
    x.view(-1)[:4] = torch.tensor([0.0, -0.0, 1e-320, -1e-320])[: x.numel()]
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    expected = gradients(module, x, upstream)
    with vectorized([module]):
        found = gradients(module, x, upstream)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[2], expected[2], rtol=1e-12, atol=1e-12)
    assert found[1].stride() == expected[1].stride()


def test_infinite_gradients_stay_where_they_are() -> None:
    module = nn.PReLU(1)
    x, upstream = torch.tensor([[1.0, -1.0]]), torch.tensor([[math.inf, 1.0]])
    with vectorized([module]):
        of_x = gradients(module, x, upstream)[1]
    assert not of_x.isfinite().all()  # the loop's check of the loss sees it


def test_a_copy_made_inside_is_independent() -> None:
    module = nn.PReLU(1)
    with vectorized([module]):
        twin = copy.deepcopy(module)
    with torch.no_grad():
        module.weight.fill_(7)
    x = torch.tensor([[-1.0]], requires_grad=True)
    assert twin(x).item() == -0.25


def test_shared_and_derived_modules() -> None:
    class Mine(nn.PReLU):
        pass

    shared, mine = nn.PReLU(1), Mine(1)
    model = nn.Sequential(shared, nn.Tanh(), shared, mine)
    with vectorized([model]):
        assert "forward" in vars(shared)
        assert "forward" not in vars(mine)
    assert "forward" not in vars(shared)


def test_a_forward_that_was_replaced_is_kept() -> None:
    module = nn.PReLU(1)
    module.forward = torch.exp  # type: ignore[method-assign,assignment]
    with vectorized([module]):
        assert module(torch.zeros(1, requires_grad=True)).item() == 1
    assert module.forward is torch.exp
