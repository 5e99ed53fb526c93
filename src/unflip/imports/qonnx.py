"""QONNX networks, as brevitas exports them: ONNX files with BipolarQuant and Quant nodes.

Weights with one absolute value per filter become bits and scales, whichever node made them; others stay floats. A
quantized value becomes a code where a layer with such weights reads it. Max pools and reshapes commute with a
quantizer, because it is monotone, so they are computed before it. Anywhere else a code becomes floats again, by a
product with +1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unflip.imports import qonnx_layers, qonnx_products  # noqa: F401  (both register their operations)
from unflip.imports.errors import CannotImport, listed
from unflip.imports.onnx_file import Node, OnnxGraph, read_onnx
from unflip.imports.qonnx_builder import OPS, Builder, Value
from unflip.packing.emit import emit
from unflip.packing.file import ONE_OUTPUT, Packed
from unflip.packing.ir import CannotPack, Graph, simplified
from unflip.packing.outputs import Structure


@dataclass(frozen=True)
class Imported:
    """The packed network, and what is to be reported about it."""

    packed: Packed
    shape: tuple[int, ...]
    classes: int
    producer: str
    changes: list[str]


def load(path: Path) -> Imported:
    """Read a QONNX file."""
    graph = read_onnx(path)
    try:
        return build(graph)
    except (CannotImport, CannotPack) as error:
        raise CannotImport(f"{path}: {error}") from None


def build(graph: OnnxGraph) -> Imported:
    b = Builder(graph.opset)
    channels, height, width = (*graph.shape, 1, 1)[:3]
    b.values |= graph.constants
    b.values[graph.input] = Value(0, (channels, height, width), flat=len(graph.shape) == 1)
    with np.errstate(all="ignore"):  # numbers that overflow are refused when the graph is written
        for node in graph.nodes:
            _run(b, node)
    last = b.values.get(graph.output)
    if not isinstance(last, Value):
        raise CannotImport(f"its output {graph.output!r:.90} does not depend on the input")
    last = b.as_float(graph.nodes[-1], last)
    if not b.binary:
        raise CannotImport(
            "no layer has weights of one absolute value per filter (±1 or ±scale), so there is nothing binary in it"
        )
    pixels = not last.flat and last.shape[1:] == (1, 1)
    structure = Structure("tensor", (ONE_OUTPUT,), (ONE_OUTPUT,))
    ops = simplified(Graph(b.ops, [last.number]))
    packed = emit(ops, structure, (channels, height, width), None, None, [pixels])
    return Imported(packed, graph.shape, last.channels, graph.producer, _changes(b))


def _changes(b: Builder) -> list[str]:
    found = [
        f"weights of {b.binary} layers are stored as bits and scales; they cannot be trained further"
    ]
    if b.floats:
        names = ", ".join(f"{name:.40}" for name in b.floats[:8])
        found.append(f"weights of more than 1 bit are stored as 32-bit floats: {names}")
    return found


def _run(b: Builder, node: Node) -> None:
    """Compute the first output of a node from values that are known already."""
    function = OPS.get(node.op)
    if function is None:
        raise CannotImport(
            f"{node.title}: this operation is not supported; remove it before the export, or replace it by one of "
            f"{listed(sorted(OPS))}"
        )
    missing = [name for name in node.inputs if name and name not in b.values]
    if missing:
        raise CannotImport(
            f"{node.title} reads {missing[0]!r:.90}, which no node before it makes: the file is cut off, has a "
            "cycle, or is not in order"
        )
    if not node.inputs and node.op != "Constant":
        raise CannotImport(f"{node.title} has no input")
    if not node.outputs or not node.outputs[0] or node.outputs[0] in b.values:
        raise CannotImport(f"{node.title}: its output needs a name that no other value has")
    inputs = [b.values[name] if name else None for name in node.inputs]
    b.values[node.outputs[0]] = function(b, node, inputs)
