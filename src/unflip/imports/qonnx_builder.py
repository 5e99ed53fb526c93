"""The packed graph that is built from a QONNX file, the table of operations, and how they read their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from unflip.imports.errors import CannotImport
from unflip.imports.onnx_file import Array, Node
from unflip.packing.describe import SHAPES
from unflip.packing.ir import Fields, Op, Shape

F32 = np.float32
MOST_CHANNELS = 2**20  # as in a packed file


@dataclass(frozen=True)
class Value:
    """A value of the packed graph, and a quantizer that is still to be applied to it."""

    number: int
    shape: Shape
    flat: bool  # (batch, features) in the ONNX file
    code: Fields | None = None

    @property
    def channels(self) -> int:
        return self.shape[0]


@dataclass
class Builder:
    """The packed graph so far, and the ONNX values by name."""

    opset: int
    ops: list[Op] = field(default_factory=list)
    values: dict[str, Value | Array] = field(default_factory=dict)
    binary: int = 0
    floats: list[str] = field(default_factory=list)  # layers with weights of more than 1 bit

    def add(
        self,
        kind: str,
        node: Node,
        inputs: list[Value],
        steps: list[Fields] | None = None,
        flat: bool | None = None,
        **fields: Any,
    ) -> Value:
        """Add an op of the packed file; its shape follows from its fields."""
        shape = SHAPES[kind](fields, [x.shape for x in inputs])
        if min(shape) < 1:
            raise CannotImport(
                f"{node.title}: its result would be {' × '.join(map(str, shape))}; sizes start at 1"
            )
        numbers = [x.number for x in inputs]
        self.ops.append(Op(kind, node.name[:200], numbers, fields, steps or [], shape))
        is_flat = inputs[0].flat if flat is None else flat
        return Value(len(self.ops), shape, is_flat)

    def step(self, node: Node, x: Value, step: Fields) -> Value:
        return self.add("map", node, [self.as_float(node, x)], [step])

    def as_code(self, node: Node, x: Value) -> Value:
        """The quantized value, for a product with binary weights."""
        if x.code is None:
            return x
        return self.add("quantize", node, [replace(x, code=None)], **x.code)

    def as_float(self, node: Node, x: Value) -> Value:
        """A code as floats: each channel is multiplied by +1."""
        if x.code is None:
            return x
        if x.channels > MOST_CHANNELS:
            raise CannotImport(
                f"{node.title}: {x.channels:,} channels; at most {MOST_CHANNELS:,} are supported"
            )
        signs = np.packbits(np.ones(x.channels, np.uint8), bitorder="little")
        return self.add(
            "conv",
            node,
            [self.as_code(node, x)],
            shape=[x.channels, 1, 1, 1],
            stride=[1, 1],
            padding=[0] * 4,
            dilation=[1, 1],
            groups=x.channels,
            bits=signs,
            scales=np.ones((1, 1), F32),
        )


Operand = Value | Array
Operation = Callable[[Builder, Node, list[Any]], Operand]
OPS: dict[str, Operation] = {}


def op(*names: str) -> Callable[[Operation], Operation]:
    """Decorator: imports the operations of these names."""

    def register(function: Operation) -> Operation:
        for name in names:
            OPS[name] = function
        return function

    return register


def value_of(b: Builder, node: Node, x: Operand | None) -> Value:
    """A float value of the network."""
    return b.as_float(node, any_value(node, x))


def any_value(node: Node, x: Operand | None) -> Value:
    if not isinstance(x, Value):
        raise CannotImport(
            f"{node.title}: its first input is a constant or missing; it should depend on the network's input"
        )
    return x


def constant(node: Node, inputs: list[Any], place: int, what: str) -> Array:
    found = inputs[place] if place < len(inputs) else None
    if not isinstance(found, np.ndarray):
        raise CannotImport(f"{node.title}: its {what} (input {place}) should be a constant")
    return found


def floats(node: Node, inputs: list[Any], place: int, what: str, shape: tuple[int, ...]) -> Array:
    found = constant(node, inputs, place, what)
    if found.shape != shape:
        raise CannotImport(f"{node.title}: its {what} has shape {found.shape}; {shape} is needed")
    return found.astype(F32)


def integers(node: Node, inputs: list[Any], place: int, what: str) -> list[int]:
    found = constant(node, inputs, place, what)
    if found.dtype.kind != "i" or found.size > 16:
        raise CannotImport(f"{node.title}: its {what} should be a few integers")
    return [int(n) for n in found.reshape(-1)]


def per_channel(node: Node, x: Value, constant: Array) -> Array:
    """A constant that broadcasts to one number per channel, or to one for all."""
    wanted = 2 if x.flat else 4
    shape = (1,) * (wanted - constant.ndim) + constant.shape
    odd = [n for axis, n in enumerate(shape) if n != 1 and axis != 1]
    if len(shape) != wanted or odd or shape[1] not in (1, x.channels):
        raise CannotImport(
            f"{node.title}: a constant of shape {constant.shape} with a value of {x.channels} channels; only one "
            "number per channel, or one for all, is supported"
        )
    return constant.reshape(-1).astype(F32)


def image(node: Node, x: Value) -> Value:
    if x.flat:
        raise CannotImport(f"{node.title}: its input is a vector; it should be an image")
    return x


def positive(node: Node, key: str, default: tuple[int, int] = (1, 1)) -> list[int]:
    found = node.wholes(key, list(default))
    if min(found) < 1:
        raise CannotImport(f"{node.title}: {key}={found} start at 1")
    return found


def refuse_padding_rule(node: Node) -> None:
    rule = node.text("auto_pad", "NOTSET")
    if rule != "NOTSET" and not (rule == "VALID" and not any(node.attributes.get("pads") or [0])):
        raise CannotImport(
            f"{node.title}: auto_pad={rule!r:.40} is not supported; export it with pads"
        )
