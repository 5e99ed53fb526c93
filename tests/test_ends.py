"""8-bit ends: formulas and gradients stated by other means, exact sums, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip.ends import (
    FeatureInput,
    FrozenInt8Conv2d,
    FrozenInt8Linear,
    ImageInput,
    Int8Conv2d,
    Int8Layer,
    Int8Linear,
    quantize_ends,
)

MEAN, STD = [0.49, 0.481, 0.4], [0.2, 0.25, 0.3]
PREPROCESS = {"mean": MEAN, "std": STD}


def net(**conv: Any) -> nn.Sequential:
    """Stem, binary convolution, classifier."""
    options = {"padding": 1, **conv}
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, **options),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def with_ends(**conv: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = net(**conv)
    unflip.binarize(model, "dorefa", ends="int8", preprocess=PREPROCESS, quiet=True)
    return model


def pixels(count: int = 4, size: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, 3, size, size), generator=generator)


def normalized(image: Tensor) -> Tensor:
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (MEAN, STD))
    return (image / 255 - mean) / std


# inputs


def test_normalized_pixels_become_the_pixels_again() -> None:
    every = torch.arange(256).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    quantizer = ImageInput(MEAN, STD)
    zero = torch.tensor([125.0, 123.0, 102.0]).view(3, 1, 1)
    assert torch.equal(quantizer.numbers(normalized(every)), every - zero)
    assert torch.equal(quantizer.zero, zero.flatten())


def test_padding_is_exact_because_zero_stays_zero() -> None:
    nothing = torch.zeros(1, 3, 2, 2)
    for mean in ([0.0, 0.5, 1.0], [-1.0, 2.0, 0.123]):  # also outside of 0 .. 1
        quantizer = ImageInput(mean, STD)
        assert not quantizer.numbers(nothing).any()
        assert not quantizer(nothing).any()


def test_the_gradient_of_an_input_is_one_inside_the_range_and_zero_outside() -> None:
    quantizer = ImageInput([0.5], [0.25])  # n = x · 63.75 + 127.5
    x = torch.tensor([[-3.0, -2.1, -2.0, 0.0, 1.3, 2.0, 2.1]]).view(1, 1, 1, 7).requires_grad_()
    weights = torch.arange(1.0, 8)
    (quantizer(x) * weights).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.flatten(), torch.tensor([0.0, 0, 3, 4, 5, 6, 0]))
    found = quantizer.numbers(x).flatten().tolist()
    assert found == [-128, -128, -128, 0, 82, 127, 127]  # 127.5 rounds to 128, which is even


def test_features_span_their_running_range() -> None:
    quantizer = FeatureInput()
    quantizer.train()
    quantizer(torch.tensor([[-1.0, 3.0]]))
    assert quantizer.range.tolist() == [-1, 3]  # the first batch alone
    quantizer(torch.tensor([[-2.0, 1.0]]))
    assert quantizer.range.tolist() == pytest.approx([-1.1, 2.8])
    low, high = quantizer.range.double().tolist()
    step = (high - low) / 255
    x = torch.linspace(-2, 4, 100)[None]
    before = quantizer.range.clone()
    found = quantizer.eval()(x)
    assert torch.equal(quantizer.range, before)
    expected = (x.double() / step + round(-low / step)).round().clamp(0, 255) - round(-low / step)
    assert torch.allclose(found.double(), expected * step, atol=1e-6)
    assert quantizer(torch.zeros(1, 2)).tolist() == [[0, 0]]


def test_a_range_includes_zero_and_may_be_empty() -> None:
    quantizer = FeatureInput()
    quantizer.train()
    quantizer(torch.full((2, 3), 5.0))
    assert quantizer.range.tolist() == [0, 5]
    assert quantizer.zero.item() == 0
    quantizer = FeatureInput()
    quantizer.train()
    assert quantizer(torch.zeros(2, 3)).tolist() == [[0] * 3] * 2


# weights


def test_weights_are_whole_multiples_of_one_scale_per_filter() -> None:
    model = with_ends(groups=1)
    layer = model[0]
    assert isinstance(layer, Int8Conv2d)
    whole, scales = layer.code()
    channel = 1 / (255 * torch.tensor(STD).double())  # the value of one step of a pixel
    folded = layer.weight.double() * channel.view(1, 3, 1, 1)
    assert torch.equal(whole.flatten(1).abs().amax(1), torch.full((8,), 127.0))
    expected = folded / (folded.flatten(1).abs().amax(1) / 127).view(-1, 1, 1, 1)
    assert (whole - expected).abs().max() <= 0.501
    assert torch.allclose(scales.double() * 127, folded.flatten(1).abs().amax(1))


def test_the_gradient_of_a_weight_is_that_of_the_quantized_one() -> None:
    layer = with_ends()[0]
    assert isinstance(layer, Int8Layer)
    factors = torch.randn_like(layer.weight)
    (layer.quantized_weight() * factors).sum().backward()
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, factors)


def test_a_filter_of_zeros() -> None:
    model = with_ends()
    model[0].weight.data[3] = 0
    whole, scales = model[0].code()
    assert not whole[3].any()
    assert scales[3] == 0
    assert torch.isfinite(model.train()(normalized(pixels()))).all()


# products


@pytest.mark.parametrize(
    "conv",
    [
        {"padding": 1},
        {"padding": 0, "stride": 2},
        {"padding": (2, 1), "stride": (1, 2), "dilation": (1, 2), "bias": False},
    ],
)
def test_a_frozen_network_is_the_evaluated_one_and_its_sums_are_exact(conv: dict[str, Any]) -> None:
    model = with_ends(**conv)
    x = normalized(pixels())
    model.train()(x)
    model.eval()
    frozen = unflip.freeze(model)
    assert torch.equal(frozen(x), model(x))
    first, last = frozen[0], frozen[5]
    assert isinstance(first, FrozenInt8Conv2d)
    assert isinstance(last, FrozenInt8Linear)
    assert first.bytes.dtype == last.bytes.dtype == torch.int8
    assert first.bytes.abs().max() <= 127
    whole = pixels() - first.byte_input.zero.view(3, 1, 1).long()
    sums = nn.functional.conv2d(
        whole.double(), first.bytes.double(), None, first.stride, first.padding, first.dilation
    )
    expected = sums.numpy().astype(np.float32) * first.scales.numpy()[:, None, None]
    if first.bias is not None:
        expected = expected + first.bias.detach().numpy()[:, None, None]
    assert np.array_equal(first(x).detach().numpy(), expected)


def test_training_is_close_to_the_exact_product() -> None:
    model = with_ends()
    x = normalized(pixels())
    model.train()(x)
    first = model[0]
    assert isinstance(first, Int8Conv2d)
    assert torch.allclose(first.train()(x), first.eval()(x), atol=1e-5)


def test_training_learns() -> None:
    model = with_ends()
    x, y = normalized(pixels(16)), torch.arange(16) % 5
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert model[0].weight.grad.abs().max() > 0
    assert model[5].weight.grad.abs().max() > 0


def test_a_compiled_step_has_the_gradients_of_an_eager_one() -> None:
    """As one graph: nothing is read on the host, so the step can be captured on a GPU."""
    gradients = []
    for compiled in (False, True):
        model = with_ends()
        step = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for _ in range(2):
            model.zero_grad()
            step(normalized(pixels())).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()] + list(model.buffers()))
    for eager, compiled_ in zip(*gradients, strict=True):
        assert torch.allclose(eager, compiled_, atol=1e-5)


def test_autocast_is_close_to_the_exact_product() -> None:
    model = with_ends()
    x = normalized(pixels())
    model.train()(x)
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        found = model[0](x)
    exact = model[0](x)
    assert (found - exact).abs().max() < 0.05 * exact.abs().max()


# binarize


def test_summary_and_report_name_the_ends(capsys: pytest.CaptureFixture[str]) -> None:
    model = unflip.binarize(net(), "dorefa", ends="int8", preprocess=PREPROCESS)
    assert "8 bits: 0, 5 (256 weights)" in capsys.readouterr().out
    assert [layer.reason for layer in unflip.summary(model)] == ["int8", "dorefa", "int8"]
    assert [type(model[i]) for i in (0, 5)] == [Int8Conv2d, Int8Linear]
    assert type(unflip.binarize(net(), "dorefa", quiet=True)[0]) is nn.Conv2d


def test_cost_counts_eight_bits() -> None:
    model = with_ends()
    model.train()(normalized(pixels()))
    for counted in (model, unflip.freeze(model)):
        first, binary, last = unflip.cost(counted, normalized(pixels())).layers
        assert (first.weight_bits, first.input_bits) == (8, 8)
        assert first.memory_bits == 8 * 216 + 32 * (8 + 8)  # weights, scales, biases
        assert first.flops == first.macs
        assert binary.weight_bits == 1
        assert last.memory_bits == 8 * 40 + 32 * (5 + 5)


def test_weights_of_a_float_twin_fit_both_ways() -> None:
    torch.manual_seed(1)
    other = net()
    model = with_ends()
    model.train()(normalized(pixels()))
    seen = model[5].byte_input.range.clone()
    unflip.load_twin(model, other.state_dict())
    assert torch.equal(model[0].weight, other[0].weight)
    assert torch.equal(model[5].byte_input.range, seen)
    plain = unflip.binarize(net(), "dorefa", quiet=True)
    unflip.load_twin(plain, model.state_dict())
    assert torch.equal(plain[0].weight, other[0].weight)


def test_a_state_dict_restores_everything() -> None:
    model = with_ends()
    x = normalized(pixels())
    model.train()(x)
    copy = with_ends()
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy.eval()(x), model.eval()(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ends": "int4"}, "ends='int4' is not one of 'float', 'int8'"),
        ({"ends": "int8"}, "needs preprocess"),
        ({"ends": "int8", "preprocess": {"mean": [0.5]}}, "should be {'mean'"),
        ({"ends": "int8", "preprocess": {"mean": [0.5], "std": [0.5]}}, "3 numbers each"),
        ({"ends": "int8", "preprocess": {"mean": MEAN, "std": [1, 0, 1]}}, "std above 0"),
        ({"ends": "int8", "preprocess": {"mean": [1, np.nan, 1], "std": STD}}, "finite"),
        (
            {"ends": "int8", "preprocess": PREPROCESS, "keep_first_and_last": False},
            "keep_first_and_last=True",
        ),
        ({"preprocess": PREPROCESS}, "no effect with ends='float'"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=r".") as caught:
        unflip.binarize(model, "dorefa", quiet=True, **options)
    assert message in str(caught.value)
    assert [type(m) for m in model if isinstance(m, nn.Conv2d)] == [nn.Conv2d, nn.Conv2d]


def test_refused_layers() -> None:
    wide = nn.Sequential(nn.Linear(4, 4), nn.Linear(65_537, 2))
    with pytest.raises(ValueError, match="65,537 weights, and at most 65,536"):
        quantize_ends(wide, None)
    double = nn.Sequential(nn.Linear(4, 4)).double()
    with pytest.raises(ValueError, match=r"not float32; call \.float\(\)"):
        quantize_ends(double, None)
    with pytest.raises(ValueError, match="no convolution or linear layer"):
        quantize_ends(nn.ReLU(), None)
    named = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"'0' .* cannot have 8 bits"):
        quantize_ends(named, None)


def test_a_range_that_is_unknown_cannot_be_frozen() -> None:
    with pytest.raises(ValueError, match="'5' cannot be frozen: it has seen no batch in training"):
        unflip.freeze(with_ends())
    model = with_ends()
    model.train()(normalized(pixels()))
    model[0].weight.data[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="'0' cannot be frozen: it has NaN"):
        unflip.freeze(model)


def test_groups_fold_the_scale_of_their_own_channels() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2))
    mean, std = [0.1, 0.4, 0.5, 0.9], [0.1, 0.2, 0.3, 0.4]
    quantize_ends(layer, {"mean": mean, "std": std})
    image = torch.randint(256, (2, 4, 5, 5))
    x = (image / 255 - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    exact, trained = layer.eval()(x), layer.train()(x)
    assert torch.allclose(exact, trained, atol=1e-5)
    plain = nn.functional.conv2d(x, layer[0].weight, layer[0].bias, groups=2)
    assert (exact - plain).abs().max() < 0.05
