"""The state of an export, and the tables of ops and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from unflip.export.builder import Builder
from unflip.packing.file import Array, Packed, PackedFileError

Shape = tuple[int, int, int]


class Value(NamedTuple):
    """A float value: its name in the ONNX graph and its channels, height, width."""

    name: str
    shape: Shape
    flat: bool = False  # batch × channels in the ONNX graph, without height and width


class Code(NamedTuple):
    """A quantized value: offset + Σ scale · term, where every term contains integers."""

    terms: list[tuple[float, str]]
    offset: float
    shape: Shape
    flat: bool = False
    largest: int = 1  # the largest absolute value of a term
    zero: Array | None = None  # of whole numbers: the number per channel that stands for 0


OPS: dict[str, Callable[..., Value | Code]] = {}
STEPS: dict[str, Callable[..., str]] = {}


def op(function: Callable[..., Value | Code]) -> Callable[..., Value | Code]:
    """Decorator: exports the op of the function's name (without an underscore at its end).

    After the exporter and the op's inputs, the function's arguments are the fields of the format.
    """
    OPS[function.__name__.rstrip("_")] = function
    return function


def step(function: Callable[..., str]) -> Callable[..., str]:
    """Decorator: exports the step of the function's name. Arguments after the exporter and x are its fields."""
    STEPS[function.__name__] = function
    return function


class Exporter:
    """The values so far, and helpers that add nodes. Functions marked with @op and @step export one op or step each."""

    def __init__(
        self,
        packed: Packed,
        taken: list[str],
        ops: dict[str, Callable[..., Value | Code]],
        max_memory: int | None = None,
    ) -> None:
        self.graph, self.tensors = packed
        self.ops = ops
        self.onnx = Builder(taken, max_memory)
        self.values: list[Value | Code] = []
        channels, height, width = self.graph["input"]["shape"]
        self.input_shape: Shape = (channels, height, width)

    def float_value(self, number: int) -> Value:
        """A float value with height and width."""
        return self.as_image(self.any_value(number))

    def any_value(self, number: int) -> Value:
        """A float value, which may be flat."""
        value = self.values[number]
        if isinstance(value, Code):
            raise PackedFileError(f"value {number} is a code; only conv can have a code as input")
        return value

    def as_image(self, x: Value) -> Value:
        return Value(self.reshape(x.name, *x.shape), x.shape) if x.flat else x

    def as_flat(self, x: Value) -> Value:
        return x if x.flat else Value(self.onnx.node("Flatten", x.name), x.shape, flat=True)

    def channels(self, tensor: str, flat: bool = False) -> str:
        """A tensor (C) or (1) as a constant that broadcasts over batch and pixels."""
        return self.per_channel(self.tensors[tensor], flat)

    def per_channel(self, array: Array, flat: bool = False) -> str:
        return self.onnx.constant(array.reshape(-1) if flat else array.reshape(-1, 1, 1))

    def sum(self, names: list[str]) -> str:
        return names[0] if len(names) == 1 else self.onnx.node("Sum", *names)

    def scaled(self, name: str, factor: float) -> str:
        return name if factor == 1 else self.onnx.node("Mul", self.onnx.number(factor), name)

    def reshape(self, name: str, *shape: int) -> str:
        return self.onnx.node("Reshape", name, self.onnx.integers(0, *shape))  # 0: the batch

    def pad(self, name: str, before: list[int], after: list[int]) -> str:
        return self.onnx.node("Pad", name, self.onnx.integers(0, *before, 0, *after))

    def times(self, x: str, factor: float) -> str:
        return self.onnx.node("Mul", x, self.onnx.number(factor))

    def plus(self, x: str, term: float) -> str:
        return self.onnx.node("Add", x, self.onnx.number(term))

    def int32(self, value: int) -> str:
        return self.onnx.constant(np.array(value, np.int32))
