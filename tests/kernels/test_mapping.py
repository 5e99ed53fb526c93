"""Mapping networks taken together equal each one alone."""

import pytest
import torch
from torch import nn

from unflip import auxiliary_losses, binarize
from unflip.kernels.check import Mismatch, check_mapping
from unflip.kernels.mapping import fill, predict_together, shared_predictions
from unflip.layers import binary_layers


@pytest.mark.parametrize("output", ["linear", "tanh"])
@pytest.mark.parametrize("mapping", ["plain", "residual"])
@pytest.mark.parametrize("kernel", [1, 3, 5, (1, 3)])
def test_together_equals_alone_in_value_and_gradient(mapping, kernel, output):
    torch.manual_seed(0)
    convs = nn.Sequential(*[nn.Conv2d(6, 5, kernel) for _ in range(3)]).double()
    options = {"mapping": mapping, "output": output}
    binarize(convs, "lns", keep_first_and_last=False, quiet=True, **options)
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
    layers = [layer for _, layer in binary_layers(model)]
    mapped = [(layer.weight, layer.weight_binarizer) for layer in layers]
    for _, binarizer in mapped:
        binarizer.shared = []
    fill(layers)
    for weight, binarizer in mapped[:2]:
        torch.testing.assert_close(
            binarizer.shared[0], binarizer.mapping(weight), rtol=1e-4, atol=1e-5
        )
    assert mapped[2][1].shared == []


@pytest.mark.parametrize("task_gradient", ["through_f", "straight_through", "both"])
def test_filled_predictions_reach_the_weights_only_through_f(task_gradient):
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    options = {"task_gradient": task_gradient}
    binarize(model, "lns", keep_first_and_last=False, quiet=True, **options)
    with shared_predictions(model):
        fill([layer for _, layer in binary_layers(model)])
        predicted = model[0].weight_binarizer.shared[0]
    leaves = [model[0].weight, model[0].weight_binarizer.mapping.conv1.weight]
    to_w, to_theta = torch.autograd.grad(predicted.sum(), leaves, allow_unused=True)
    assert (to_w is None) == (task_gradient != "through_f")
    assert to_theta is not None


def _mapped_convolution():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3))
    binarize(model, "lns", keep_first_and_last=False, quiet=True)
    return model


def test_a_hidden_value_within_rounding_of_zero_is_not_taken_for_a_wrong_kernel():
    model = _mapped_convolution()
    mapping = model[0].weight_binarizer.mapping
    hidden = []
    mapping.norm1.register_forward_hook(lambda *args: hidden.append(args[-1]))
    mapping(model[0].weight)
    with torch.no_grad():
        mapping.norm1.bias[0] -= hidden[0][0, 0, 0, 0] + 5e-7  # that value is now just below zero
    differences = []

    def fused(mappings, weights):
        predictions = []
        for one, weight in zip(mappings, weights, strict=True):
            plain = predict_together([one], [weight])[0]
            with torch.no_grad():
                one.norm1.bias += 1e-6  # a rounding error, to its other side
            predictions.append(predict_together([one], [weight])[0])
            leaf = one.conv1.weight
            a, b = (
                torch.autograd.grad(p.sum(), leaf, retain_graph=True)[0]
                for p in (plain, predictions[-1])
            )
            differences.append(((a - b).norm() / a.norm()).item())
            one.norm1.bias.data -= 1e-6
        return predictions

    check_mapping({"0": model[0]}, fused, backward=0.001)
    assert len(differences) == 2  # attempts
    assert differences[0] > 0.01 > 1e-5 > differences[1]


@pytest.mark.parametrize("wrong", [0.97, float("nan")])
def test_a_kernel_with_a_wrong_gradient_is_refused_however_often_it_is_looked_at(wrong):
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return wrong * grad

    def fused(mappings, weights):
        return [
            Off.apply(predict_together([m], [w])[0]) for m, w in zip(mappings, weights, strict=True)
        ]

    with pytest.raises(Mismatch, match=r"gradient . of 0 is off by"):
        check_mapping({"0": _mapped_convolution()[0]}, fused)
