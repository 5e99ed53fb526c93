"""LNS: Training Binary Neural Networks through Learning with Noisy Supervision.

Han et al., ICML 2020, arXiv:2010.04871.

Sign(W) binarizes each weight alone. Here a small network f, one for each layer, looks at a whole filter of
latent weights and predicts its binary weights; sign(W) of a pretrained binary network supervises f as a
*noisy* label q̃, because some signs are flipped wrongly.

Weights     q̂ = f(W),  Q = E · sign(q̂), the scale E as the base method has it
            ∂L/∂q̂ = E · ∂L/∂Q (straight through the sign), and from there to W and to θ of f
Mapping     f: convolutions c → 2c → 2c → c, 3×3, padding 1, BatchNorm and ReLU between; c is the number of
            input channels, a filter is one image, a layer's filters are the batch
Loss        ℓ̃(q̂, q̃) = [(1 − ρ₋q̃) ℓ(q̂, q̃) − ρq̃ ℓ(q̂, −q̃)] / (1 − ρ₊ − ρ₋),  ℓ(q̂, q) = (q̂ − q)²
            ρ₊ = P(q̃ = −1 | q = +1), ρ₋ = P(q̃ = +1 | q = −1); L = L_cls + α Σ_layers ℓ̃
            E over flipped labels of ℓ̃ is ℓ on the clean label.
            ∂ℓ̃/∂q̂ = 2 (q̂ − q̃) − 4 ρq̃ q̃ / (1 − ρ₊ − ρ₋)
Inputs      as the base method has them

Under the squared loss the correction moves the target and nothing else: ℓ̃ = (q̂ − t)² + const with
t = q̃ (1 − ρ₋q̃ + ρq̃) / (1 − ρ₊ − ρ₋); for ρ₊ = ρ₋ = ρ that is t = q̃ / (1 − 2ρ), a stretch.

The paper leaves much open; each choice is an option, reasoned about in ``docs/lns.md``. So is the loss: ``loss`` takes
one of the others of ``noisy_labels.py`` in ℓ̃'s place, and with ``rates="estimated"`` every weight has its own ρ₊ and
ρ₋ (:func:`set_flip_rates`), estimated for instance by ``train/flip_rates.py``.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unflip.methods.base import (
    BinaryWeight,
    InputBinarizer,
    Method,
    WeightBinarizer,
    register,
    resolve,
)
from unflip.methods.mapping_network import CHUNK, FilterNorm, MappingNetwork, Statistics
from unflip.methods.noisy_labels import (
    backward_loss,
    check_loss_options,
    check_rates,
    forward_loss,
    generalised_cross_entropy,
    smoothed_cross_entropy,
    symmetric_cross_entropy,
    unbiased_loss,
)
from unflip.ste import sign, straight_through

__all__ = [
    "CHUNK",
    "LNS",
    "FilterNorm",
    "Learned",
    "MappedSign",
    "MappingNetwork",
    "set_flip_rates",
    "sign_agreement",
    "trust_mappings",
    "unbiased_loss",
    "warm_start",
]

Learned = dict[str, dict[str, Tensor]]  # θ after a warm start, by a hash of what it began with


class MappedSign(WeightBinarizer):
    """E · sign(f(W)) with the base method's scale E; supervised by the base method's signs."""

    labels: Tensor
    alpha: Tensor
    rho_plus: Tensor
    rho_minus: Tensor

    def __init__(self, config: LNS, layer: nn.Module, base: WeightBinarizer) -> None:
        super().__init__()
        self.config = config
        self.base = base
        weight = layer.weight
        assert isinstance(weight, Tensor)
        if weight[:, 0].numel() < 2:
            raise ValueError(
                f"lns: a layer with weight {tuple(weight.shape)} is a single filter with one value a "
                "channel, which BatchNorm over filters turns to zero; skip it"
            )
        self.mapping = MappingNetwork(weight, config.mapping == "residual", config.statistics)
        self.mapping.to(device=weight.device, dtype=weight.dtype)
        self.shared: list[Tensor] | None = None
        # Until f has learned the signs, or a warning said that it has not.
        self.untaught = config.mapping == "plain"
        base.requires_grad_(False)  # its signs are labels and its scale is taken as it is
        if config.labels == "frozen":
            empty = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
            self.register_buffer("labels", empty)
            self.latent_replaced(weight)
        # Tensors, not numbers: a compiled step is the same for every α and ρ, so a sweep compiles one.
        precise = torch.promote_types(weight.dtype, torch.float32)
        self.hold("alpha", config.alpha, weight.new_empty(0, dtype=precise))
        self.terms = weight.numel() if config.reduction == "sum" else 1  # a sum is so many means
        for name, rho in (("rho_plus", config.rho_plus), ("rho_minus", config.rho_minus)):
            if config.rates == "estimated":  # the given ones, until set_flip_rates
                self.register_buffer(name, weight.new_full(weight.shape, rho))
            else:
                self.hold(name, rho, weight)

    def base_code(self, weight: Tensor) -> BinaryWeight:
        code = self.base.code(weight.detach())
        if len(code.signs) != 1:
            raise ValueError(
                f"lns: base={self.config.base!r} writes a weight as {len(code.signs)} signs; "
                "the mapping predicts one, so a base with one sign a weight is needed"
            )
        return code

    def predict(self, weight: Tensor) -> Tensor:
        """q̂ = f(W); computed once a step where the training loop shares it (``kernels/mapping.py``)."""
        if self.shared is None:
            return self.mapping(weight)
        if not self.shared:
            self.shared.append(self.mapping(weight))
        return self.shared[0]

    def code(self, weight: Tensor) -> BinaryWeight:
        return self.base_code(weight)._replace(signs=sign(self.predict(weight))[None])

    def forward(self, weight: Tensor) -> Tensor:
        base, predicted = self.base_code(weight), self.predict(weight)
        binary = base._replace(signs=sign(predicted)[None]).dense()
        return straight_through(binary, base.scales[0] * self._passed(predicted))

    def surrogate(self, weight: Tensor) -> Tensor:
        return self.base_code(weight).scales[0] * self._passed(self.predict(weight))

    def _passed(self, predicted: Tensor) -> Tensor:
        """What the straight-through gradient sees: q̂ itself, or q̂ inside [−1, 1] alone."""
        return predicted.clamp(-1, 1) if self.config.gradient == "clipped" else predicted

    @torch.no_grad()
    def latent_replaced(self, weight: Tensor) -> None:
        """New weights (a pretrained network's) bring new labels where those are frozen, and f knows none of them."""
        self.base.latent_replaced(weight)
        self.untaught = self.config.mapping == "plain"
        if self.config.labels == "frozen":
            self.labels.copy_(self.base_code(weight).signs[0])

    def noisy_labels(self, weight: Tensor) -> Tensor:
        if self.config.labels == "frozen":
            return self.labels.to(weight.dtype)
        return self.base_code(weight).signs[0]

    def supervision(self, q_hat: Tensor, labels: Tensor) -> Tensor:
        """The loss of each q̂ against its noisy label."""
        config, k = self.config, self.config.sharpness
        rates = self.rho_plus, self.rho_minus  # one for all weights, or one for each
        if config.loss == "unbiased":
            return unbiased_loss(q_hat, labels, *rates)
        if config.loss == "forward":
            return forward_loss(q_hat, labels, *rates, k)
        if config.loss == "backward":
            return backward_loss(q_hat, labels, *rates, k)
        if config.loss == "gce":
            return generalised_cross_entropy(q_hat, labels, k, config.gce_q)
        if config.loss == "sce":
            return symmetric_cross_entropy(q_hat, labels, k, config.sce_alpha, config.sce_beta)
        return smoothed_cross_entropy(q_hat, labels, k, config.smoothing)

    def auxiliary_loss(self, weight: Tensor) -> Tensor | None:
        config = self.config
        # A compiled step must not depend on it; without gradients no one is training.
        if not torch.compiler.is_compiling() and self.training and torch.is_grad_enabled():
            self._warn_if_untaught()
        q_hat = self.predict(weight)
        if config.loss_on == "after_sign":
            q_hat = straight_through(sign(q_hat), self._passed(q_hat))
        loss = self.supervision(q_hat, self.noisy_labels(weight))
        # Never in half precision: a sum, or α times the number of weights, leaves float16's range.
        precise = torch.promote_types(loss.dtype, torch.float32)
        return self.alpha.to(precise) * self.terms * loss.to(precise).mean()

    def _warn_if_untaught(self) -> None:
        """Once: accuracy would stay near guessing, and the loss alone does not tell why."""
        if self.untaught:
            self.untaught = False
            warnings.warn(
                "lns: a mapping network that has not learned the signs of its weights is being trained: it gives "
                "random ones. Call unflip.methods.lns.warm_start(model) after unflip.load_twin and before "
                "training, or use mapping='residual'.",
                stacklevel=2,
            )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if any(key.startswith(f"{prefix}mapping.") for key in state_dict):
            self.untaught = False  # it has learned what the one that was saved had

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.base.start_epoch(epoch, epochs)

    def after_step(self, weight: Tensor) -> None:
        self.base.after_step(weight)


@register("lns")
@dataclass(frozen=True)
class LNS(Method):
    """A network over each filter predicts its signs, supervised by the base method's noisy ones.

    ``mapping="residual"`` starts as the base method where that takes sign(W); over one that centres its weights it
    starts with some other signs (``docs/lns.md``).
    """

    base: str | Mapping[str, Any] | Method = "dorefa"
    alpha: float = 1.0
    rho_plus: float = 0.005
    rho_minus: float = 0.005
    loss_on: Literal["before_sign", "after_sign"] = "before_sign"
    reduction: Literal["mean", "sum"] = "mean"
    labels: Literal["following", "frozen"] = "following"
    gradient: Literal["identity", "clipped"] = "identity"
    mapping: Literal["plain", "residual"] = "plain"
    statistics: Statistics = "filters"
    loss: Literal["unbiased", "forward", "backward", "gce", "sce", "smoothing"] = "unbiased"
    rates: Literal["given", "estimated"] = "given"
    sharpness: float = 2.0  # k of p = σ(k q̂), for every loss but "unbiased"
    gce_q: float = 0.7
    sce_alpha: float = 0.1
    sce_beta: float = 1.0
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rates(self.rho_plus, self.rho_minus)
        check_loss_options(
            self.sharpness, self.gce_q, self.sce_alpha, self.sce_beta, self.smoothing
        )
        if self.rates == "estimated" and self.loss not in ("unbiased", "forward", "backward"):
            raise ValueError(f"lns: loss={self.loss!r} has no use for rates='estimated'")
        if not (isinstance(self.alpha, (int, float)) and 0 <= self.alpha < math.inf):
            raise ValueError(f"lns: alpha={self.alpha!r} should be a finite number >= 0")
        object.__setattr__(self, "base", resolve(self.base))
        if isinstance(self.base, LNS):
            raise ValueError("lns: base='lns' would map a mapping; give it the method it corrects")
        reason = self.base_method.unfit_for_lns
        if reason:
            raise ValueError(f"lns: base={self.base_method.name!r} does not work: {reason}")

    @property
    def base_method(self) -> Method:
        assert isinstance(self.base, Method)
        return self.base

    @property
    def family(self) -> str:
        """α, ρ and the like shape the training alone; these shape what the weights mean."""
        meaning = [f"base={self.base_method.family}"]
        meaning += ["mapping=residual"] if self.mapping == "residual" else []
        meaning += ["statistics=fixed"] if self.statistics == "fixed" else []
        return f"lns({', '.join(meaning)})"

    @property
    def binary_downsample(self) -> bool:
        return self.base_method.binary_downsample

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return MappedSign(self, layer, self.base_method.weight_binarizer(layer))

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return self.base_method.input_binarizer(layer)

    def adapt(self, model: nn.Module) -> None:
        self.base_method.adapt(model)


def mapped_layers(model: nn.Module) -> list[tuple[str, Tensor, MappedSign]]:
    """(name, latent weight, binarizer) of every LNS layer; an error if there is none."""
    layers = []
    for name, module in model.named_modules():
        binarizer, weight = (
            getattr(module, "weight_binarizer", None),
            getattr(module, "weight", None),
        )
        if isinstance(binarizer, MappedSign) and isinstance(weight, Tensor):
            layers.append((name, weight, binarizer))
    if not layers:
        raise ValueError("the model has no LNS layer: binarize it with method='lns' first")
    return layers


def trust_mappings(model: nn.Module) -> None:
    """Say that the mapping networks have learned their signs, where their tensors were filled in place."""
    for module in model.modules():
        if isinstance(module, MappedSign):
            module.untaught = False


@torch.no_grad()
def set_flip_rates(model: nn.Module, rates: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Give every weight its own (ρ₊, ρ₋): for each LNS layer two tensors that fit its weight."""
    for name, weight, binarizer in mapped_layers(model):
        if binarizer.config.rates != "estimated":
            raise ValueError(f"layer {name!r} has rates='given': make LNS with rates='estimated'")
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
    """Share of weights, for each LNS layer, where the mapping gives the noisy label."""
    return {
        name: (binarizer.code(weight).signs[0] == binarizer.noisy_labels(weight))
        .double()
        .mean()
        .item()
        for name, weight, binarizer in mapped_layers(model)
    }


def warm_start(
    model: nn.Module,
    steps: int = 2000,
    lr: float = 1e-3,
    agreement: float = 0.9995,
    progress: Callable[[str, float], None] | None = None,
    learned: Learned | None = None,
) -> dict[str, float]:
    """Teach each mapping network the noisy labels with everything else fixed.

    f sees the weights and nothing else, so no data are needed. A layer stops when its signs agree with
    the labels on a share of ``agreement``, or after ``steps`` steps of Adam. Returns the agreement
    reached for each layer; ``progress`` is called with it as each layer ends. ``learned``, kept from one
    model to the next, has what mapping networks have learned: one that begins as another did is not taught again.

    Labels that were frozen earlier are taken anew: the warm start is where supervision begins.
    """
    reached = {}
    for name, weight, binarizer in mapped_layers(model):
        binarizer.latent_replaced(weight)
        reached[name] = _fit_mapping(weight.detach(), binarizer, steps, lr, agreement, learned)
        binarizer.untaught = False
        if progress:
            progress(name, reached[name])
    short = {name: share for name, share in reached.items() if not share >= min(agreement, 0.999)}
    if short:
        shares = ", ".join(f"{name} {share:.3%}" for name, share in short.items())
        warnings.warn(
            f"after {steps} steps the mapping still disagrees with the labels: {shares}. "
            "More steps or mapping='residual' may help.",
            stacklevel=2,
        )
    return reached


def _fit_mapping(
    weight: Tensor,
    binarizer: MappedSign,
    steps: int,
    lr: float,
    agreement: float,
    learned: Learned | None,
) -> float:
    """In float32: half is not enough for Adam."""
    config, mapping, dtype = binarizer.config, binarizer.mapping, weight.dtype
    if dtype in (torch.float16, torch.bfloat16):
        mapping.float()
        weight = weight.float()
    labels = binarizer.noisy_labels(weight)
    how = weight, labels, binarizer, steps, lr, agreement
    if learned is None:
        _teach(*how)
    elif (beginning := _beginning(*how)) in learned:
        mapping.load_state_dict(learned[beginning])
    else:
        _teach(*how)
        learned[beginning] = {name: t.clone() for name, t in mapping.state_dict().items()}
    for norm in _norms(mapping):  # the last forward pass above measured what "fixed" keeps
        norm.measuring = config.statistics == "filters"
    mapping.to(dtype)
    return (sign(mapping(weight.to(dtype)).detach()) == labels).double().mean().item()


def _beginning(weight: Tensor, labels: Tensor, binarizer: MappedSign, *how: float) -> str:
    """A hash of all that decides what a mapping network learns. α is not of that, nor what follows the warm start."""
    later = ("alpha", "labels", "loss_on", "reduction", "gradient")
    config = {k: v for k, v in asdict(binarizer.config).items() if k not in later}
    total = hashlib.sha256(
        repr((sorted(config.items()), how, weight.dtype, weight.device)).encode()
    )
    rates = binarizer.rho_plus, binarizer.rho_minus
    for tensor in (weight, labels, *rates, *binarizer.mapping.state_dict().values()):
        total.update(tensor.detach().cpu().double().numpy().tobytes())  # exact, from bfloat16 too
    return total.hexdigest()


def _norms(mapping: nn.Module) -> list[FilterNorm]:
    return [m for m in mapping.modules() if isinstance(m, FilterNorm)]


def _teach(
    weight: Tensor, labels: Tensor, binarizer: MappedSign, steps: int, lr: float, agreement: float
) -> None:
    """Adam on the supervision's loss before the sign, over θ alone."""
    mapping = binarizer.mapping
    optimizer = torch.optim.Adam(mapping.parameters(), lr=lr)
    check_every = 20  # comparing signs costs a device synchronisation

    for norm in _norms(mapping):
        norm.measuring = True
    share = 0.0
    for step in range(steps + 1):
        with torch.enable_grad():
            q_hat = mapping(weight)
            loss = binarizer.supervision(q_hat, labels).mean()
        if step % check_every == 0:
            share = (sign(q_hat.detach()) == labels).double().mean().item()
        if share >= agreement or step == steps:
            break
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        grads = torch.autograd.grad(loss, list(mapping.parameters()))
        for parameter, grad in zip(mapping.parameters(), grads, strict=True):
            parameter.grad = grad
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
