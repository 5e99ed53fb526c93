"""The graph before it is written: ops with arrays, and the passes that simplify it.

Values are numbered as in the file: 0 is the input, the op at position i gives value i + 1. While tracing, every
element-wise operation is a separate ``map``. :func:`simplified` moves maps into the convolutions before them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from unflip.packing.file import Array

Shape = tuple[int, int, int]
Fields = dict[str, Any]  # plain values, and arrays that become tensors of the file


class CannotPack(ValueError):
    """A network, or a part of it, that the file format does not support. The message says which part and why."""


@dataclass
class Op:
    """One operation. A step is {"step": kind, ...}, as in the file, with arrays instead of tensor names."""

    kind: str
    name: str
    inputs: list[int]
    fields: Fields = field(default_factory=dict)
    steps: list[Fields] = field(default_factory=list)
    shape: Shape = (0, 0, 0)
    value: Any = None  # torch's tensor for this value on the example, or None if it has none

    def uses(self) -> list[int]:
        """The values it reads."""
        return [*self.inputs, *(s["value"] for s in self.steps if "value" in s)]

    def renumbered(self, new: dict[int, int]) -> Op:
        steps = [{**s, "value": new[s["value"]]} if "value" in s else s for s in self.steps]
        return replace(self, inputs=[new[v] for v in self.inputs], steps=steps)


@dataclass
class Graph:
    """Ops in order, and the outputs: any values, possibly with duplicates."""

    ops: list[Op]
    outputs: list[int]


def finite(*arrays: Array) -> bool:
    """Whether all numbers are finite in float32."""
    with np.errstate(over="ignore"):
        return all(bool(np.isfinite(a.astype(np.float32)).all()) for a in arrays)


def affine(scale: Array | None, shift: Array | None) -> Fields:
    step: Fields = {"step": "affine"}
    if scale is not None:
        step["scale"] = scale
    if shift is not None:
        step["shift"] = shift
    return step


def clamp(low: float | None, high: float | None) -> Fields:
    return {"step": "clamp", "low": low, "high": high}


def prelu(slope: Array) -> Fields:
    return {"step": "prelu", "slope": slope}


def conv_fields(
    shape: Any,
    stride: Any = (1, 1),
    padding: Any = (0, 0, 0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
) -> Fields:
    return {
        "shape": list(shape),
        "stride": list(stride),
        "padding": list(padding),
        "dilation": list(dilation),
        "groups": groups,
    }


def sides_of(padding: Any, kernel: Any, dilation: Any) -> list[int]:
    """Top, left, bottom, right of a convolution's padding, also of one by name."""
    if not isinstance(padding, str):
        return [*padding, *padding]
    total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    return [total[0] // 2, total[1] // 2, total[0] - total[0] // 2, total[1] - total[1] // 2]


def simplified(graph: Graph) -> Graph:
    """The same network in fewer ops."""
    graph = _once(graph)
    graph = _lifted(graph)
    graph = _fused(graph)
    for op in graph.ops:
        op.steps = merged(op.steps)
    graph = _without_empty_maps(graph)
    return _ordered(graph)


def _once(graph: Graph) -> Graph:
    """Merge equal ops on equal values: two convolutions of one input share its quantizer."""
    new, seen, ops = {0: 0}, dict[Any, int](), list[Op]()
    for number, op in enumerate(graph.ops, 1):
        op = op.renumbered(new)
        key = (op.kind, tuple(op.inputs), _content(op.fields), _content(op.steps))
        if key not in seen:
            ops.append(op)
            seen[key] = len(ops)
        new[number] = seen[key]
    return Graph(ops, [new[v] for v in graph.outputs])


def _content(value: Any) -> Any:
    """A hashable value that is equal if the content is equal."""
    if isinstance(value, dict):
        return tuple((k, _content(v)) for k, v in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_content, value))
    if isinstance(value, np.ndarray):
        return array_key(value)
    return value


def array_key(array: Array) -> tuple[Any, ...]:
    """A small key that is equal for arrays of equal content."""
    digest = hashlib.sha256(np.ascontiguousarray(array).data).digest() if array.size else b""
    return array.shape, array.dtype.str, digest


_PER_CHANNEL = ("affine", "prelu", "clamp")  # steps that are the same for all pixels


def _lifted(graph: Graph) -> Graph:
    """Move steps after a convolution's pixel_shuffle before it, where the convolution can do them."""
    graph = _reachable(graph)
    users, ops = _users(graph), list(graph.ops)
    for number, op in enumerate(ops, 1):
        path = _path_up(number, ops, users)
        if op.kind != "map" or not path or any(s["step"] not in _PER_CHANNEL for s in op.steps):
            continue
        base = ops[path[0] - 1].inputs[0]
        phases = ops[base - 1].shape[0] // op.shape[0]
        steps = [{k: _repeated(v, phases) for k, v in step.items()} for step in op.steps]
        lifted = Op("map", op.name, [base], {}, steps, ops[base - 1].shape)
        # Nothing else reads these ops: each moves down one position, and the map takes the first.
        moved = [replace(ops[place - 1], value=None) for place in path]
        moved[-1].value = op.value
        for place, mover, read in zip([*path[1:], number], moved, path, strict=True):
            ops[place - 1] = replace(mover, inputs=[read])
        ops[path[0] - 1] = lifted
    return Graph(ops, graph.outputs)


def _path_up(number: int, ops: list[Op], users: dict[int, int]) -> list[int]:
    """The ops between a conv or map and this map, if they only move pixels: pixel_shuffle, then possibly slice."""
    path: list[int] = []
    op = ops[number - 1]
    while op.inputs and op.inputs[0] and users[op.inputs[0]] == 1:
        value = op.inputs[0]
        op = ops[value - 1]
        if op.kind in ("conv", "map"):
            shuffled = path and ops[path[0] - 1].kind == "pixel_shuffle"
            return path if shuffled else []
        if op.kind not in ("pixel_shuffle", "slice") or not op.inputs[0]:
            break
        if op.kind == "slice" and op.shape[0] != ops[op.inputs[0] - 1].shape[0]:
            break
        path.insert(0, value)
    return []


def _repeated(value: Any, times: int) -> Any:
    """Repeat numbers per output channel of a shuffle for its input channels."""
    return np.repeat(value, times) if isinstance(value, np.ndarray) and value.size > 1 else value


def _fused(graph: Graph) -> Graph:
    """Move the steps of a map into the conv or map before it, if nothing else reads the value between."""
    graph = _reachable(graph)
    users = _users(graph)
    new: dict[int, int] = {0: 0}
    ops: list[Op | None] = []
    for number, op in enumerate(graph.ops, 1):
        op = _best_base(op, graph, users)
        base = op.inputs[0] if op.inputs else 0
        op = op.renumbered(new)
        target = ops[op.inputs[0] - 1] if op.inputs and op.inputs[0] else None
        if op.kind == "map" and target is not None and _can_take_steps(base, graph, users):
            target = replace(target, steps=target.steps + op.steps, shape=op.shape, value=op.value)
            ops[op.inputs[0] - 1] = (
                None  # its old position; a value that it adds may come after that
            )
            ops.append(target)
        else:
            ops.append(op)
        new[number] = len(ops)
    outputs = [new[v] for v in graph.outputs]
    return _reachable(Graph([op or Op("gone", "", []) for op in ops], outputs))


def _users(graph: Graph) -> dict[int, int]:
    """value -> the number of times it is read; an output counts as a read."""
    counts = dict.fromkeys(range(len(graph.ops) + 1), 0)
    for value in graph.outputs:
        counts[value] += 1
    for op in graph.ops:
        for value in op.uses():
            counts[value] += 1
    return counts


def _can_take_steps(value: int, graph: Graph, users: dict[int, int]) -> bool:
    return value > 0 and users[value] == 1 and graph.ops[value - 1].kind in ("conv", "map")


def _best_base(op: Op, graph: Graph, users: dict[int, int]) -> Op:
    """a + b and a · b of equal shapes may be steps of either operand. Prefer a conv that nothing else reads."""
    if op.kind != "map" or len(op.steps) != 1 or op.steps[0]["step"] not in ("add", "mul"):
        return op
    a, b = op.inputs[0], op.steps[0]["value"]
    if op.steps[0]["step"] == "mul" and _shape(b, graph) != op.shape:
        return op

    def merit(value: int) -> tuple[bool, bool, int]:
        free = _can_take_steps(value, graph, users)
        return free, free and _is_conv_chain(value, graph, users), value

    if merit(b) > merit(a):
        return replace(op, inputs=[b], steps=[{**op.steps[0], "value": a}])
    return op


def _is_conv_chain(value: int, graph: Graph, users: dict[int, int]) -> bool:
    while _can_take_steps(value, graph, users):
        if graph.ops[value - 1].kind == "conv":
            return True
        value = graph.ops[value - 1].inputs[0]
    return False


def _shape(value: int, graph: Graph) -> Shape | None:
    return graph.ops[value - 1].shape if value else None


def _reachable(graph: Graph) -> Graph:
    """Remove ops whose values nothing reads."""
    needed, stack = set[int](), list(graph.outputs)
    while stack:
        value = stack.pop()
        if value and value not in needed:
            needed.add(value)
            stack += graph.ops[value - 1].uses()
    return _renumbered(graph, sorted(needed))


def _ordered(graph: Graph) -> Graph:
    """Order ops so that values are computed as late as possible, to keep their lifetimes short."""
    order, state = list[int](), dict[int, bool]()
    stack = graph.outputs[::-1]
    while stack:
        value = stack[-1]
        if value == 0 or state.get(value):
            stack.pop()
        elif value in state:
            state[value] = True
            order.append(stack.pop())
        else:
            state[value] = False
            # values read by steps come first: a shortcut is computed before the conv it is added to
            stack += [v for v in graph.ops[value - 1].uses() if not state.get(v)]
    return _renumbered(graph, order)


def _renumbered(graph: Graph, order: Iterable[int]) -> Graph:
    order = list(order)
    new = {0: 0} | {value: position for position, value in enumerate(order, 1)}
    ops = [graph.ops[v - 1].renumbered(new) for v in order]
    return Graph(ops, [new[v] for v in graph.outputs])


def _without_empty_maps(graph: Graph) -> Graph:
    new, ops = {0: 0}, list[Op]()
    for number, op in enumerate(graph.ops, 1):
        if op.kind == "map" and not op.steps:
            new[number] = new[op.inputs[0]]
            continue
        ops.append(op.renumbered(new))
        new[number] = len(ops)
    return Graph(ops, [new[v] for v in graph.outputs])


def merged(steps: list[Fields]) -> list[Fields]:
    """Merge adjacent steps of the same kind and remove steps that do nothing."""
    result: list[Fields] = []
    for step in steps:
        joined = _joined(result[-1], step) if result else None
        if joined is not None:
            result[-1] = joined
        else:
            result.append(step)
    tidy = [_tidied(step) for step in result]
    return [step for step in tidy if step is not None]


def _joined(first: Fields, second: Fields) -> Fields | None:
    if first["step"] == second["step"] == "affine":
        return _joined_affine(first, second)
    if first["step"] == second["step"] == "clamp":
        return _joined_clamp(first, second)
    return None


def _joined_affine(first: Fields, second: Fields) -> Fields | None:
    """(x·a + b)·c + d = x·(a·c) + (b·c + d), in float64. None if that overflows float32."""
    one, zero = np.ones(1), np.zeros(1)
    a, b = first.get("scale", one), first.get("shift", zero)
    c, d = second.get("scale", one), second.get("shift", zero)
    scale, shift = a * c, b * c + d
    if not finite(scale, shift):
        return None
    return affine(scale, shift)


def _joined_clamp(first: Fields, second: Fields) -> Fields:
    """min(max(x, low), high) twice; the second one takes precedence."""

    def limited(bound: float | None) -> float | None:
        if bound is None:
            return None
        low, high = second["low"], second["high"]
        bound = bound if low is None else max(bound, low)
        return bound if high is None else min(bound, high)

    low, high = limited(first["low"]), limited(first["high"])
    return clamp(second["low"] if low is None else low, second["high"] if high is None else high)


def _tidied(step: Fields) -> Fields | None:
    """Convert to float32, with one number if all channels are equal. None if the step does nothing."""
    step = {k: _compact(v) if isinstance(v, np.ndarray) else v for k, v in step.items()}
    if step["step"] == "affine":
        if (step.get("scale", 1) == np.float32(1)).all():
            step.pop("scale", None)
        if (step.get("shift", 0) == np.float32(0)).all():
            step.pop("shift", None)
        return step if len(step) > 1 else None
    if step["step"] == "clamp" and step["low"] is None and step["high"] is None:
        return None
    return step


def _compact(values: Array) -> Array:
    values = np.asarray(values, dtype=np.float32)
    return values[:1] if values.size and (values == values.flat[0]).all() else values
