"""What is in a packed network: shapes, sizes and work, op by op."""

from __future__ import annotations

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
    weight_bits: int | None  # bits a weight; None where there are none
    bytes: int  # of the tensors it is the first to use
    binary_macs: int  # one for each pair of bit planes
    float_macs: int


@dataclass(frozen=True)
class Description:
    """All ops, what is returned, and the bytes of the same network with float weights."""

    rows: list[Row]
    outputs: dict[str, Shape]  # by name, in order
    float_bytes: int


def describe(packed: Packed) -> Description:
    """Count a packed network, for one image."""
    graph = packed.graph
    shapes = value_shapes(graph)
    seen: set[str] = set()
    rows, float_bytes = [], 0
    for number, op in enumerate(graph["ops"], 1):
        new = [name for name in _tensor_names(op, packed) if name not in seen]
        seen.update(new)
        own = sum(packed.tensors[name].nbytes for name in new)
        bits, binary, dense = _work(op, graph, packed, shapes[number])
        rows.append(Row(op["op"], op["name"], shapes[number], bits, own, binary, dense))
        float_bytes += _float_bytes(op, packed, new)
    outputs = {name: shapes[value] for name, value in outputs_of(graph)}
    return Description(rows, outputs, float_bytes)


def _tensor_names(op: Fields, packed: Packed) -> list[str]:
    fields = [op, *op.get("steps", [])]
    found = [v for part in fields for k, v in part.items() if k not in ("op", "name", "step")]
    return [v for v in found if isinstance(v, str) and v in packed.tensors]


def _work(op: Fields, graph: Fields, packed: Packed, shape: Shape) -> tuple[int | None, int, int]:
    """(bits a weight, binary MACs, float MACs)."""
    if op["op"] != "conv":
        return None, 0, 0
    macs = prod(shape) * prod(op["shape"][1:])
    if "weight" in op:
        return 32, 0, macs
    bases, source = len(packed.tensors[op["scales"]]), op["inputs"][0]
    maker = graph["ops"][source - 1] if source else {"op": "input"}
    if maker["op"] != "quantize":
        return bases, 0, macs
    return bases, macs * bases * len(maker["scales"]), 0


def _float_bytes(op: Fields, packed: Packed, new: list[str]) -> int:
    """The weight as floats, and what stands round it; scales and thresholds would not be there."""
    if op["op"] == "quantize":
        return 0
    own = {op.get(key) for key in ("weight", "bits", "scales", "offset")}
    rest = sum(packed.tensors[name].nbytes for name in new if name not in own)
    return rest + 4 * prod(op.get("shape", [0]))


def value_shapes(graph: Fields) -> list[Shape]:
    """C × H × W of every value, the input's first."""
    shapes: list[Shape] = [_triple(graph["input"]["shape"])]
    for op in graph["ops"]:
        shapes.append(_shape(op, [shapes[i] for i in op["inputs"]]))
    return shapes


def _shape(op: Fields, inputs: list[Shape]) -> Shape:
    c, h, w = inputs[0]
    kind = op["op"]
    if kind == "conv":
        return _conv_shape(op, h, w)
    if kind in ("max_pool", "avg_pool"):
        return c, *_pool_size(op, h, w)
    if kind == "mean":
        return c, 1, 1
    if kind == "mean_abs":
        return (1, 1, 1) if op["over"] == "sample" else (op["groups"], h, w)
    if kind == "concat":
        return sum(shape[0] for shape in inputs), h, w
    if kind == "slice":
        sizes = zip(op["start"], op["stop"], op["step"], strict=True)
        return _triple([-(-(stop - start) // step) for start, stop, step in sizes])
    if kind == "pad":
        sizes = zip(inputs[0], op["before"], op["after"], strict=True)
        return _triple([sum(parts) for parts in sizes])
    if kind == "resize":
        return _triple([c, *op["size"]])
    if kind in ("upsample", "pixel_shuffle"):
        high, wide = op["factor"]
        shared = high * wide if kind == "pixel_shuffle" else 1
        return c // shared, h * high, w * wide
    return (c * h * w, 1, 1) if kind == "flatten" else (c, h, w)


def _triple(sizes: list[int]) -> Shape:
    c, h, w = sizes
    return c, h, w


def _conv_shape(op: Fields, h: int, w: int) -> Shape:
    filters, _, kh, kw = op["shape"]
    top, left, bottom, right = op["padding"]
    sizes = []
    for size, kernel, at in ((h + top + bottom, kh, 0), (w + left + right, kw, 1)):
        reach = op["dilation"][at] * (kernel - 1) + 1
        sizes.append((size - reach) // op["stride"][at] + 1)
    return filters, sizes[0], sizes[1]


def _pool_size(op: Fields, h: int, w: int) -> tuple[int, int]:
    sizes = []
    for size, at in ((h, 0), (w, 1)):
        kernel, stride, padding = (op[key][at] for key in ("kernel", "stride", "padding"))
        room = size + 2 * padding - kernel
        count = (-(-room // stride) if op["ceil"] else room // stride) + 1
        if op["ceil"] and (count - 1) * stride >= size + padding:
            count -= 1  # the last window would start in the padding on the right
        sizes.append(count)
    return sizes[0], sizes[1]
