"""A network that was built from the graph of another framework, and modules of BMXNet's networks."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from unflip.imports.errors import CannotImport


class Part(NamedTuple):
    """A module of the network and the values it takes; value n is the result of node n."""

    name: str
    node: int
    inputs: tuple[int, ...]


class SymbolNetwork(nn.Module):
    """A network that runs the parts of a graph in order."""

    def __init__(self, parts: list[tuple[Part, nn.Module]], data: int, output: int) -> None:
        super().__init__()
        self.parts = [part for part, _ in parts]
        self.data, self.output = data, output
        for part, module in parts:
            if hasattr(self, part.name):
                raise CannotImport(f"a node has the name {part.name!r}, which is reserved")
            self.add_module(part.name, module)

    def forward(self, x: Tensor) -> Tensor:
        values = {self.data: x}
        for part in self.parts:
            values[part.node] = getattr(self, part.name)(*(values[i] for i in part.inputs))
        return values[self.output]


class CountingConv(nn.Module):
    """QConvolution: counts equal signs. ``conv`` has the signs as weights and becomes binary."""

    def __init__(self, conv: nn.Conv2d, padding: tuple[int, int]) -> None:
        super().__init__()
        self.conv = conv
        self.padding = padding
        self.shift = conv.weight[0].numel() / 2

    def forward(self, x: Tensor) -> Tensor:
        high, wide = self.padding
        padded = F.pad(x, (wide, wide, high, high)) if high or wide else x
        return self.conv(padded) * 0.5 + self.shift


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class GlobalMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3), keepdim=True)
