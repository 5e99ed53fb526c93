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

The paper leaves much open; each choice is an option, reasoned about in ``docs/lns.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip.methods.base import (
    BinaryWeight,
    InputBinarizer,
    Method,
    WeightBinarizer,
    register,
    resolve,
)
from unflip.ste import sign, straight_through

Statistics = Literal["filters", "fixed"]

# A row of a linear layer (or a 1×1 filter) wider than this is mapped in chunks: f would have 8c² weights.
CHUNK = 512


def unbiased_loss(q_hat: Tensor, q_noisy: Tensor, rho_plus: float, rho_minus: float) -> Tensor:
    """ℓ̃ for each element; its mean over flipped labels is the squared loss on the clean ones."""
    check_rates(rho_plus, rho_minus)
    # In q̂'s own precision: where() on the two rates would round them to float32.
    positive = (q_noisy > 0).to(q_hat.dtype)
    rho_same = positive * rho_plus + (1 - positive) * rho_minus  # ρ[q̃]
    rho_other = positive * rho_minus + (1 - positive) * rho_plus  # ρ[−q̃]
    agree, disagree = (q_hat - q_noisy) ** 2, (q_hat + q_noisy) ** 2
    return ((1 - rho_other) * agree - rho_same * disagree) / (1 - rho_plus - rho_minus)


def check_rates(rho_plus: float, rho_minus: float) -> None:
    """The correction divides by 1 − ρ₊ − ρ₋: past that the labels say the opposite."""
    for name, rho in (("rho_plus", rho_plus), ("rho_minus", rho_minus)):
        if not 0 <= rho < 1:
            raise ValueError(f"{name}={rho} should be a probability, 0 <= {name} < 1")
    if not rho_plus + rho_minus < 1:
        raise ValueError(
            f"rho_plus={rho_plus} and rho_minus={rho_minus} add up to {rho_plus + rho_minus}; "
            "the loss is unbiased only for rho_plus + rho_minus < 1"
        )


class FilterNorm(nn.Module):
    """BatchNorm inside f: the same function in training, evaluation and freezing.

    ``filters``: always the statistics over the layer's own filters, so that f depends on W and θ alone.
    ``fixed``: the statistics measured at the end of the warm start, constant from then on.
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

    Layers that are not 3×3: padded 3×3 convolutions keep any map's size, so 5×5 and 11×11 filters need
    nothing else. Along a dimension of size 1 only the centre tap would see anything, so the kernel is 1
    there: for a 1×1 convolution f is a perceptron over the channels. A linear layer's row is a 1×1
    filter. Rows of more than 512 inputs are cut into chunks that share one f. With groups, c is the
    number of channels a filter has, and all groups share f.
    """

    def __init__(self, weight: Tensor, residual: bool, statistics: Statistics) -> None:
        super().__init__()
        c, kernel = weight.shape[1], tuple(weight.shape[2:]) or (1, 1)
        self.residual = residual
        self.chunks = math.ceil(c / CHUNK) if kernel == (1, 1) else 1
        c = math.ceil(c / self.chunks)
        taps = (3 if kernel[0] > 1 else 1, 3 if kernel[1] > 1 else 1)
        pad = (taps[0] // 2, taps[1] // 2)
        self.conv1 = nn.Conv2d(c, 2 * c, taps, padding=pad, bias=False)
        self.norm1 = FilterNorm(2 * c, statistics)
        self.conv2 = nn.Conv2d(2 * c, 2 * c, taps, padding=pad, bias=False)
        self.norm2 = FilterNorm(2 * c, statistics)
        self.conv3 = nn.Conv2d(2 * c, c, taps, padding=pad)
        if residual:
            nn.init.zeros_(self.conv3.weight)
            nn.init.zeros_(self.conv3.bias)  # type: ignore[arg-type]

    def forward(self, weight: Tensor) -> Tensor:
        # Never in autocast's half precision: f would be one function while training with it and another
        # when freezing without, and a q̂ near 0 would change its sign.
        device = weight.device.type
        with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            h = F.relu(self.norm1(self.conv1(self._images(weight))))
            h = F.relu(self.norm2(self.conv2(h)))
            predicted = self._filters(self.conv3(h), weight)
        if self.residual:
            size = weight.detach().abs().mean()
            predicted = predicted + weight / size.clamp_min(torch.finfo(weight.dtype).tiny)
        return predicted

    def _images(self, weight: Tensor) -> Tensor:
        """Filters as images; a row of several chunks becomes several 1×1 images."""
        images = weight if weight.dim() == 4 else weight[:, :, None, None]
        if self.chunks == 1:
            return images
        width = self.conv1.in_channels
        images = F.pad(images, (0, 0, 0, 0, 0, width * self.chunks - images.shape[1]))
        return images.reshape(-1, width, 1, 1)

    def _filters(self, images: Tensor, weight: Tensor) -> Tensor:
        rows = images.reshape(weight.shape[0], -1, *images.shape[2:])[:, : weight.shape[1]]
        return rows.reshape(weight.shape)


class MappedSign(WeightBinarizer):
    """E · sign(f(W)) with the base method's scale E; supervised by the base method's signs."""

    labels: Tensor

    def __init__(self, config: LNS, layer: nn.Module, base: WeightBinarizer) -> None:
        super().__init__()
        self.config = config
        self.base = base
        weight = layer.weight
        assert isinstance(weight, Tensor)
        if config.statistics == "filters" and weight[:, 0].numel() < 2:
            raise ValueError(
                f"lns: a layer with weight {tuple(weight.shape)} is a single filter with one value a "
                "channel, which BatchNorm over filters turns to zero; skip it or use statistics='fixed'"
            )
        self.mapping = MappingNetwork(weight, config.mapping == "residual", config.statistics)
        self.mapping.to(device=weight.device, dtype=weight.dtype)
        self.shared: list[Tensor] | None = None
        if config.labels == "frozen":
            empty = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
            self.register_buffer("labels", empty)
            self.latent_replaced(weight)

    def base_code(self, weight: Tensor) -> BinaryWeight:
        code = self.base.code(weight.detach())
        if len(code.signs) != 1:
            raise ValueError(
                f"lns: base={self.config.base!r} writes a weight as {len(code.signs)} signs; "
                "the mapping predicts one, so a base with one sign a weight is needed"
            )
        return code

    def predict(self, weight: Tensor) -> Tensor:
        """q̂ = f(W); computed once a step where the training loop shares it (``train/mapping.py``)."""
        if self.shared is None:
            return self.mapping(weight)
        if not self.shared:
            self.shared.append(self.mapping(weight))
        return self.shared[0]

    def code(self, weight: Tensor) -> BinaryWeight:
        scale = self.base_code(weight).scales
        return BinaryWeight(sign(self.predict(weight))[None], scale)

    def forward(self, weight: Tensor) -> Tensor:
        scale = self.base_code(weight).scales[0]
        predicted = self.predict(weight)
        return straight_through(scale * sign(predicted), scale * self._passed(predicted))

    def surrogate(self, weight: Tensor) -> Tensor:
        return self.base_code(weight).scales[0] * self._passed(self.predict(weight))

    def _passed(self, predicted: Tensor) -> Tensor:
        """What the straight-through gradient sees: q̂ itself, or q̂ inside [−1, 1] alone."""
        return predicted.clamp(-1, 1) if self.config.gradient == "clipped" else predicted

    @torch.no_grad()
    def latent_replaced(self, weight: Tensor) -> None:
        """New weights (a pretrained network's) bring new labels where those are frozen."""
        if self.config.labels == "frozen":
            self.labels.copy_(self.base_code(weight).signs[0])

    def noisy_labels(self, weight: Tensor) -> Tensor:
        if self.config.labels == "frozen":
            return self.labels.to(weight.dtype)
        return self.base_code(weight).signs[0]

    def auxiliary_loss(self, weight: Tensor) -> Tensor | None:
        config = self.config
        q_hat = self.predict(weight)
        if config.loss_on == "after_sign":
            q_hat = straight_through(sign(q_hat), self._passed(q_hat))
        loss = unbiased_loss(q_hat, self.noisy_labels(weight), config.rho_plus, config.rho_minus)
        return config.alpha * (loss.mean() if config.reduction == "mean" else loss.sum())

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.base.start_epoch(epoch, epochs)

    def after_step(self, weight: Tensor) -> None:
        self.base.after_step(weight)


@register("lns")
@dataclass(frozen=True)
class LNS(Method):
    """A network over each filter predicts its signs, supervised by the base method's noisy ones."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rates(self.rho_plus, self.rho_minus)
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ValueError(f"lns: alpha={self.alpha} should be a finite number >= 0")
        object.__setattr__(self, "base", resolve(self.base))
        if isinstance(self.base, LNS):
            raise ValueError("lns: base='lns' would map a mapping; give it the method it corrects")

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
) -> dict[str, float]:
    """Teach each mapping network the noisy labels with everything else fixed.

    f sees the weights and nothing else, so no data are needed. A layer stops when its signs agree with
    the labels on a share of ``agreement``, or after ``steps`` steps of Adam. Returns the agreement
    reached for each layer; ``progress`` is called with it as each layer ends.

    Labels that were frozen earlier are taken anew: the warm start is where supervision begins.
    """
    reached = {}
    for name, weight, binarizer in mapped_layers(model):
        binarizer.latent_replaced(weight)
        reached[name] = _fit_mapping(weight.detach(), binarizer, steps, lr, agreement)
        if progress:
            progress(name, reached[name])
    return reached


def _fit_mapping(
    weight: Tensor, binarizer: MappedSign, steps: int, lr: float, agreement: float
) -> float:
    """Adam on ℓ̃ before the sign over θ alone."""
    config, mapping = binarizer.config, binarizer.mapping
    norms = [m for m in mapping.modules() if isinstance(m, FilterNorm)]
    labels = binarizer.noisy_labels(weight)
    optimizer = torch.optim.Adam(mapping.parameters(), lr=lr)
    check_every = 20  # comparing signs costs a device synchronisation

    for norm in norms:
        norm.measuring = True
    share = 0.0
    for step in range(steps + 1):
        with torch.enable_grad():
            q_hat = mapping(weight)
            loss = unbiased_loss(q_hat, labels, config.rho_plus, config.rho_minus).mean()
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
    for norm in norms:  # the last forward pass above measured what "fixed" keeps
        norm.measuring = config.statistics == "filters"
    return (binarizer.code(weight).signs[0] == labels).double().mean().item()
