"""Exports a packed network to an ONNX file of standard operators, for onnxruntime and other readers of ONNX.

The result is equal to ours, not only close to it:

- A convolution of a code is a convolution of small integers with ±1, which is exact in float32 in any order of
  summation. Its scales are multiplied afterwards.
- onnxruntime folds a constant factor into the weights of the convolution before it. Then sums are no longer exact, and
  a sum that should be 0 may flip the next layer's sign. It looks for the constant in the second operand, so after a
  binary convolution the constant is the first operand.
- onnxruntime loses values that an Identity returns as an output and a Pad reads. So values get the outputs' names.
- Sizes that are rounded up are written as padding, because runtimes disagree about ``ceil_mode``.
"""

from __future__ import annotations

import os
from typing import Any

from unflip.export import activations, binary, shapes, steps  # noqa: F401  (each registers its ops)
from unflip.export.exporter import OPS, Exporter, Value
from unflip.export.graph import (
    INPUT,
    add_ops,
    add_outputs,
    for_user,
    metadata,
    output_names,
    write_model,
)
from unflip.packing.file import Packed


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    max_memory: int | None = None,
    max_work: int | None = None,
) -> int:
    """Write the packed network ``source`` to the ONNX file ``target`` and return its size in bytes.

    ``unflip.load`` checks the file first; the limits are its limits.
    """
    return write_model(to_model, source, target, max_memory, max_work)


def to_model(packed: Packed, max_memory: int | None = None) -> Any:
    """The ``onnx.ModelProto`` of a packed network. Vectors have no height and width there."""
    e = Exporter(packed, output_names(packed), OPS, max_memory)
    e.values.append(_input(e))
    add_ops(e)
    sizes = add_outputs(e)
    e.onnx.remove_identities()
    return e.onnx.model(for_user(e.values[0].shape), sizes, metadata(e.graph))


def _input(e: Exporter) -> Value:
    shape = e.input_shape
    vector = shape[1:] == (1, 1)
    return Value(e.reshape(INPUT, *shape) if vector else INPUT, shape)
