"""LNS: Training Binary Neural Networks through Learning with Noisy Supervision.

Han et al., ICML 2020, arXiv:2010.04871.

Sign(W) binarizes each weight alone. Here a small network f, one per layer, reads a whole filter of latent weights and
predicts its binary weights. Sign(W) of a pretrained binary network supervises f as a *noisy* label q̃, because some
signs are flipped wrongly.

Weights     q̂ = f(W),  Q = E · sign(q̂), with the scale E of the base method
            ∂L/∂q̂ = E · ∂L/∂Q (straight through the sign), and from there to W and to θ of f
            (other interpretations: see below)
Mapping     f: convolutions c → 2c → 2c → c, 3×3, padding 1, BatchNorm and ReLU between; c is the number of
            input channels, a filter is one image, the filters of a layer are the batch
Loss        ℓ̃(q̂, q̃) = [(1 − ρ₋q̃) ℓ(q̂, q̃) − ρq̃ ℓ(q̂, −q̃)] / (1 − ρ₊ − ρ₋),  ℓ(q̂, q) = (q̂ − q)²
            ρ₊ = P(q̃ = −1 | q = +1), ρ₋ = P(q̃ = +1 | q = −1); L = L_cls + α Σ_layers ℓ̃
            The mean of ℓ̃ over flipped labels is ℓ for the clean label.
            ∂ℓ̃/∂q̂ = 2 (q̂ − q̃) − 4 ρq̃ q̃ / (1 − ρ₊ − ρ₋)
Inputs      as in the base method
Before      A warm start teaches each f the noisy labels; f reads only the weights, so it needs no data. A recipe runs
the first   it before the first epoch (warm_steps, warm_lr, warm_agreement, warm_patience); in Python, call
epoch       ``unflip.methods.lns.warm_start(model)``

Task's gradient G = ∂L_cls/∂Q, with the base method's surrogate s(W) (W itself for DoReFa), by ``task_gradient``:

    through_f           W: E · G · ∂f/∂W       θ: E · G · ∂f/∂θ      ℓ̃ trains W and θ
    straight_through    W: G · ∂s/∂W           θ: 0                  ℓ̃ trains θ alone: f reads W detached
    both                W: G · ∂s/∂W           θ: E · G · ∂f/∂θ      ℓ̃ trains θ alone: f reads W detached

The bits are those of sign(f(W)) in all three. ``output="tanh"`` puts a tanh at the end of f, which keeps all signs.

With the squared loss the correction only moves the target: ℓ̃ = (q̂ − t)² + const with
t = q̃ (1 − ρ₋q̃ + ρq̃) / (1 − ρ₊ − ρ₋). For ρ₊ = ρ₋ = ρ this is t = q̃ / (1 − 2ρ), a stretch.

The paper leaves much open; each choice is an option, explained in ``docs/lns.md``. ``loss`` replaces ℓ̃ by another loss
of ``noisy_labels.py``. With ``rates="estimated"`` every weight has its own ρ₊ and ρ₋ (:func:`set_flip_rates`). A recipe
estimates them before the first epoch from the run it starts from (``flip_rates.py``). ``lr`` is θ's peak learning
rate; it follows the recipe's schedule.

Parts: ``lns_options.py``, ``mapping_network.py`` (f), ``mapped_sign.py`` (the binarizer), ``noisy_labels.py`` (losses),
``warm_start.py``, ``flip_rates.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from unflip.methods.base import InputBinarizer, ParameterGroup, Preparation, WeightBinarizer
from unflip.methods.flip_rates import compare_branches
from unflip.methods.lns_options import LNSOptions
from unflip.methods.mapped_sign import (
    MappedSign,
    mapped_layers,
    set_flip_rates,
    sign_agreement,
)
from unflip.methods.mapping_network import CHUNK, FilterNorm, MappingNetwork
from unflip.methods.noisy_labels import unbiased_loss
from unflip.methods.registry import register
from unflip.methods.warm_start import WarmStartLog, warm_start

__all__ = [
    "CHUNK",
    "LNS",
    "FilterNorm",
    "MappedSign",
    "MappingNetwork",
    "mapped_layers",
    "set_flip_rates",
    "sign_agreement",
    "unbiased_loss",
    "warm_start",
]

# How flip rates are estimated: short branches at a low rate stay close to the network they start from.
BRANCHES = 3
BRANCH_EPOCHS = 2
BRANCH_RATE = 0.1


@register("lns")
@dataclass(frozen=True)
class LNS(LNSOptions):
    """A network over each filter predicts its signs, supervised by the noisy signs of the base method.

    ``mapping="residual"`` starts exactly as a base method that takes sign(W). Over a base method that centers its
    weights it starts with some other signs (``docs/lns.md``).
    """

    from_scratch: ClassVar[bool] = False

    @property
    def binary_downsample(self) -> bool:
        return self.base_method.binary_downsample

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return MappedSign(self, layer, self.base_method.weight_binarizer(layer))

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return self.base_method.input_binarizer(layer)

    def adapt(self, model: nn.Module) -> None:
        self.base_method.adapt(model)

    def needs_start(self) -> str | None:
        if self.rates == "estimated":
            return "rates='estimated' compares copies of the network that the run starts from"
        return None

    def parameter_groups(self, model: nn.Module) -> list[ParameterGroup]:
        """θ of all mapping networks, as the group "mapping"."""
        mappings = [m.mapping for m in model.modules() if isinstance(m, MappedSign)]
        theta = [parameter for mapping in mappings for parameter in mapping.parameters()]
        own = [ParameterGroup("mapping", theta, self.lr)] if theta else []
        return [*own, *self.base_method.parameter_groups(model)]

    def prepare(self, model: nn.Module, preparation: Preparation) -> None:
        self.base_method.prepare(model, preparation)
        if self.rates == "estimated":
            _estimate_rates(model, preparation)
        if self.warm_steps:
            self._warm_start(model, preparation)

    def _warm_start(self, model: nn.Module, preparation: Preparation) -> None:
        log = WarmStartLog(preparation.say)
        how = self.warm_steps, self.warm_lr, self.warm_agreement, self.warm_patience
        warm_start(model, *how, progress=log, memo=preparation.memo)
        preparation.say(log.summary())


def _estimate_rates(model: nn.Module, preparation: Preparation) -> None:
    baseline, branches = preparation.branches(BRANCHES, BRANCH_EPOCHS, BRANCH_RATE)
    rates = compare_branches(baseline, branches)
    set_flip_rates(model, rates.for_weights(model))
    found = [layer.rho for layer in rates.whole.values()]
    preparation.say(f"flip rates of the baseline's layers: {min(found):.3%} to {max(found):.3%}")
