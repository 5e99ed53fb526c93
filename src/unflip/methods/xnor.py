"""XNOR-Net: ImageNet Classification Using Binary Convolutional Neural Networks.

Rastegari et al., ECCV 2016, arXiv:1603.05279, section 3.2.

Weights     Q = α · sign(W), α = ‖W‖₁ / n for each filter of n weights
            ∂L/∂W_i = ∂L/∂Q_i · (1/n + α · 1[|W_i| ≤ 1])
            after each step W is centered over its input channels and clipped to [−1, 1]
Inputs      x ≈ K · sign(x): the layer's output is (sign(x) ⊛ Q) · K, with
            K = mean_c |x| ∗ box, the box of the layer's kernel size with value 1 / (w·h)
            ∂L/∂x = ∂L/∂B · 1[|x| ≤ 1], plus the ordinary gradient of K

Differences from the authors' code (github.com/allenai/XNOR-Net, util.lua, train.lua and models/alexnetxnor.lua):

- We include the paper's K map; the code leaves it out (``k_map=False``).
- The code multiplies the gradient of W by n (1 − 1/c): 135 to 567 for the layers of ResNet-20 with c = 16 to 64. With
  SGD this is another learning rate of W in each layer. ``gradient="released"`` has this factor (``bwn.py``).
- Centering and clipping follow the code; the paper does not mention them. The code does both before each forward pass,
  we do them after each step.

With groups, K is computed over the channels of each group.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip.methods.base import InputBinarizer, InputCode, Method, WeightBinarizer
from unflip.methods.bwn import CenteredBWNSign, Gradient
from unflip.methods.pieces import ClippedSign
from unflip.methods.registry import register


class SignTimesK(ClippedSign):
    """sign(x), and K as a factor of the layer's output."""

    def __init__(self, k_map: bool) -> None:
        super().__init__()
        self.k_map = k_map

    def output_scale(self, x: Tensor, layer: nn.Module) -> Tensor | None:
        if not self.k_map:
            return None
        if isinstance(layer, nn.Linear):
            return x.abs().mean(-1, keepdim=True)
        assert isinstance(layer, nn.Conv2d)
        groups, (kh, kw) = layer.groups, layer.kernel_size
        mean = torch.unflatten(x.abs(), -3, (groups, -1)).mean(-3)
        box = mean.new_full((groups, 1, kh, kw), 1 / (kh * kw))
        # With the layer's padding mode, stride and dilation, for each group.
        if layer.padding_mode != "zeros":
            pad = layer._reversed_padding_repeated_twice
            mean = F.pad(mean, pad, mode=layer.padding_mode)
            k = F.conv2d(mean, box, None, layer.stride, 0, layer.dilation, groups)
        else:
            k = F.conv2d(mean, box, None, layer.stride, layer.padding, layer.dilation, groups)
        return k.repeat_interleave(layer.out_channels // groups, -3)

    def code(self) -> InputCode:
        return super().code()._replace(k_map=self.k_map)


@register("xnor")
@dataclass(frozen=True)
class XNORNet(Method):
    """Per-filter scale times sign, and the input's K map on the output."""

    k_map: bool = True
    gradient: Gradient = "paper"

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return CenteredBWNSign(self.gradient)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return SignTimesK(self.k_map)
