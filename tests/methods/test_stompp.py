"""StoMPP: masks, both gradients, the schedule from layer to layer."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import unflip
from unflip import methods
from unflip.layers import BinaryLinear, binary_layers
from unflip.methods.stompp import MaskedInputs, MaskedWeights, partly_binary


def chain(layers: int = 4, **options: Any) -> nn.Module:
    """A chain whose last layer stays float."""
    net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers + 1)))
    return unflip.binarize(net, "stompp", quiet=True, **options)


def shares(model: nn.Module) -> list[float]:
    """p of every layer, which is the same for its weights and inputs."""
    found = []
    for _, layer in binary_layers(model):
        parts = (layer.weight_binarizer, layer.input_binarizer)
        values = [float(part.progress.value) for part in parts]  # type: ignore[union-attr, arg-type]
        assert values[0] == values[1]
        found.append(values[0])
    return found


@pytest.mark.parametrize("surrogate", [False, True])
def test_value_and_gradient(surrogate: bool) -> None:
    x = torch.linspace(-2, 2, 41, dtype=torch.float64).requires_grad_()
    mask = torch.arange(41) % 3 == 0
    upstream = torch.randn(41, dtype=torch.float64)
    out = partly_binary(x, mask, surrogate)
    (found,) = torch.autograd.grad(out, x, upstream)
    value = x.detach()
    signs = torch.where(value >= 0, 1.0, -1.0).double()
    torch.testing.assert_close(out.detach(), torch.where(mask, signs, value.clamp(-1, 1)))
    inside = (value.abs() <= 1).double()
    passes = inside if surrogate else inside * ~mask
    torch.testing.assert_close(found, upstream * passes)


def test_layers_become_binary_one_after_the_other() -> None:
    model = chain(layers=4)
    assert shares(model) == [0, 0, 0, 0]
    unflip.start_epoch(model, 0, 8)  # half of the first layer's part is over after this epoch
    assert shares(model) == pytest.approx([0.125, 0, 0, 0])
    unflip.start_epoch(model, 4, 8)
    assert shares(model) == pytest.approx([1, 1, 0.125, 0])
    unflip.start_epoch(model, 7, 8)
    assert shares(model) == [1, 1, 1, 1]


def test_all_is_binary_in_the_last_epoch() -> None:
    model = chain()
    unflip.start_epoch(model, 2, 3)
    x = torch.randn(5, 6)
    for _, layer in binary_layers(model):
        assert layer.training
        assert set(layer.binary_weight().unique().tolist()) <= {-1.0, 1.0}
        assert set(layer.input_binarizer(x).unique().tolist()) <= {-1.0, 1.0}
        trained = layer(x)
        assert torch.equal(trained, layer.eval()(x))


def test_masks_are_drawn_with_p_a_part_at_a_time() -> None:
    weight = torch.randn(200, 200)
    masked = MaskedWeights(methods.get("stompp", refresh=4), weight)  # type: ignore[arg-type]
    masked.progress.set_number("value", 0.5)
    masked.after_step(weight)
    assert masked.mask.float().mean().item() == pytest.approx(0.125, abs=0.01)
    for _ in range(60):
        masked.after_step(weight)
    assert masked.mask.float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_a_loop_without_start_epoch_is_warned() -> None:
    model, x = chain(layers=2), torch.randn(8, 6)
    model.train()(x).sum().backward()
    with pytest.warns(UserWarning, match="stompp: .* without unflip.start_epoch"):
        unflip.freeze(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        untrained = chain(layers=2).eval()
        untrained(x)
        unflip.start_epoch(model, 0, 1)
        model.train()(x).sum().backward()
        unflip.freeze(model)


def test_weights_stay_within_one() -> None:
    layer = BinaryLinear(4, 3, method="stompp")
    with torch.no_grad():
        layer.weight.fill_(5)
    unflip.after_step(layer)
    assert (layer.weight == 1).all()


def test_without_a_surrogate_binary_inputs_stop_the_gradient() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    inputs = MaskedInputs(methods.get("stompp", gradient="none"), x)  # type: ignore[arg-type]
    inputs.start_epoch(0, 1)
    out = inputs(x)
    assert not out.requires_grad or not torch.autograd.grad(out.sum(), x)[0].any()


def test_masks_are_restored() -> None:
    model, other = chain(), chain()
    unflip.start_epoch(model, 1, 8)
    for _ in range(300):
        unflip.after_step(model)
    other.load_state_dict(model.state_dict())
    masks = [layer.weight_binarizer.mask for _, layer in binary_layers(model)]
    assert any(mask.any() for mask in masks)  # type: ignore[operator, union-attr]
    for (_, layer), mask in zip(binary_layers(other), masks, strict=True):
        assert torch.equal(layer.weight_binarizer.mask, mask)  # type: ignore[arg-type]


def test_options() -> None:
    assert methods.get("stompp", refresh=7, gradient="none").family == "stompp"
    with pytest.raises(ValueError, match="stompp: refresh=0 should be a whole number"):
        methods.get("stompp", refresh=0)
    with pytest.raises(ValueError, match="stompp: gradient='clip' is not one of"):
        methods.get("stompp", gradient="clip")
    with pytest.raises(ValueError, match=r"stompp.*mapping network"):
        methods.get("lns", base="stompp")
