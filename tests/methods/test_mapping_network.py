"""f, the mapping network of LNS: its shape for every kind of layer, and which weights it sees."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unflip
from unflip.layers import (
    BinaryConv2d,
    BinaryLayer,
    BinaryLinear,
)
from unflip.methods.lns import (
    CHUNK,
    MappedSign,
    MappingNetwork,
)

Net = Callable[..., nn.Module]


def mapped(layer: nn.Module) -> MappedSign:
    assert isinstance(layer, BinaryLayer)
    assert isinstance(layer.weight_binarizer, MappedSign)
    return layer.weight_binarizer


@pytest.mark.parametrize(("c", "out"), [(16, 16), (3, 10), (1, 4)])
def test_mapping_has_the_papers_shape(c: int, out: int) -> None:
    f = mapped(BinaryConv2d(c, out, 3, method="lns")).mapping
    convs = [m for m in f.modules() if isinstance(m, nn.Conv2d)]
    assert [tuple(m.weight.shape) for m in convs] == [
        (2 * c, c, 3, 3),
        (2 * c, 2 * c, 3, 3),
        (c, 2 * c, 3, 3),
    ]
    for m in convs:
        assert (m.stride, m.padding, m.dilation, m.groups) == ((1, 1), (1, 1), (1, 1), 1)
    assert f.norm1.weight.shape == f.norm2.bias.shape == (2 * c,)


def test_mapping_is_conv_norm_relu_twice_and_conv() -> None:
    layer = BinaryConv2d(4, 9, 3, method="lns")
    f = mapped(layer).mapping
    with torch.no_grad():
        for norm in (f.norm1, f.norm2):
            norm.weight.uniform_(0.5, 2)
            norm.bias.uniform_(-1, 1)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean = x.mean((0, 2, 3), keepdim=True)
        var = (x - mean).square().mean((0, 2, 3), keepdim=True)
        unit = (x - mean) / (var + 1e-5).sqrt()
        return unit * weight[:, None, None] + bias[:, None, None]

    h = F.conv2d(layer.weight, f.conv1.weight, padding=1)
    h = norm(h, f.norm1.weight, f.norm1.bias).relu()
    h = norm(F.conv2d(h, f.conv2.weight, padding=1), f.norm2.weight, f.norm2.bias).relu()
    expected = F.conv2d(h, f.conv3.weight, f.conv3.bias, padding=1)
    torch.testing.assert_close(f(layer.weight), expected)


LAYERS: dict[str, Any] = {
    "3x3": lambda **o: BinaryConv2d(4, 10, 3, **o),
    "1x1": lambda **o: BinaryConv2d(6, 10, 1, **o),
    "5x5": lambda **o: BinaryConv2d(3, 6, 5, padding=2, **o),
    "11x11": lambda **o: BinaryConv2d(3, 4, 11, padding=5, stride=4, **o),
    "1x3": lambda **o: BinaryConv2d(4, 6, (1, 3), **o),
    "3x1": lambda **o: BinaryConv2d(4, 6, (3, 1), **o),
    "2x2": lambda **o: BinaryConv2d(4, 6, 2, **o),
    "grouped": lambda **o: BinaryConv2d(8, 12, 3, groups=4, **o),
    "depthwise": lambda **o: BinaryConv2d(6, 6, 3, groups=6, **o),
    "depthwise 1x1": lambda **o: BinaryConv2d(6, 6, 1, groups=6, **o),
    "one filter": lambda **o: BinaryConv2d(4, 1, 3, **o),
    "linear": lambda **o: BinaryLinear(20, 12, **o),
    "linear 513": lambda **o: BinaryLinear(CHUNK + 1, 5, **o),
    "linear 1300": lambda **o: BinaryLinear(1300, 3, **o),
    "1x1 600": lambda **o: BinaryConv2d(600, 4, 1, **o),
}


def an_input(layer: BinaryLayer) -> Tensor:
    if isinstance(layer, nn.Linear):
        return torch.randn(3, layer.in_features)
    assert isinstance(layer, nn.Conv2d)
    return torch.randn(2, layer.in_channels, 12, 12)


@pytest.mark.parametrize("statistics", ["filters", "fixed"])
@pytest.mark.parametrize("kind", LAYERS)
def test_any_layer(kind: str, statistics: str) -> None:
    layer = LAYERS[kind](method={"name": "lns", "statistics": statistics})
    f = mapped(layer).mapping
    assert f(layer.weight).shape == layer.weight.shape
    x = an_input(layer)
    out = layer(x)
    assert out.isfinite().all()
    (out.square().mean() + unflip.auxiliary_loss(layer)).backward()
    assert layer.weight.grad is not None
    assert (layer.weight.grad != 0).float().mean() > 0.6, "f passes gradient to all of W"
    for name, parameter in f.named_parameters():
        assert parameter.grad is not None, name
        if parameter.dim() == 4:  # no tap of a kernel is dead: it would see nothing but padding
            assert (parameter.grad.abs().sum((0, 1)) > 0).all(), name
    assert torch.equal(unflip.freeze(layer)(x), layer.eval()(x))


def fixed(layer: BinaryLayer) -> MappingNetwork:
    assert layer.method.statistics == "fixed"  # type: ignore[attr-defined]
    return mapped(layer).mapping


def moved_by(f: MappingNetwork, weight: Tensor, index: tuple[int, ...]) -> Tensor:
    """Where q̂ changes when one weight does."""
    other = weight.detach().clone()
    other[index] += 10
    with torch.no_grad():
        return f(weight) != f(other)


def test_f_sees_a_whole_filter_and_only_that() -> None:
    layer = BinaryConv2d(4, 6, 3, method={"name": "lns", "statistics": "fixed"})
    moved = moved_by(fixed(layer), layer.weight, (2, 1, 0, 0))
    assert moved[2].flatten(1).any(1).all(), "every channel of the filter"
    assert moved[2, :, 2, 2].any(), "three 3×3 convolutions reach the opposite corner"
    assert not moved[[0, 1, 3, 4, 5]].any(), "filters are the batch"


def test_statistics_over_filters_tie_the_filters_together() -> None:
    layer = BinaryConv2d(4, 6, 3, method="lns")
    f = mapped(layer).mapping
    assert moved_by(f, layer.weight, (2, 1, 0, 0)).flatten(1).any(1).all()
    # and make f blind to the scale of W, as BatchNorm is
    torch.testing.assert_close(f(8 * layer.weight), f(layer.weight), rtol=1e-2, atol=1e-3)


def test_groups_share_f_and_keep_their_filters_apart() -> None:
    layer = BinaryConv2d(8, 12, 3, groups=4, method={"name": "lns", "statistics": "fixed"})
    f = fixed(layer)
    assert f.conv1.in_channels == 2
    weight = layer.weight.detach().clone()
    weight[9] = weight[0]  # the same filter in another group
    with torch.no_grad():
        q_hat = f(weight)
    torch.testing.assert_close(q_hat[9], q_hat[0])


@pytest.mark.parametrize("inputs", [CHUNK, CHUNK + 1, 700, 1025, 1300])
def test_wide_rows_are_cut_into_chunks_that_share_f(inputs: int) -> None:
    layer = BinaryLinear(inputs, 3, method={"name": "lns", "statistics": "fixed"})
    f = fixed(layer)
    chunks = math.ceil(inputs / CHUNK)
    width = math.ceil(inputs / chunks)
    assert f.conv1.weight.shape == (2 * width, width, 1, 1)
    for place in (0, width - 1, inputs - 1):
        moved = moved_by(f, layer.weight, (1, place))
        chunk = place // width
        assert moved[1, chunk * width : (chunk + 1) * width].float().mean() > 0.9
        moved[1, chunk * width : (chunk + 1) * width] = False
        assert not moved.any(), "nothing outside the row's own chunk"


def test_a_single_filter_of_single_values_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 1, 1), nn.Flatten(), nn.Linear(9, 2))
    with pytest.raises(ValueError, match=r"cannot binarize '1': lns: .*\(1, 4, 1, 1\).*skip it"):
        unflip.binarize(model, "lns")
    assert type(model[1]) is nn.Conv2d, "the model is left as it was"
    with pytest.raises(
        ValueError, match="skip it"
    ):  # its warm start would measure the same nothing
        unflip.binarize(model, "lns", statistics="fixed")


def test_layers_that_are_not_3x3_have_room_enough() -> None:
    """AlexNet's first layer has three channels: twice that is too few to learn 23,232 signs."""
    layer = unflip.BinaryConv2d(3, 64, 11, stride=4, method="lns")
    assert layer.weight_binarizer.mapping.conv1.out_channels == 32
    assert (
        unflip.BinaryConv2d(3, 64, 3, method="lns").weight_binarizer.mapping.conv1.out_channels == 6
    )
