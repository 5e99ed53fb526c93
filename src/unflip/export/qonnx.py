"""Exports a packed network to QONNX, the ONNX dialect that tools for FPGAs read (FINN, hls4ml).

Signs are ``BipolarQuant`` nodes, numbers of a few bits are ``Quant`` nodes, and both stand before the weights and the
inputs of a product. Products are of small integers, and scales are multiplied afterwards, so that nothing is rounded
before. A sign of such a sum is taken of the whole number itself: a BatchNorm between them becomes a whole threshold.

The batch size is 1, and vectors are batch × features: these tools have no other batch sizes, and build linear layers
from ``MatMul`` nodes.
"""

from __future__ import annotations

import os
from typing import Any

from unflip.export import activations, binary, shapes, steps  # noqa: F401  (each registers its ops)
from unflip.export.exporter import OPS, Value
from unflip.export.graph import (
    INPUT,
    add_ops,
    add_outputs,
    for_user,
    metadata,
    output_names,
    write_model,
)
from unflip.export.qonnx_codes import quantize, to_bytes
from unflip.export.qonnx_exporter import DOMAIN, QonnxExporter
from unflip.export.qonnx_products import conv, flatten, mean
from unflip.packing.file import Packed

OWN = {f.__name__: f for f in (conv, flatten, mean, quantize, to_bytes)}


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    max_memory: int | None = None,
    max_work: int | None = None,
) -> int:
    """Write the packed network ``source`` to the QONNX file ``target`` and return its size in bytes.

    ``unflip.load`` checks the file first; the limits are its limits.
    """
    return write_model(to_model, source, target, max_memory, max_work)


def to_model(packed: Packed, max_memory: int | None = None) -> Any:
    """The ``onnx.ModelProto`` of a packed network, for one image."""
    e = QonnxExporter(packed, output_names(packed), OPS | OWN, max_memory)
    shape = e.input_shape
    e.values.append(Value(INPUT, shape, flat=shape[1:] == (1, 1)))
    add_ops(e)
    sizes = add_outputs(e)
    e.onnx.remove_identities()
    e.onnx.remove_unused(sizes)
    return e.onnx.model(for_user(shape), sizes, metadata(e.graph), batch=1, domains=(DOMAIN,))
