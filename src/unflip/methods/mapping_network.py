"""f, the network of LNS that reads a filter of latent weights and predicts its signs (see ``lns.py``)."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip.methods.pieces import layer_mean

Statistics = Literal["filters", "fixed"]
Output = Literal["linear", "tanh"]

# A row of a linear layer (or a 1×1 filter) wider than this is mapped in chunks, because f has 8c² weights.
CHUNK = 512
# For filters that are not 3×3: six hidden channels (c = 3) cannot learn the signs of an 11×11 layer.
LEAST_HIDDEN = 32


class FilterNorm(nn.Module):
    """BatchNorm inside f: the same function in training, evaluation and freezing.

    ``filters``: always the statistics over the layer's own filters, so that f depends only on W and θ.
    ``fixed``: the statistics measured at the end of the warm start, constant after it.
    """

    mean: Tensor
    var: Tensor

    def __init__(self, channels: int, statistics: Statistics) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.measuring = statistics == "filters"
        if statistics == "fixed":
            self.register_buffer("mean", torch.zeros(channels))
            self.register_buffer("var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.measuring:
            if "mean" in self._buffers:  # warm start of statistics="fixed"
                var, mean = torch.var_mean(x.detach(), dim=(0, 2, 3), correction=0)
                self.mean.copy_(mean)
                self.var.copy_(var)
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True)
        return F.batch_norm(x, self.mean, self.var, self.weight, self.bias)


class MappingNetwork(nn.Module):
    """f for one layer: (filters, c, kh, kw) -> the same shape.

    Layers that are not 3×3: padded 3×3 convolutions keep the size of any map, so 5×5 and 11×11 filters need
    no change. Along a dimension of size 1 only the center tap would see weights, so the kernel has size 1
    there: for a 1×1 convolution f is a perceptron over the channels. A row of a linear layer is a 1×1
    filter. Rows of more than 512 inputs are split into chunks that share one f. With groups, c is the
    number of channels per filter, and all groups share f. If a layer is not 3×3, f has at least 32
    hidden channels.
    """

    def __init__(
        self,
        weight: Tensor,
        residual: bool,
        statistics: Statistics,
        output: Output = "linear",
    ) -> None:
        super().__init__()
        c, kernel = weight.shape[1], tuple(weight.shape[2:]) or (1, 1)
        self.residual = residual
        self.output = output
        self.chunks = math.ceil(c / CHUNK) if kernel == (1, 1) else 1
        c = math.ceil(c / self.chunks)
        taps = (3 if kernel[0] > 1 else 1, 3 if kernel[1] > 1 else 1)
        pad = (taps[0] // 2, taps[1] // 2)
        hidden = 2 * c if kernel == (3, 3) else max(2 * c, LEAST_HIDDEN)
        self.conv1 = nn.Conv2d(c, hidden, taps, padding=pad, bias=False)
        self.norm1 = FilterNorm(hidden, statistics)
        self.conv2 = nn.Conv2d(hidden, hidden, taps, padding=pad, bias=False)
        self.norm2 = FilterNorm(hidden, statistics)
        self.conv3 = nn.Conv2d(hidden, c, taps, padding=pad)
        if residual:
            nn.init.zeros_(self.conv3.weight)
            nn.init.zeros_(self.conv3.bias)  # type: ignore[arg-type]

    def forward(self, weight: Tensor) -> Tensor:
        # Never in autocast's half precision: f would differ between training with autocast and freezing
        # without it, and a q̂ near 0 would change its sign.
        device = weight.device.type
        with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            h = F.relu(self.norm1(self.conv1(self._images(weight))))
            h = F.relu(self.norm2(self.conv2(h)))
            predicted = self._filters(self.conv3(h), weight)
        return self.finish(predicted, weight)

    def finish(self, predicted: Tensor, weight: Tensor) -> Tensor:
        """q̂ from the last convolution: plus the weight in units of the layer's mean |w|, then tanh, if f has them."""
        if self.residual:
            size = layer_mean(weight.detach())[0]
            predicted = predicted + weight / size.clamp_min(torch.finfo(weight.dtype).tiny)
        return self.saturate(predicted)

    def saturate(self, predicted: Tensor) -> Tensor:
        """tanh if f ends with it. It keeps every sign, so the bits do not depend on it."""
        return predicted.tanh() if self.output == "tanh" else predicted

    def _images(self, weight: Tensor) -> Tensor:
        """Filters as images; a row that is split into chunks becomes several 1×1 images."""
        images = weight if weight.dim() == 4 else weight[:, :, None, None]
        if self.chunks == 1:
            return images
        width = self.conv1.in_channels
        images = F.pad(images, (0, 0, 0, 0, 0, width * self.chunks - images.shape[1]))
        return images.reshape(-1, width, 1, 1)

    def _filters(self, images: Tensor, weight: Tensor) -> Tensor:
        rows = images.reshape(weight.shape[0], -1, *images.shape[2:])[:, : weight.shape[1]]
        return rows.reshape(weight.shape)
