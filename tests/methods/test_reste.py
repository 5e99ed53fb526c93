"""ReSTE: the power function's gradient between its two bounds, its schedule, the layer's mean as scale."""

import math

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.reste import PowerEstimator, PowerSignInputs, PowerSignWeights

POINTS = torch.cat(
    [
        torch.tensor([0, -0.0, 1e-12, -1e-12, 0.1, -0.1, 1.5, -1.5, 1.5000001, -1.5000001, 1e6]),
        torch.linspace(-2, 2, 401),
    ]
).double()


def estimator(o: float) -> PowerEstimator:
    made = PowerEstimator(3, 1.5, 0.1, POINTS)
    made.o.fill_(o)
    return made


def slope(x: float, o: float) -> float:
    """The paper's definition, a number at a time."""
    if abs(x) > 1.5:
        return 0
    if abs(x) <= 0.1:
        return 0.1 ** (1 / o) / 0.1
    return abs(x) ** ((1 - o) / o) / o


def slopes(points: Tensor, o: float) -> Tensor:
    values = [slope(x, o) for x in points.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view_as(points)


@pytest.mark.parametrize("o", [1, 1.3, 2, 3])
def test_inputs(o: float) -> None:
    x = POINTS.clone().requires_grad_()
    out = PowerSignInputs(estimator(o))(x)
    assert torch.equal(out.detach(), torch.where(POINTS >= 0, 1.0, -1.0).double())
    upstream = torch.randn_like(POINTS)
    out.backward(upstream)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, upstream * slopes(POINTS, o))


def test_values_to_look_up() -> None:
    # o = 1 is the straight-through estimator cut off at 1.5
    assert estimator(1)(torch.tensor([0, 0.05, 0.7, 1.5, 1.6]).double()).tolist() == [1, 1, 1, 1, 0]
    # o = 2: 0.1^(−1/2) = 3.1623 below 0.1; 1 / (2√x) above
    found = estimator(2)(torch.tensor([0.0, 0.25, 1.0, 1.44]).double())
    expected = torch.tensor([10**0.5, 1, 0.5, 0.5 / 1.2]).double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("o", [1, 2, 3])
@pytest.mark.parametrize("shape", [(3, 7), (4, 2, 3, 1), (1, 1)])
def test_weights_with_the_scale_differentiated(shape: tuple[int, ...], o: float) -> None:
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out = PowerSignWeights(estimator(o))(weight)
    values = weight.detach()
    signs = torch.where(values >= 0, 1.0, -1.0).double()
    scale = values.abs().sum() / values.numel()
    torch.testing.assert_close(out.detach(), scale * signs)
    upstream = torch.randn(shape, dtype=torch.float64)
    out.backward(upstream)
    expected = scale * upstream * slopes(values, o)
    expected += (upstream * signs).sum() * signs / values.numel()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected)


def test_weights_by_hand() -> None:
    weight = torch.tensor([[3.0, -1.0], [0.0, -4.0]])
    code = PowerSignWeights(estimator(1)).code(weight)
    assert code.signs.tolist() == [[[1, -1], [1, -1]]]
    assert code.scales.tolist() == [[[2]]]


def test_the_schedule() -> None:
    layer = BinaryLinear(6, 4, method="reste")
    weights, inputs = layer.weight_binarizer, layer.input_binarizer
    assert isinstance(weights, PowerSignWeights)
    assert isinstance(inputs, PowerSignInputs)
    o = inputs.estimator.o
    assert o.item() == 1
    before = layer.code()
    epochs = 600
    for epoch, expected in ((0, 1), (200, 1 + 2 * (1 - math.sqrt(3) / 2)), (400, 2)):
        unflip.start_epoch(layer, epoch, epochs)
        assert o.item() == pytest.approx(expected, rel=1e-6)
        assert weights.estimator.o.item() == o.item()
    assert inputs.estimator.o is o
    unflip.start_epoch(layer, epochs - 1, epochs)
    assert 2.99 < o.item() < 3
    assert torch.equal(layer.code().scales, before.scales)
    assert torch.equal(layer.code().signs, before.signs)
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_eval_is_frozen_and_what_inputs_are() -> None:
    model = nn.Sequential(BinaryConv2d(3, 8, 3, method="reste"), nn.BatchNorm2d(8))
    unflip.start_epoch(model, 9, 10)
    x = torch.randn(4, 3, 6, 6)
    model(x)
    assert torch.equal(unflip.freeze(model)(x), model.eval()(x))
    part = BinaryLinear(2, 2, method="reste").input_binarizer
    assert (part.bits, part.unit, part.fused_as) == (1, True, None)


def test_infinite_inputs_have_a_sign_and_no_gradient() -> None:
    x = torch.tensor([math.inf, -math.inf, 0.5], requires_grad=True)
    binary = BinaryLinear(3, 2, method="reste").input_binarizer(x)
    assert binary.tolist() == [1, -1, 1]
    binary.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0, 1]


def test_half_precision_has_no_pole() -> None:
    made = estimator(3).half()
    x = torch.tensor([0, 6e-8, -6e-8, 0.1, 1.5, 6e4], dtype=torch.float16)
    assert made(x).dtype == torch.float16
    torch.testing.assert_close(made(x).double(), slopes(x.double(), 3), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"o_end": 0.5}, "reste: o_end=0.5 should be"),
        ({"m": 0}, "reste: m=0 and t=1.5 should be"),
        ({"t": 0.05}, "reste: m=0.1 and t=0.05 should be"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.get("reste", **options)
