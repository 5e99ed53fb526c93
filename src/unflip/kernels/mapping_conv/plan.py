"""Sizes and offsets of the flat tensors that the mapping kernels work on.

Layout of the flat tensors, layer after layer in each part:

    latent, q̂        (filters, 3, 3, c)
    parameters       conv1 (2c, 3, 3, c), conv2 (2c, 3, 3, 2c), conv3 (c, 3, 3, 2c), the norms' weight and bias
                     (2c each, twice), conv3's bias (c)
    saved            y1, h1, y2, h2 (filters, 3, 3, 2c); mean and 1/σ of norm1, of norm2 (2c each)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unflip.kernels.tuning import cdiv

MOST_ELEMENTS = 2**31 - 2**20  # offsets are int32
PART = 16  # filters in one partial sum; BLOCK_F is a multiple of it


@dataclass(frozen=True)
class Plan:
    """Sizes of the flat tensors, and where each layer begins in them."""

    filters: tuple[int, ...]
    channels: tuple[int, ...]
    table: Tensor  # filters, channels, and four sizes summed over the layers before (make_plan)

    @property
    def activations(self) -> int:
        return count_activations(self.filters, self.channels)

    @property
    def squares(self) -> int:
        return sum(c * c for c in self.channels)

    @property
    def norms(self) -> int:
        return sum(self.channels)

    @property
    def partials(self) -> int:
        return self._count(lambda f, c: 9 * cdiv(f, PART) * c)

    @property
    def shared(self) -> dict[str, Any]:
        """Arguments that all kernels have in common."""
        layers = len(self.filters)
        return {
            "table_ptr": self.table,
            "layers": layers,
            "ALIGNED": all(c % 16 == 0 for c in self.channels),
            "LAYERS": 1 << (layers - 1).bit_length(),
        }

    def programs(self, row_block: int, columns: int, column_block: int) -> int:
        """Programs of a norm: 9 · filters pixels × columns · c channels in blocks."""
        return self._count(lambda f, c: cdiv(9 * f, row_block) * cdiv(columns * c, column_block))

    def conv_programs(self, f_block: int, columns: int, column_block: int) -> int:
        """Programs of a convolution: filters at nine positions × columns · c channels in blocks."""
        return self._count(lambda f, c: 9 * cdiv(f, f_block) * cdiv(columns * c, column_block))

    def wgrad_programs(self, o_block: int, i_block: int) -> int:
        """Programs of conv2's gradient, the largest of the three."""
        return self._count(lambda f, c: 9 * cdiv(2 * c, o_block) * cdiv(2 * c, i_block))

    def _count(self, each: Callable[[int, int], int]) -> int:
        return sum(each(f, c) for f, c in zip(self.filters, self.channels, strict=True))

    def weights(self, parameters: Tensor) -> list[Tensor]:
        """The part of the three convolutions in the parameters (or in their gradient)."""
        return list(parameters[: 72 * self.squares].split([n * self.squares for n in (18, 36, 18)]))

    def vectors(self, parameters: Tensor) -> list[Tensor]:
        """Weight and bias of norm1, of norm2, and conv3's bias."""
        return list(
            parameters[72 * self.squares :].split([n * self.norms for n in (2, 2, 2, 2, 1)])
        )

    def values(self, saved: Tensor) -> list[Tensor]:
        """y1, h1, y2, h2."""
        return list(saved[: 8 * self.activations].chunk(4))

    def statistics(self, saved: Tensor) -> list[Tensor]:
        """Mean and 1/σ of norm1, of norm2."""
        return list(saved[8 * self.activations :].chunk(4))


def count_activations(filters: Sequence[int], channels: Sequence[int]) -> int:
    return sum(9 * f * c for f, c in zip(filters, channels, strict=True))


@functools.lru_cache(maxsize=64)
def make_plan(filters: tuple[int, ...], channels: tuple[int, ...], device: torch.device) -> Plan:
    """Cached: a CUDA graph cannot hold a table that is copied to the device in every call."""
    rows, sums = [], [0, 0, 0, 0]
    for f, c in zip(filters, channels, strict=True):
        rows.append([f, c, *sums])
        sizes = (9 * f * c, c * c, c, 9 * cdiv(f, PART) * c)
        sums = [a + b for a, b in zip(sums, sizes, strict=True)]
    if max(2 * sums[0], 72 * sums[1], 2 * sums[3]) > MOST_ELEMENTS:
        raise ValueError("mapping: too many elements for 32-bit offsets")
    return Plan(filters, channels, torch.tensor(rows, dtype=torch.int32, device=device))
