"""Compares the packed network with the model, op by op.

Each op gets torch's values as inputs. So a difference is reported where it arises, and a value that rounding moves
across a threshold changes one bit of one op's output, not the output of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from unflip.packing.file import Packed
from unflip.packing.ir import CannotPack, Fields, Graph
from unflip.packing.outputs import Structure
from unflip.packing.reference import run_op

TOLERANCE = 1e-4  # of the largest magnitude of an op's output
INPUT_ROUNDING = 2.0**-20  # relative; eight times that of float32
MOST_CROSSINGS = 1e-3  # fraction of a code's elements


def check(
    packed: Packed, graph: Graph, structure: Structure, example: Tensor, outputs: list[Tensor]
) -> None:
    """Raise CannotPack if the packed network differs from the model."""
    values = [_image(example)]
    for op, made in zip(packed.graph["ops"], graph.ops, strict=True):
        found = run_op(op, packed.tensors, values)
        expected = found if made.value is None else _image(made.value)
        where = f"{op['op']} {op['name']!r}"
        if op["op"] == "quantize" and len(op["inputs"]) == 2:
            _compare_most(where, found, expected)
        elif op["op"] == "quantize":
            _compare(where, found, expected)
        else:
            _compare(where, found, expected, partial(_sensitivity, op, packed, values))
        values.append(expected)
    for place, value, output in zip(structure.places, graph.outputs, outputs, strict=True):
        _compare(f"the network's {place}", values[value], _image(output))


def _compare_most(where: str, found: Tensor, expected: Tensor) -> None:
    """For thresholds that depend on a mean: rounding of the mean may move a value across a threshold."""
    share = (found != expected).double().mean().item()
    if share > MOST_CROSSINGS:
        raise CannotPack(
            f"the packed network differs from the model at {where}: {share:.2%} of its bits"
        )


def _sensitivity(op: Fields, packed: Packed, values: list[Tensor]) -> float:
    """The largest change of an op's output if its inputs change by a few float32 roundings, up or in both directions.

    The mean of large values that cancel out is tiny, but its rounding error is that of the large values.
    """
    found = run_op(op, packed.tensors, values)
    random = torch.Generator().manual_seed(0)
    largest = 0.0
    for both in (False, True):
        moved = [v + v.abs() * INPUT_ROUNDING * _signs(v, random, both) for v in values]
        largest = max(largest, (run_op(op, packed.tensors, moved) - found).abs().max().item())
    return largest


def _signs(value: Tensor, random: torch.Generator, both: bool) -> Tensor | int:
    return torch.randint(2, value.shape, generator=random) * 2 - 1 if both else 1


def _compare(
    where: str, found: Tensor, expected: Tensor, sensitivity: Callable[[], float] = lambda: 0.0
) -> None:
    if found.shape != expected.shape:
        raise CannotPack(
            f"the packed network differs from the model at {where}: shape {tuple(found.shape)} instead of "
            f"{tuple(expected.shape)}"
        )
    if not torch.isfinite(expected).all():
        raise CannotPack(
            f"the model gives NaN or infinity at {where} for example_input; check the weights and the example"
        )
    size = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    if not difference <= TOLERANCE * max(size, 1e-20) and not difference <= sensitivity():
        raise CannotPack(
            f"the packed network differs from the model at {where}: by up to {difference:.3g}, with values up to "
            f"{size:.3g}. Do hooks change values?"
        )


def _image(tensor: Tensor) -> Tensor:
    return tensor.reshape(*tensor.shape, *[1] * (4 - tensor.dim()))
