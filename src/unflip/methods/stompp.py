"""StoMPP: Layerwise Progressive Freezing.

Smith, Islam, 2026, arXiv:2601.22660 and arXiv:2606.27759 (Stochastic Masked Partial Progressive binarization).
Training begins with clipped float values. A random mask M replaces more and more of them by signs, one layer after the
other from the input to the output. So the layers behind the one that changes still pass exact gradients.

Weights     training:    Q = M · sign(W) + (1 − M) · clip(W, −1, 1)
            evaluation:  Q = sign(W)                                             (what is frozen)
            ∂L/∂W = ∂L/∂Q · (1 − M) · 1[|W| ≤ 1]       (gradient="none": no straight-through gradient at all)
            ∂L/∂W = ∂L/∂Q · 1[|W| ≤ 1]                 (gradient="straight_through": also where M = 1)
Inputs      the same function and gradient of x, with its own mask
Masks       P(M = 1) = p. After each step a share 1/refresh of the weights draws its mask again
Schedule    p = clip(t, 0, 1)³ with t = L (i + 1) / N − l, for layer l = 0 .. L − 1 in epoch i = 0 .. N − 1: each layer
            has an equal part of the training, and in the last epoch all are binary

Not verified: we had the abstracts and two summaries of the second paper by others, and found no code. From these come
the masks with clip and sign, both gradients, the cube, refresh = 100, the order of the layers, and that first, last and
down-sampling layers stay float. Our choices: equal parts for all layers, a value of p per epoch instead of per step,
masks of inputs drawn again in every pass, no scale, and W clipped to [−1, 1] after each step (as BinaryConnect, their
baseline). The default is gradient="straight_through", which has the higher accuracies in the second paper.

Accuracy before the last epoch is that of a network which is not trained to be binary yet. The masks of the weights are
part of the state dict.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, Self

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
from unflip.methods.pieces import ClippedSign, PlainSign, check_whole, sign_code
from unflip.methods.registry import register
from unflip.ste import clipped_sign, sign, straight_through


class Progress(Numbers):
    """p of one layer, by epoch. ``Method.adapt`` sets the place of the layer in its network."""

    value: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.place, self.layers = 0, 1
        self.started = False
        self.hold("value", 0.0, like)

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.started = True
        passed = self.layers * (epoch + 1) / epochs - self.place
        self.set_number("value", min(max(passed, 0.0), 1.0) ** 3)


def partly_binary(x: Tensor, mask: Tensor, surrogate: bool) -> Tensor:
    """sign(x) where the mask is 1, clip(x) elsewhere; ``surrogate``: signs have the gradient of clip."""
    clipped, signs = x.clamp(-1, 1), sign(x.detach())
    return torch.where(mask, straight_through(signs, clipped) if surrogate else signs, clipped)


class MaskedWeights(PlainSign):
    mask: Tensor

    def __init__(self, config: StoMPP, weight: Tensor) -> None:
        super().__init__()
        self.config = config
        self.progress = Progress(weight)
        self.trained = False
        self.register_buffer("mask", torch.zeros_like(weight, dtype=torch.bool))

    def code(self, weight: Tensor) -> BinaryWeight:
        if self.trained and not self.progress.started and not self.training:
            self.trained = False  # warn once
            warnings.warn(
                "stompp: the network was trained without unflip.start_epoch, so its weights and inputs stayed float. "
                "Call unflip.start_epoch(model, epoch, epochs) before each epoch (docs/training.md).",
                stacklevel=2,
            )
        return super().code(weight)

    def forward(self, weight: Tensor) -> Tensor:
        if not self.training:
            return super().forward(weight)
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.trained = True
        return partly_binary(weight, self.mask, self.config.gradient == "straight_through")

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.progress.start_epoch(epoch, epochs)
        if self.progress.numbers["value"] == 1:
            self.mask.fill_(True)

    @torch.no_grad()
    def after_step(self, weight: Tensor) -> None:
        super().after_step(weight)
        drawn = torch.rand_like(weight) < self.progress.value
        again = torch.rand_like(weight) < 1 / self.config.refresh
        self.mask.copy_(torch.where(again, drawn, self.mask))


class MaskedInputs(InputBinarizer):
    def __init__(self, config: StoMPP, like: Tensor) -> None:
        super().__init__()
        self.config = config
        self.progress = Progress(like)

    def train(self, mode: bool = True) -> Self:
        self.unit = not mode  # in training some values are not −1 or +1
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return clipped_sign(x)
        mask = torch.rand_like(x) < self.progress.value
        return partly_binary(x, mask, self.config.gradient == "straight_through")

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.progress.start_epoch(epoch, epochs)

    def deployed(self) -> InputBinarizer:
        return ClippedSign()

    def code(self) -> InputCode:
        return sign_code()


@register("stompp")
@dataclass(frozen=True)
class StoMPP(Method):
    """Clipped float values that become signs at random, layer by layer."""

    gradient: Literal["none", "straight_through"] = "straight_through"
    refresh: int = 100

    def __post_init__(self) -> None:
        check_whole("stompp", "refresh", self.refresh, 1, 1_000_000)
        super().__post_init__()

    @property
    def family(self) -> str:
        """Both options affect training only."""
        return self.name

    @property
    def unfit_for_lns(self) -> str | None:
        return "most of its weights are not binary while it trains, so a mapping network would have no labels for them"

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        assert isinstance(layer.weight, Tensor)
        return MaskedWeights(self, layer.weight)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        assert isinstance(layer.weight, Tensor)
        return MaskedInputs(self, layer.weight)

    def adapt(self, model: nn.Module) -> None:
        from unflip.layers import binary_layers  # which needs the methods' base classes

        layers = [layer for _, layer in binary_layers(model)]
        for place, layer in enumerate(layers):
            for binarizer in (layer.weight_binarizer, layer.input_binarizer):
                progress = binarizer.progress
                assert isinstance(progress, Progress)
                progress.place, progress.layers = place, len(layers)
