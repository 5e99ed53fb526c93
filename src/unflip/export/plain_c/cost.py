"""Estimates of the instructions that each layer takes on a Cortex-M4 with FPU.

The numbers per unit of work were measured once, with gcc 12 at -O2 on an emulated board (docs/microcontrollers.md), by
function. They follow the loops of kernels/: an estimate, not a simulation. An instruction takes about 1.3 cycles,
because loads and taken branches take two or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from unflip.export.plain_c.geometry import CodeLayout, Geometry
from unflip.export.plain_c.memory import line_numbers
from unflip.export.plain_c.plan import Plan, Task
from unflip.export.plain_c.source import Layer, Source
from unflip.export.plain_c.weights import window_numbers

CYCLES_PER_INSTRUCTION = 1.3
WORD = 32  # pixels that are counted at a time

# Instructions of binary convolutions
PER_COUNTED = 8.4  # per place of a list and word
PER_WORD = 740.0  # digits to numbers
PER_ROW = 98.0  # of a word: pixels at the border
PER_LISTED = 11.0  # per +1 of a filter
PER_CLASS = 42.0  # per filter and class of border pixels
PER_MOVED_BYTE = {"words": 2.0, "rows": 16.0, "bits": 28.0}
# Of convolutions with 8-bit weights
PER_BYTE_MAC = 1.7
PER_BYTE_SUM = 10.0
PER_PIXEL_BYTE, PER_FLOAT_BYTE = 11.0, 28.0  # value of the rows that an output row needs
PER_COPIED_BYTE = 4.0  # value of a window
# Of the rest
PER_FLOAT_MAC = 3.05
PER_GATHERED = 18.0  # value of the rows that an output row needs
PER_POOLED = 18.0  # value of a window
PER_MEAN_VALUE = 56.0  # a sum in double precision, which the FPU lacks
PER_ELEMENT = 12.0  # of ops that move or map elements
PER_CURVE = 60.0
PER_EXP = 9000.0  # in double precision: a softmax
PER_PACKED_WORD = 12.0
STEP = {"affine": 1.0, "prelu": 4.0, "clamp": 8.0, "add": 2.0, "mul": 2.0}


@dataclass(frozen=True)
class Estimate:
    """One layer."""

    layer: Layer
    instructions: int

    @property
    def cycles(self) -> int:
        return round(self.instructions * CYCLES_PER_INSTRUCTION)


def estimate(plan: Plan, source: Source) -> list[Estimate]:
    """For every layer of a source that :func:`make_source` made of the plan."""
    return [Estimate(layer, round(_instructions(plan, layer))) for layer in source.layers]


def _instructions(plan: Plan, layer: Layer) -> float:
    task = layer.task
    if task.conv is not None:
        dense = _float_conv if task.conv.bytes is None else _byte_conv
        return (_binary(plan, layer) if layer.binary else dense(layer)) + _epilogue(task, layer)
    if task.kind in ("map", "quantize"):
        return _epilogue(task, layer)
    if task.kind in ("max_pool", "avg_pool"):
        return PER_POOLED * prod(task.out) * prod(task.fields["kernel"]) + _epilogue(task, layer)
    if task.kind in ("mean", "mean_abs", "normalize"):
        return PER_MEAN_VALUE * prod(layer.input) * (2 if task.kind == "normalize" else 1)
    each = {"curve": PER_CURVE, "softmax": PER_EXP, "log_softmax": PER_EXP}
    return each.get(task.kind, PER_ELEMENT) * prod(task.out)


def _epilogue(task: Task, layer: Layer) -> float:
    """Instructions for all outputs."""
    if layer.integer:
        assert task.quantizer is not None
        return prod(task.out) * (4.0 + 5.0 * len(task.quantizer.strict))
    each = 5.0 + sum(
        STEP[s["step"]] * (len({"scale", "shift"} & set(s)) if s["step"] == "affine" else 1)
        for s in task.steps
    )
    each += 1.0 if task.value is not None else 0.0
    each += 4.0 * len(task.quantizer.strict) if task.quantizer is not None else 0.0
    return prod(task.out) * each


def _float_conv(layer: Layer) -> float:
    conv = layer.task.conv
    assert conv is not None
    gathered = conv.shape[2] * layer.input[2] * layer.input[0] * layer.task.out[1]
    return PER_FLOAT_MAC * prod(layer.task.out) * conv.depth + PER_GATHERED * gathered


def _byte_conv(layer: Layer) -> float:
    task, conv = layer.task, layer.task.conv
    assert conv is not None
    sums = prod(task.out) * (PER_BYTE_MAC * window_numbers(conv) + PER_BYTE_SUM)
    each = PER_PIXEL_BYTE if task.inputs[0] == 0 else PER_FLOAT_BYTE
    gathered = each * line_numbers(task) * task.out[1] * conv.groups
    copied = PER_COPIED_BYTE * conv.depth * conv.groups * prod(task.out[1:])
    return sums + gathered + (copied if conv.shape[2] > 1 else 0)


def _binary(plan: Plan, layer: Layer) -> float:
    task, conv = layer.task, layer.task.conv
    assert conv is not None
    q = plan.quantizers[task.inputs[0]]
    passes = conv.bases * q.planes
    filters, ones = conv.shape[0], conv.depth / 2
    if layer.packed:
        return PER_PACKED_WORD * filters * (2 * passes + 1) * -(-layer.input[0] // WORD)
    g = Geometry(task, conv, CodeLayout(layer.input, q.planes, False))
    words, rows = g.pixels // WORD, max(1.0, WORD / (8 * g.bytes))
    per_word = passes * (PER_COUNTED * ones + PER_WORD) + PER_ROW * rows * conv.bases
    per_filter = conv.bases * (PER_LISTED * ones + PER_CLASS * g.classes) + words * per_word
    windows = conv.groups * words * q.planes * (PER_COUNTED * conv.depth + PER_WORD)
    return filters * per_filter + windows + _moved(task, layer, q.planes * g.plane_step)


def _moved(task: Task, layer: Layer, moved: int) -> float:
    conv = task.conv
    assert conv is not None
    if conv.stride != (1, 1):
        return PER_MOVED_BYTE["bits"] * moved
    whole = layer.input[2] in (8, 16, 32) and layer.input[2] == task.out[2]
    return PER_MOVED_BYTE["words" if whole else "rows"] * moved
