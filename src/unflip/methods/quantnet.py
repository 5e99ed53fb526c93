"""Quantization Networks.

Yang et al., CVPR 2019, arXiv:1911.09464, at 1 bit. A quantizer is a sum of sigmoids (here one) whose steepness T rises
per epoch. The network is trained with the soft function and tested with the step it approaches.

Weights     x = β·W / M, M = max|W| of the layer (not differentiated)
            training:    Q = α·M · (2σ(T·x) − 1)
            evaluation:  Q = α·M · sign(x)                                       (what is frozen)
            ∂L/∂W = ∂L/∂Q · α·β · 2σ(x)(1 − σ(x))     (the temperature is 1 in the backward pass, see below)
            ∂L/∂β = Σ ∂L/∂Q · α·W · 2σ(x)(1 − σ(x)),  ∂L/∂α = Σ ∂L/∂Q · Q / α;  β starts at 5/4, α at 4/5
Inputs      z = β·x − b, b = 0.05 fixed, β learned, starts at 1
            training:    B = σ(T·z)
            evaluation:  B = 1[z ≥ 0], in {0, 1}
            ∂L/∂x = ∂L/∂B · β · σ(z)(1 − σ(z)),  ∂L/∂β = Σ ∂L/∂B · x · σ(z)(1 − σ(z))
Schedule    T = min(10·(i + 1), 2000) in epoch i = 0, 1, ...

For binary networks the authors' code evaluates σ' at temperature 1: at T = 100 the derivative of the soft function
itself, T·σ'(T·x), is zero for nearly every weight.

Differences from the authors' code:
- It calibrates β = 5/4 / max|W| and α = 1/β once, on a pretrained network. Here both are always in units of max|W|, so
  that weights may start at random or come from another network.
- It multiplies σ'(x) of the weights by T, which rises to hundreds, with learning rates chosen for that. Here the factor
  is 1, as a comment in its code says for the inputs.
- Inputs: there β is calibrated on data; here it starts at 1. The output factor 1/β is left out, because the weights' α
  includes it.
- There T is capped for the weights only, and T·x is clipped to ±10. The step is at z > 0 there, z ≥ 0 here.
``code`` depends on α and β, which are parameters, not on T.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from unflip.methods.base import (
    BinaryWeight,
    InputBinarizer,
    InputCode,
    Method,
    Numbers,
    WeightBinarizer,
)
from unflip.methods.pieces import one_step_code
from unflip.methods.registry import register
from unflip.ste import sign, straight_through

STEEPEST = 2000.0


class Temperature(Numbers):
    """T, by epoch."""

    value: Tensor

    def __init__(self, rise: float, like: Tensor) -> None:
        super().__init__()
        self.rise = rise
        self.hold("value", min(rise, STEEPEST), like)

    def start_epoch(self, epoch: int) -> None:
        self.set_number("value", min(self.rise * (epoch + 1), STEEPEST))


class SigmoidWeights(WeightBinarizer):
    def __init__(self, temperature: Temperature, like: Tensor) -> None:
        super().__init__()
        self.temperature = temperature
        self.alpha = nn.Parameter(like.new_full((), 0.8))
        self.beta = nn.Parameter(like.new_full((), 1.25))

    def largest(self, weight: Tensor) -> Tensor:
        largest = weight.detach().abs().amax()
        return largest.masked_fill(largest == 0, 1)

    def code(self, weight: Tensor) -> BinaryWeight:
        largest = self.largest(weight)
        scale = (self.alpha * largest).view(1, *[1] * weight.dim())
        return BinaryWeight(sign(self.beta * (weight / largest))[None], scale)

    def surrogate(self, weight: Tensor) -> Tensor:
        return self._scaled(weight, self.code(weight).signs[0])

    def forward(self, weight: Tensor) -> Tensor:
        if not self.training:
            return super().forward(weight)
        x = (self.beta * (weight / self.largest(weight))).detach()
        return self._scaled(weight, 2 * torch.sigmoid(self.temperature.value * x) - 1)

    def _scaled(self, weight: Tensor, value: Tensor) -> Tensor:
        """α·M times ``value``, with the gradient of 2σ(x) − 1."""
        largest = self.largest(weight)
        x = self.beta * (weight / largest)
        return self.alpha * largest * straight_through(value, 2 * torch.sigmoid(x) - 1)

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.temperature.start_epoch(epoch)


class SigmoidInputs(InputBinarizer):
    def __init__(self, temperature: Temperature, threshold: float, like: Tensor) -> None:
        super().__init__()
        self.temperature, self.threshold = temperature, threshold
        self.beta = nn.Parameter(like.new_ones(()))

    def train(self, mode: bool = True) -> Self:
        self.unit = not mode  # in training the values are soft, not 0 and 1
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        # The gradient of β is a sum over all of x, for which half precision is too coarse.
        x = x.to(torch.promote_types(x.dtype, self.beta.dtype))
        z = self.beta * x - self.threshold
        soft = self.temperature.value * z
        value = torch.sigmoid(soft) if self.training else (sign(z) + 1) / 2
        return straight_through(value, torch.sigmoid(z))

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.temperature.start_epoch(epoch)

    def deployed(self) -> InputBinarizer:
        step = StepInputs(self.temperature, self.threshold, self.beta)
        step.beta = self.beta
        return step

    def code(self) -> InputCode:
        return one_step_code(self)


class StepInputs(SigmoidInputs):
    """The inputs of a frozen layer: they are hard in training mode too, as its weights are."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


@register("quantnet")
@dataclass(frozen=True)
class QuantizationNetworks(Method):
    """Trained with sigmoids that steepen per epoch, tested with the step; inputs {0, 1}."""

    temperature: float = 10.0
    threshold: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature <= STEEPEST:
            raise ValueError(
                f"quantnet: temperature={self.temperature} should be > 0 and <= {STEEPEST:g}"
            )
        if not 0 <= self.threshold < float("inf"):
            raise ValueError(f"quantnet: threshold={self.threshold} should be finite and >= 0")

    @property
    def family(self) -> str:
        """The temperature affects training only; the threshold changes the meaning of inputs."""
        same = self.threshold == type(self).threshold
        return self.name if same else f"{self.name}(threshold={self.threshold})"

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        assert isinstance(layer.weight, Tensor)
        return SigmoidWeights(Temperature(self.temperature, layer.weight), layer.weight)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        assert isinstance(layer.weight, Tensor)
        temperature = Temperature(self.temperature, layer.weight)
        return SigmoidInputs(temperature, self.threshold, layer.weight)
