"""QONNX's quantizers as codes of the packed file: thresholds, and the number for each level.

A code's threshold is the smallest float32 number that reaches a level. It is found by bisection with the quantizer
itself, so that ties and the rounding of a division fall as in the original.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from unflip.imports.errors import CannotImport
from unflip.imports.onnx_file import Array, Node
from unflip.packing.ir import Fields

F32 = np.float32
MOST_STEPS, MOST_BITS = 255, 8

ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "ROUND": np.round,
    "HALF_EVEN": np.round,
    "CEIL": np.ceil,
    "FLOOR": np.floor,
}


def bipolar(x: Array, scale: Array) -> Array:
    """BipolarQuant: +scale where x is at least 0, else −scale."""
    signs: Array = np.where(x >= 0, F32(1), F32(-1)) * scale
    return signs


def bipolar_code(node: Node, scale: Array) -> Fields:
    return _levels([0.0], _one(node, "scale", scale, positive=True) * 2, None)


class Quant:
    """Quant with constant parameters: (clip(round(x / scale + zero)) − zero) · scale."""

    def __init__(self, node: Node, scale: Array, zero: Array, bits: Array) -> None:
        self.node, self.scale, self.zero = node, scale.astype(F32), zero.astype(F32)
        width = _one(node, "bit width", bits, positive=True)
        if not (self.scale > 0).all():
            raise CannotImport(f"{node.title}: its scale should be positive")
        signed, narrow = bool(node.whole("signed", 1)), bool(node.whole("narrow", 0))
        if width != round(width) or width > 32:
            raise CannotImport(f"{node.title}: {width:g} bits; 1 to 32 whole bits are supported")
        self.bits = int(width)
        self.rounding = node.text("rounding_mode", "ROUND").upper()
        if self.rounding not in ROUNDINGS:
            raise CannotImport(
                f"{node.title}: rounding_mode={self.rounding!r:.40} is not supported; supported are "
                f"{', '.join(ROUNDINGS)}"
            )
        self.is_sign = self.bits == 1 and signed  # as qonnx computes it
        half = 2 ** (self.bits - 1)
        self.low = -half + narrow if signed else 0
        self.high = half - 1 if signed else 2 * half - 1 - narrow

    def whole(self, x: Array) -> Array:
        place = x / self.scale + self.zero
        found: Array = ROUNDINGS[self.rounding](np.clip(place, F32(self.low), F32(self.high)))
        return found

    def __call__(self, x: Array) -> Array:
        x = x.astype(F32)
        if self.is_sign:
            number: Array = np.where(x / self.scale + self.zero >= 0, F32(1), F32(-1))
        else:
            number = self.whole(x)
        return (number - self.zero) * self.scale

    def code(self) -> Fields:
        scale = _one(self.node, "scale", self.scale, positive=True)
        zero = _one(self.node, "zero point", self.zero)
        if self.is_sign:
            if zero:
                raise CannotImport(
                    f"{self.node.title}: 1 bit with zero point {zero:g}; only 0 is supported"
                )
            return bipolar_code(self.node, np.array(scale))
        if self.bits > MOST_BITS:
            raise CannotImport(
                f"{self.node.title}: {self.bits} bits; the inputs of a layer have at most {MOST_BITS} in a packed file"
            )
        steps = range(self.low + 1, self.high + 1)
        limits = [_smallest(self.whole, n) for n in steps]
        return _levels(limits, scale, (self.low - zero) * scale)


def multi_threshold_code(node: Node, thresholds: Array, channels: int) -> Fields:
    """MultiThreshold: out_scale · (number of thresholds that x reaches) + out_bias."""
    layout = node.text("data_layout", "")
    if layout not in ("", "NCHW", "NC"):
        raise CannotImport(
            f"{node.title}: data_layout={layout!r:.20}; only NCHW and NC are supported"
        )
    if thresholds.ndim != 2 or thresholds.shape[0] not in (1, channels):
        raise CannotImport(
            f"{node.title}: thresholds of shape {thresholds.shape}; ({channels} or 1, steps) is needed"
        )
    steps = thresholds.shape[1]
    if not 1 <= steps <= MOST_STEPS:
        raise CannotImport(f"{node.title}: {steps:,} thresholds; 1 to {MOST_STEPS} are supported")
    scale = _one(node, "out_scale", np.array(node.number("out_scale", 1.0)), positive=True)
    code = _levels([0.0] * steps, scale, node.number("out_bias", 0.0))
    return code | {"thresholds": thresholds.T.astype(F32)}


def _levels(limits: list[float], scale: float, offset: float | None) -> Fields:
    """One scale per binary digit of the number of steps that are reached. Without an offset, values are ±."""
    digits = len(limits).bit_length()
    return {
        "thresholds": np.array(limits, F32).reshape(-1, 1),
        "strict": [False] * len(limits),
        "coding": "levels" if len(limits) > 1 else "planes",
        "scales": [scale * 2**p for p in range(digits)],
        "offset": -scale / 2 if offset is None else offset,
    }


def _one(node: Node, what: str, array: Array, positive: bool = False) -> float:
    """The one number of a parameter of a layer's inputs."""
    numbers = np.unique(array)
    if len(numbers) != 1:
        raise CannotImport(
            f"{node.title}: its {what} has {len(numbers):,} different numbers; the inputs of a layer need one {what} "
            "for all channels"
        )
    found = float(F32(numbers[0]))
    if not math.isfinite(found) or (positive and found <= 0):
        raise CannotImport(f"{node.title}: its {what} is {found:g}; it should be positive")
    return found


def _smallest(rising: Callable[[Array], Array], level: int) -> float:
    """The smallest finite float32 number that reaches a level, by bisection over their order."""
    high = int(np.finfo(F32).max.view(np.int32))
    low = -high
    while low < high:
        middle = (low + high) // 2
        if rising(_number(middle)) >= level:
            high = middle
        else:
            low = middle + 1
    return float(_number(low))


def _number(place: int) -> Array:
    """The float32 number at a position of their order; 0 is 0."""
    bits = place if place >= 0 else (-place) | 0x80000000
    return np.array(bits, np.uint32).view(F32)
