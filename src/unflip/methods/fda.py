"""FDA-BNN: Learning Frequency Domain Approximation for Binary Neural Networks.

Xu et al., NeurIPS 2021, arXiv:2103.00841.

Within one period, sign is the square wave Σ_i 4 / ((2i + 1)π) · sin((2i + 1)ωt). Its first n + 1 terms are
differentiable, and a small network ê learns the remainder:

Weights     Q = E · (sign(W) + α ê(W)), E = E(|W|) over the whole layer, not differentiated (DoReFa's)
            ∂L/∂W = ∂L/∂Q · (ŝ'(W) + E α ê'(W))
Inputs      B = sign(x) + α ê(x), ∂L/∂x = ∂L/∂B · (ŝ'(x) + α ê'(x))
Gradient    ŝ'(t) = 4ω/π · Σ_{i=0..n} cos((2i + 1)ωt) = 2ω/π · sin(2(n + 1)ωt) / sin(ωt) for |ωt| ≤ π/2, 0 outside
Noise       ê(t) = max(t W₁, 0) W₂ + 0.1 sin(t), vectors t of length d, W₁: d × d/64, W₂: d/64 × d, learned; each
            layer has one for its weights and one for its inputs
Schedule    per epoch, n rises from 9 to 18 and α falls to 0: at the end ê has no effect

In evaluation and in a frozen network ê is dropped and its cost is not counted. Weights and inputs are their signs.

Differences from the authors' code: they released the evaluation only. In the paper's figure 2 and equation 14, α ê is
part of the forward pass of training; its algorithm 1 leaves it out. Without it nothing bounds ê, and in our trials it
grew without limit. Our choices where the paper says nothing: ω = 0.1, at which the middle lobe of ŝ' is about as wide
as the usual window |t| ≤ 1 (at ω = 1 it is a tenth of that and hardly trains). α starts at 0.1 and falls linearly.
t is a filter for weights, and the channels of a pixel (the features of a linear layer) for inputs. ê has at least 4
hidden units and sees t clipped at |ωt| = π/2, where ŝ' is 0 and the wave turns back towards its next jump.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip.methods.base import (
    BinaryWeight,
    InputBinarizer,
    InputCode,
    Method,
    Numbers,
    WeightBinarizer,
)
from unflip.methods.pieces import at_least_float32, check_whole, layer_mean, sign_code
from unflip.methods.registry import register
from unflip.ste import sign, straight_through

REDUCTION = 64
SHORTCUT = 0.1


class NoiseAdaptation(nn.Module):
    """ê over the last dimension."""

    def __init__(self, length: int, like: Tensor) -> None:
        super().__init__()
        hidden = max(4, length // REDUCTION)
        place = {"device": like.device, "dtype": like.dtype}
        self.first = nn.Linear(length, hidden, bias=False, **place)
        self.second = nn.Linear(hidden, length, bias=False, **place)

    def forward(self, t: Tensor) -> Tensor:
        learned = self.second(F.relu(self.first(t.to(self.first.weight.dtype))))
        return learned.to(t.dtype) + SHORTCUT * torch.sin(t)


class Fourier(Numbers):
    """The truncated series and the noise of one tensor, with the schedules of n and α."""

    terms: Tensor  # n + 1
    alpha: Tensor

    def __init__(self, config: "FDA", adaptation: NoiseAdaptation | None, like: Tensor) -> None:
        super().__init__()
        self.config = config
        self.adaptation = adaptation
        self.limit = math.pi / (2 * config.frequency)
        self.hold("terms", config.terms + 1, like)
        self.hold("alpha", config.alpha, like)

    def start_epoch(self, epoch: int, epochs: int) -> None:
        progress = epoch / max(1, epochs - 1)
        self.set_number("terms", self.config.terms + round(self.config.terms * progress) + 1)
        self.set_number("alpha", self.config.alpha * (1 - progress))

    def sine(self, x: Tensor) -> Tensor:
        """A function whose derivative is ŝ'."""
        t = x.clamp(-self.limit, self.limit)
        return self.derivative(t).detach() * t

    def derivative(self, t: Tensor) -> Tensor:
        """ŝ'(t), by the closed form of the sum."""
        theta = self.config.frequency * at_least_float32(t)
        terms, sine = self.terms.to(theta.dtype), torch.sin(theta)
        zero = sine == 0
        ratio = torch.sin(2 * terms * theta) / (sine + zero.to(sine.dtype))
        slope = 2 * self.config.frequency / math.pi * torch.where(zero, 2 * terms, ratio)
        return slope.to(t.dtype)

    def noise(self, x: Tensor, vectors: int) -> Tensor:
        """α ê in training, otherwise 0; ``vectors`` is the dimension of the vectors t."""
        if self.adaptation is None or not self.training:
            return torch.zeros_like(x)
        t = x.clamp(-self.limit, self.limit).movedim(vectors, -1)
        return self.alpha * self.adaptation(t).movedim(-1, vectors)


class FourierWeights(WeightBinarizer):
    def __init__(self, config: "FDA", weight: Tensor) -> None:
        super().__init__()
        self.fourier = Fourier(config, NoiseAdaptation(weight[0].numel(), weight), weight)

    def code(self, weight: Tensor) -> BinaryWeight:
        return BinaryWeight(sign(weight)[None], layer_mean(weight))

    def surrogate(self, weight: Tensor) -> Tensor:
        return self.fourier.sine(weight)

    def forward(self, weight: Tensor) -> Tensor:
        noise = self.fourier.noise(weight.flatten(1), -1).view_as(weight)
        return super().forward(weight) + layer_mean(weight.detach())[0] * noise

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.fourier.start_epoch(epoch, epochs)


class FourierInputs(InputBinarizer):
    def __init__(self, fourier: Fourier, channels: int) -> None:
        super().__init__()
        self.fourier = fourier
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        binary = straight_through(sign(x), self.fourier.sine(x))
        return binary + self.fourier.noise(x, self.channels)

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.fourier.start_epoch(epoch, epochs)

    def deployed(self) -> InputBinarizer:
        whole = self.fourier
        return FourierInputs(Fourier(whole.config, None, whole.terms), self.channels)

    def code(self) -> InputCode:
        return sign_code()


@register("fda")
@dataclass(frozen=True)
class FDA(Method):
    """Layer-wise mean times sign; gradient of a Fourier series and of a small network."""

    terms: int = 9  # n in the first epoch; it doubles until the last
    frequency: float = 0.1  # ω
    alpha: float = 0.1  # α in the first epoch; 0 in the last

    def __post_init__(self) -> None:
        check_whole(self.name, "terms", self.terms, 1, 100)
        super().__post_init__()
        if not (math.isfinite(self.frequency) and self.frequency > 0):
            raise ValueError(f"fda: frequency={self.frequency} should be a finite number > 0")
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ValueError(f"fda: alpha={self.alpha} should be a finite number >= 0")

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        assert isinstance(layer.weight, Tensor)
        return FourierWeights(self, layer.weight)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        if isinstance(layer, nn.Conv2d):
            length, channels = layer.in_channels, -3
        else:
            length, channels = weight.shape[1], -1
        return FourierInputs(Fourier(self, NoiseAdaptation(length, weight), weight), channels)
