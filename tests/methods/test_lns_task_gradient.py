"""Interpretations of LNS: where the task's gradient goes, the output of f, the loss after the sign. In closed form."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.kernels.mapping import fill, shared_predictions
from unflip.layers import BinaryConv2d, BinaryLayer, binary_layers
from unflip.methods.lns import LNS, MappedSign, sign_agreement, warm_start

Net = Callable[..., nn.Module]

OTHERS = [name for name in methods.names() if name != "lns"]
BASES = [name for name in OTHERS if methods.get(name).unfit_for_lns is None]
ROUTES = ("through_f", "straight_through", "both")


def mapped(layer: nn.Module) -> MappedSign:
    assert isinstance(layer, BinaryLayer)
    assert isinstance(layer.weight_binarizer, MappedSign)
    return layer.weight_binarizer


def layer_of(**options: Any) -> BinaryConv2d:
    """A layer in float64, with some |q̂| > 1 before any tanh."""
    torch.manual_seed(0)
    method = methods.get("lns", **options)
    layer = BinaryConv2d(4, 10, 3, dtype=torch.float64, method=method)
    mapped(layer).untaught = False  # no warning
    with torch.no_grad():
        mapped(layer).mapping.conv3.weight.mul_(3)
    return layer


def plain_f(layer: BinaryConv2d, weight: Tensor) -> Tensor:
    """f without its last activation, written out."""
    f = mapped(layer).mapping
    h = weight
    for conv, norm in ((f.conv1, f.norm1), (f.conv2, f.norm2)):
        y = nn.functional.conv2d(h, conv.weight, padding=1)
        mean, var = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), correction=0, keepdim=True)
        scale, shift = norm.weight[:, None, None], norm.bias[:, None, None]
        h = ((y - mean) / (var + 1e-5).sqrt() * scale + shift).clamp_min(0)
    return nn.functional.conv2d(h, f.conv3.weight, f.conv3.bias, padding=1)


def theta(layer: BinaryConv2d) -> list[Tensor]:
    return list(mapped(layer).mapping.parameters())


@pytest.mark.parametrize("gradient", ["identity", "clipped"])
@pytest.mark.parametrize("output", ["linear", "tanh"])
@pytest.mark.parametrize("route", ROUTES)
def test_gradients_of_the_task_over_dorefa(route: str, output: str, gradient: str) -> None:
    """W gets G itself by the straight-through gradient; E · G reaches W and θ through f. Every number by hand."""
    layer = layer_of(task_gradient=route, output=output, gradient=gradient)
    w, upstream = layer.weight, torch.randn(10, 4, 3, 3, dtype=torch.float64)
    raw = plain_f(layer, w)
    q_hat = raw.tanh() if output == "tanh" else raw
    scale = w.abs().mean().detach()
    binary = layer.binary_weight()
    assert torch.equal(binary, scale * torch.where(q_hat >= 0, 1.0, -1.0).double())

    to_q = scale * upstream * ((q_hat.abs() <= 1) if gradient == "clipped" else 1)
    slope = 1 - q_hat.detach() ** 2 if output == "tanh" else 1
    through_f = torch.autograd.grad(raw, [w, *theta(layer)], to_q.detach() * slope)
    found = torch.autograd.grad(binary, [w, *theta(layer)], upstream, allow_unused=True)
    torch.testing.assert_close(found[0], through_f[0] if route == "through_f" else upstream)
    if route == "straight_through":
        assert all(grad is None for grad in found[1:])
    else:
        torch.testing.assert_close(found[1:], through_f[1:])


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("route", ["straight_through", "both"])
def test_w_gets_the_gradient_of_its_base_method(base: str, route: str) -> None:
    layer = layer_of(task_gradient=route, base=base)
    plain = BinaryConv2d(4, 10, 3, dtype=torch.float64, method=base)
    plain.weight_binarizer.load_state_dict(mapped(layer).base.state_dict())
    upstream = torch.randn(10, 4, 3, 3, dtype=torch.float64)
    [found] = torch.autograd.grad(layer.binary_weight(), layer.weight, upstream)
    expected = torch.autograd.grad(
        plain.weight_binarizer.surrogate(layer.weight), layer.weight, upstream
    )
    torch.testing.assert_close(found, *expected)


@pytest.mark.parametrize("loss_on", ["before_sign", "after_sign"])
@pytest.mark.parametrize("output", ["linear", "tanh"])
@pytest.mark.parametrize("rho", [0.0, 0.005, 0.05, 0.2])
@pytest.mark.parametrize("route", ROUTES)
def test_gradients_of_the_supervision(route: str, rho: float, output: str, loss_on: str) -> None:
    """∂ℓ̃/∂q̂ = 2 (v − q̃) − 4 ρ q̃ / (1 − 2ρ), with v = q̂ or sign(q̂); to W only if f sees W attached."""
    rates = {"rho_plus": rho, "rho_minus": rho}
    layer = layer_of(task_gradient=route, output=output, loss_on=loss_on, alpha=1.5, **rates)
    w = layer.weight
    raw = plain_f(layer, w)
    q_hat = raw.tanh() if output == "tanh" else raw
    labels = torch.where(w >= 0, 1.0, -1.0).double()
    value = q_hat.detach()
    if loss_on == "after_sign":
        value = torch.where(value >= 0, 1.0, -1.0).double()
    agree, disagree = (value - labels) ** 2, (value + labels) ** 2
    each = ((1 - rho) * agree - rho * disagree) / (1 - 2 * rho)
    loss = unflip.auxiliary_loss(layer)
    torch.testing.assert_close(loss, 1.5 * each.mean())

    to_q = 1.5 / w.numel() * (2 * (value - labels) - 4 * rho * labels / (1 - 2 * rho))
    expected = torch.autograd.grad(q_hat, [w, *theta(layer)], to_q)
    found = torch.autograd.grad(loss, [w, *theta(layer)], allow_unused=True)
    torch.testing.assert_close(found[1:], expected[1:])
    if route == "through_f":
        torch.testing.assert_close(found[0], expected[0])
    else:
        assert found[0] is None


def test_tanh_of_a_residual_mapping() -> None:
    layer = layer_of(mapping="residual", output="tanh")
    nn.init.normal_(mapped(layer).mapping.conv3.weight)
    w = layer.weight
    expected = (plain_f(layer, w) + w / w.abs().mean()).tanh()
    torch.testing.assert_close(mapped(layer).predict(w), expected)


def test_neither_option_changes_bits_or_what_a_state_dict_means(same_net: Net) -> None:
    default, other = same_net(), same_net(task_gradient="both", output="tanh")
    other.load_state_dict(default.state_dict())
    assert unflip.flip_rate(default, other) == 0
    assert LNS(task_gradient="both", output="tanh").family == LNS().family


OPTIONS = [
    {"task_gradient": "straight_through"},
    {"task_gradient": "both", "output": "tanh"},
    {"task_gradient": "straight_through", "loss_on": "after_sign", "rho_plus": 0.2},
]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss.backward()
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_is_the_same_shared_filled_and_compiled(
    options: dict[str, Any], same_net: Net
) -> None:
    model = same_net(**options, warm_steps=0).double()
    for _, layer in binary_layers(model):
        mapped(layer).untaught = False
    layers = [layer for _, layer in binary_layers(model)]
    upstream = [torch.randn_like(layer.weight) for layer in layers]

    def step() -> Tensor:
        # A linear loss of the weights: in a network, rounding errors can move an input across a threshold.
        pairs = zip(layers, upstream, strict=True)
        task = sum((layer.binary_weight() * grad).sum() for layer, grad in pairs)
        return task + unflip.auxiliary_loss(model)

    expected = gradients(model, step())
    for layer in layers:
        assert all(p.grad is not None for p in (layer.weight, *mapped(layer).mapping.parameters()))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = [gradients(model, compiled())]
    for filled in (False, True):
        with shared_predictions(model):
            if filled:  # on a GPU shared_predictions does it
                fill(layers)
            results.append(gradients(model, step()))
    for found in results:
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:after at most 200 steps")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_bits_of_training_are_frozen(options: dict[str, Any], same_net: Net) -> None:
    model = same_net(**options)
    warm_start(model, steps=200, agreement=0.99)
    assert min(sign_agreement(model).values()) > 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model)
    x = torch.randn(8, 3, 8, 8)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x).square().mean() + unflip.auxiliary_loss(model)).backward()
        optimizer.step()
        unflip.after_step(model)
    assert unflip.flip_rate(before, model) > 0
    frozen = unflip.freeze(model)
    assert unflip.flip_rate(frozen, model) == 0
    assert torch.equal(frozen.eval()(x), model.eval()(x))
