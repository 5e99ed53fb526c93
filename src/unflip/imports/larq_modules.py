"""Torch modules for Keras's layers that torch does not have, and convolutions with Keras's paddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip.imports.larq_quantizers import LarqMethod
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.base import BinaryWeight, InputBinarizer

Sides = tuple[int, int]  # zeros before and after, along one axis


def same_padding(size: int, kernel: int, stride: int, dilation: int = 1) -> Sides:
    """TensorFlow's SAME: ceil(size / stride) outputs, and the odd zero comes after."""
    outputs = -(-size // stride)
    total = max((outputs - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


def conv_of(
    weight: Tensor | BinaryWeight,
    inputs: InputBinarizer,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[Sides, Sides],
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> nn.Conv2d:
    """A convolution with these weights: a binary one for a ``BinaryWeight``."""
    conv: nn.Conv2d
    if isinstance(weight, BinaryWeight):
        conv = BinaryConv2d(1, 1, 1, bias=False, method=LarqMethod(weight, inputs))
        weight = weight.dense()
    else:
        conv = nn.Conv2d(1, 1, 1, bias=False)  # its own weight is replaced
    conv.out_channels, conv.in_channels = weight.shape[0], weight.shape[1] * groups
    conv.kernel_size = (weight.shape[2], weight.shape[3])
    conv.stride, conv.dilation, conv.groups = stride, dilation, groups
    conv.weight = nn.Parameter(weight)
    conv.bias = None if bias is None else nn.Parameter(bias)
    (top, bottom), (left, right) = padding
    conv.padding = (top, left)
    conv._reversed_padding_repeated_twice = [left, right, top, bottom]
    if (top, left) != (bottom, right):
        # zeros by F.pad, which may differ on both sides; torch's constructor does not offer it
        conv.padding_mode = "constant"  # type: ignore[assignment]
    return conv


def linear_of(
    weight: Tensor | BinaryWeight, inputs: InputBinarizer, bias: Tensor | None
) -> nn.Linear:
    """A linear layer with these weights: a binary one for a ``BinaryWeight``."""
    layer: nn.Linear
    if isinstance(weight, BinaryWeight):
        layer = BinaryLinear(1, 1, bias=False, method=LarqMethod(weight, inputs))
        weight = weight.dense()
    else:
        layer = nn.Linear(1, 1, bias=False)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer


class Levels(nn.Module):
    """A quantizer whose result stays float: a binary convolution of each channel with one weight, +1."""

    def __init__(self, inputs: InputBinarizer, channels: int) -> None:
        super().__init__()
        one = BinaryWeight(torch.ones(1, channels, 1, 1, 1), torch.ones(1, 1, 1, 1, 1))
        self.conv = conv_of(one, inputs, None, (1, 1), ((0, 0), (0, 0)), groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return self.conv(x[:, :, None, None]).flatten(1)
        return self.conv(x)


class Pool(nn.Module):
    """A max or average pool with Keras's paddings. Padding does not count in an average."""

    def __init__(
        self,
        kind: str,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[Sides, Sides],
    ) -> None:
        super().__init__()
        uneven = [before != after for before, after in padding]
        # An odd zero after the image is what rounding up adds. At stride 1 it is not: pad more, and drop the first.
        drop = [odd and step == 1 for odd, step in zip(uneven, stride, strict=True)]
        self.first = (int(drop[0]), int(drop[1]))
        sides = [sides[first] for sides, first in zip(padding, self.first, strict=True)]
        options: dict[str, Any] = {"padding": tuple(sides), "ceil_mode": any(uneven)}
        if kind == "max":
            self.pool: nn.Module = nn.MaxPool2d(kernel, stride, **options)
        else:
            self.pool = nn.AvgPool2d(kernel, stride, **options, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        high, wide = self.first
        x = self.pool(x)
        return x[:, :, high:, wide:] if high or wide else x


class GlobalPool(nn.Module):
    """The mean or the largest value of all pixels."""

    def __init__(self, kind: str, keep: bool) -> None:
        super().__init__()
        self.kind, self.keep = kind, keep

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "max":
            return x.amax((2, 3), keepdim=self.keep)
        return x.mean((2, 3), keepdim=self.keep)


class Combine(nn.Module):
    """Add, Subtract, Multiply or Average of several values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *values: Tensor) -> Tensor:
        total = values[0]
        for value in values[1:]:
            if self.kind == "Multiply":
                total = total * value
            else:
                total = total - value if self.kind == "Subtract" else total + value
        return total / len(values) if self.kind == "Average" else total


class Concat(nn.Module):
    def forward(self, *values: Tensor) -> Tensor:
        return torch.cat(values, 1)


class Channels(nn.Module):
    """Some of the channels, as one output of tf.split."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.start, self.stop = start, stop

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.start : self.stop]


class AddToLast(nn.Module):
    """x plus y, where y is added to the last channels of x (MeliusNet's improvement block)."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + F.pad(y, (0, 0, 0, 0, x.shape[1] - y.shape[1], 0))


class AsImage(nn.Module):
    """A vector as an image of one pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, None, None]


class Clip(nn.Module):
    """x · scale + shift, clipped to low .. high, and then also a slope outside."""

    def __init__(
        self,
        low: float | None,
        high: float | None,
        scale: float = 1.0,
        shift: float = 0.0,
        outside: float = 0.0,
    ) -> None:
        super().__init__()
        self.low, self.high, self.scale, self.shift, self.outside = low, high, scale, shift, outside

    def forward(self, x: Tensor) -> Tensor:
        x = x if (self.scale, self.shift) == (1, 0) else x * self.scale + self.shift
        if self.low is None and self.high is None:
            return x
        inside = x.clamp(self.low, self.high)
        return inside * (1 - self.outside) + x * self.outside if self.outside else inside
