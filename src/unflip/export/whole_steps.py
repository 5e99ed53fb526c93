"""What the steps after a sum of whole numbers make of it: exporters look for the numbers that reach a threshold."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32


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
