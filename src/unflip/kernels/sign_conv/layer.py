"""The product of a binary layer by the operators of ``operator.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unflip.kernels.sign_conv.cover import supports
from unflip.kernels.sign_conv.operator import sign_conv2d


def fused_product(
    layer: Any, x: Tensor, unit: Tensor, *, networks: int, cuda: bool
) -> Tensor | None:
    """The product of a layer with inputs −1, 0 and +1; None if the kernels do not cover the layer.

    The kernels take the sign and mask its gradient if they know the binarizer. Otherwise the layer binarizes first.
    """
    binarizer = layer.input_binarizer
    if not isinstance(layer, nn.Conv2d) or layer.padding_mode != "zeros":
        return None
    if not supports(x.shape, unit.shape, layer.stride, layer.padding, layer.dilation, layer.groups):
        return None
    assert not isinstance(layer.padding, str)  # supports() refuses it
    kind: Any = binarizer.fused_as or "given"
    x = binarizer(x) if kind == "given" else binarizer.shifted(x)
    x = x.to(torch.float16)
    return sign_conv2d(x, unit, layer.stride, layer.padding, kind, networks=networks, cuda=cuda)
