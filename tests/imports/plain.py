"""Plain torch implementations of networks that others trained, without our layers: the tests compare with them.

A value within rounding error of a threshold may fall on either side of it, and one such sign changes many values after
it. So a network can follow the signs of the runtime, and compare each of them with its own value before that sign.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]


class Followed:
    """The signs of the runtime, from the values before them; and what the network itself has there."""

    def __init__(self, values: Mapping[str, Tensor], thresholds: Mapping[str, float]) -> None:
        self.values, self.thresholds = values, thresholds
        self.seen = 0  # signs
        self.different: list[Tensor] = []  # per layer, signs of each image that differ
        self.zeros = 0  # values exactly on their threshold
        self.error = (
            0.0  # largest difference of a value, relative to the root mean square of its layer
        )
        self.nearest = 0.0  # the same for the distance from its threshold of a sign that differs

    def signs(self, name: str, x: Tensor, threshold: Tensor | float) -> Tensor:
        other = self.values[name].to(x.dtype)
        edge = (other.shape[2] - x.shape[2]) // 2  # our padding, which is before the sign
        other = other[:, :, edge : other.shape[2] - edge, edge : other.shape[3] - edge]
        theirs = other >= self.thresholds[name]
        differs = theirs != (x >= threshold)
        scale = x.square().mean().sqrt()
        self.seen += x.numel()
        self.zeros += int((x == threshold).sum())
        self.different.append(differs.sum((1, 2, 3)))
        self.error = max(self.error, float(((x - other) / x.abs().clamp(min=scale)).abs().max()))
        if differs.any():
            self.nearest = max(self.nearest, float((x - threshold).abs()[differs].max() / scale))
        return torch.where(theirs, 1.0, -1.0).to(x.dtype)


def signs_of(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


# --- BMXNet -----------------------------------------------------------------------------------------------


def params(path: Path) -> dict[str, Any]:
    """All arrays of a well-formed .params file; binary weights as float64 words."""
    data = path.read_bytes()
    [count] = struct.unpack_from("<Q", data, 16)
    at, arrays = 24, []
    for _ in range(count):
        [dims] = struct.unpack_from("<I", data, at)
        at, step = at + 4, "I"
        if dims == 0xF993FAC8:
            [dims] = struct.unpack_from("<I", data, at)
            at, step = at + 4, "q"
        shape = struct.unpack_from(f"<{dims}{step}", data, at)
        at += struct.calcsize(f"<{dims}{step}")
        kind = ["<f4", "<f8"][struct.unpack_from("<i", data, at + 8)[0]]
        at += 12
        arrays.append(np.frombuffer(data, kind, int(np.prod(shape)), at).reshape(shape))
        at += arrays[-1].nbytes
    at, names = at + 8, []
    for _ in range(count):
        [length] = struct.unpack_from("<Q", data, at)
        names.append(data[at + 8 : at + 8 + length].decode().split(":")[1])
        at += 8 + length
    return dict(zip(names, arrays, strict=True))


class Bmxnet:
    """BMXNet's ResNet-18: pre-activation blocks of binary convolutions that count equal signs."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.arrays = params(path)
        self.dtype = dtype
        self.large = "bn0_gamma" in self.arrays  # 7 × 7 stem, BatchNorm, ReLU and max pool

    def get(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name].astype(np.float32)).to(self.dtype)

    def norm(self, x: Tensor, name: str) -> Tensor:
        shape = (1, -1, 1, 1)
        mean, variance, beta = (
            self.get(f"{name}_{part}").view(shape) for part in ("moving_mean", "moving_var", "beta")
        )
        gamma = (
            torch.ones_like(beta) if name == "bn_data" else self.get(f"{name}_gamma").view(shape)
        )
        return (x - mean) / torch.sqrt(variance + 2e-5) * gamma + beta

    def conv(
        self, x: Tensor, name: str, channels: int, kernel: int, stride: int, to: Followed | None
    ) -> Tensor:
        words = self.arrays[f"{name}_weight"]
        padding = kernel // 2
        if words.dtype == np.float32:
            return F.conv2d(x.relu(), self.get(f"{name}_weight"), stride=stride, padding=padding)
        bits = np.unpackbits(np.frombuffer(words.tobytes(), np.uint8), bitorder="little")
        weight = (
            torch.from_numpy(bits.astype(np.float32)).view(channels, -1, kernel, kernel) * 2 - 1
        )
        signs = signs_of(x) if to is None else to.signs(f"{name}.conv", x, 0.0)
        dot = F.conv2d(F.pad(signs.float(), [padding] * 4, value=1.0), weight, stride=stride)
        return ((weight[0].numel() + dot) / 2).to(self.dtype)

    def __call__(self, x: Tensor, to: Followed | None = None) -> Tensor:
        x = self.norm(x.to(self.dtype), "bn_data")
        stem, stride = self.get("conv0_weight"), 2 if self.large else 1
        x = F.conv2d(x, stem, stride=stride, padding=stem.shape[-1] // 2)
        if self.large:
            x = F.max_pool2d(self.norm(x, "bn0").relu(), 3, 2, 1)
        for stage in range(1, 5):
            channels = 32 << stage
            for unit in (1, 2):
                name, first = f"stage{stage}_unit{unit}", unit == 1
                stride = 2 if first and stage > 1 else 1
                inner = self.norm(x, f"{name}_bn1")
                shortcut = self.conv(inner, f"{name}_sc", channels, 1, stride, to) if first else x
                y = self.conv(inner, f"{name}_conv1", channels, 3, stride, to)
                y = self.norm(y, f"{name}_bn2")
                x = self.conv(y, f"{name}_conv2", channels, 3, 1, to) + shortcut
        x = self.norm(x, "bn1").relu().mean((2, 3))
        return F.linear(x, self.get("fc1_weight"), self.get("fc1_bias"))


# --- AdaBin's ResNet-20 -----------------------------------------------------------------------------------


class AdabinResnet20:
    """AdaBin's ResNet-20: binary values α (±1 + β) for inputs, standard deviation and mean per filter for weights."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        self.state = {k.removeprefix("module."): v.to(dtype) for k, v in state.items()}
        self.dtype = dtype

    def norm(self, x: Tensor, name: str) -> Tensor:
        s = self.state
        mean, variance, weight, bias = (
            s[f"{name}.{part}"].view(1, -1, *[1] * (x.dim() - 2))
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias

    def maxout(self, x: Tensor, name: str) -> Tensor:
        up, down = (
            self.state[f"{name}.{part}"].view(1, -1, 1, 1) for part in ("pos_scale", "neg_scale")
        )
        return torch.where(x > 0, up * x, down * x)

    def conv(self, x: Tensor, name: str, stride: int, to: Followed | None) -> Tensor:
        alpha, beta = self.state[f"{name}.binary_a.alpha_a"], self.state[f"{name}.binary_a.beta_a"]
        signs = torch.sign(x - beta) if to is None else to.signs(name, x, beta)
        x = alpha * (signs + beta)
        weight = self.state[f"{name}.weight"]
        center = weight.mean((1, 2, 3), keepdim=True)
        spread = ((weight - center) ** 2).mean((1, 2, 3), keepdim=True).sqrt()
        return F.conv2d(x, torch.sign(weight - center) * spread + center, stride=stride, padding=1)

    def __call__(self, x: Tensor, to: Followed | None = None) -> Tensor:
        x = F.conv2d(x.to(self.dtype), self.state["conv1.weight"], padding=1)
        x = self.maxout(self.norm(x, "bn1"), "nonlinear1")
        for stage in (1, 2, 3):
            for block in range(3):
                for n in (1, 2):
                    name = f"layer{stage}.{block}"
                    shrinks = stage > 1 and block == 0 and n == 1
                    y = self.conv(x, f"{name}.conv{n}", 2 if shrinks else 1, to)
                    if shrinks:
                        side = x.shape[1] // 2
                        x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, side, side))
                    x = self.maxout(self.norm(y, f"{name}.bn{n}") + x, f"{name}.nonlinear{n}")
        x = self.norm(x.mean((2, 3)), "bn2")
        return F.linear(x, self.state["linear.weight"], self.state["linear.bias"])
