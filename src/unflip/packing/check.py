"""Compares what was packed with the model, op by op.

Each op is given what torch has for its inputs, so a difference is found where it arises, and a value that rounding
puts on the other side of a threshold changes one bit of one op's output, not the network's answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unflip.packing.file import Packed
from unflip.packing.ir import CannotPack, Graph
from unflip.packing.outputs import Structure
from unflip.packing.reference import run_op

TOLERANCE = 1e-4  # of the largest magnitude of an op's output
MOST_CROSSINGS = 1e-3  # share of a code's elements


def check(
    packed: Packed, graph: Graph, structure: Structure, example: Tensor, outputs: list[Tensor]
) -> None:
    """Refuse a packed network that is not what the model is."""
    values = [_image(example)]
    for op, made in zip(packed.graph["ops"], graph.ops, strict=True):
        found = run_op(op, packed.tensors, values)
        expected = found if made.value is None else _image(made.value)
        where = f"{op['op']} {op['name']!r}"
        if op["op"] == "quantize" and len(op["inputs"]) == 2:
            _compare_most(where, found, expected)
        else:
            _compare(where, found, expected)
        values.append(expected)
    for place, value, output in zip(structure.places, graph.outputs, outputs, strict=True):
        _compare(f"the network's {place}", values[value], _image(output))


def _compare_most(where: str, found: Tensor, expected: Tensor) -> None:
    """Thresholds that depend on a mean move with the order of its sum: a value right beside one may cross it."""
    share = (found != expected).double().mean().item()
    if share > MOST_CROSSINGS:
        raise CannotPack(
            f"packed network and model part at {where}: {share:.2%} of its bits differ"
        )


def _compare(where: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape:
        raise CannotPack(
            f"packed network and model part at {where}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
        )
    if not torch.isfinite(expected).all():
        raise CannotPack(f"the model has NaN or infinity at {where} on the example")
    size = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    if not difference <= TOLERANCE * max(size, 1e-20):
        raise CannotPack(
            f"packed network and model part at {where}: they differ by {difference:.3g} where values are up to "
            f"{size:.3g}"
        )


def _image(tensor: Tensor) -> Tensor:
    return tensor.reshape(*tensor.shape, *[1] * (4 - tensor.dim()))
