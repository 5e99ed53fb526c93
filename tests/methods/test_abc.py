"""ABC-Net: shifted signs with scales by least squares, inputs with learned shifts and scales."""

import numpy as np
import pytest
import torch
from torch import Tensor

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.abc import ShiftedInputs, ShiftedSigns, solve


def numpys(weight: Tensor, bases: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signs, α of smallest norm and Σ α B for one group, by numpy alone."""
    w = weight.double().numpy().ravel()
    shifts = np.linspace(-1, 1, bases) if bases > 1 else np.zeros(1)
    signs = np.where(w - w.mean() + shifts[:, None] * w.std() >= 0, 1.0, -1.0)
    alpha = np.linalg.lstsq(signs.T, w, rcond=None)[0]
    return signs, alpha, alpha @ signs


def test_two_bases_by_hand() -> None:
    # mean 1, std 5: thresholds at 1 + 5 and 1 − 5
    weight = torch.tensor([[-7.0, -1], [3, 9]])
    weight = weight * 5 / weight.std(correction=0)
    weight = weight - weight.mean() + 1
    code = ShiftedSigns(2, "layer").code(weight)
    assert code.signs[0].tolist() == [[-1, -1], [-1, 1]]  # u = −1
    assert code.signs[1].tolist() == [[-1, 1], [1, 1]]  # u = +1
    assert code.scales.shape == (2, 1, 1)
    # α₁ + α₂ on the last weight, −(α₁ + α₂) on the first, α₂ − α₁ between
    low, mid, high = weight[0, 0], (weight[0, 1] + weight[1, 0]) / 2, weight[1, 1]
    expected = [((high - low) / 2 - mid) / 2, ((high - low) / 2 + mid) / 2]
    torch.testing.assert_close(code.scales.flatten(), torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bases", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 3, 3), (16, 16, 3, 3), (1, 1, 1, 1), (2, 1)])
def test_least_squares_of_a_layer_against_numpy(shape: tuple[int, ...], bases: int) -> None:
    weight = torch.randn(shape)
    code = ShiftedSigns(bases, "layer").code(weight)
    signs, alpha, total = numpys(weight, bases)
    assert np.array_equal(code.signs.flatten(1).numpy(), signs)
    np.testing.assert_allclose(code.dense().numpy().ravel(), total, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(code.scales.numpy().ravel(), alpha, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bases", [1, 3, 5])
def test_least_squares_of_each_filter_against_numpy(bases: int) -> None:
    """Small filters: many bases coincide, and α is that of smallest norm."""
    weight = torch.randn(12, 2, 1, 3, dtype=torch.float64)
    weight[3], weight[4], weight[5, 0] = 0, -0.7, 2.0
    code = ShiftedSigns(bases, "filter").code(weight)
    assert code.scales.shape == (bases, 12, 1, 1, 1)
    for i, filter_weights in enumerate(weight):
        _, alpha, total = numpys(filter_weights, bases)
        np.testing.assert_allclose(code.dense()[i].numpy().ravel(), total, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(code.scales[:, i].numpy().ravel(), alpha, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(code.dense()[3:5], weight[3:5], rtol=1e-6, atol=1e-9)


def test_more_bases_are_nearer_to_the_weights() -> None:
    weight = torch.randn(64, 32, 3, 3)
    errors = [(ShiftedSigns(m, "layer").code(weight).dense() - weight).norm() for m in range(1, 9)]
    assert all(b < a for a, b in zip(errors, errors[2:], strict=False))
    assert errors[4] < 0.35 * weight.norm()


def test_elimination_against_numpy() -> None:
    root = torch.randn(7, 6, 6, dtype=torch.float64)
    matrix, right = root @ root.mT + torch.eye(6), torch.randn(7, 6, dtype=torch.float64)
    found = solve(matrix, right)
    expected = np.linalg.solve(matrix.numpy(), right.numpy()[..., None])[..., 0]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("scope", ["layer", "filter"])
def test_weight_gradient_is_the_sum_of_the_scales(scope: str) -> None:
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    binarizer = methods.get("abc", scope=scope).weight_binarizer(torch.nn.Conv2d(3, 4, 3))
    upstream = torch.randn_like(weight)
    binarizer(weight).backward(upstream)
    scales = binarizer.code(weight.detach()).scales
    torch.testing.assert_close(weight.grad, upstream * scales.sum(0))


def test_inputs_start_as_a_staircase() -> None:
    x = torch.tensor([-9.0, -0.81, -0.79, -0.41, -0.39, -0.01, 0, 0.39, 0.41, 0.79, 0.81, 9])
    out = ShiftedInputs(5, torch.zeros(1))(x)
    expected = torch.tensor([-1, -1, -0.6, -0.6, -0.2, -0.2, 0.2, 0.2, 0.6, 0.6, 1, 1])
    torch.testing.assert_close(out, expected)
    assert torch.equal(ShiftedInputs(1, torch.zeros(1))(x), torch.where(x >= 0, 1.0, -1.0))


def test_input_gradients() -> None:
    binarizer = ShiftedInputs(3, torch.zeros(1, dtype=torch.float64))
    shifts = torch.tensor([0.2, 0.5, -0.3], dtype=torch.float64)
    scales = torch.tensor([0.7, -0.4, 1.1], dtype=torch.float64)
    with torch.no_grad():
        binarizer.shifts.copy_(shifts)
        binarizer.scales.copy_(scales)
    points = torch.linspace(-2, 2, 4001, dtype=torch.float64) + 1e-7
    x = points.clone().requires_grad_()
    out = binarizer(x)
    shifted = points + shifts[:, None]
    bits = torch.where(shifted >= 0.5, 1.0, -1.0).double()
    torch.testing.assert_close(out, scales @ bits)
    upstream = torch.randn_like(points)
    out.backward(upstream)
    inside = ((shifted >= 0) & (shifted <= 1)).double()
    torch.testing.assert_close(x.grad, upstream * (scales @ inside))
    torch.testing.assert_close(binarizer.shifts.grad, scales * (inside @ upstream))
    torch.testing.assert_close(binarizer.scales.grad, bits @ upstream)


def test_bits_and_cost() -> None:
    layer = BinaryConv2d(8, 16, 3, method={"name": "abc", "weight_bases": 3, "input_bases": 2})
    assert layer.input_binarizer.bits == 2
    assert not layer.input_binarizer.unit
    spent = unflip.cost(layer, torch.randn(1, 8, 5, 5))
    assert spent.layers[0].weight_bits == 3
    assert spent.flops == 16 * 9 * 8 * 9 * 3 * 2 / 64
    assert spent.memory_bits == 3 * 16 * 72 + 32 * (3 + 16 + 4)  # α, bias, v and β


@pytest.mark.parametrize("options", [{}, {"scope": "filter"}, {"weight_bases": 1}])
def test_frozen_is_exact(options: dict[str, object]) -> None:
    layer = BinaryLinear(17, 9, method={"name": "abc", **options}).eval()
    x = torch.randn(5, 17)
    assert torch.equal(unflip.freeze(layer)(x), layer(x))


def test_lns_needs_one_sign_a_weight() -> None:
    with pytest.raises(ValueError, match=r"abc.*5 signs"):
        BinaryLinear(6, 4, method={"name": "lns", "base": "abc"})
    one = {"name": "abc", "weight_bases": 1}
    assert len(BinaryLinear(6, 4, method={"name": "lns", "base": one}).code().signs) == 1


@pytest.mark.parametrize("name", ["weight_bases", "input_bases"])
def test_numbers_of_bases_are_checked(name: str) -> None:
    for value in (0, 9, 2.5):
        with pytest.raises(
            ValueError, match=rf"abc: {name}={value} should be a whole number, 1 to 8"
        ):
            methods.get("abc", **{name: value})
    with pytest.raises(ValueError, match="abc: scope='channel' is not one of 'layer', 'filter'"):
        methods.get("abc", scope="channel")
