"""Operations with faster gradients on a CPU have torch's values and gradients. tests/kernels/test_prelu.py has more."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unflip.ste import clipped_sign
from unflip.vectorized import clip, prelu

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("ends", [(-1, 1), (0, 1), (-0.3, 0.7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_has_the_gradient_of_clamp(dtype: torch.dtype, ends: tuple[float, float]) -> None:
    low, high = torch.tensor(ends, dtype=dtype)
    steps = torch.tensor([-2, -1, 0, 1, 2], dtype=torch.float64) * torch.finfo(dtype).eps
    near = [(end.double() * (1 + steps) + steps / 8).to(dtype) for end in (low, high)]
    x = torch.cat(
        [*near, torch.randn(50).to(dtype), torch.tensor([math.inf, -math.inf], dtype=dtype)]
    )
    upstream = torch.randn(len(x)).to(dtype)
    found = []
    for function in (clip, Tensor.clamp):
        leaf = x.clone().requires_grad_()
        y = function(leaf, *ends)
        y.backward(upstream)
        assert leaf.grad is not None
        found.append((y.detach(), leaf.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_clip_under_func_and_twice() -> None:
    x = torch.tensor([-2.0, -1.0, 0.5, 1.0, 1.5], dtype=torch.float64)
    inside = torch.func.grad(lambda v: clip(v, -1, 1).sum())(x)
    assert inside.tolist() == [0, 1, 1, 1, 0]
    assert torch.vmap(lambda v: clip(v, -1, 1))(x).tolist() == [-1, -1, 0.5, 1, 1]
    leaf = (0.9 * x).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda v: clip(v, -1, 1) ** 2, leaf)


def test_second_derivatives_of_prelu() -> None:
    x = torch.tensor([[-2.0, 3.0], [-0.5, 1.5]], dtype=torch.float64, requires_grad=True)
    slope = torch.tensor([0.25, -1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(prelu, (x, slope))


def test_torch_fx_traces_it() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, slope: Tensor) -> Tensor:
            return prelu(clip(x, -1, 1), slope)

    x, slope = torch.randn(3, 4), torch.tensor([0.25])
    assert torch.equal(torch.fx.symbolic_trace(Model())(x, slope), Model()(x, slope))


def test_gradients_while_torch_flushes_denormal_numbers() -> None:
    """There, the float next to 0 is 0."""
    x = torch.tensor([-1.0, -0.0, 0.0, 0.5, 1.0, 1.5], requires_grad=True)
    torch.set_flush_denormal(True)
    try:
        clip(x, 0, 1).sum().backward()
    finally:
        torch.set_flush_denormal(False)
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 1, 1, 1, 0]


def test_traces_and_forward_mode_have_torchs_operations() -> None:
    x = torch.randn(3, 4).requires_grad_()
    slope = torch.tensor([0.25])
    traced = torch.jit.trace(lambda v: prelu(clip(v, -1, 1), slope), x)
    assert torch.equal(traced(x), prelu(clip(x, -1, 1), slope))
    assert "PythonOp" not in str(traced.graph)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(clip(dual, -1, 1)).tangent
    assert torch.equal(tangent, (x.abs() <= 1).float())


def test_tensors_without_values_have_gradients() -> None:
    with FakeTensorMode():  # torch's tools that estimate memory and FLOPs use it
        x, slope = torch.zeros(2, 3, requires_grad=True), torch.zeros(3)
        (prelu(x, slope) + clip(x, -1, 1) + clipped_sign(x)).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (2, 3)
