"""VGG-small, the VGG-like CIFAR-10 network of binary networks.

The network of BinaryConnect (Courbariaux et al., NeurIPS 2015, arXiv:1511.00363) without its two hidden
linear layers: 128-128-M-256-256-M-512-512-M, then one linear layer. Built as in the released code of IR-Net
(Qin et al., CVPR 2020, arXiv:1909.10788): conv → pool → BatchNorm → hardtanh, the pool only at M.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from unflip.models.base import (
    MethodLike,
    binary_twin,
    check_sizes,
    register_model,
    resolve_method,
    scaled_channels,
)


def conv_layer(c_in: int, c_out: int, *, pool: bool = False) -> nn.Sequential:
    """The pool comes before BatchNorm: the maximum of float values carries more than that of signs."""
    layer = nn.Sequential()
    layer.add_module("conv", nn.Conv2d(c_in, c_out, 3, padding=1, bias=False))
    if pool:
        layer.add_module("pool", nn.MaxPool2d(2))
    layer.add_module("bn", nn.BatchNorm2d(c_out))
    layer.add_module("activation", nn.Hardtanh())
    return layer


class VGGSmall(nn.Module):
    """Six 3×3 convolutions and a linear layer."""

    def __init__(
        self, channels: Sequence[int], image_size: int, num_classes: int, in_channels: int
    ) -> None:
        super().__init__()
        c1, c2, c3, c4, c5, c6 = channels
        self.layer1 = conv_layer(in_channels, c1)
        self.layer2 = conv_layer(c1, c2, pool=True)
        self.layer3 = conv_layer(c2, c3)
        self.layer4 = conv_layer(c3, c4, pool=True)
        self.layer5 = conv_layer(c4, c5)
        self.layer6 = conv_layer(c5, c6, pool=True)
        self.fc = nn.Linear(c6 * (image_size // 8) ** 2, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(x))
        x = self.layer4(self.layer3(x))
        x = self.layer6(self.layer5(x))
        return self.fc(x.flatten(1))


@register_model("vgg_small", input_shape=(3, 32, 32), parts=6)
def vgg_small(
    method: MethodLike = "float",
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    width: int = 128,
    widths: Sequence[float] | None = None,
    image_size: int = 32,
) -> nn.Module:
    """VGG-small for images of 32×32, of width 128, 256, 512.

    The first convolution and the linear layer stay float. ``image_size`` (8 or more) changes only the size
    of the linear layer. ``widths`` are six factors on the channels, one per convolution; the products are rounded to
    multiples of 8.
    """
    sizes = {"num_classes": num_classes, "in_channels": in_channels, "width": width}
    check_sizes("vgg_small", **sizes, image_size=image_size)
    if image_size < 8:
        raise ValueError(
            f"vgg_small: image_size={image_size} is too small for three pools: 8 or more"
        )
    published = [width, width, 2 * width, 2 * width, 4 * width, 4 * width]
    channels = scaled_channels("vgg_small", published, widths, "convolution")
    model = VGGSmall(channels, image_size, num_classes, in_channels)
    return binary_twin(model, resolve_method(method))
