"""SURGE: the output of the binary layer, the gradient of both paths."""

import pytest
import torch
from torch import nn

import unflip
from unflip import methods
from unflip.kernels.norm.layer import _takes_units as takes_units
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.surge import EPSILON, BranchedSign, two_paths


def branch_of(layer: nn.Module) -> nn.Parameter:
    binarizer = layer.weight_binarizer
    assert isinstance(binarizer, BranchedSign)
    return binarizer.branch


@pytest.mark.parametrize("eta", [0.0, 0.1, 2.0])
def test_gradients_of_a_linear_layer(eta: float) -> None:
    layer = BinaryLinear(6, 5, method={"name": "surge", "eta": eta}).double()
    branch = branch_of(layer)
    with torch.no_grad():
        branch.normal_()
    x = (2 * torch.randn(7, 6, dtype=torch.float64)).requires_grad_()
    upstream = torch.randn(7, 5, dtype=torch.float64)
    y = layer(x)
    grads = torch.autograd.grad(y, [x, branch, layer.weight], upstream)

    w, a, v = layer.weight.detach(), branch.detach(), x.detach()
    q = w.abs().mean(1, keepdim=True) * torch.where(w >= 0, 1.0, -1.0)
    b = torch.where(v >= 0, 1.0, -1.0).double()
    assert layer.bias is not None
    torch.testing.assert_close(y.detach(), b @ q.T + layer.bias.detach())
    of_binary, of_branch = (upstream @ q) * (v.abs() <= 1), upstream @ a
    factor = eta * of_binary.norm() / (of_branch.norm() + EPSILON)
    torch.testing.assert_close(grads[0], of_binary + factor * of_branch)
    torch.testing.assert_close(grads[1], upstream.T @ v)
    torch.testing.assert_close(grads[2], upstream.T @ b)


def test_a_convolution() -> None:
    layer = BinaryConv2d(4, 6, 3, stride=2, padding=1, groups=2, method="surge").double()
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    upstream = torch.randn_like(y)
    found, of_branch = torch.autograd.grad(y, [x, branch_of(layer)], upstream)

    plain = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False).double()
    v = x.detach().requires_grad_()
    with torch.no_grad():
        plain.weight.copy_(branch_of(layer))
    g_a, expected = torch.autograd.grad(plain(v), [v, plain.weight], upstream)
    torch.testing.assert_close(of_branch, expected)
    layer.eval()
    (g_b,) = torch.autograd.grad(layer(v), v, upstream)  # no branch
    torch.testing.assert_close(found, g_b + 0.1 * g_b.norm() / (g_a.norm() + EPSILON) * g_a)
    assert torch.equal(layer(v), y)


def test_the_branch_starts_as_a_copy_and_is_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    unflip.binarize(model, "surge", quiet=True)
    branch = branch_of(model[1])
    assert torch.equal(branch, model[1].weight)
    assert branch is not model[1].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(branch, model[1].weight)
    frozen = unflip.freeze(model.eval())
    assert not any("branch" in name for name in frozen.state_dict())


def test_the_branch_is_a_copy_of_weights_that_load_twin_brings() -> None:
    model = nn.Sequential(BinaryLinear(8, 5, method="surge"))
    unflip.load_twin(model, nn.Sequential(nn.Linear(8, 5)).state_dict())
    assert torch.equal(branch_of(model[0]), model[0].weight)


def test_the_gradient_beyond_one_is_not_lost() -> None:
    layer = BinaryLinear(4, 3, method="surge")
    x = torch.tensor([[0.5, 3.0, -2.0, 0.1]], requires_grad=True)
    (found,) = torch.autograd.grad(layer(x).sum(), x)
    assert found[0, 1] != 0
    assert found[0, 2] != 0


def test_no_branch_without_gradients() -> None:
    layer = BinaryLinear(4, 3, method="surge")
    x = torch.randn(2, 4)
    assert layer.weight_binarizer.gradient_branch(x, layer) is not None
    with torch.no_grad():
        assert layer.weight_binarizer.gradient_branch(x, layer) is None
    assert layer.eval().weight_binarizer.gradient_branch(x, layer) is None


def test_kernels_that_normalize_do_not_skip_the_branch() -> None:
    plain, branched = (BinaryConv2d(8, 8, 3, bias=False, method=m) for m in ("bireal", "surge"))
    assert takes_units(plain)
    assert not takes_units(branched)


def test_the_operator_is_well_formed() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(two_paths, (x, 0.1), test_utils=tests)


def test_options() -> None:
    assert methods.get("surge", eta=3.0).family == "surge"
    for eta in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="surge: eta="):
            methods.get("surge", eta=eta)
    with pytest.raises(ValueError, match=r"surge.*mapping network"):
        methods.get("lns", base="surge")
