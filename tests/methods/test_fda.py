"""FDA-BNN: the gradient of a truncated Fourier series, and of a small network that is dropped."""

import math

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.fda import FDA, Fourier, FourierInputs, FourierWeights, NoiseAdaptation

DOUBLE = torch.zeros(1, dtype=torch.float64)


def series(t: Tensor, n: int, omega: float) -> Tensor:
    """The paper's equation 10, term by term; 0 beyond a quarter of the period."""
    slope = sum(torch.cos((2 * i + 1) * omega * t) for i in range(n + 1)) * 4 * omega / math.pi
    return torch.where((omega * t).abs() <= math.pi / 2, slope, 0)


def points() -> Tensor:
    edges = torch.tensor([0.0, -0.0, 1e-30, -1e-12, 1e-5, 1e4, -1e4], dtype=torch.float64)
    return torch.cat([edges, torch.linspace(-3, 3, 2001, dtype=torch.float64)])


@pytest.mark.parametrize(
    ("n", "omega"), [(1, 1.0), (9, 1.0), (9, 0.1), (18, 0.7), (40, math.pi / 2)]
)
def test_the_series(n: int, omega: float) -> None:
    fourier = Fourier(FDA(terms=n, frequency=omega), None, DOUBLE)
    x = points().requires_grad_()
    out = FourierInputs(fourier, -1)(x)
    assert torch.equal(out, torch.where(points() >= 0, 1.0, -1.0).double())
    upstream = torch.randn_like(out)
    out.backward(upstream)
    torch.testing.assert_close(x.grad, upstream * series(points(), n, omega), rtol=1e-9, atol=1e-9)
    assert fourier.derivative(DOUBLE).item() == pytest.approx(4 * omega / math.pi * (n + 1))


def test_many_terms_add_up_to_sign() -> None:
    """∫ ŝ' from 0 to t is near 1 for every t > 0 within the quarter."""
    fourier = Fourier(FDA(terms=100, frequency=1.0), None, DOUBLE)
    t = torch.linspace(0, math.pi / 2, 20_001, dtype=torch.float64)
    wave = torch.cumulative_trapezoid(fourier.derivative(t), t)
    assert (wave[2000:] - 1).abs().max() < 0.03


def test_noise_adaptation_by_hand() -> None:
    noise = NoiseAdaptation(2, DOUBLE)
    assert noise.first.weight.shape == (4, 2)
    with torch.no_grad():
        noise.first.weight.zero_()
        noise.first.weight[0].copy_(torch.tensor([1.0, -2.0]))
        noise.second.weight.zero_()
        noise.second.weight[:, 0].copy_(torch.tensor([3.0, 5.0]))
    t = torch.tensor([[1.0, 0.25], [-1.0, 0.5]], dtype=torch.float64)
    hidden = torch.tensor([[0.5], [0.0]], dtype=torch.float64)
    expected = hidden * torch.tensor([3.0, 5.0]) + 0.1 * torch.sin(t)
    torch.testing.assert_close(noise(t), expected)
    assert NoiseAdaptation(640, DOUBLE).first.weight.shape == (10, 640)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_inputs_with_the_noise_module(alpha: float) -> None:
    """Equations 14 to 17, times α where ê stands."""
    layer = nn.Conv2d(6, 5, 3, dtype=torch.float64)
    inputs = FDA(alpha=alpha, frequency=1.0).input_binarizer(layer)
    noise = inputs.get_submodule("fourier.adaptation")
    assert isinstance(noise, NoiseAdaptation)
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64, requires_grad=True)
    out = inputs(x)
    upstream = torch.randn_like(out)
    out.backward(upstream)

    t = x.detach().movedim(1, -1).reshape(-1, 6)
    t_in = t.clamp(-math.pi / 2, math.pi / 2)
    z = upstream.movedim(1, -1).reshape(-1, 6)
    w1, w2 = noise.first.weight.detach().T, noise.second.weight.detach().T
    value = torch.where(t >= 0, 1.0, -1.0) + alpha * (
        (t_in @ w1).relu() @ w2 + 0.1 * torch.sin(t_in)
    )
    torch.testing.assert_close(out.movedim(1, -1).reshape(-1, 6), value)
    active = (t_in @ w1 >= 0).double()
    through = ((z @ w2.T) * active) @ w1.T + z * 0.1 * torch.cos(t_in)
    to_t = z * series(t, 9, 1.0) + alpha * through * (t.abs() <= math.pi / 2)
    torch.testing.assert_close(x.grad, to_t.view(2, 4, 4, 6).movedim(-1, 1))
    to_w1 = alpha * t_in.T @ ((z @ w2.T) * active)
    to_w2 = alpha * (t_in @ w1).relu().T @ z
    torch.testing.assert_close(noise.first.weight.grad, to_w1.T)
    torch.testing.assert_close(noise.second.weight.grad, to_w2.T)
    assert torch.equal(inputs.eval()(x), torch.where(x >= 0, 1.0, -1.0))


def test_weights_are_layer_mean_times_sign() -> None:
    weight = torch.tensor([[1.0, -3.0, 0.0], [-0.0, 2.0, -6.0]])
    made = FourierWeights(FDA(), weight)
    expected = torch.tensor([[2.0, -2, 2], [2, 2, -2]])
    assert torch.equal(made.eval()(weight), expected)
    noise = made.get_submodule("fourier.adaptation")(weight)
    torch.testing.assert_close(made.train()(weight), expected + 2 * 0.1 * noise)
    made.start_epoch(29, 30)
    assert torch.equal(made(weight), expected), "no trace is left"


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_weight_gradient(alpha: float) -> None:
    weight = 0.3 * torch.randn(5, 4, 3, 3, dtype=torch.float64)
    weight.requires_grad_()
    made = FourierWeights(FDA(alpha=alpha, frequency=1.0), weight)
    upstream = torch.randn_like(weight)
    made(weight).backward(upstream)
    w = weight.detach()
    leaf = w.clone().requires_grad_()
    noise = made.get_submodule("fourier.adaptation")(leaf.flatten(1)).view_as(leaf)
    (learned,) = torch.autograd.grad(noise, leaf, upstream)
    expected = upstream * series(w, 9, 1.0) + alpha * w.abs().mean() * learned
    torch.testing.assert_close(weight.grad, expected)


def test_schedule() -> None:
    layer = BinaryConv2d(4, 6, 3, method={"name": "fda", "alpha": 0.8})
    for part in (layer.weight_binarizer, layer.input_binarizer):
        fourier = part.get_submodule("fourier")
        assert isinstance(fourier, Fourier)
        address = fourier.terms.data_ptr(), fourier.alpha.data_ptr()
        for epoch, terms, alpha in [(0, 9, 0.8), (40, 13, 0.48), (100, 18, 0.0)]:
            unflip.start_epoch(layer, epoch, 101)
            assert fourier.terms.item() == terms + 1
            assert fourier.alpha.item() == pytest.approx(alpha)
        assert (fourier.terms.data_ptr(), fourier.alpha.data_ptr()) == address
    unflip.start_epoch(layer, 0, 1)
    assert not any("terms" in key or "alpha" in key for key in layer.state_dict())


def test_the_noise_module_is_dropped_when_frozen_and_not_counted() -> None:
    layer = BinaryConv2d(16, 8, 3, bias=False, method="fda").eval()
    assert layer.get_parameter("input_binarizer.fourier.adaptation.first.weight").shape == (4, 16)
    assert layer.get_parameter("weight_binarizer.fourier.adaptation.first.weight").shape == (4, 144)
    frozen, x = unflip.freeze(layer), torch.randn(3, 16, 5, 5)
    assert set(frozen.state_dict()) == {"bits", "scales"}
    assert torch.equal(frozen(x), layer(x))
    assert unflip.cost(layer, x).memory_bits == 8 * 144 + 32
    assert "adaptation" in "".join(layer.state_dict()), "the layer itself keeps it"


def test_inputs_of_any_size_stay_signs() -> None:
    layer = BinaryLinear(7, 3, method="fda").eval()
    x = torch.tensor([[1e30, -1e30, 65000, -65000, 1e-30, -1e-30, 0]])
    expected = torch.tensor([[1.0, -1, 1, -1, 1, -1, 1]])
    assert torch.equal(layer.input_binarizer(x), expected)
    assert layer.input_binarizer.unit
    assert layer.input_binarizer.fused_as is None
    assert layer.train().input_binarizer(x).isfinite().all()
    half = BinaryLinear(7, 3, method="fda").half()
    assert half.input_binarizer(x.clamp(-65000, 65000).half()).isfinite().all()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"terms": 0}, "fda: terms=0 should be a whole number, 1 to 100"),
        ({"frequency": 0.0}, "fda: frequency=0.0 should be a finite number > 0"),
        ({"alpha": -1.0}, "fda: alpha=-1.0 should be a finite number >= 0"),
        ({"alpha": math.nan}, "fda: alpha=nan should be a finite number >= 0"),
    ],
    ids=str,
)
def test_options(option: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.get("fda", **option)
