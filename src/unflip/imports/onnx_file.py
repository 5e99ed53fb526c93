"""Reads ONNX files as data: nodes in order, constants as arrays. Files that it names are never opened."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unflip.imports.errors import CannotImport

Array = np.ndarray[Any, np.dtype[Any]]

MOST_BYTES = 2**31
MOST_NODES = 100_000
MOST_ELEMENTS = 2**28  # of a constant
LARGEST_FLOAT = float(np.finfo(np.float32).max)

# ONNX's numbers of types -> the dtype in raw_data, and the field that has the numbers instead
TYPES = {
    1: ("<f4", "float_data"),
    2: ("|u1", "int32_data"),
    3: ("|i1", "int32_data"),
    6: ("<i4", "int32_data"),
    7: ("<i8", "int64_data"),
    9: ("|b1", "int32_data"),
    11: ("<f8", "double_data"),
}
# Other domains give the same names other meanings, such as channels_last.
DOMAINS = {"", "ai.onnx", "qonnx.custom_op.general", "onnx.brevitas", "finn.custom_op.general"}
INT, INTS, FLOAT, TEXT, TENSOR = 2, 7, 1, 3, 4  # ONNX's numbers of kinds of attributes


@dataclass(frozen=True)
class Node:
    """One operation. ``attributes`` holds ints, floats, texts, lists of ints, and arrays."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]

    @property
    def title(self) -> str:
        return f"{self.op:.60} {self.name!r:.90}"

    def number(self, key: str, default: float) -> float:
        found = self.attributes.get(key, default)
        if not isinstance(found, int | float) or not math.isfinite(found):
            raise CannotImport(f"{self.title}: {key}={found!r:.60} should be a number")
        return float(found)

    def whole(self, key: str, default: int) -> int:
        found = self.attributes.get(key, default)
        if not isinstance(found, int):
            raise CannotImport(f"{self.title}: {key}={found!r:.60} should be a whole number")
        return found

    def wholes(self, key: str, default: list[int]) -> list[int]:
        """A list as long as the default, of numbers that the packed file can hold."""
        found = self.attributes.get(key, default)
        if (
            not isinstance(found, list)
            or len(found) != len(default)
            or not all(0 <= n <= 2**16 for n in found)
        ):
            raise CannotImport(
                f"{self.title}: {key}={found!r:.60} should be {len(default)} whole numbers from 0 to 65,536"
            )
        return found

    def text(self, key: str, default: str) -> str:
        found = self.attributes.get(key, default)
        if not isinstance(found, str):
            raise CannotImport(f"{self.title}: {key}={found!r:.60} should be a text")
        return found

    def only(self, **allowed: Any) -> None:
        """Refuse attributes with other values than the ones that are supported."""
        for key, value in allowed.items():
            if self.attributes.get(key, value) != value:
                raise CannotImport(
                    f"{self.title}: {key}={self.attributes[key]!r:.60} is not supported; only {value!r} is"
                )


@dataclass(frozen=True)
class OnnxGraph:
    nodes: list[Node]
    constants: dict[str, Array]
    input: str
    shape: tuple[int, ...]  # without the batch
    output: str
    producer: str
    opset: int  # of ONNX's own operations


def read_onnx(path: Path) -> OnnxGraph:
    """Read a file. Errors name it."""
    try:
        if path.exists() and not path.is_file():
            raise CannotImport(f"{path} is not a file; give the path of an .onnx file")
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise CannotImport(f"{path}: {size:,} bytes; at most {MOST_BYTES:,} are read")
        data = path.read_bytes()
    except OSError as error:
        raise CannotImport(f"{path} cannot be read: {error.strerror or error}") from None
    return parse_onnx(data, str(path))


def parse_onnx(data: bytes, where: str) -> OnnxGraph:
    from google.protobuf.message import DecodeError
    from onnx import ModelProto

    model = ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, RecursionError) as error:
        raise CannotImport(
            f"{where}: cut off, damaged, or not an ONNX file ({error!s:.100}); export it again"
        ) from None
    try:
        return _graph(model)
    except CannotImport as error:
        raise CannotImport(f"{where}: {error}") from None


def _graph(model: Any) -> OnnxGraph:
    graph = model.graph
    if not graph.node or not graph.output:
        raise CannotImport("cut off, or not an ONNX file: it has no nodes or no output")
    if len(graph.node) > MOST_NODES:
        raise CannotImport(f"{len(graph.node):,} nodes; at most {MOST_NODES:,} are supported")
    if model.functions:
        raise CannotImport(
            f"it defines {len(model.functions)} functions of its own, which are not supported; inline them before the "
            "export"
        )
    if graph.sparse_initializer:
        raise CannotImport("sparse constants are not supported; export dense ones")
    constants: dict[str, Array] = {}
    for tensor in graph.initializer:
        key = _text(tensor.name)
        if key in constants:
            raise CannotImport(f"two constants have the name {key!r:.90}")
        constants[key] = array_of(tensor)
    name, shape = _input(graph, constants)
    if len(graph.output) != 1:
        names = ", ".join(f"{_text(o.name)!r:.40}" for o in graph.output[:8])
        raise CannotImport(
            f"it has {len(graph.output)} outputs ({names}); export a network with one output"
        )
    producer = f"{_text(model.producer_name)} {_text(model.producer_version)}".strip()[:200]
    return OnnxGraph(
        [_node(node) for node in graph.node],
        constants,
        name,
        shape,
        _text(graph.output[0].name),
        producer or "not stated",
        max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1),
    )


def _input(graph: Any, constants: dict[str, Array]) -> tuple[str, tuple[int, ...]]:
    inputs = [value for value in graph.input if _text(value.name) not in constants]
    if len(inputs) != 1:
        raise CannotImport(f"it has {len(inputs)} inputs; a packed network has one")
    dims = list(inputs[0].type.tensor_type.shape.dim)
    if len(dims) not in (2, 4):
        raise CannotImport(
            f"its input has {len(dims)} dimensions; (batch, channels, height, width) and (batch, features) are "
            "supported"
        )
    shape = tuple(dim.dim_value for dim in dims[1:])
    if any(size < 1 or size > 2**20 for size in shape):
        raise CannotImport(
            f"its input is {' × '.join(str(n or '?') for n in shape)} without the batch; export it with fixed sizes "
            "from 1 to 1,048,576"
        )
    return _text(inputs[0].name), shape


def array_of(tensor: Any) -> Array:
    """The array of a tensor. Its size is checked before anything is allocated."""
    title = f"the constant {_text(tensor.name)!r:.90}"
    if tensor.data_location == 1 or tensor.external_data:
        raise CannotImport(
            f"{title} is in another file, which is not opened; export the network as one file"
        )
    if tensor.data_type not in TYPES:
        raise CannotImport(
            f"{title} has ONNX's type {tensor.data_type}; floats of 32 and 64 bits, integers and booleans are supported"
        )
    dtype, place = TYPES[tensor.data_type]
    shape = tuple(tensor.dims)
    count = math.prod(shape)
    if any(not 0 <= n <= MOST_ELEMENTS for n in (*shape, count)) or len(shape) > 8:
        raise CannotImport(
            f"{title} has the shape {shape!r:.100}; at most {MOST_ELEMENTS:,} elements are supported"
        )
    if tensor.raw_data:
        found = len(tensor.raw_data) / np.dtype(dtype).itemsize
        flat = np.frombuffer(tensor.raw_data, dtype) if found == count else np.zeros(0)
    else:
        numbers = getattr(tensor, place)
        found = len(numbers)
        flat = _numbers(numbers, dtype, title) if found == count else np.zeros(0)
    if found != count:
        raise CannotImport(f"{title} of shape {shape!r:.100} has {found:g} numbers, not {count:,}")
    if dtype[1] == "f" and not (np.abs(flat) <= LARGEST_FLOAT).all():  # also false for NaN
        raise CannotImport(f"{title} contains NaN, infinity, or numbers too large for float32")
    return flat.reshape(shape)


def _numbers(numbers: Any, dtype: str, title: str) -> Array:
    """Numbers of a wider type. Those that do not fit are refused: numpy would only keep their last bits."""
    wide = np.array(numbers, dtype if dtype[1] == "f" else np.int64)
    flat = wide.astype(dtype)
    if dtype[1] != "f" and (flat != wide).any():
        raise CannotImport(f"{title} has a number that does not fit its type")
    return flat


def _node(node: Any) -> Node:
    domain = _text(node.domain)
    if domain not in DOMAINS:
        raise CannotImport(
            f"{_text(node.op_type):.60} {_text(node.name)!r:.90} is of the domain {domain!r:.60}, which is not "
            "supported; export the network without it"
        )
    return Node(
        _text(node.op_type),
        _text(node.name or (node.output[0] if node.output else "")),
        tuple(map(_text, node.input)),
        tuple(map(_text, node.output)),
        {_text(attribute.name): _attribute(attribute) for attribute in node.attribute},
    )


def _text(found: str | bytes) -> str:
    """protobuf gives texts that are not UTF-8 as bytes."""
    return found if isinstance(found, str) else found.decode("utf-8", "replace")


def _attribute(attribute: Any) -> Any:
    """Its value; None for kinds that no supported operation has, such as graphs."""
    if attribute.type == TEXT:
        return _text(attribute.s)
    if attribute.type == TENSOR:
        return array_of(attribute.t)
    kinds = {INT: "i", FLOAT: "f"}
    if attribute.type in kinds:
        return getattr(attribute, kinds[attribute.type])
    return list(attribute.ints) if attribute.type == INTS else None
