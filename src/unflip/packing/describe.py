"""The contents of a packed network: shapes, sizes and work, op by op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from unflip.packing.file import Packed, outputs_of
from unflip.packing.ir import Shape

Fields = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One op."""

    op: str
    name: str
    shape: Shape  # of its value
    weight_bits: int | None  # bits per weight; None if there are no weights
    bytes: int  # of the tensors that it is the first to use
    binary_macs: int  # counted once per pair of bit planes
    byte_macs: int
    float_macs: int


@dataclass(frozen=True)
class Description:
    """All ops, the outputs, and the size of the same network with float weights."""

    rows: list[Row]
    outputs: dict[str, Shape]  # by name, in order
    float_bytes: int


def describe(packed: Packed) -> Description:
    """Describe a packed network, with the work for one image."""
    graph = packed.graph
    shapes = value_shapes(graph)
    seen: set[str] = set()
    rows, float_bytes = [], 0
    for number, op in enumerate(graph["ops"], 1):
        new = [name for name in tensor_names(op, packed) if name not in seen]
        seen.update(new)
        own = sum(packed.tensors[name].nbytes for name in new)
        work = _work(op, graph, packed, shapes[number])
        rows.append(Row(op["op"], op["name"], shapes[number], work[0], own, *work[1:]))
        float_bytes += _float_bytes(op, packed, new)
    outputs = {name: shapes[value] for name, value, _ in outputs_of(graph)}
    return Description(rows, outputs, float_bytes)


def tensor_names(op: Fields, packed: Packed) -> list[str]:
    """The tensors that an op and its steps use."""
    fields = [op, *op.get("steps", [])]
    found = [v for part in fields for k, v in part.items() if k not in ("op", "name", "step")]
    return [v for v in found if isinstance(v, str) and v in packed.tensors]


def _work(
    op: Fields, graph: Fields, packed: Packed, shape: Shape
) -> tuple[int | None, int, int, int]:
    """(bits per weight, binary MACs, 8-bit MACs, float MACs)."""
    if op["op"] != "conv":
        return None, 0, 0, 0
    macs = prod(shape) * prod(op["shape"][1:])
    if "weight" in op:
        return 32, 0, 0, macs
    if "bytes" in op:
        return 8, 0, macs, 0
    bases, source = len(packed.tensors[op["scales"]]), op["inputs"][0]
    maker = graph["ops"][source - 1] if source else {"op": "input"}
    if maker["op"] != "quantize":
        return bases, 0, 0, macs
    return bases, macs * bases * len(maker["scales"]), 0, 0


def _float_bytes(op: Fields, packed: Packed, new: list[str]) -> int:
    """The size with float weights, without the scales and thresholds that only quantized networks have."""
    if op["op"] in ("quantize", "to_bytes"):
        return 0
    own = {op.get(key) for key in ("weight", "bits", "bytes", "scales", "offset")}
    rest = sum(packed.tensors[name].nbytes for name in new if name not in own)
    return rest + 4 * prod(op.get("shape", [0]))


def value_shapes(graph: Fields) -> list[Shape]:
    """C × H × W of every value; the input is value 0."""
    shapes: list[Shape] = [_triple(graph["input"]["shape"])]
    for op in graph["ops"]:
        shapes.append(_shape(op, [shapes[i] for i in op["inputs"]]))
    return shapes


def _shape(op: Fields, inputs: list[Shape]) -> Shape:
    return SHAPES[op["op"]](op, inputs)


def _same(op: Fields, inputs: list[Shape]) -> Shape:
    return inputs[0]


def _concat(op: Fields, inputs: list[Shape]) -> Shape:
    return sum(shape[0] for shape in inputs), *inputs[0][1:]


def _slice(op: Fields, inputs: list[Shape]) -> Shape:
    sizes = zip(op["start"], op["stop"], op["step"], strict=True)
    return _triple([-(-(stop - start) // step) for start, stop, step in sizes])


def _pad(op: Fields, inputs: list[Shape]) -> Shape:
    sizes = zip(inputs[0], op["before"], op["after"], strict=True)
    return _triple([sum(parts) for parts in sizes])


def _upsample(op: Fields, inputs: list[Shape]) -> Shape:
    (c, h, w), (high, wide) = inputs[0], op["factor"]
    return c, h * high, w * wide


def _pixel_shuffle(op: Fields, inputs: list[Shape]) -> Shape:
    (c, h, w), (high, wide) = inputs[0], op["factor"]
    return c // (high * wide), h * high, w * wide


def _mean_abs(op: Fields, inputs: list[Shape]) -> Shape:
    return (1, 1, 1) if op["over"] == "sample" else (op["groups"], *inputs[0][1:])


def _triple(sizes: list[int]) -> Shape:
    c, h, w = sizes
    return c, h, w


def _conv(op: Fields, inputs: list[Shape]) -> Shape:
    _, h, w = inputs[0]
    filters, _, kh, kw = op["shape"]
    top, left, bottom, right = op["padding"]
    sizes = []
    for size, kernel, at in ((h + top + bottom, kh, 0), (w + left + right, kw, 1)):
        reach = op["dilation"][at] * (kernel - 1) + 1
        sizes.append((size - reach) // op["stride"][at] + 1)
    return filters, sizes[0], sizes[1]


def _pool(op: Fields, inputs: list[Shape]) -> Shape:
    c, h, w = inputs[0]
    sizes = []
    for size, at in ((h, 0), (w, 1)):
        kernel, stride, padding = (op[key][at] for key in ("kernel", "stride", "padding"))
        room = size + 2 * padding - kernel
        count = (-(-room // stride) if op["ceil"] else room // stride) + 1
        if op["ceil"] and (count - 1) * stride >= size + padding:
            count -= 1  # the last window would start in the padding at the end
        sizes.append(count)
    return c, sizes[0], sizes[1]


SHAPES: dict[str, Callable[[Fields, list[Shape]], Shape]] = {
    "quantize": _same,
    "to_bytes": _same,
    "conv": _conv,
    "map": _same,
    "max_pool": _pool,
    "avg_pool": _pool,
    "mean": lambda op, inputs: (inputs[0][0], 1, 1),
    "mean_abs": _mean_abs,
    "concat": _concat,
    "slice": _slice,
    "pad": _pad,
    "flatten": lambda op, inputs: (prod(inputs[0]), 1, 1),
    "softmax": _same,
    "log_softmax": _same,
    "curve": _same,
    "normalize": _same,
    "upsample": _upsample,
    "pixel_shuffle": _pixel_shuffle,
    "channel_shuffle": _same,
    "resize": lambda op, inputs: _triple([inputs[0][0], *op["size"]]),
}
