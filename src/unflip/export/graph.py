"""What all ONNX files have in common: the ops in order, the outputs, the metadata, writing the file."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unflip.export.exporter import Code, Exporter, Shape, Value
from unflip.packing.file import Packed, PackedFileError, outputs_of, read, write_whole
from unflip.runtime import load

INPUT = "input"  # its name in the ONNX graph


def write_model(
    to_model: Callable[[Packed, int | None], Any],
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    max_memory: int | None,
    max_work: int | None,
) -> int:
    """Check ``source``, write its model to ``target``, and return the size in bytes."""
    load(source, max_memory=max_memory, max_work=max_work)
    packed = read(source)
    try:
        data: bytes = to_model(packed, max_memory).SerializeToString()
    except PackedFileError as error:
        raise PackedFileError(f"{source}: {error}") from None
    write_whole(Path(target), data)
    return len(data)


def output_names(packed: Packed) -> list[str]:
    names = [output.name for output in outputs_of(packed.graph)]
    if INPUT in names:
        raise PackedFileError(
            f"an output is named {INPUT!r}, like the input of an ONNX file; give it another name in the model"
        )
    return names


def add_ops(e: Exporter) -> None:
    for op in e.graph["ops"]:
        e.values.append(_exported(e, op))


def add_outputs(e: Exporter) -> dict[str, list[int]]:
    """Add the outputs, and return their shapes by name. Vectors have no height and width."""
    sizes = {}
    for name, number, pixels in outputs_of(e.graph):
        value = e.float_value(number) if pixels else e.any_value(number)
        shape = list(value.shape) if pixels else for_user(value.shape)
        e.onnx.node("Flatten" if len(shape) == 1 and not value.flat else "Identity", value.name)
        e.onnx.rename_last(name)
        sizes[name] = shape
    return sizes


def metadata(graph: dict[str, Any]) -> dict[str, str]:
    texts = {key: graph.get(key) for key in ("labels", "source")}
    texts["preprocess"] = graph["input"].get("preprocess")
    return {key: json.dumps(value) for key, value in texts.items() if value is not None}


def for_user(shape: Shape) -> list[int]:
    return list(shape[:1] if shape[1:] == (1, 1) else shape)


def _exported(e: Exporter, op: dict[str, Any]) -> Value | Code:
    """Call the function of the op. Unknown and missing fields are errors."""
    fields = {key: value for key, value in op.items() if key not in ("op", "name", "inputs")}
    where = f"op {len(e.values) - 1} ({op.get('op')} {op.get('name')!r})"
    function = e.ops.get(op.get("op", ""))
    if function is None:
        raise PackedFileError(f"{where}: unknown op; the known ones are {', '.join(e.ops)}")
    signature = inspect.signature(function)
    if "name" in signature.parameters:
        fields["name"] = op.get("name", "")
    try:
        signature.bind(e, op.get("inputs"), **fields)
    except TypeError as error:
        raise PackedFileError(f"{where}: {error}") from None
    try:
        return function(e, op["inputs"], **fields)
    except PackedFileError as error:
        raise PackedFileError(f"{where}: {error}") from None
