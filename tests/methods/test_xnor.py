"""XNOR-Net: the K map against a loop over its definition, and centred, clipped latent weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unflip
from unflip.layers import BinaryConv2d, BinaryLinear

CONVS: list[dict[str, Any]] = [
    {},
    {"padding": 1},
    {"stride": 2, "padding": 1},
    {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
    {"dilation": 2, "padding": 2},
    {"groups": 2, "padding": 1},
    {"groups": 4, "stride": 2},
    {"kernel_size": (1, 3), "padding": (0, 1), "groups": 2, "stride": (3, 2), "dilation": (1, 3)},
    {"kernel_size": 1},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    {"kernel_size": 3, "padding": (1, 2), "padding_mode": "reflect", "stride": 2},
]


def conv(options: dict[str, Any], **more: Any) -> BinaryConv2d:
    arguments = {"kernel_size": 3, "dtype": torch.float64, "method": "xnor", **options, **more}
    return BinaryConv2d(4, 8, **arguments)


def padded(x: Tensor, layer: nn.Conv2d) -> Tensor:
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    if layer.padding == "same":  # torch puts the odd one at the end
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        top, left = total[0] // 2, total[1] // 2
        return F.pad(x, (left, total[1] - left, top, total[0] - top), mode=mode)
    if layer.padding == "valid":
        return x
    ph, pw = layer.padding
    return F.pad(x, (pw, pw, ph, ph), mode=mode)


def naive(x: Tensor, layer: BinaryConv2d) -> tuple[Tensor, Tensor]:
    """(sign(x) ⊛ Q, K), both by loops over the definition."""
    groups, (kh, kw), (sh, sw) = layer.groups, layer.kernel_size, layer.stride
    dh, dw = layer.dilation
    signs, sizes = padded(torch.where(x >= 0, 1.0, -1.0).double(), layer), padded(x.abs(), layer)
    w = layer.weight.detach()
    height = (signs.shape[2] - dh * (kh - 1) - 1) // sh + 1
    width = (signs.shape[3] - dw * (kw - 1) - 1) // sw + 1
    product = x.new_zeros(len(x), len(w), height, width)
    k_map = torch.zeros_like(product)
    inside, outside = x.shape[1] // groups, len(w) // groups
    for o in range(len(w)):
        g = o // outside
        channels = slice(g * inside, (g + 1) * inside)
        q = w[o].abs().mean() * torch.where(w[o] >= 0, 1.0, -1.0)
        for i in range(height):
            for j in range(width):
                rows = slice(i * sh, i * sh + dh * (kh - 1) + 1, dh)
                columns = slice(j * sw, j * sw + dw * (kw - 1) + 1, dw)
                product[:, o, i, j] = (signs[:, channels, rows, columns] * q).sum((1, 2, 3))
                box = sizes[:, channels, rows, columns].mean(1)
                k_map[:, o, i, j] = box.sum((1, 2)) / (kh * kw)
    return product, k_map


@pytest.mark.parametrize("options", CONVS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_k_map_against_a_loop(options: dict[str, Any], bias: bool) -> None:
    layer = conv(options, bias=bias)
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    x[0, 0, 0, 0], x[0, 1, 2, 3], x[1, 2, 3, 4] = 0.0, -0.0, 1e3
    product, k_map = naive(x, layer)
    scale = layer.input_binarizer.output_scale(x, layer)
    torch.testing.assert_close(scale, k_map)
    expected = product * k_map
    if layer.bias is not None:  # after K: the bias belongs to the output
        expected = expected + layer.bias[:, None, None]
    torch.testing.assert_close(layer(x), expected)


def test_an_image_without_a_batch() -> None:
    layer = conv({"padding": 1, "groups": 2})
    x = torch.randn(4, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer(x[None])[0])


def test_linear() -> None:
    layer = BinaryLinear(3, 2, method="xnor")
    layer.weight.data = torch.tensor([[1.0, -2.0, 0.0], [-3.0, -3.0, 3.0]])
    layer.bias.data = torch.tensor([5.0, -5.0])
    x = torch.tensor([[0.5, 1.0, -4.5], [0, 0, 0.3]])
    # K = 2 and 0.1; sign(x) = [1, 1, -1] and [1, 1, 1]; α = 1 and 3
    expected = torch.tensor([[2 * -1 + 5, 2 * -9 - 5], [0.1 * 1 + 5, 0.1 * -3 - 5]])
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x.view(2, 1, 3)), expected.view(2, 1, 2))


def test_without_the_k_map() -> None:
    layer = conv({"padding": 1}, method={"name": "xnor", "k_map": False})
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    product, _ = naive(x, layer)
    torch.testing.assert_close(layer(x), product + layer.bias[:, None, None])


@pytest.mark.parametrize("options", CONVS[:6], ids=str)
def test_input_gradient_is_straight_through_plus_that_of_k(options: dict[str, Any]) -> None:
    layer = conv(options, bias=False)
    x = (1.2 * torch.randn(1, 4, 5, 5, dtype=torch.float64)).requires_grad_()
    out = layer(x)
    upstream = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, x, upstream)

    point = x.detach()
    product, k_map = naive(point, layer)
    weight = layer.code().dense()
    settings = (layer.stride, layer.padding, layer.dilation, layer.groups)
    leaf = torch.zeros_like(point, requires_grad=True)
    F.conv2d(leaf, weight, None, *settings).backward(upstream * k_map)
    assert leaf.grad is not None
    through = leaf.grad * (point.abs() <= 1)
    step = 1e-6
    moves = step * torch.eye(point.numel(), dtype=torch.float64).view(-1, *point.shape[1:])
    above = layer.input_binarizer.output_scale(point + moves, layer)
    below = layer.input_binarizer.output_scale(point - moves, layer)
    assert above is not None
    of_k = ((above - below) * upstream * product).sum((1, 2, 3)).div(2 * step).view_as(point)
    torch.testing.assert_close(found, through + of_k, rtol=1e-6, atol=1e-7)


def test_weight_gradient() -> None:
    layer = BinaryLinear(12, 2, bias=False, method="xnor")
    points = [0.0, -0.0, 1e-8, -1e-8, 0.5, -0.5, 1, -1, 1.0001, -1.0001, 30, -30]
    layer.weight.data = torch.tensor([points, points])
    upstream = torch.randn(2, 12)
    (grad,) = torch.autograd.grad(layer.binary_weight(), layer.weight, upstream)
    w = layer.weight.detach()
    alpha = w.abs().mean(1, keepdim=True)
    torch.testing.assert_close(grad, upstream * (1 / 12 + alpha * (w.abs() <= 1)))


def test_after_step_centres_over_input_channels_then_clips() -> None:
    layer = BinaryConv2d(2, 1, (1, 2), method="xnor")
    layer.weight.data = torch.tensor([[[[3.0, 0.5]], [[-5.0, 0.1]]]])
    weight = layer.weight
    unflip.after_step(layer)
    assert layer.weight is weight
    torch.testing.assert_close(
        layer.weight.detach(), torch.tensor([[[[1.0, 0.2]], [[-1.0, -0.2]]]])
    )


def test_after_step_does_not_centre_a_single_channel_to_nothing() -> None:
    layer = BinaryConv2d(4, 4, 3, groups=4, method="xnor")
    before = layer.weight.detach().clone()
    unflip.after_step(layer)
    assert torch.equal(layer.weight, before.clamp(-1, 1))
    assert layer.weight.abs().sum() > 0


def test_the_released_gradient_is_a_factor_per_layer() -> None:
    """n (1 − 1/c) = 36 · 3/4 for weights inside (−1, 1); the rest of the layer is the same."""
    torch.manual_seed(0)
    plain = conv({})
    released = conv({}, method=unflip.methods.get("xnor", gradient="released"))
    released.weight, released.bias = (nn.Parameter(p.detach().clone()) for p in plain.parameters())
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for layer in (plain, released):
        layer(x).square().sum().backward()
    assert plain.weight.grad is not None
    torch.testing.assert_close(released.weight.grad, 27 * plain.weight.grad)
