"""Exports a packed network to an ONNX file of standard operators, for onnxruntime and other readers of ONNX.

The result is equal to ours, not only close to it:

- A convolution of a code is a convolution of small integers with ±1, which is exact in float32 in any order of
  summation. Its scales are multiplied afterwards.
- onnxruntime folds a constant factor into the weights of the convolution before it. Then sums are no longer exact, and
  a sum that should be 0 may flip the next layer's sign. It looks for the constant in the second operand, so after a
  binary convolution the constant is the first operand.
- Sizes that are rounded up are written as padding, because runtimes disagree about ``ceil_mode``.
"""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

from unflip.export import activations, binary, shapes, steps  # noqa: F401  (each registers its ops)
from unflip.export.exporter import OPS, Code, Exporter, Shape, Value
from unflip.packing.file import Packed, PackedFileError, outputs_of, read, write_whole
from unflip.runtime import load

INPUT = "input"  # its name in the ONNX graph


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    max_memory: int | None = None,
    max_work: int | None = None,
) -> int:
    """Write the packed network ``source`` to the ONNX file ``target`` and return its size in bytes.

    ``unflip.load`` checks the file first; the limits are its limits.
    """
    load(source, max_memory=max_memory, max_work=max_work)
    packed = read(source)
    try:
        data: bytes = to_model(packed).SerializeToString()
    except PackedFileError as error:
        raise PackedFileError(f"{source}: {error}") from None
    write_whole(Path(target), data)
    return len(data)


def to_model(packed: Packed) -> Any:
    """The ``onnx.ModelProto`` of a packed network. Vectors have no height and width there."""
    outputs = outputs_of(packed.graph)
    if INPUT in {output.name for output in outputs}:
        raise PackedFileError(
            f"an output is named {INPUT!r}, like the input of an ONNX file; give it another name in the model"
        )
    e = Exporter(packed, [output.name for output in outputs])
    e.values.append(_input(e))
    for op in e.graph["ops"]:
        e.values.append(_exported(e, op))
    sizes = {}
    for name, number, pixels in outputs:
        value = e.float_value(number)
        shape = list(value.shape) if pixels else _for_user(value.shape)
        e.onnx.node("Flatten" if len(shape) == 1 else "Identity", value.name)
        e.onnx.rename_last(name)
        sizes[name] = shape
    return e.onnx.model(_for_user(e.values[0].shape), sizes, _metadata(e.graph))


def _input(e: Exporter) -> Value:
    shape: Shape = tuple(e.graph["input"]["shape"])
    vector = shape[1:] == (1, 1)
    return Value(e.reshape(INPUT, *shape) if vector else INPUT, shape)


def _metadata(graph: dict[str, Any]) -> dict[str, str]:
    texts = {key: graph.get(key) for key in ("labels", "source")}
    texts["preprocess"] = graph["input"].get("preprocess")
    return {key: json.dumps(value) for key, value in texts.items() if value is not None}


def _exported(e: Exporter, op: dict[str, Any]) -> Value | Code:
    """Call the function of the op. Unknown and missing fields are errors."""
    fields = {key: value for key, value in op.items() if key not in ("op", "name", "inputs")}
    where = f"op {len(e.values) - 1} ({op.get('op')} {op.get('name')!r})"
    function = OPS.get(op.get("op", ""))
    if function is None:
        raise PackedFileError(f"{where}: unknown op; the known ones are {', '.join(OPS)}")
    if function is binary.conv:
        fields["name"] = op.get("name", "")
    try:
        inspect.signature(function).bind(e, op.get("inputs"), **fields)
    except TypeError as error:
        raise PackedFileError(f"{where}: {error}") from None
    try:
        return function(e, op["inputs"], **fields)
    except PackedFileError as error:
        raise PackedFileError(f"{where}: {error}") from None


def _for_user(shape: Shape) -> list[int]:
    return list(shape[:1] if shape[1:] == (1, 1) else shape)
