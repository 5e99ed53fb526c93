"""What the steps after a sum of whole numbers make of it: exporters look for the numbers that reach a threshold.

Both functions compute as the runtime does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32
LEAST_FOLDED, MOST_FOLDED = F32(1e-18), F32(1e18)


def can_be_folded(scales: Array, offset: Array | None, factor: Array) -> bool:
    """Whether a factor after binary weights may become part of their scales and offset: no product loses digits."""
    if offset is not None and not _keep_digits(offset, factor, vanish=False):
        return False  # an offset must not become 0
    return _keep_digits(scales, factor, vanish=True)


def _keep_digits(a: Array, b: Array, vanish: bool) -> bool:
    """Whether no product is very large or small, or 0 because ``a`` is, or if they may ``vanish``, because ``b`` is."""
    with np.errstate(over="ignore", under="ignore"):
        size = np.abs(a * b)
    usual = (size >= LEAST_FOLDED) & (size <= MOST_FOLDED)
    return bool((usual | (a == 0) | ((b == 0) & vanish)).all())


def evaluated(step: dict[str, Any], v: Array) -> Array:
    """One step without other values, in float32 and as the runtime computes it. ``v``: (channels, count)."""
    if step["step"] == "affine":
        v = v * step["scale"].reshape(-1, 1) if "scale" in step else v
        return v + step["shift"].reshape(-1, 1) if "shift" in step else v
    if step["step"] == "prelu":
        return np.where(v >= 0, v, v * step["slope"].reshape(-1, 1))
    low, high = step["low"], step["high"]
    v = v if low is None else np.where(F32(low) > v, F32(low), v)
    return v if high is None else np.where(v > F32(high), F32(high), v)
