"""AlexNet: ImageNet Classification with Deep Convolutional Neural Networks, in three layouts.

krizhevsky  Krizhevsky et al., NeurIPS 2012, float only: conv → ReLU → local response normalization → pool, two groups,
            biases, dropout. 60,965,224 parameters. The paper gives images of 224 pixels and first maps of 55×55, which
            need a border of 2 pixels.
xnor        XNOR-Net, Rastegari et al., ECCV 2016, arXiv:1603.05279: BatchNorm → sign → conv → pool, no groups, no
            dropout. The stem is conv → BatchNorm → ReLU → pool; the last layer reads BatchNorm → ReLU.
dorefa      DoReFa-Net, Zhou et al., 2016, arXiv:1606.06160: conv → BatchNorm → pool → clip, two groups. The stem is
            12×12 without border, BatchNorm or pool; pools follow convolutions 2, 3 and 5. The last layer reads values
            clipped to [0, 1].

Verified in the released code (allenai/XNOR-Net, ``models/alexnetxnor.lua``; tensorpack, ``examples/DoReFa-Net``):
order, kernel sizes, borders, groups, pools, and the ε of BatchNorm. BatchNorm has scale and shift in both.

Different from that code: no biases before BatchNorm, which subtracts them. XNOR-Net writes its two hidden linear layers
as convolutions of 6×6 and 1×1, which compute the same; only the centering of latent weights (``methods/xnor.py``) is
then over 9,216 inputs of a row instead of 256 channels.

Inferred: Han et al. (ICML 2020) do not say which layout they have. Their memory column, 180 Mbit of 2^20, supports two
groups: "dorefa" has 181.1, of which 0.6 are BatchNorm's, and "xnor" has 182.2. Their 1860 for the float network is
1860.5 here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from torch import Tensor, nn

from unflip.models.base import (
    MethodLike,
    binary_twin,
    check_options,
    check_sizes,
    float_inputs,
    register_model,
    resolve_method,
    takes_signs,
)

Layout = Literal["krizhevsky", "xnor", "dorefa"]


def named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def conv(c_in: int, c_out: int, kernel: int, groups: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution that keeps the size of its input."""
    return nn.Conv2d(c_in, c_out, kernel, padding=kernel // 2, groups=groups, bias=bias)


def channels(width: int) -> tuple[int, int, int, int]:
    """Of the first convolution; of the second and fifth; of the third and fourth; of the hidden linear layers."""
    return width, width * 8 // 3, width * 4, width * 128 // 3


class Layers(nn.Module):
    """Layers 1 to 8, one after another."""

    def forward(self, x: Tensor) -> Tensor:
        for number in range(1, 9):
            x = self.get_submodule(f"layer{number}")(x)
        return x


class Krizhevsky(Layers):
    """The float original."""

    def __init__(self, width: int, size: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        c1, c2, c3, hidden = channels(width)
        stem = nn.Conv2d(in_channels, c1, 11, 4, padding=2)
        self.layer1 = named(conv=stem, relu=nn.ReLU(), norm=_response_norm(), pool=_pool())
        second = conv(c1, c2, 5, groups=2, bias=True)
        self.layer2 = named(conv=second, relu=nn.ReLU(), norm=_response_norm(), pool=_pool())
        self.layer3 = named(conv=conv(c2, c3, 3, bias=True), relu=nn.ReLU())
        self.layer4 = named(conv=conv(c3, c3, 3, groups=2, bias=True), relu=nn.ReLU())
        fifth = conv(c3, c2, 3, groups=2, bias=True)
        self.layer5 = named(conv=fifth, relu=nn.ReLU(), pool=_pool())
        sixth = nn.Linear(c2 * size**2, hidden)
        self.layer6 = named(flatten=nn.Flatten(), fc=sixth, relu=nn.ReLU(), dropout=nn.Dropout(0.5))
        self.layer7 = named(fc=nn.Linear(hidden, hidden), relu=nn.ReLU(), dropout=nn.Dropout(0.5))
        self.layer8 = named(fc=nn.Linear(hidden, num_classes))


def _response_norm() -> nn.Module:
    """The paper's n = 5, α = 1e-4 on the sum, β = 0.75, k = 2; torch divides α by n."""
    return nn.LocalResponseNorm(5, 5e-4, 0.75, 2.0)


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2)


class Xnor(Layers):
    """XNOR-Net's layout. ``binary``: whether convolutions binarize their inputs, so that no ReLU stands before them."""

    def __init__(
        self, width: int, size: int, num_classes: int, in_channels: int, binary: bool
    ) -> None:
        super().__init__()
        c1, c2, c3, hidden = channels(width)

        def before(c_in: int) -> dict[str, nn.Module]:
            return {"bn": nn.BatchNorm2d(c_in, eps=1e-4), "activation": _between(binary)}

        stem = nn.Conv2d(in_channels, c1, 11, 4, padding=2, bias=False)
        self.layer1 = named(conv=stem, bn=nn.BatchNorm2d(c1), relu=nn.ReLU(), pool=_pool())
        self.layer2 = named(**before(c1), conv=conv(c1, c2, 5), pool=_pool())
        self.layer3 = named(**before(c2), conv=conv(c2, c3, 3))
        self.layer4 = named(**before(c3), conv=conv(c3, c3, 3))
        self.layer5 = named(**before(c3), conv=conv(c3, c2, 3), pool=_pool())
        sixth = nn.Linear(c2 * size**2, hidden, bias=False)
        self.layer6 = named(**before(c2), flatten=nn.Flatten(), fc=sixth)
        seventh = nn.Linear(hidden, hidden, bias=False)
        bn = nn.BatchNorm1d(hidden, eps=1e-4)
        self.layer7 = named(bn=bn, activation=_between(binary), fc=seventh)
        bn, last = nn.BatchNorm1d(hidden, eps=1e-3), nn.Linear(hidden, num_classes)
        self.layer8 = named(bn=bn, relu=nn.ReLU(), fc=last)


def _between(binary: bool) -> nn.Module:
    """A binary layer clips or takes the sign of its input itself. K of XNOR-Net needs the input unclipped."""
    return nn.Identity() if binary else nn.ReLU()


class DoReFa(Layers):
    """DoReFa-Net's layout. ``binary`` as in :class:`Xnor`."""

    def __init__(
        self, width: int, image_size: int, num_classes: int, in_channels: int, binary: bool
    ) -> None:
        super().__init__()
        c1, c2, c3, hidden = channels(width)
        first, second, third = _dorefa_sizes(image_size)

        def after(c_out: int, pool: nn.Module) -> dict[str, nn.Module]:
            bn = nn.BatchNorm2d(c_out, eps=1e-4)
            return {"bn": bn, "pool": pool, "activation": _between(binary)}

        stem = nn.Conv2d(in_channels, c1, 12, 4, bias=False)
        self.layer1 = named(conv=stem, activation=_between(binary))
        self.layer2 = named(conv=conv(c1, c2, 5, groups=2), **after(c2, _same_pool(first)))
        self.layer3 = named(conv=conv(c2, c3, 3), **after(c3, _same_pool(second)))
        self.layer4 = named(conv=conv(c3, c3, 3, groups=2), **after(c3, nn.Identity()))
        self.layer5 = named(conv=conv(c3, c2, 3, groups=2), **after(c2, _pool()))
        features = c2 * pooled(third) ** 2
        sixth, seventh = (nn.Linear(n, hidden, bias=False) for n in (features, hidden))
        bn6, bn7 = (nn.BatchNorm1d(hidden, eps=1e-4) for _ in range(2))
        self.layer6 = named(flatten=nn.Flatten(), fc=sixth, bn=bn6, activation=_between(binary))
        clip = nn.Hardtanh(0.0, 1.0) if binary else nn.ReLU()
        self.layer7 = named(fc=seventh, bn=bn7, activation=clip)
        self.layer8 = named(fc=nn.Linear(hidden, num_classes))


def _same_pool(size: int) -> nn.MaxPool2d:
    """TensorFlow's "SAME" pool 3/2 for maps of ``size``: ceil(size / 2) windows, the border after the map first."""
    return nn.MaxPool2d(3, 2, padding=size % 2, ceil_mode=True)


def _dorefa_sizes(image_size: int) -> tuple[int, int, int]:
    """Heights of the maps before each of the three pools."""
    first = (image_size - 12) // 4 + 1
    second = (first + 1) // 2
    return first, second, (second + 1) // 2


def pooled(size: int) -> int:
    """Height after a pool 3/2 without border; 0 or less if the map is too small for it."""
    return (size - 3) // 2 + 1


def feature_size(layout: Layout, image_size: int) -> int:
    """Height of the last feature map."""
    if layout == "dorefa":
        return pooled(_dorefa_sizes(image_size)[-1])
    return pooled(pooled(pooled((image_size + 4 - 11) // 4 + 1)))


@register_model("alexnet", input_shape=(3, 224, 224))
def alexnet(
    method: MethodLike = "float",
    *,
    num_classes: int = 1000,
    in_channels: int = 3,
    width: int = 96,
    image_size: int = 224,
    layout: Layout | None = None,
) -> nn.Module:
    """AlexNet for images of 224×224.

    layout      "krizhevsky": the float original. "xnor", "dorefa": the networks of XNOR-Net and DoReFa-Net, binary or
                float; see the top of this file. None: "krizhevsky" for the float network, "xnor" for a method that
                takes the sign of its inputs, "dorefa" for others. Float and binary layouts differ, as they do in the
                papers' comparison. The exact float twin of a binary AlexNet, which can load its weights, has the same
                layout. In "dorefa" the maximum over nine values comes before the binarization, so that nearly all
                signs of an untrained network are +1.
    width       channels of the first convolution, a multiple of 6; everything else is in proportion.
    image_size  changes only the first linear layer.
    """
    chosen = resolve_method(method)
    sizes = {"num_classes": num_classes, "in_channels": in_channels, "width": width}
    check_sizes("alexnet", **sizes, image_size=image_size)
    if layout is None:
        layout = "krizhevsky" if chosen is None else "xnor" if takes_signs(chosen) else "dorefa"
    check_options("alexnet", layout=(layout, Layout))
    if chosen is not None and layout == "krizhevsky":
        raise ValueError(
            f"alexnet: layout='krizhevsky' is for method='float', and the method is {chosen}: use 'xnor' or 'dorefa'"
        )
    if width % 6:
        raise ValueError(f"alexnet: width={width} should be a multiple of 6 (two groups, thirds)")
    size = feature_size(layout, image_size)
    if size < 1:
        least = next(n for n in range(image_size, 224) if feature_size(layout, n) >= 1)
        raise ValueError(
            f"alexnet: image_size={image_size} is too small for its pools: {least} or more"
        )
    if layout == "krizhevsky":
        return Krizhevsky(width, size, num_classes, in_channels)
    binary = not float_inputs(chosen)
    if layout == "xnor":
        return binary_twin(Xnor(width, size, num_classes, in_channels, binary), chosen)
    return binary_twin(DoReFa(width, image_size, num_classes, in_channels, binary), chosen)
