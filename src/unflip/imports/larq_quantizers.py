"""Larq's quantizers as discrete codes: signs and scales of a kernel, thresholds and levels of an input.

Gradients do not matter here, so quantizers that differ only in them are the same: ``ste_sign``, ``approx_sign`` and
``swish_sign`` are all sign(x) with sign(0) = +1, as in unflip. Kernels are in Keras's layout, with filters last.

The names are those of Larq 0.14 and of the quantizers that larq-zoo defines: ``xnor_weight_scale`` (XNORNet) and
``magnitude_aware_sign_unclipped`` (DoReFaNet).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unflip.imports.errors import CannotImport
from unflip.imports.keras_config import Layer
from unflip.imports.mxnet_params import Array
from unflip.methods.base import (
    BinaryWeight,
    FloatInput,
    InputBinarizer,
    InputCode,
    Method,
    WeightBinarizer,
)
from unflip.methods.dorefa import UnitInterval
from unflip.methods.pieces import ClippedSign

MOST_BITS = 8


class Kernel(NamedTuple):
    """Σ scales[b] · signs[b] + offset. Signs have the shape of the kernel; a scale is one number or one per filter."""

    signs: list[Array]
    scales: list[Array]
    offset: float = 0.0


def _signs(kernel: Array) -> Array:
    return np.where(kernel >= 0, np.float32(1), np.float32(-1))


def _one(kernel: Array, scale: Array | float = 1.0) -> Kernel:
    return Kernel([_signs(kernel)], [np.atleast_1d(np.asarray(scale, np.float32))])


def _sign(layer: Layer, kernel: Array) -> Kernel:
    return _one(kernel)


def _per_filter(layer: Layer, kernel: Array) -> Kernel:
    return _one(kernel, np.abs(kernel.astype(np.float64)).reshape(-1, kernel.shape[-1]).mean(0))


def _clipped_per_filter(layer: Layer, kernel: Array) -> Kernel:
    return _per_filter(layer, np.clip(kernel, -1, 1))


def _per_layer(layer: Layer, kernel: Array) -> Kernel:
    return _one(kernel, np.abs(kernel.astype(np.float64)).mean())


def _heaviside(layer: Layer, kernel: Array) -> Kernel:
    """0 and 1: half a sign and a half."""
    signs = np.where(kernel > 0, np.float32(1), np.float32(-1))
    return Kernel([signs], [np.full(1, 0.5, np.float32)], 0.5)


def _ternary(layer: Layer, kernel: Array) -> Kernel:
    """−1, 0 and +1: the mean of two signs."""
    if layer.flag("ternary_weight_networks", False):
        threshold = np.float32(0.7) * np.abs(kernel).sum(dtype=np.float64) / kernel.size
    else:
        threshold = np.float32(_threshold(layer))
    high = np.where(kernel >= threshold, np.float32(1), np.float32(-1))
    low = np.where(kernel > -threshold, np.float32(1), np.float32(-1))
    return Kernel([high, low], [np.full(1, 0.5, np.float32)] * 2)


def _threshold(layer: Layer) -> float:
    threshold = layer.number("threshold_value", 0.05)
    if threshold <= 0:
        raise layer.wrong("threshold_value", "above 0")
    return threshold


def _bits(layer: Layer) -> int:
    bits = layer.whole("k_bit", 2)
    if bits > MOST_BITS:
        raise layer.wrong("k_bit", f"at most {MOST_BITS}")
    return bits


def _dorefa(layer: Layer, kernel: Array) -> Kernel:
    """Levels 0 .. n are k signs: one per binary digit of the level."""
    bits = _bits(layer)
    n = np.float32(2**bits - 1)
    weights = layer.choice("mode", "activations", "activations", "weights") == "weights"
    if weights:
        limited = np.tanh(kernel)
        largest = np.float32(2) * np.abs(limited).max()
        unit = (limited / largest if largest else limited) + np.float32(0.5)
    else:
        unit = np.clip(kernel, 0, 1)
    levels = np.round(unit * n).astype(np.int64)
    signs = [np.where(levels >> p & 1, np.float32(1), np.float32(-1)) for p in range(bits)]
    scales = [np.full(1, 2**p / (n if weights else 2 * n), np.float32) for p in range(bits)]
    return Kernel(signs, scales, 0.0 if weights else 0.5)


KERNELS: dict[str, Callable[[Layer, Array], Kernel]] = {
    "SteSign": _sign,
    "ApproxSign": _sign,
    "SwishSign": _sign,
    "MagnitudeAwareSign": _per_filter,
    "SteHeaviside": _heaviside,
    "SteTern": _ternary,
    "DoReFa": _dorefa,
    "xnor_weight_scale": _clipped_per_filter,
    "magnitude_aware_sign_unclipped": _per_layer,
}
ALIASES = {
    "ste_sign": "SteSign",
    "approx_sign": "ApproxSign",
    "swish_sign": "SwishSign",
    "magnitude_aware_sign": "MagnitudeAwareSign",
    "ste_heaviside": "SteHeaviside",
    "ste_tern": "SteTern",
    "dorefa_quantizer": "DoReFa",
    "DoReFaQuantizer": "DoReFa",
    "NoOpQuantizer": "NoOp",
}
# The settings of each quantizer. clip_value, beta and precision act only in training.
SETTINGS: dict[str, tuple[str, ...]] = {
    "SteSign": ("clip_value",),
    "ApproxSign": (),
    "SwishSign": ("beta",),
    "MagnitudeAwareSign": ("clip_value",),
    "SteHeaviside": ("clip_value",),
    "SteTern": ("threshold_value", "ternary_weight_networks", "clip_value"),
    "DoReFa": ("k_bit", "mode"),
    "NoOp": ("precision",),
    "xnor_weight_scale": (),
    "magnitude_aware_sign_unclipped": (),
}
# Of every layer of Keras, and so of every quantizer; none changes a quantizer's result.
LAYER_SETTINGS = ("name", "trainable", "dtype", "dynamic", "batch_input_shape", "metrics")


class Quantizer(NamedTuple):
    """A quantizer's name, None if it changes nothing, and its settings."""

    name: str | None
    settings: Layer


def quantizer(layer: Layer, key: str) -> Quantizer:
    name, settings = layer.function(key)
    return checked(name, settings)


def checked(name: str | None, settings: Layer) -> Quantizer:
    """The quantizer, if all its settings are known: one that is ignored could change the result."""
    name = ALIASES.get(name, name) if name else None
    known = SETTINGS.get(name or "")
    for key, value in settings.config.items():
        if known is not None and key not in (*known, *LAYER_SETTINGS):
            raise CannotImport(
                f"{settings.title}: the quantizer {name} has the unknown setting {key!s:.80}={value!r:.80}; known "
                f"are {', '.join((*known, *LAYER_SETTINGS))}. If it does not change the result, remove it from the "
                "model's config, and give that with --config FILE; otherwise use another quantizer"
            )
    return Quantizer(None if name == "NoOp" else name, settings)


def quantized(found: Quantizer, kernel: Array) -> Kernel:
    if found.name not in KERNELS:
        raise CannotImport(
            f"{found.settings.kind}: {found.name!r:.80} is not a supported quantizer; supported are "
            f"{', '.join(KERNELS)} and NoOp"
        )
    return KERNELS[found.name](found.settings, kernel)


def already_binary(kernel: Array) -> Kernel | None:
    """A kernel that is stored as ±scale, one scale per filter (Bop, or a model that was saved as binary)."""
    rows = np.abs(kernel).reshape(-1, kernel.shape[-1])
    if (rows != rows[:1]).any() or not rows.all() or len(rows) < 2:
        return None
    return _one(kernel, rows[0])


# --- inputs


class Heaviside(InputBinarizer):
    """1 above 0, and 0 at 0 and below."""

    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    def code(self) -> InputCode:
        return InputCode(torch.zeros(1, 1), (1.0,), 0.0, (True,))


class Ternary(InputBinarizer):
    """+1 from the threshold on, −1 from its negative down, 0 between."""

    bits = 2

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = float(np.float32(threshold))

    def forward(self, x: Tensor) -> Tensor:
        return (x >= self.threshold).to(x.dtype) - (x <= -self.threshold).to(x.dtype)

    def code(self) -> InputCode:
        steps = torch.tensor([[-self.threshold], [self.threshold]])
        return InputCode(steps, (1.0, 2.0), -1.0, (True, False), "levels")


def input_binarizer(found: Quantizer) -> InputBinarizer:
    """The module for an input quantizer."""
    if found.name is None:
        return FloatInput()
    if found.name in ("SteSign", "ApproxSign", "SwishSign"):
        return ClippedSign()
    if found.name == "SteHeaviside":
        return Heaviside()
    if found.name == "DoReFa" and found.settings.choice("mode", "activations", "activations"):
        return UnitInterval(_bits(found.settings))
    if found.name == "SteTern" and not found.settings.flag("ternary_weight_networks", False):
        return Ternary(_threshold(found.settings))
    raise CannotImport(
        f"{found.settings.kind}: {found.name!r:.80} is not supported for inputs; supported are SteSign, ApproxSign, "
        "SwishSign, SteHeaviside, SteTern with a fixed threshold, DoReFa in mode 'activations' and NoOp"
    )


# --- the method of imported layers


class GivenWeight(WeightBinarizer):
    """The signs and scales of a file, whatever the latent weight is."""

    signs: Tensor
    scales: Tensor
    offset: Tensor | None

    def __init__(self, code: BinaryWeight) -> None:
        super().__init__()
        for name, tensor in code._asdict().items():
            self.register_buffer(name, tensor)

    def code(self, weight: Tensor) -> BinaryWeight:
        return BinaryWeight(self.signs, self.scales, self.offset)

    def surrogate(self, weight: Tensor) -> Tensor:
        return weight


@dataclass(frozen=True)
class LarqMethod(Method):
    """Weights and inputs as a file states them; it cannot be trained."""

    name = "larq"
    weight: BinaryWeight
    inputs: InputBinarizer

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return GivenWeight(self.weight)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return self.inputs

    def __str__(self) -> str:
        return self.name
