"""PCNN: projection onto ±a, gradients through a learned matrix, and the projection loss."""

import math

import pytest
import torch
from torch import Tensor

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.pcnn import Projection
from unflip.methods.pieces import ClippedSign


def projection(
    weight: Tensor, matrix: Tensor, strength: float = 1e-4, step: float = 0.1
) -> Projection:
    made = Projection(weight, strength, step)
    assert made.matrix.shape == matrix.shape
    with torch.no_grad():
        made.matrix.copy_(matrix)
    return made


def example() -> tuple[Tensor, Tensor]:
    """Weights (4, 3, 2, 3) and a matrix of the kernel's size with some |P ∘ C| > 1."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 3, 2, 3, generator=generator, dtype=torch.float64)
    matrix = 1 + 0.5 * torch.randn(1, 1, 2, 3, generator=generator, dtype=torch.float64)
    return weight, matrix


def test_projection_is_onto_the_nearer_of_two_values() -> None:
    weight, matrix = example()
    weight[0, 0, 0] = torch.tensor([0.0, -0.0, 1e-9])
    found = projection(weight, matrix)(weight)
    a = weight.abs().mean()
    values = torch.stack([-a, a])
    distances = (matrix.mean() * weight.unsqueeze(-1) - values).abs()
    nearest = values[distances.argmin(-1)]
    nearest[0, 0, 0] = a  # sign(0) = +1; the two are equally near
    torch.testing.assert_close(found, nearest)
    assert torch.equal(projection(weight, -matrix).code(weight).signs[0, 1:], -found[1:] / a)


def test_a_hand_computed_layer() -> None:
    layer = BinaryLinear(2, 2, bias=False, method="pcnn")
    layer.weight.data = torch.tensor([[4.0, -2.0], [0.0, -0.5]])
    assert layer(torch.tensor([[0.0, -7.0]])).tolist() == [[2 * 1.625, 2 * 1.625]]
    # λ/2 Σ (a·sign(C) − C)², a = 1.625
    errors = torch.tensor([1.625 - 4, -1.625 + 2, 1.625, -1.625 + 0.5])
    expected = 0.5e-4 * errors.square().sum()
    torch.testing.assert_close(unflip.auxiliary_loss(layer), expected)


@pytest.mark.parametrize(("strength", "step"), [(1e-4, 0.1), (0.7, 0.3), (0.7, 0.0), (0.0, 0.3)])
def test_gradients_are_the_papers(strength: float, step: float) -> None:
    """Those of the cross entropy and of L_P together, with δ = ∂L/∂Ĉ, but for the term in η²."""
    weight, matrix = example()
    delta = torch.randn(weight.shape, dtype=torch.float64)
    weight.requires_grad_()
    made = projection(weight, matrix, strength, step)
    binary = made(weight)
    loss = made.auxiliary_loss(weight)
    assert loss is not None
    torch.autograd.backward([binary, loss], [delta, torch.ones_like(loss)])

    c, c_hat = weight.detach(), binary.detach()
    inside = ((matrix * c).abs() <= 1).double()
    assert 0.1 < inside.mean() < 0.9
    moved = c + step * delta
    error = matrix * moved - c_hat
    to_weight = delta * matrix * inside + strength * error * matrix
    torch.testing.assert_close(weight.grad, to_weight)
    to_matrix = delta * c * inside + strength * (error * moved - step**2 * matrix * delta**2)
    torch.testing.assert_close(made.matrix.grad, to_matrix.sum((0, 1), keepdim=True))


def test_loss_value_and_weight() -> None:
    weight, matrix = example()
    loss = projection(weight, matrix, strength=0.6).auxiliary_loss(weight)
    a = weight.abs().mean()
    signs = torch.where(weight * matrix.mean() >= 0, 1.0, -1.0)
    torch.testing.assert_close(loss, 0.3 * (a * signs - matrix * weight).square().sum())
    found = projection(weight, matrix, strength=0.0).auxiliary_loss(weight)
    assert found is not None
    assert found.item() == 0


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (BinaryLinear(6, 4, method="pcnn"), (1, 1)),
        (BinaryConv2d(6, 4, (1, 5), groups=2, method="pcnn"), (1, 1, 1, 5)),
    ],
    ids=["linear", "conv"],
)
def test_the_matrix_has_the_kernels_size(layer: torch.nn.Module, shape: tuple[int, ...]) -> None:
    matrix = layer.get_parameter("weight_binarizer.matrix")
    assert matrix.shape == shape
    assert (matrix == 1).all()
    assert not any("matrix" in key for key in unflip.freeze(layer).state_dict())


def test_inputs_are_sign_with_the_clipped_gradient() -> None:
    points = torch.cat([torch.linspace(-2, 2, 401), torch.tensor([0.0, -0.0, 1, -1])]).double()
    x = points.clone().requires_grad_()
    out = ClippedSign()(x)
    assert torch.equal(out, torch.where(points >= 0, 1.0, -1.0).double())
    upstream = torch.randn_like(points)
    out.backward(upstream)
    torch.testing.assert_close(x.grad, upstream * (points.abs() <= 1))


def test_training_lowers_the_projection_loss() -> None:
    """Weights gather round ±a, as the paper's figure shows."""
    layer = BinaryConv2d(8, 8, 3, method={"name": "pcnn", "strength": 1.0})
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for _ in range(30):
        loss = unflip.auxiliary_loss(layer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


def test_frozen_is_exact() -> None:
    layer = BinaryConv2d(5, 7, 3, padding=1, method="pcnn").eval()
    with torch.no_grad():
        layer.get_parameter("weight_binarizer.matrix").uniform_(-2, 1)
    x = torch.randn(3, 5, 6, 6)
    assert torch.equal(unflip.freeze(layer)(x), layer(x))


def test_lns_refuses_it() -> None:
    with pytest.raises(ValueError, match=r"pcnn.*gradient of a sign that LNS replaces; use base="):
        methods.get("lns", base="pcnn")


def test_options() -> None:
    for name in ("strength", "step"):
        for value in (-0.1, math.nan, math.inf):
            with pytest.raises(
                ValueError, match=rf"pcnn: {name}={value} should be a finite number"
            ):
                methods.get("pcnn", **{name: value})
    with pytest.raises(
        ValueError,
        match=r"pcnn: projections=4 would need a network 4 times as wide; use projections=1",
    ):
        methods.get("pcnn", projections=4)
