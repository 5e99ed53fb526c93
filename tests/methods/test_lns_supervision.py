"""The supervision of LNS: labels that follow or stay, and the auxiliary loss with each of its options."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.kernels.mapping import shared_predictions
from unflip.layers import (
    BinaryConv2d,
    BinaryLayer,
    BinaryLinear,
    binary_layers,
)
from unflip.methods.lns import (
    LNS,
    MappedSign,
    unbiased_loss,
    warm_start,
)

Net = Callable[..., nn.Module]

OTHERS = [name for name in methods.names() if name != "lns"]
BASES = [name for name in OTHERS if methods.get(name).unfit_for_lns is None]


def mapped(layer: nn.Module) -> MappedSign:
    assert isinstance(layer, BinaryLayer)
    assert isinstance(layer.weight_binarizer, MappedSign)
    return layer.weight_binarizer


@torch.no_grad()
def flip_some(layer: BinaryLayer) -> Tensor:
    layer.weight[0].neg_()
    return torch.where(layer.weight >= 0, 1.0, -1.0)


def test_following_labels_follow_and_frozen_ones_do_not() -> None:
    for labels, follows in (("following", True), ("frozen", False)):
        layer = BinaryLinear(8, 6, method=LNS(labels=labels))
        first = mapped(layer).noisy_labels(layer.weight).clone()
        assert torch.equal(first, torch.where(layer.weight >= 0, 1.0, -1.0))
        signs = flip_some(layer)
        now = mapped(layer).noisy_labels(layer.weight)
        assert torch.equal(now, signs if follows else first)
        q_hat = mapped(layer).mapping(layer.weight)
        expected = unbiased_loss(q_hat, now, 0.005, 0.005).mean()
        torch.testing.assert_close(unflip.auxiliary_loss(layer), expected)


def test_a_pretrained_networks_weights_bring_new_frozen_labels(
    float_net: Net, lns_net: Net
) -> None:
    source = unflip.binarize(float_net(), "dorefa", quiet=True)
    model = lns_net(labels="frozen")
    unflip.load_twin(model, source.state_dict())
    for (_, layer), (_, twin) in zip(binary_layers(model), binary_layers(source), strict=True):
        signs = torch.where(twin.weight >= 0, 1.0, -1.0)
        assert torch.equal(mapped(layer).noisy_labels(layer.weight), signs)
        assert mapped(layer).labels.dtype == torch.int8


def test_the_warm_start_takes_frozen_labels_again() -> None:
    layer = BinaryLinear(8, 6, method=LNS(labels="frozen"))
    signs = flip_some(layer)
    warm_start(layer, steps=0)
    assert torch.equal(mapped(layer).noisy_labels(layer.weight), signs)


def test_frozen_labels_travel_with_the_state_dict() -> None:
    layer, other = (BinaryLinear(8, 6, method=LNS(labels="frozen")) for _ in range(2))
    first = mapped(layer).labels.clone()
    flip_some(layer)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(mapped(other).labels, first)
    assert torch.equal(other.weight, layer.weight)


def test_auxiliary_loss_is_alpha_times_the_sum_over_layers(lns_net: Net) -> None:
    model = lns_net(alpha=2.5, rho_plus=0.1, rho_minus=0.2)
    expected = {}
    for name, layer in binary_layers(model):
        q_hat, w = mapped(layer).mapping(layer.weight), layer.weight
        labels = torch.where(w >= 0, 1.0, -1.0)
        expected[name] = 2.5 * unbiased_loss(q_hat, labels, 0.1, 0.2).mean()
    losses = unflip.auxiliary_losses(model)
    torch.testing.assert_close(losses, expected)
    assert list(losses) == ["2", "5", "8", "12"]
    torch.testing.assert_close(unflip.auxiliary_loss(model), sum(expected.values()))


def test_alpha_scales_the_loss() -> None:
    layer = BinaryLinear(8, 6, method=LNS(alpha=1))
    one = unflip.auxiliary_loss(layer)
    state = layer.state_dict()
    for alpha in (0, 0.5, 5):
        other = BinaryLinear(8, 6, method=LNS(alpha=alpha))
        other.load_state_dict(dict(state))
        torch.testing.assert_close(unflip.auxiliary_loss(other), alpha * one)


@pytest.mark.parametrize("base", BASES)
def test_other_methods_have_no_auxiliary_loss(base: str, float_net: Net) -> None:
    model = unflip.binarize(float_net(), base, quiet=True)
    assert unflip.auxiliary_losses(model) == {}
    assert unflip.auxiliary_loss(model).item() == 0
    assert unflip.auxiliary_loss(float_net()).item() == 0


@pytest.mark.parametrize("gradient", ["identity", "clipped"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss_on", ["before_sign", "after_sign"])
def test_loss_options_against_closed_forms(loss_on: str, reduction: str, gradient: str) -> None:
    config = LNS(
        alpha=1.5,
        rho_plus=0.1,
        rho_minus=0.3,
        loss_on=loss_on,  # type: ignore[arg-type]
        reduction=reduction,  # type: ignore[arg-type]
        gradient=gradient,  # type: ignore[arg-type]
    )
    layer = BinaryConv2d(4, 10, 3, method=config)
    f = mapped(layer).mapping
    with torch.no_grad():
        f.conv3.weight.mul_(3)
    q_hat = f(layer.weight)
    labels = torch.where(layer.weight >= 0, 1.0, -1.0)
    own = torch.where(labels > 0, 0.1, 0.3)
    other = torch.where(labels > 0, 0.3, 0.1)
    value = q_hat.detach()
    if loss_on == "after_sign":
        value = torch.where(value >= 0, 1.0, -1.0)
    each = ((1 - other) * (value - labels) ** 2 - own * (value + labels) ** 2) / 0.6
    count = labels.numel() if reduction == "mean" else 1
    loss = unflip.auxiliary_loss(layer)
    torch.testing.assert_close(loss, 1.5 * each.sum() / count)
    if loss_on == "after_sign":  # two values: 0 is never among them
        expected = (labels == value) * -4 * own / 0.6 + (labels != value) * 4 * (1 - other) / 0.6
        torch.testing.assert_close(each, expected)

    # to q̂ the paper's gradient; through the sign only for |q̂| ≤ 1 when it is clipped
    to_q = 2 * (value - labels) - 4 * own * labels / 0.6
    inside = q_hat.detach().abs() <= 1
    assert 0.1 < inside.float().mean() < 0.9
    if loss_on == "after_sign" and gradient == "clipped":
        to_q = to_q * inside
    leaves = [layer.weight, *f.parameters()]
    expected_grads = torch.autograd.grad(q_hat, leaves, 1.5 * to_q / count)
    found = torch.autograd.grad(loss, leaves)
    for grad, expected_grad in zip(found, expected_grads, strict=True):
        size = expected_grad.abs().max().item()
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5 * size)


@pytest.mark.parametrize("made_half", [True, False])
def test_a_sum_in_half_precision_is_finite(made_half: bool) -> None:
    """More weights than float16 can count."""
    conv = nn.Conv2d(96, 96, 3)
    if made_half:
        conv.half()
    layer = unflip.binarize(conv, LNS(reduction="sum"), keep_first_and_last=False, quiet=True)
    loss = unflip.auxiliary_loss(layer.half())
    assert loss.isfinite()
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()
    mean = copy.deepcopy(layer).float()
    torch.testing.assert_close(loss, unflip.auxiliary_loss(mean), rtol=1e-2, atol=0)


def test_a_hook_that_reads_the_bits_leaves_the_gradients() -> None:
    layer = BinaryConv2d(4, 4, 3, method=LNS(mapping="residual"))
    layer.register_forward_pre_hook(lambda module, _: module.code() and None)
    with shared_predictions(layer):
        (layer(torch.randn(2, 4, 5, 5)).square().mean() + unflip.auxiliary_loss(layer)).backward()
    assert layer.weight.grad is not None
    assert mapped(layer).mapping.conv3.weight.grad is not None


def test_predictions_can_be_shared_by_the_two_losses(float_net: Net, lns_net: Net) -> None:
    model = lns_net()
    twin = copy.deepcopy(model)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for _, layer in binary_layers(model):
        mapped(layer).mapping.register_forward_hook(count)
    x = torch.randn(4, 3, 8, 8)
    with shared_predictions(model):
        (model(x).square().mean() + unflip.auxiliary_loss(model)).backward()
    assert calls == 4
    (twin(x).square().mean() + unflip.auxiliary_loss(twin)).backward()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model(x)
    assert calls == 8, "outside, f(W) is computed again"
    with shared_predictions(unflip.binarize(float_net(), "dorefa", quiet=True)):
        pass
