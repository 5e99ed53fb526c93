"""AdaBin: two values of its own for each filter and each layer's inputs; Maxout for PReLU."""

import pytest
import torch
from torch import nn

import unflip
from unflip.layers import BinaryConv2d, BinaryLinear, binary_layers
from unflip.methods.adabin import AdaptiveInputs, AdaptiveSet, Maxout


def binarizer(sharpness: float = 1e-3) -> AdaptiveSet:
    made = AdaptiveSet(torch.zeros(1, dtype=torch.float64))
    made.sharpness.fill_(sharpness)
    return made


def test_weights_by_hand() -> None:
    # mean 1, std 2; mean −2, std 1; a filter of equal weights
    weight = torch.tensor([[3.0, -1, 3, -1], [-1, -3, -3, -1], [0.5, 0.5, 0.5, 0.5]])
    code = AdaptiveSet(weight).code(weight)
    assert code.offset is not None
    assert code.offset.flatten().tolist() == [1, -2, 0.5]
    assert code.scales.shape == (1, 3, 1)
    torch.testing.assert_close(code.scales.flatten(), torch.tensor([2.0, 1, 0]))
    assert code.signs[0].tolist() == [[1, -1, 1, -1], [1, -1, -1, 1], [1, 1, 1, 1]]
    torch.testing.assert_close(AdaptiveSet(weight)(weight), weight)


@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 3, 3), (2, 1, 1, 1)])
def test_the_set_has_the_filters_own_moments(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, dtype=torch.float64) + 0.3
    binary = binarizer()(weight)
    beta = weight.flatten(1).mean(1).view(-1, *[1] * (len(shape) - 1))
    alpha = weight.flatten(1).std(1, correction=0).view_as(beta)
    expected = beta + alpha * torch.where(weight >= beta, 1.0, -1.0)
    torch.testing.assert_close(binary, expected)


@pytest.mark.parametrize("sharpness", [1e-3, 0.1, 1.0, 3.0, 10.0])
def test_weight_gradient(sharpness: float) -> None:
    """∂Q/∂W by the chain rule, written out with the derivatives of mean and deviation."""
    weight = torch.randn(5, 4, 3, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(weight)
    binarizer(sharpness)(weight).backward(upstream)
    w, n = weight.detach().flatten(1), 12
    g = upstream.flatten(1)
    beta, alpha = w.mean(1, keepdim=True), w.std(1, correction=0, keepdim=True)
    normal = (w - beta) / alpha
    slope = max(1, sharpness) * (1 - torch.tanh(sharpness * normal) ** 2)
    to_normal = g * alpha * slope
    to_alpha = (g * torch.where(normal >= 0, 1.0, -1.0)).sum(1, keepdim=True)
    to_alpha = to_alpha - (to_normal * normal / alpha).sum(1, keepdim=True)
    to_beta = g.sum(1, keepdim=True) - (to_normal / alpha).sum(1, keepdim=True)
    expected = to_normal / alpha + to_alpha * normal / n + to_beta / n
    torch.testing.assert_close(weight.grad, expected.view_as(weight))


def test_a_filter_of_equal_weights_has_the_gradient_of_its_mean() -> None:
    weight = torch.full((2, 4), 0.25, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(weight)
    binarizer()(weight).backward(upstream)
    torch.testing.assert_close(
        weight.grad, upstream, rtol=1e-5, atol=1e-5
    )  # max(1, t) (1 − tanh² 0)


def test_schedule() -> None:
    layer = BinaryLinear(4, 3, method="adabin")
    made = layer.weight_binarizer
    assert isinstance(made, AdaptiveSet)
    assert made.sharpness.item() == pytest.approx(1e-3)
    address = made.sharpness.data_ptr()
    for epoch, expected in [(0, 1e-3), (100, 1e-2), (300, 1), (399, 10 ** (-3 + 4 * 399 / 400))]:
        unflip.start_epoch(layer, epoch, 400)
        assert made.sharpness.item() == pytest.approx(expected)
    assert made.sharpness.data_ptr() == address, "a captured step reads it there"
    assert not any("sharpness" in key for key in layer.state_dict())


def test_inputs_and_their_gradients() -> None:
    made = AdaptiveInputs(torch.zeros(1, dtype=torch.float64))
    with torch.no_grad():
        made.distance.fill_(0.5)
        made.centre.fill_(-0.3)
    points = torch.linspace(-2, 2, 4001, dtype=torch.float64) + 1e-7
    x = points.clone().requires_grad_()
    out = made(x)
    z = (points + 0.3) / 0.5
    signs = torch.where(z >= 0, 1.0, -1.0).double()
    torch.testing.assert_close(out, 0.5 * signs - 0.3)
    assert out.unique().numel() == 2
    upstream = torch.randn_like(points)
    out.backward(upstream)
    slope = (2 - 2 * z.abs()).clamp(min=0)
    torch.testing.assert_close(x.grad, upstream * slope)
    torch.testing.assert_close(made.distance.grad, (upstream * (signs - slope * z)).sum())
    torch.testing.assert_close(made.centre.grad, (upstream * (1 - slope)).sum())


def test_inputs_start_as_sign() -> None:
    layer = BinaryConv2d(3, 4, 3, method="adabin")
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(layer.input_binarizer(x), torch.where(x >= 0, 1.0, -1.0))
    assert not layer.input_binarizer.unit
    assert layer.input_binarizer.bits == 1


def test_a_negative_distance_gives_the_same_set() -> None:
    made = AdaptiveInputs(torch.zeros(1))
    x = torch.randn(50)
    before = made(x)
    with torch.no_grad():
        made.distance.neg_()
    assert torch.equal(made(x), before)


# --- the offset -----------------------------------------------------------------------------------------


def trained_layer() -> BinaryConv2d:
    layer = BinaryConv2d(6, 8, 3, padding=1, groups=2, method="adabin")
    with torch.no_grad():
        layer.weight.add_(0.1 * torch.randn(8, 1, 1, 1))
        layer.get_parameter("input_binarizer.distance").fill_(0.7)
        layer.get_parameter("input_binarizer.centre").fill_(0.2)
    return layer.eval()


def test_the_offset_is_frozen_and_costs_no_bit() -> None:
    layer = trained_layer()
    frozen = unflip.freeze(layer)
    x = torch.randn(3, 6, 7, 7)
    assert torch.equal(frozen(x), layer(x))
    state = frozen.state_dict()
    assert state["offset"].shape == (8, 1, 1, 1)
    assert state["bits"].numel() == 8 * 27 // 8
    spent = unflip.cost(layer, x)
    assert spent.layers[0].weight_bits == 1
    assert spent.memory_bits == 8 * 27 + 32 * (8 + 8 + 8 + 2)  # α, β, bias; α and β of the inputs
    assert spent.flops == 8 * 49 * 27 / 64
    other = unflip.freeze(BinaryConv2d(6, 8, 3, padding=1, groups=2, method="adabin"))
    other.load_state_dict(state)
    assert torch.equal(other(x), frozen(x))
    assert frozen.double().get_buffer("offset").dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_keeps_the_offset(dtype: torch.dtype) -> None:
    layer, x = trained_layer(), torch.randn(3, 6, 7, 7)
    expected = layer(x)
    with torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(layer(x).float(), expected, rtol=2e-3, atol=2e-3)


def test_lns_keeps_the_offset() -> None:
    layer = BinaryConv2d(6, 8, 3, method={"name": "lns", "base": "adabin"})
    plain = BinaryConv2d(6, 8, 3, method="adabin")
    plain.weight = layer.weight
    code, base = layer.code(), plain.code()
    assert code.offset is not None
    assert base.offset is not None
    assert torch.equal(code.offset, base.offset)
    assert torch.equal(layer.binary_weight(), base.scales[0] * code.signs[0] + base.offset)
    x = torch.randn(2, 6, 5, 5)
    assert torch.equal(unflip.freeze(layer)(x), layer.eval()(x))


# --- Maxout ---------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.PReLU(8),
        nn.Conv2d(8, 8, 3),
        nn.Sequential(nn.PReLU(), nn.Flatten(), nn.Linear(32, 5)),
        nn.PReLU(5),
        nn.Linear(5, 2),
    )


def test_maxout_takes_the_place_of_prelu() -> None:
    source, model = net(), net()
    model.load_state_dict(source.state_dict())
    slopes = model[1].weight
    unflip.binarize(model, "adabin", quiet=True)
    found = [m for m in model.modules() if isinstance(m, nn.PReLU)]
    assert [type(m) for m in found] == [Maxout] * 3
    assert [m.num_parameters for m in found] == [8, 1, 5]
    assert found[0].weight is slopes
    for module, shape in zip(found, [(2, 8, 4, 4), (2, 8, 2, 2), (2, 5)], strict=True):
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), nn.functional.prelu(x, module.weight))
    extra = {k for k in model.state_dict() if "adapted" in k}
    assert extra == {f"{n}.adapted.positive" for n in ("1", "3.0", "4")}
    back = net()
    unflip.load_twin(back, model.state_dict())
    assert all(torch.equal(v, back.state_dict()[k]) for k, v in source.state_dict().items())


def test_maxout_by_hand() -> None:
    prelu = nn.PReLU(2)
    module = Maxout(prelu)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.25, -1]))
        module.adapted.positive.copy_(torch.tensor([2.0, 3]))
    x = torch.tensor([[-4.0, -4.0], [4, 4], [0, 0]], requires_grad=True)
    out = module(x)
    assert out.tolist() == [[-1, 4], [8, 12], [0, 0]]
    out.sum().backward()
    assert x.grad is not None
    assert x.grad[:2].tolist() == [[0.25, -1], [2, 3]]
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [-4, -4]
    assert module.adapted.positive.grad is not None
    assert module.adapted.positive.grad.tolist() == [4, 4]


def test_a_prelu_used_twice_stays_one() -> None:
    prelu = nn.PReLU()
    model = nn.Sequential(nn.Linear(4, 4), prelu, nn.Linear(4, 4), prelu, nn.Linear(4, 2))
    unflip.binarize(model, "adabin", keep_first_and_last=False, quiet=True)
    assert isinstance(model[1], Maxout)
    assert model[1] is model[3]


def test_without_maxout() -> None:
    model = unflip.binarize(net(), "adabin", maxout=False, quiet=True)
    assert not any(isinstance(m, Maxout) for m in model.modules())
    assert all(layer.method.options()["maxout"] is False for _, layer in binary_layers(model))


def test_a_scaled_center_is_that_of_the_authors_code() -> None:
    """α (sign((x − β) / α) + β): the threshold is β, the center αβ."""
    made = AdaptiveInputs(torch.zeros(1, dtype=torch.float64), scaled=True)
    with torch.no_grad():
        made.distance.fill_(0.5)
        made.centre.fill_(0.3)
    x = torch.tensor([-1.0, 0.29, 0.3, 0.31, 2.0], dtype=torch.float64, requires_grad=True)
    found = made(x)
    torch.testing.assert_close(found, 0.15 + 0.5 * torch.tensor([-1.0, -1, 1, 1, 1]).double())
    found.sum().backward()
    z = (x.detach() - 0.3) / 0.5
    slope = (2 - 2 * z.abs()).clamp(min=0)
    sign = torch.where(z >= 0, 1.0, -1.0)
    torch.testing.assert_close(x.grad, slope)
    torch.testing.assert_close(made.distance.grad, (sign + 0.3 - slope * z).sum())
    torch.testing.assert_close(made.centre.grad, (0.5 - slope).sum())
    layer = BinaryLinear(4, 3, method={"name": "adabin", "center": "scaled"})
    assert isinstance(layer.input_binarizer, AdaptiveInputs)
    assert layer.input_binarizer.scaled
    code = layer.input_binarizer.code()
    assert code.scales == (2.0,)
