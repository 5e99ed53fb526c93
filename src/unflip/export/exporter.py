"""The state of an export, and the tables of ops and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from unflip.export.builder import Builder
from unflip.packing.file import Packed, PackedFileError

Shape = tuple[int, int, int]


class Value(NamedTuple):
    """A float value: its name in the ONNX graph and its channels, height, width."""

    name: str
    shape: Shape


class Code(NamedTuple):
    """A quantized value: offset + Σ scale · term, where every term contains integers."""

    terms: list[tuple[float, str]]
    offset: float
    shape: Shape


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

    def __init__(self, packed: Packed, taken: list[str]) -> None:
        self.graph, self.tensors = packed
        self.onnx = Builder(taken=taken)
        self.values: list[Value | Code] = []

    def float_value(self, number: int) -> Value:
        value = self.values[number]
        if isinstance(value, Code):
            raise PackedFileError(f"value {number} is a code; only conv can have a code as input")
        return value

    def channels(self, tensor: str) -> str:
        """A tensor (C) or (1) as a constant that broadcasts over batch and pixels."""
        return self.onnx.constant(self.tensors[tensor].reshape(-1, 1, 1))

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
