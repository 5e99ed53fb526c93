"""The state of an export to QONNX: quantization nodes, and sums of integers that are kept for a sign after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from unflip.export.exporter import Code, Exporter, Value
from unflip.export.whole_steps import evaluated
from unflip.packing.file import Array, Packed

DOMAIN = "qonnx.custom_op.general"
F32 = np.float32
MOST_NUMBERS = 2**26  # that are compared per layer to find whole thresholds


class WholeSum(NamedTuple):
    """A value is ``steps(scale · n)``, where the node ``name`` has the whole numbers n."""

    name: str
    flat: bool
    largest: int  # the largest absolute value of n
    scale: Array  # one per channel
    steps: list[dict[str, Any]]  # affine, prelu and clamp, with arrays instead of names of tensors


class QonnxExporter(Exporter):
    def __init__(
        self,
        packed: Packed,
        taken: list[str],
        ops: dict[str, Callable[..., Value | Code]],
        max_memory: int | None = None,
    ) -> None:
        super().__init__(packed, taken, ops, max_memory)
        self.sums: dict[int, WholeSum] = {}  # by number of the value

    def sum(self, names: list[str]) -> str:
        """Additions of two values each: other tools do not know Sum."""
        total = names[0]
        for name in names[1:]:
            total = self.onnx.node("Add", total, name)
        return total

    def bipolar(self, name: str) -> str:
        """+1 where the value is at least 0, else −1."""
        return self.onnx.node("BipolarQuant", name, self.onnx.number(1), domain=DOMAIN)

    def whole(self, name: str, bits: int, signed: bool, narrow: bool = False) -> str:
        """Round to whole numbers of ``bits`` bits. Numbers outside of their range are clipped."""
        one, zero, width = (self.onnx.number(v) for v in (1, 0, bits))
        return self.onnx.node(
            "Quant",
            name,
            one,
            zero,
            width,
            domain=DOMAIN,
            signed=int(signed),
            narrow=int(narrow),
            rounding_mode="ROUND",
        )

    def whole_thresholds(
        self, number: int, limits: Array, strict: list[bool]
    ) -> tuple[Value, Array] | None:
        """Thresholds for the whole number behind a value, if it has one and they are exact.

        Returns ±n, whose sign depends on the channel, and thresholds (steps, channels) that it reaches (>=) exactly
        where the value reaches its own.
        """
        found = self.sums.get(number)
        if found is None:
            return None
        tried = (2 * found.largest + 1) * len(found.scale) * len(limits)
        if tried > MOST_NUMBERS:
            return None
        reached = _reached(found, limits, strict)
        rising = ~(reached[..., :-1] & ~reached[..., 1:]).any(-1)
        falling = ~(~reached[..., :-1] & reached[..., 1:]).any(-1)
        up, down = rising.all(0), falling.all(0)
        if not (up | down).all():
            return None
        count = reached.sum(-1)
        # of 2 · largest + 1 numbers the last ``count`` are reached, or the first ``count`` of a falling one
        whole = (found.largest + 1 - count).astype(F32)
        name, shape = found.name, self.any_value(number).shape
        if not up.all():
            name = self.onnx.node(
                "Mul", name, self.per_channel(np.where(up, 1, -1).astype(F32), found.flat)
            )
        return Value(name, shape, found.flat), whole


def _reached(found: WholeSum, limits: Array, strict: list[bool]) -> Array:
    """Whether each whole number reaches each threshold: (steps, channels, numbers)."""
    numbers = np.arange(-found.largest, found.largest + 1).astype(F32)
    with np.errstate(all="ignore"):
        v = found.scale[:, None] * numbers
        for step in found.steps:
            v = evaluated(step, v)
        each = np.broadcast_to(limits, (len(limits), len(v)))[..., None]
        return np.stack([v > t if s else v >= t for t, s in zip(each, strict, strict=True)])
