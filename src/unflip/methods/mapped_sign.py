"""E · sign(f(W)), the weights of an LNS layer, and functions over all such layers of a model (see ``lns.py``)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unflip.layers import binary_layers
from unflip.methods.base import BinaryWeight, WeightBinarizer
from unflip.methods.lns_options import LNSOptions
from unflip.methods.mapping_network import MappingNetwork
from unflip.methods.noisy_labels import (
    backward_loss,
    forward_loss,
    generalized_cross_entropy,
    smoothed_cross_entropy,
    symmetric_cross_entropy,
    unbiased_loss,
)
from unflip.methods.pieces import at_least_float32
from unflip.ste import sign, straight_through


class MappedSign(WeightBinarizer):
    """E · sign(f(W)) with the base method's scale E; supervised by the base method's signs."""

    labels: Tensor
    alpha: Tensor
    rho_plus: Tensor
    rho_minus: Tensor

    def __init__(self, config: LNSOptions, layer: nn.Module, base: WeightBinarizer) -> None:
        super().__init__()
        self.config = config
        self.base = base
        weight = layer.weight
        assert isinstance(weight, Tensor)
        if weight[:, 0].numel() < 2:
            raise ValueError(
                f"lns: a layer with weight {tuple(weight.shape)} is a single filter with one value per channel, "
                "which BatchNorm over filters turns into zeros; skip it"
            )
        residual = config.mapping == "residual"
        self.mapping = MappingNetwork(weight, residual, config.statistics, config.output)
        self.mapping.to(device=weight.device, dtype=weight.dtype)
        self.shared: list[Tensor] | None = None
        # True until f has learned the signs, or a warning has said that it has not.
        self.untaught = config.mapping == "plain"
        base.requires_grad_(False)  # its signs are labels, and its scale is not trained
        if config.labels == "frozen":
            empty = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
            self.register_buffer("labels", empty)
            self.latent_replaced(weight)
        # Tensors, not numbers: a sweep over α and ρ then compiles only one step.
        self.hold("alpha", config.alpha, at_least_float32(weight.new_empty(0)))
        self.terms = weight.numel() if config.reduction == "sum" else 1  # sum = terms · mean
        for name, rho in (("rho_plus", config.rho_plus), ("rho_minus", config.rho_minus)):
            if config.rates == "estimated":  # the given rates until set_flip_rates is called
                self.register_buffer(name, weight.new_full(weight.shape, rho))
            else:
                self.hold(name, rho, weight)

    def base_code(self, weight: Tensor) -> BinaryWeight:
        code = self.base.code(weight.detach())
        if len(code.signs) != 1:
            raise ValueError(
                f"lns: base={self.config.base!r} writes a weight as {len(code.signs)} signs, but the mapping "
                "predicts one; use a base with one sign per weight"
            )
        return code

    def seen(self, weight: Tensor) -> Tensor:
        """W as f reads it: detached if W gets the base method's gradient instead of one through f."""
        return weight if self.config.task_gradient == "through_f" else weight.detach()

    def predict(self, weight: Tensor) -> Tensor:
        """q̂ = f(W); computed once per step if the training loop shares it (``kernels/mapping.py``)."""
        if self.shared is None:
            return self.mapping(self.seen(weight))
        # One that was computed without gradients, as ``code`` does for a hook, must not serve the training step.
        if not self.shared or (torch.is_grad_enabled() and not self.shared[0].requires_grad):
            self.shared[:] = [self.mapping(self.seen(weight))]
        return self.shared[0]

    def code(self, weight: Tensor) -> BinaryWeight:
        return self.base_code(weight)._replace(signs=sign(self.predict(weight))[None])

    def forward(self, weight: Tensor) -> Tensor:
        base, predicted = self.base_code(weight), self.predict(weight)
        binary = base._replace(signs=sign(predicted)[None]).dense()
        return straight_through(binary, self._soft(weight, base.scales[0], predicted))

    def surrogate(self, weight: Tensor) -> Tensor:
        return self._soft(weight, self.base_code(weight).scales[0], self.predict(weight))

    def _soft(self, weight: Tensor, scale: Tensor, predicted: Tensor) -> Tensor:
        """The function of W and θ whose gradient the task's gradient is multiplied with."""
        if self.config.task_gradient == "straight_through":
            return self.base.surrogate(weight)
        through_f = scale * self._passed(predicted)
        if self.config.task_gradient == "through_f":
            return through_f
        return self.base.surrogate(weight) + through_f

    def _passed(self, predicted: Tensor) -> Tensor:
        """The values whose gradient passes straight through: q̂, or q̂ clipped to [−1, 1]."""
        return predicted.clamp(-1, 1) if self.config.gradient == "clipped" else predicted

    @torch.no_grad()
    def latent_replaced(self, weight: Tensor) -> None:
        """New weights bring new signs, which f has not learned, and new labels if labels are frozen."""
        self.base.latent_replaced(weight)
        self.untaught = self.config.mapping == "plain"
        if self.config.labels == "frozen":
            self.labels.copy_(self.base_code(weight).signs[0])

    def noisy_labels(self, weight: Tensor) -> Tensor:
        if self.config.labels == "frozen":
            return self.labels.to(weight.dtype)
        return self.base_code(weight).signs[0]

    def supervision(self, q_hat: Tensor, labels: Tensor) -> Tensor:
        """The loss of each q̂ for its noisy label."""
        config, k = self.config, self.config.sharpness
        rates = self.rho_plus, self.rho_minus  # one for all weights, or one per weight
        if config.loss == "unbiased":
            return unbiased_loss(q_hat, labels, *rates)
        if config.loss == "forward":
            return forward_loss(q_hat, labels, *rates, k)
        if config.loss == "backward":
            return backward_loss(q_hat, labels, *rates, k)
        if config.loss == "gce":
            return generalized_cross_entropy(q_hat, labels, k, config.gce_q)
        if config.loss == "sce":
            return symmetric_cross_entropy(q_hat, labels, k, config.sce_alpha, config.sce_beta)
        return smoothed_cross_entropy(q_hat, labels, k, config.smoothing)

    def auxiliary_loss(self, weight: Tensor) -> Tensor | None:
        config = self.config
        # Only in training, which has gradients. A compiled step must not depend on the warning.
        if not torch.compiler.is_compiling() and self.training and torch.is_grad_enabled():
            self._warn_if_untaught()
        q_hat = self.predict(weight)
        if config.loss_on == "after_sign":
            q_hat = straight_through(sign(q_hat), self._passed(q_hat))
        loss = self.supervision(q_hat, self.noisy_labels(weight))
        # Never in half precision: a sum, or α times the number of weights, overflows float16.
        loss = at_least_float32(loss)
        return self.alpha.to(loss.dtype) * self.terms * loss.mean()

    def _warn_if_untaught(self) -> None:
        """Warn once: accuracy would stay near chance, and the loss alone does not show why."""
        if self.untaught:
            self.untaught = False
            warnings.warn(
                "lns: a mapping network is being trained that has not learned the signs of its weights, so it "
                "predicts random ones. In a recipe set method.warm_steps above 0; in Python call "
                "unflip.methods.lns.warm_start(model) after unflip.load_twin and before training. "
                "Or use mapping='residual'.",
                stacklevel=2,
            )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if any(key.startswith(f"{prefix}mapping.") for key in state_dict):
            self.untaught = False  # the saved mapping had been trained

    def restored(self) -> None:
        self.untaught = False
        self.base.restored()

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.base.start_epoch(epoch, epochs)

    def before_step(self, weight: Tensor) -> None:
        self.base.before_step(weight)

    def after_step(self, weight: Tensor) -> None:
        self.base.after_step(weight)


def mapped_layers(model: nn.Module) -> list[tuple[str, Tensor, MappedSign]]:
    """(name, latent weight, binarizer) of every LNS layer; raises ValueError if the model has none."""
    layers = [
        (name, layer.weight, layer.weight_binarizer)
        for name, layer in binary_layers(model)
        if isinstance(layer.weight_binarizer, MappedSign)
    ]
    if not layers:
        raise ValueError("the model has no LNS layer: binarize it with method='lns' first")
    return layers


@torch.no_grad()
def set_flip_rates(model: nn.Module, rates: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Give every weight its own (ρ₊, ρ₋): per LNS layer, two tensors that broadcast to its weight."""
    for name, weight, binarizer in mapped_layers(model):
        if binarizer.config.rates != "estimated":
            raise ValueError(
                f"layer {name!r} has rates='given': binarize the model with rates='estimated'"
            )
        if name not in rates:
            raise ValueError(f"no flip rates for layer {name!r}, only for {', '.join(rates)}")
        plus, minus = (r.to(weight).expand_as(weight) for r in rates[name])
        if not ((plus >= 0) & (minus >= 0) & (plus + minus < 1)).all():
            raise ValueError(
                f"flip rates of layer {name!r} should be >= 0 and add up to less than 1"
            )
        binarizer.rho_plus.copy_(plus)
        binarizer.rho_minus.copy_(minus)


@torch.no_grad()
def sign_agreement(model: nn.Module) -> dict[str, float]:
    """Per LNS layer, the share of weights whose predicted sign is the noisy label."""
    return {
        name: (binarizer.code(weight).signs[0] == binarizer.noisy_labels(weight))
        .double()
        .mean()
        .item()
        for name, weight, binarizer in mapped_layers(model)
    }
