"""AlexNet: ImageNet Classification with Deep Convolutional Neural Networks.

Krizhevsky et al., NeurIPS 2012: the original with its two groups, 60,965,224 parameters. The binary one has
BatchNorm instead of local response normalization, as in XNOR-Net (arXiv:1603.05279) and DoReFa-Net
(arXiv:1606.06160), and is the network that Han et al. (ICML 2020) compare with the float original.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from unflip.models.base import (
    Activation,
    MethodLike,
    activation_module,
    binary_twin,
    check_options,
    check_sizes,
    choose_activation,
    register_model,
    resolve_method,
)

Norm = Literal["lrn", "batch"]


class ConvLayer(nn.Module):
    """One convolution with its pool, normalization and activation.

    batch   conv → pool → BatchNorm → activation: the next layer binarizes BatchNorm's output. The
            pool comes first, since the maximum over nine values of ±1 is nearly always +1.
    lrn     conv → activation → local response normalization (where the original has it) → pool
    """

    def __init__(
        self, conv: nn.Conv2d, norm: Norm, activation: Activation, *, lrn: bool, pool: bool
    ) -> None:
        super().__init__()
        self.batch = norm == "batch"
        self.conv = conv
        self.activation = activation_module(activation)
        self.pool = nn.MaxPool2d(3, 2) if pool else nn.Identity()
        if norm == "batch":
            self.norm: nn.Module = nn.BatchNorm2d(conv.out_channels)
        else:
            # The paper's n = 5, α = 1e-4 on the sum, β = 0.75, k = 2; torch divides α by n.
            self.norm = nn.LocalResponseNorm(5, 5e-4, 0.75, 2.0) if lrn else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.batch:
            return self.activation(self.norm(self.pool(x)))
        return self.pool(self.norm(self.activation(x)))


class AlexNet(nn.Module):
    """Five convolutions, three linear layers."""

    def __init__(
        self,
        width: int,
        image_size: int,
        norm: Norm,
        activation: Activation,
        num_classes: int,
        in_channels: int,
    ) -> None:
        super().__init__()
        bias = norm == "lrn"  # BatchNorm subtracts any bias in front of it
        c1, c2, c3, hidden = width, width * 8 // 3, width * 4, width * 128 // 3

        def layer(
            c_in: int, c_out: int, k: int, groups: int = 1, lrn: bool = False, pool: bool = False
        ) -> ConvLayer:
            stride, padding = (4, 0) if k == 11 else (1, k // 2)
            conv = nn.Conv2d(c_in, c_out, k, stride, padding, groups=groups, bias=bias)
            return ConvLayer(conv, norm, activation, lrn=lrn, pool=pool)

        self.layer1 = layer(in_channels, c1, 11, lrn=True, pool=True)
        self.layer2 = layer(c1, c2, 5, groups=2, lrn=True, pool=True)
        self.layer3 = layer(c2, c3, 3)
        self.layer4 = layer(c3, c3, 3, groups=2)
        self.layer5 = layer(c3, c2, 3, groups=2, pool=True)
        self.fc6 = nn.Linear(c2 * feature_size(image_size) ** 2, hidden, bias=bias)
        self.after6 = self._after_linear(hidden, norm, activation)
        self.fc7 = nn.Linear(hidden, hidden, bias=bias)
        self.after7 = self._after_linear(hidden, norm, activation)
        self.fc8 = nn.Linear(hidden, num_classes)
        self.dropout = nn.Dropout(0.5) if norm == "lrn" else nn.Identity()

    @staticmethod
    def _after_linear(features: int, norm: Norm, activation: Activation) -> nn.Module:
        act = activation_module(activation)
        if norm == "lrn":
            return act
        return nn.Sequential(nn.BatchNorm1d(features, affine=False), act)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer5(self.layer4(self.layer3(self.layer2(self.layer1(x)))))
        x = self.dropout(self.after6(self.fc6(x.flatten(1))))
        x = self.dropout(self.after7(self.fc7(x)))
        return self.fc8(x)


def feature_size(image_size: int) -> int:
    """Height of the last feature map: a convolution 11/4, then three pools 3/2."""
    size = (image_size - 11) // 4 + 1
    for _ in range(3):
        size = (size - 3) // 2 + 1
    return size


@register_model("alexnet", input_shape=(3, 227, 227))
def alexnet(
    method: MethodLike = "float",
    *,
    num_classes: int = 1000,
    in_channels: int = 3,
    width: int = 96,
    image_size: int = 227,
    norm: Norm | None = None,
    activation: Activation | None = None,
) -> nn.Module:
    """AlexNet for images of 227×227.

    norm        "lrn": the float original, with biases and dropout. "batch": BatchNorm, no bias in front of
                it, no dropout, as binary layers need it. None: "lrn" for the float network, "batch" for
                a binary one. The two differ, as they do in the papers' comparison; the exact float
                twin of a binary AlexNet, which can load its weights, is ``alexnet(norm="batch")``.
    activation  None: ReLU, or hardtanh where the method takes the sign of its input, because
                sign(ReLU(x)) is always +1.
    width       channels of the first convolution, a multiple of 6; everything else is in proportion.
    image_size  changes only the first linear layer.

    BatchNorm has scale and shift after convolutions, and neither after the two hidden linear layers. Han et al. do
    not say which they have. Their memory column is 180 Mbit of 2^20; this network has 180.4, and with scale and shift
    it would have 180.9. The column does not prove it: their 1860 for the float network is 1860.5 here.
    """
    chosen = resolve_method(method)
    sizes = {"num_classes": num_classes, "in_channels": in_channels, "width": width}
    check_sizes("alexnet", **sizes, image_size=image_size)
    if norm is None:
        norm = "lrn" if chosen is None else "batch"
    check_options("alexnet", norm=(norm, Norm))
    if chosen is not None and norm == "lrn":
        raise ValueError(f"alexnet: norm='lrn' is for method='float'; {chosen} needs norm='batch'")
    if width % 6:
        raise ValueError(f"alexnet: width={width} should be a multiple of 6 (two groups, thirds)")
    if feature_size(image_size) < 1:
        raise ValueError(f"alexnet: image_size={image_size} is too small for its pools: 67 or more")
    act = choose_activation("alexnet", chosen, activation)
    return binary_twin(AlexNet(width, image_size, norm, act, num_classes, in_channels), chosen)
