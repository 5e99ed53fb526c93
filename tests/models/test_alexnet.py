"""AlexNet in the layouts of three papers, layer by layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unflip import models
from unflip.models.alexnet import _same_pool


def test_xnors_alexnet_is_bn_sign_conv_pool() -> None:
    with torch.device("meta"):
        model = models.alexnet("xnor", layout="xnor")
    layers = {
        n: [type(m).__name__ for m in c if not isinstance(m, nn.Identity)]
        for n, c in model.named_children()
    }
    assert layers == {
        "layer1": ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"],
        "layer2": ["BatchNorm2d", "BinaryConv2d", "MaxPool2d"],
        "layer3": ["BatchNorm2d", "BinaryConv2d"],
        "layer4": ["BatchNorm2d", "BinaryConv2d"],
        "layer5": ["BatchNorm2d", "BinaryConv2d", "MaxPool2d"],
        "layer6": ["BatchNorm2d", "Flatten", "BinaryLinear"],
        "layer7": ["BatchNorm1d", "BinaryLinear"],
        "layer8": ["BatchNorm1d", "ReLU", "Linear"],
    }
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert {c.groups for c in convs} == {1}
    assert [c.kernel_size[0] for c in convs] == [11, 5, 3, 3, 3]
    assert convs[0].padding == (2, 2)


def test_dorefas_alexnet_is_conv_bn_pool_clip() -> None:
    with torch.device("meta"):
        model = models.alexnet("dorefa", layout="dorefa")
    layers = {
        n: [type(m).__name__ for m in c if not isinstance(m, nn.Identity)]
        for n, c in model.named_children()
    }
    assert layers == {
        "layer1": ["Conv2d"],  # the next layer clips to [0, 1] and rounds, as all binary ones do
        "layer2": ["BinaryConv2d", "BatchNorm2d", "MaxPool2d"],
        "layer3": ["BinaryConv2d", "BatchNorm2d", "MaxPool2d"],
        "layer4": ["BinaryConv2d", "BatchNorm2d"],
        "layer5": ["BinaryConv2d", "BatchNorm2d", "MaxPool2d"],
        "layer6": ["Flatten", "BinaryLinear", "BatchNorm1d"],
        "layer7": ["BinaryLinear", "BatchNorm1d", "Hardtanh"],
        "layer8": ["Linear"],
    }
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [c.groups for c in convs] == [1, 2, 1, 2, 2]
    assert (convs[0].kernel_size, convs[0].padding, convs[0].bias) == ((12, 12), (0, 0), None)
    heights = []
    for layer in list(model.children())[:5]:
        layer.register_forward_hook(lambda _, __, out: heights.append(out.shape[-1]))
    with torch.device("meta"):
        model.eval()(torch.empty(1, 3, 224, 224))
    assert heights == [54, 27, 14, 14, 6]


@pytest.mark.parametrize("size", [5, 6, 27, 54])
def test_tensorflows_same_pool(size: int) -> None:
    """SAME: ceil(n / 2) windows; of the border that they need, the smaller half comes first."""
    x = torch.randn(1, 1, size, size, generator=torch.Generator().manual_seed(0))
    border = max((-(-size // 2) - 1) * 2 + 3 - size, 0)
    first, last = border // 2, border - border // 2
    padded = F.pad(x, (first, last, first, last), value=-torch.inf)
    assert torch.equal(_same_pool(size)(x), F.max_pool2d(padded, 3, 2))


def test_the_original_alexnet_is_krizhevskys() -> None:
    with torch.device("meta"):
        model = models.alexnet()
    kinds = [type(m) for m in model.modules()]
    assert kinds.count(nn.LocalResponseNorm) == kinds.count(nn.Dropout) == 2
    assert nn.BatchNorm2d not in kinds
    assert all(m.bias is not None for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear))


def test_local_response_normalization_by_hand() -> None:
    """b = a / (2 + 1e-4 · Σ a²)^0.75 over five neighbouring channels, as in the paper."""
    model = models.alexnet(width=6, image_size=63)
    a = torch.full((1, 6, 1, 1), 10.0)
    neighbours = torch.tensor([3.0, 4.0, 5.0, 5.0, 4.0, 3.0]).view(1, 6, 1, 1)
    expected = a / (2 + 1e-4 * 100 * neighbours) ** 0.75
    assert torch.allclose(model.get_submodule("layer1.norm")(a), expected)
