"""Mapping networks taken together equal each one alone."""

import pytest
import torch
from torch import nn

from unflip import auxiliary_losses, binarize
from unflip.layers import binary_layers
from unflip.train.mapping import _fill, predict_together, shared_predictions


@pytest.mark.parametrize("mapping", ["plain", "residual"])
@pytest.mark.parametrize("kernel", [1, 3, 5, (1, 3)])
def test_together_equals_alone_in_value_and_gradient(mapping, kernel):
    torch.manual_seed(0)
    convs = nn.Sequential(*[nn.Conv2d(6, 5, kernel) for _ in range(3)]).double()
    binarize(convs, "lns", keep_first_and_last=False, quiet=True, mapping=mapping)
    layers = [layer for _, layer in binary_layers(convs)]
    for layer in layers:  # residual mappings start at zero, which would hide mistakes
        nn.init.normal_(layer.weight_binarizer.mapping.conv3.weight)
    alone = [layer.weight_binarizer.mapping(layer.weight) for layer in layers]
    together = predict_together(
        [layer.weight_binarizer.mapping for layer in layers], [layer.weight for layer in layers]
    )
    probe = torch.randn_like(alone[0])
    parameters = [p for p in convs.parameters() if p.dim() > 1]
    expected = torch.autograd.grad(
        sum((a * probe).sum() for a in alone), parameters, allow_unused=True
    )
    found = torch.autograd.grad(
        sum((t * probe).sum() for t in together), parameters, allow_unused=True
    )
    for a, t in zip(alone, together, strict=True):
        torch.testing.assert_close(t, a, rtol=1e-9, atol=1e-9)
    for e, f in zip(expected, found, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-7, atol=1e-9)


def test_a_shared_prediction_is_computed_once_and_forgotten(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    binarize(model, "lns", quiet=True)
    mapping = model[1].weight_binarizer.mapping
    calls = []
    forward = mapping.forward
    monkeypatch.setattr(mapping, "forward", lambda w: (calls.append(1), forward(w))[1])
    with shared_predictions(model):
        model(torch.randn(2, 3, 9, 9))
        auxiliary_losses(model)
    assert len(calls) == 1
    assert model[1].weight_binarizer.shared is None


def test_layers_of_other_shapes_and_fixed_statistics_are_left_to_themselves():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 8, 3), nn.Linear(8, 8))
    binarize(model, "lns", keep_first_and_last=False, quiet=True)
    mapped = [(layer.weight, layer.weight_binarizer) for _, layer in binary_layers(model)]
    for _, binarizer in mapped:
        binarizer.shared = []
    _fill(mapped)
    for weight, binarizer in mapped[:2]:
        torch.testing.assert_close(
            binarizer.shared[0], binarizer.mapping(weight), rtol=1e-4, atol=1e-5
        )
    assert mapped[2][1].shared == []
