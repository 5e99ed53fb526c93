"""Converts the graph to the file's content: JSON and named tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from unflip.packing.file import Array, Packed
from unflip.packing.ir import CannotPack, Fields, Graph, Shape, array_key
from unflip.packing.outputs import Structure

MOST_OPS, MOST_CHANNELS, LARGEST_SIZE, MOST_ELEMENTS = 100_000, 1_048_576, 65_536, 2**28


def emit(
    graph: Graph,
    structure: Structure,
    shape: Shape,
    preprocess: Any,
    labels: list[str] | None,
    pixels: Sequence[bool] = (),
) -> Packed:
    """The packed network. Tensors with equal content are stored once.

    ``pixels``: for each output, whether it is an image of one pixel, (N, C, 1, 1), and not a vector (N, C).
    """
    _check_limits(graph)
    store = _Store()
    ops = []
    for number, op in enumerate(graph.ops):
        fields: Fields = {"op": op.kind, "name": op.name, "inputs": op.inputs}
        fields |= store.named(op.fields, str(number), op.name)
        if op.kind in ("conv", "map"):
            fields["steps"] = [
                store.named(step, f"{number}.{place}", op.name)
                for place, step in enumerate(op.steps)
            ]
        ops.append(fields)
    content = {
        "input": {"shape": list(shape), "preprocess": preprocess},
        "ops": ops,
        **_returned(graph, structure, pixels or [False] * len(graph.outputs)),
        "labels": labels,
    }
    return Packed(content, store.tensors)


def _returned(graph: Graph, structure: Structure, pixels: Sequence[bool]) -> Fields:
    more: list[Fields] = [{"pixels": True} if kept else {} for kept in pixels]
    if structure.kind == "tensor":
        return {"output": graph.outputs[0], **more[0]}
    parts = zip(structure.names, graph.outputs, more, strict=True)
    return {
        "outputs": [{"name": name, "value": value, **rest} for name, value, rest in parts],
        "structure": structure.kind,
    }


def _check_limits(graph: Graph) -> None:
    """Refuse what a reader would refuse."""
    if len(graph.ops) > MOST_OPS:
        raise CannotPack(f"the network has {len(graph.ops):,} ops; a file has at most {MOST_OPS:,}")
    for op in graph.ops:
        channels, *sizes = op.shape
        if channels > MOST_CHANNELS or max(sizes) > LARGEST_SIZE or prod(op.shape) > MOST_ELEMENTS:
            raise CannotPack(
                f"the result of {op.kind} {op.name!r} is {' × '.join(map(str, op.shape))}; a file has at most "
                f"{MOST_CHANNELS:,} channels, heights and widths of at most {LARGEST_SIZE:,}, and at most "
                f"{MOST_ELEMENTS:,} elements"
            )


class _Store:
    """The tensors of the file."""

    def __init__(self) -> None:
        self.tensors: dict[str, Array] = {}
        self.known: dict[Any, str] = {}

    def named(self, fields: Fields, prefix: str, op: str) -> Fields:
        """The fields with each array replaced by the name of its tensor."""
        return {
            key: self.add(value, f"{prefix}.{key}", op) if isinstance(value, np.ndarray) else value
            for key, value in fields.items()
        }

    def add(self, array: Array, name: str, op: str) -> str:
        if array.dtype != np.uint8:
            array = array.astype("<f4")
            if not np.isfinite(array).all():
                raise CannotPack(
                    f"{name.rpartition('.')[2]} of {op!r} contains NaN or infinity; check how the network was trained"
                )
        key = array_key(array)
        if key not in self.known:
            self.known[key] = name
            self.tensors[name] = np.ascontiguousarray(array)
        return self.known[key]
