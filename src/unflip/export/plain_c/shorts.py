"""Values of 16 bits: shortcuts that are only added, pooled, extended or averaged need half the memory.

This is an option, because scores are no longer those of the runtime: the error is measured on images and stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2

from unflip.export.plain_c.plan import Plan

Shorts = Mapping[int, float]  # value -> scale: the number is the integer times the scale
LARGEST = 32767
HEADROOM = 2  # of the range, for images that were not measured
MOVERS = {"pad", "slice"}  # they copy numbers: both values are 16 bits with one scale, or none
MAKERS = {"conv", "map", "max_pool", "avg_pool", *MOVERS}
READERS = {"max_pool", "avg_pool", "mean", *MOVERS}


def possible_shorts(plan: Plan) -> list[int]:
    """Float values that can be 16 bits: all their readers can read them, and they are not returned."""
    made = {t.value for t in plan.tasks if t.kind in MAKERS and t.value is not None}
    wrong = set(plan.outputs)
    for task in plan.tasks:
        if task.kind not in READERS:
            wrong.update(task.inputs)
        wrong.update(s["value"] for s in task.steps if s["step"] == "mul")
        if task.quantizer is not None and task.quantizer.unit is not None:
            wrong.add(task.quantizer.unit)
    found = made - wrong
    moves = [{t.inputs[0], t.value} for t in plan.tasks if t.kind in MOVERS]
    for pair in [*reversed(moves), *moves]:
        if not pair <= found:
            found -= pair
    return sorted(v for v in found if v is not None)


def scales_of(plan: Plan, largest: Mapping[int, float]) -> dict[int, float]:
    """Powers of two, from the largest absolute number of each value."""
    scales = {
        v: 2.0 ** ceil(log2(max(HEADROOM * most, 1e-6) / LARGEST)) for v, most in largest.items()
    }
    for task in plan.tasks:
        if task.kind in MOVERS and task.value in scales:
            scales[task.value] = scales[task.inputs[0]]
    return scales
