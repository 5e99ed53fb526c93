"""ResNet: Deep Residual Learning for Image Recognition, and its 1-bit forms.

He et al., CVPR 2016, arXiv:1512.03385. The 1-bit forms differ in the layers around a convolution:

plain           He et al.: conv → BN → ReLU, one shortcut per block
bireal          Bi-Real Net, Liu et al., ECCV 2018, arXiv:1808.00278: (sign →) conv → BN, then add; one
                shortcut per convolution, so the float values between blocks are never cut off
bireal-prelu    "with PReLU after every binary convolution", Han et al., ICML 2020, arXiv:2010.04871:
                conv → PReLU → BN, then add
reactnet        ReActNet's ResNet-18, Liu et al., ECCV 2020, arXiv:2003.03488: (RSign →) conv → BN, add, then PReLU
adabin          AdaBin's ResNet-18, Tu et al., ECCV 2022, arXiv:2208.08084: as reactnet, with a PReLU also in the stem
                and BatchNorm between the mean and the linear layer
conv-prelu-bn   ResNet-20 of FDA-BNN, Xu et al., NeurIPS 2021, who share authors with Han et al.
conv-bn-hardtanh  ResNet-20 of IR-Net, Qin et al., CVPR 2020, arXiv:1909.10788
conv-bn-prelu   the order of ReActNet: conv → BN, add, then PReLU
adabin          ResNet-20 of AdaBin: as conv-bn-prelu, with BatchNorm between the mean and the linear layer

A binary layer binarizes its input itself, so there is no sign in this file. Weights start as torch initializes them.
The orders of bireal, reactnet and adabin are those of the released code. That of bireal-prelu is inferred: later code
of the same authors has conv → PReLU → BN.
One file of more than 400 lines, because all forms share their blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from unflip.layers import normalized
from unflip.methods import Carry
from unflip.models.base import (
    Activation,
    MethodLike,
    activation_module,
    binary_twin,
    check_options,
    check_sizes,
    choose_activation,
    float_inputs,
    register_model,
    resolve_method,
    scaled_channels,
)

Shortcut = Literal["block", "conv"]
Order = Literal["conv-prelu-bn", "conv-bn-hardtanh", "conv-bn-prelu", "adabin"]
Variant = Literal["plain", "bireal", "bireal-prelu", "reactnet", "adabin"]
Downsample = Literal["float", "binary"]
Pixels = Literal["every-second", "mean"]

# (channels in, channels out, stride) -> the shortcut around a convolution that changes the shape
MakeShortcut = Callable[[int, int, int], nn.Module]


@dataclass(frozen=True)
class Style:
    """The layers around the two convolutions of a block."""

    shortcut: Shortcut
    prelu: bool = False  # between convolution and BatchNorm
    prelu_after: bool = False  # in the place of ``after``
    before: Activation = "identity"  # on a convolution's input
    after: Activation = "identity"  # after BatchNorm, or after the add if there is one


class Block(nn.Module):
    """Two 3×3 convolutions with one shortcut around both, or one around each."""

    def __init__(
        self, c_in: int, c_out: int, stride: int, style: Style, downsample: nn.Module
    ) -> None:
        super().__init__()
        self.per_conv = style.shortcut == "conv"
        self.before1 = activation_module(style.before)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False)
        self.prelu1 = nn.PReLU(c_out) if style.prelu else nn.Identity()
        self.bn1 = nn.BatchNorm2d(c_out)
        self.after1 = _after(style, c_out)
        self.before2 = activation_module(style.before)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.prelu2 = nn.PReLU(c_out) if style.prelu else nn.Identity()
        self.bn2 = nn.BatchNorm2d(c_out)
        self.after2 = _after(style, c_out)
        self.downsample = downsample
        self.carry1 = Carry(c_out) if self.per_conv else nn.Identity()
        self.carry2 = Carry(c_out)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.downsample(x)
        carried = self.carry1(shortcut) if self.per_conv else None
        y = self.after1(normalized(self.conv1, self.prelu1, self.bn1, self.before1(x), carried))
        carried = self.carry2(y if self.per_conv else shortcut)
        return self.after2(normalized(self.conv2, self.prelu2, self.bn2, self.before2(y), carried))


def _after(style: Style, channels: int) -> nn.Module:
    return nn.PReLU(channels) if style.prelu_after else activation_module(style.after)


def stage(
    c_in: int, c_out: int, blocks: int, stride: int, style: Style, shortcut: MakeShortcut
) -> nn.Sequential:
    """``blocks`` blocks. If the shape changes, the first one changes it."""
    layers = []
    for i in range(blocks):
        c, s = (c_in, stride) if i == 0 else (c_out, 1)
        changes = c != c_out or s != 1
        layers.append(
            Block(c, c_out, s, style, shortcut(c, c_out, s) if changes else nn.Identity())
        )
    return nn.Sequential(*layers)


class OptionA(nn.Module):
    """He et al.'s shortcut without weights: every second pixel, new channels zero, half on each side.

    ``x[::2]`` and a 3×3 convolution of stride 2 and padding 1 both give ceil(n / 2) pixels, for odd n too. With
    ``pixels="mean"`` it is the mean of 2×2 pixels, so that none is dropped. If the next stage is narrower (``widths``
    can do that), the first channels are kept and the rest are dropped.
    """

    def __init__(self, c_in: int, c_out: int, stride: int, pixels: Pixels = "every-second") -> None:
        super().__init__()
        self.stride = stride
        self.mean = pixels == "mean" and stride > 1
        self.kept = min(c_in, c_out)
        self.below = (c_out - self.kept) // 2
        self.above = c_out - self.kept - self.below

    def forward(self, x: Tensor) -> Tensor:
        if self.mean:
            x = F.avg_pool2d(x[:, : self.kept], self.stride, ceil_mode=True)
        else:
            x = x[:, : self.kept, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.below, self.above))

    def extra_repr(self) -> str:
        mean = ", mean of pixels" if self.mean else ""
        return f"stride={self.stride}, zero_channels=({self.below}, {self.above}){mean}"


class CifarResNet(nn.Module):
    """3×3 stem, stages of as many blocks each, mean over the image, linear."""

    def __init__(
        self,
        channels: Sequence[int],
        blocks: int,
        style: Style,
        order: Order,
        stem_activation: nn.Module,
        shortcut: MakeShortcut,
        num_classes: int,
        in_channels: int,
    ) -> None:
        super().__init__()
        head_norm = order in ("conv-bn-hardtanh", "adabin")
        first, last = channels[0], channels[-1]
        self.conv1 = nn.Conv2d(in_channels, first, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.stem_activation = stem_activation
        self.stages = [f"layer{number}" for number in range(1, len(channels) + 1)]
        for name, c_in, c_out in zip(self.stages, (first, *channels), channels, strict=False):
            stride = 1 if name == "layer1" else 2
            self.add_module(name, stage(c_in, c_out, blocks, stride, style, shortcut))
        self.head_activation = activation_module("relu" if style.prelu else "identity")
        self.head_norm = nn.BatchNorm1d(last) if head_norm else nn.Identity()
        self.fc = nn.Linear(last, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_activation(self.bn1(self.conv1(x)))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        x = self.head_activation(x).mean((2, 3))
        return self.fc(self.head_norm(x))


def _cifar_style(shortcut: Shortcut, order: Order) -> Style:
    return {
        "conv-prelu-bn": Style(shortcut, prelu=True),
        "conv-bn-hardtanh": Style(shortcut, after="hardtanh"),
        "conv-bn-prelu": Style(shortcut, prelu_after=True),
        "adabin": Style(shortcut, prelu_after=True),
    }[order]


@register_model("resnet20", input_shape=(3, 32, 32), parts=3)
def resnet20(
    method: MethodLike = "float",
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    width: int = 16,
    widths: Sequence[float] | None = None,
    shortcut: Shortcut = "block",
    order: Order = "conv-prelu-bn",
    pixels: Pixels = "every-second",
) -> nn.Module:
    """ResNet-20 for small images (32×32; 8×8 and odd sizes work), of width 16, 32, 64.

    widths    three factors on the channels of the stages, the stem's being the first stage's; the products
              are rounded to multiples of 8. A shortcut into a narrower stage keeps the first channels.
    shortcut  "block": one around two convolutions. "conv": one around each (Bi-Real).
    order     "conv-prelu-bn": y = bn(prelu(conv(x))), then the add and nothing after it; the stem is
              conv → BN, the head ReLU → mean → linear. This is FDA-BNN's released ResNet-20; it shares
              authors with Han et al. (ICML 2020), who do not say which order they have. PReLU starts at
              0.25 and has one slope per channel, which is our choice: FDA-BNN has one for all channels.
              "conv-bn-hardtanh": hardtanh(bn(conv(x)) + shortcut); the stem is conv → BN → hardtanh, the
              head mean → BatchNorm → linear. This is IR-Net's released code.
              "conv-bn-prelu": prelu(bn(conv(x)) + shortcut), one slope per channel; the stem is
              conv → BN → PReLU, the head mean → linear. This is the order of ReActNet and most later
              networks; no paper has exactly this ResNet-20.
              "adabin": the same with the head mean → BatchNorm → linear. With shortcut="conv" this is
              AdaBin's released ResNet-20.
    pixels    which pixels a shortcut keeps if the image becomes smaller: "every-second" (He et al.) or the
              "mean" of 2×2.

    Shortcuts that change the shape have no weights (:class:`OptionA`), so only the stem and ``fc`` stay float.
    """
    check_options(
        "resnet20", shortcut=(shortcut, Shortcut), order=(order, Order), pixels=(pixels, Pixels)
    )
    check_sizes("resnet20", num_classes=num_classes, in_channels=in_channels, width=width)
    style = _cifar_style(shortcut, order)
    channels = scaled_channels("resnet20", (width, 2 * width, 4 * width), widths, "stage")
    parts = style, order, _after(style, channels[0]), partial(OptionA, pixels=pixels)
    model = CifarResNet(channels, 3, *parts, num_classes, in_channels)
    return binary_twin(model, resolve_method(method))


def strided_projection(c_in: int, c_out: int, stride: int) -> nn.Module:
    """He et al.: a 1×1 convolution that skips pixels."""
    conv = nn.Conv2d(c_in, c_out, 1, stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out))


def pooled_projection(c_in: int, c_out: int, stride: int) -> nn.Module:
    """Bi-Real Net: average first, so that no pixel is dropped, then a 1×1 convolution.

    With ceil_mode an odd size n becomes ceil(n / 2), as in the convolution beside it. Convolution and BatchNorm have
    the names they have in :func:`strided_projection`, so one variant can load the weights of the other.
    """
    pool = nn.AvgPool2d(stride, ceil_mode=True)
    conv = nn.Conv2d(c_in, c_out, 1, bias=False)
    return nn.Sequential(OrderedDict({"pool": pool, "0": conv, "1": nn.BatchNorm2d(c_out)}))


@register_model("resnet18_cifar", input_shape=(3, 32, 32), parts=4)
def resnet18_cifar(
    method: MethodLike = "float",
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    width: int = 64,
    widths: Sequence[float] | None = None,
    shortcut: Shortcut = "block",
    order: Order = "conv-prelu-bn",
    pixels: Pixels = "every-second",
    downsample: Downsample | None = None,
) -> nn.Module:
    """ResNet-18 for small images, of width 64 to 512: a 3×3 stem without a pool, four stages of two blocks.

    This is the "ResNet-18" of papers on CIFAR-10. Options as for ResNet-20, except that shortcuts which change the
    shape have weights, as in all released networks:

    widths      four factors on the channels of the stages
    order       "conv-bn-hardtanh" with shortcut="block" is the network of IR-Net, and with downsample="binary" that of
                ReCU; in both the stem is conv → BN. "adabin" with shortcut="conv" is AdaBin's.
    pixels      "every-second": a 1×1 convolution of stride 2; "mean": a mean of 2×2 pixels before it
    downsample  whether those 1×1 convolutions are "float" or "binary"; None: as in the method's paper
    """
    check_options(
        "resnet18_cifar",
        shortcut=(shortcut, Shortcut),
        order=(order, Order),
        pixels=(pixels, Pixels),
    )
    if downsample is not None:
        check_options("resnet18_cifar", downsample=(downsample, Downsample))
    check_sizes("resnet18_cifar", num_classes=num_classes, in_channels=in_channels, width=width)
    chosen, style = resolve_method(method), _cifar_style(shortcut, order)
    channels = scaled_channels("resnet18_cifar", [width << i for i in range(4)], widths, "stage")
    stem = nn.Identity() if order == "conv-bn-hardtanh" else _after(style, channels[0])
    change = strided_projection if pixels == "every-second" else pooled_projection
    model = CifarResNet(channels, 2, style, order, stem, change, num_classes, in_channels)
    binary = chosen is not None and chosen.binary_downsample
    if downsample is not None:
        binary = downsample == "binary"
    return binary_twin(model, chosen, skip=() if binary else ("*.downsample.*",))


class ImageNetResNet(nn.Module):
    """7×7 stem and max pool, four stages, mean over the image, linear.

    Parameters have the names of torchvision's ResNets.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        channels: Sequence[int],
        style: Style,
        stem_activation: nn.Module,
        shortcut: MakeShortcut,
        head_norm: nn.Module,
        num_classes: int,
        in_channels: int,
    ) -> None:
        super().__init__()
        c1, c2, c3, c4 = channels
        self.conv1 = nn.Conv2d(in_channels, c1, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(c1)
        self.stem_activation = stem_activation
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = stage(c1, c1, blocks[0], 1, style, shortcut)
        self.layer2 = stage(c1, c2, blocks[1], 2, style, shortcut)
        self.layer3 = stage(c2, c3, blocks[2], 2, style, shortcut)
        self.layer4 = stage(c3, c4, blocks[3], 2, style, shortcut)
        self.head_norm = head_norm
        self.fc = nn.Linear(c4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.stem_activation(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.head_norm(x.mean((2, 3))))


def _imagenet_resnet(
    name: str,
    blocks: Sequence[int],
    method: MethodLike,
    variant: Variant,
    downsample: Downsample | None,
    activation: Activation | None,
    widths: Sequence[float] | None,
    width: int,
    num_classes: int,
    in_channels: int,
) -> nn.Module:
    """A ResNet of basic blocks; the options are those of :func:`resnet18`."""
    check_options(name, variant=(variant, Variant))
    check_sizes(name, num_classes=num_classes, in_channels=in_channels, width=width)
    if downsample is not None:
        check_options(name, downsample=(downsample, Downsample))
    chosen = resolve_method(method)
    channels = scaled_channels(name, [width << i for i in range(4)], widths, "stage")
    stem: nn.Module = nn.Identity()
    head_norm: nn.Module = nn.Identity()
    shortcut: MakeShortcut = pooled_projection
    if variant == "plain":
        after = choose_activation(name, chosen, activation)
        style, stem = Style("block", after=after), activation_module(after)
        shortcut = strided_projection
    else:
        sign_only = variant == "bireal" and float_inputs(chosen)
        default: Activation = "hardtanh" if sign_only else "identity"
        before = choose_activation(name, chosen, activation, default)
        last = variant in ("reactnet", "adabin")
        style = Style("conv", variant == "bireal-prelu", prelu_after=last, before=before)
    if variant == "adabin":
        stem, head_norm = nn.PReLU(channels[0]), nn.BatchNorm1d(channels[-1])
    parts = style, stem, shortcut, head_norm
    model = ImageNetResNet(blocks, channels, *parts, num_classes, in_channels)
    binary = chosen is not None and chosen.binary_downsample
    if downsample is not None:
        binary = downsample == "binary"
    return binary_twin(model, chosen, skip=() if binary else ("*.downsample.*",))


@register_model("resnet18", input_shape=(3, 224, 224), parts=4)
def resnet18(
    method: MethodLike = "float",
    *,
    num_classes: int = 1000,
    in_channels: int = 3,
    width: int = 64,
    widths: Sequence[float] | None = None,
    variant: Variant = "plain",
    downsample: Downsample | None = None,
    activation: Activation | None = None,
) -> nn.Module:
    """ResNet-18 for ImageNet, of width 64 to 512.

    widths      four factors on the channels of the stages, the stem's being the first stage's; the products are
                rounded to multiples of 8.
    variant     "plain", "bireal", "bireal-prelu", "reactnet" or "adabin": see the top of this file. Down-sampling
                shortcuts are 1×1 convolutions of stride 2 (plain) or after a 2×2 average pool (the others). The
                stem of "bireal", "bireal-prelu" and "reactnet" has no activation, as in Bi-Real Net's code.
    downsample  whether those 1×1 convolutions are "float" or "binary"; None: as in the method's paper
                (``Method.binary_downsample``). It does not matter for the float twin.
    activation  None, in the plain variant: ReLU, or hardtanh if the method takes the sign of its input
                (BinaryNet's and IR-Net's choice), because sign(ReLU(x)) is always +1. None, in the others:
                no activation if the method binarizes the input. Otherwise "bireal" has hardtanh before each
                convolution, where Bi-Real Net has it to pretrain the float twin, which would be linear
                without it. Activations have no parameters, so weights fit any choice.
    """
    options = variant, downsample, activation, widths, width, num_classes, in_channels
    return _imagenet_resnet("resnet18", (2, 2, 2, 2), method, *options)


@register_model("resnet34", input_shape=(3, 224, 224), parts=4)
def resnet34(
    method: MethodLike = "float",
    *,
    num_classes: int = 1000,
    in_channels: int = 3,
    width: int = 64,
    widths: Sequence[float] | None = None,
    variant: Variant = "plain",
    downsample: Downsample | None = None,
    activation: Activation | None = None,
) -> nn.Module:
    """ResNet-34 for ImageNet, the usual teacher of binary networks; options as for ResNet-18."""
    options = variant, downsample, activation, widths, width, num_classes, in_channels
    return _imagenet_resnet("resnet34", (3, 4, 6, 3), method, *options)
