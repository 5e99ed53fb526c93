"""A packed network as an ONNX file of standard operators, for onnxruntime and whatever else reads ONNX.

Binary weights stay bits in the file; nodes in front of each convolution unpack them to ±1, which a runtime does
once, when it loads the file. What makes the result equal to ours and not only close to it:

- A convolution of a code is one of small integers with ±1, exact in float32 in any order of summation. Its scales
  are multiplied afterwards.
- onnxruntime multiplies a constant into the weights of the convolution before it, and the integers are gone: then
  a sum that should be 0 is a little above or below it, and the next layer's sign may flip. It looks for the
  constant in second place, so behind a binary convolution it stands in the first.
- Sizes that are rounded up are written out as padding: runtimes disagree about ``ceil_mode``.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unflip.export.builder import Builder
from unflip.packing.file import Array, Packed, PackedFileError, outputs_of, read

Shape = tuple[int, int, int]
INPUT = "input"  # its name in the ONNX graph
FLOAT, BOOL = 1, 9  # ONNX's numbers for types
MANY_STEPS = 7  # above this, thresholds are looked up and not compared with one by one


class Value(NamedTuple):
    """A float value: its name in the ONNX graph and its channels, height, width."""

    name: str
    shape: Shape


class Code(NamedTuple):
    """A quantized value: offset + Σ scale · term, where every term holds integers."""

    terms: list[tuple[float, str]]
    offset: float
    shape: Shape


def export(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> int:
    """Write the packed network ``source`` as the ONNX file ``target``; returns its size in bytes."""
    packed = read(source)
    try:
        data: bytes = to_model(packed).SerializeToString()
    except PackedFileError as error:
        raise PackedFileError(f"{source}: {error}") from None
    beside = Path(target).with_name(Path(target).name + ".part")
    beside.write_bytes(data)
    beside.replace(target)
    return len(data)


def to_model(packed: Packed) -> Any:
    """The ``onnx.ModelProto`` of a packed network."""
    return _Exporter(packed).model()


class _Exporter:
    """Goes through the ops once; a method a kind of op or step, with the format's fields as its arguments."""

    def __init__(self, packed: Packed) -> None:
        self.graph, self.tensors = packed
        self.outputs = outputs_of(self.graph)
        if INPUT in {output.name for output in self.outputs}:
            raise PackedFileError(
                f"an output is called {INPUT!r}, as an ONNX file's input is: give it another name in the model"
            )
        self.onnx = Builder(taken=[output.name for output in self.outputs])
        self.values: list[Value | Code] = []

    def model(self) -> Any:
        """A vector has no height and width for the user, neither on the way in nor on the way out."""
        self.values.append(self._input())
        for op in self.graph["ops"]:
            self.values.append(self._make(op))
        sizes = {}
        for name, number in self.outputs:
            value = self._float(number)
            self.onnx.node("Flatten" if value.shape[1:] == (1, 1) else "Identity", value.name)
            self.onnx.rename_last(name)
            sizes[name] = _for_user(value.shape)
        return self.onnx.model(_for_user(self.values[0].shape), sizes, self._metadata())

    def _input(self) -> Value:
        shape: Shape = tuple(self.graph["input"]["shape"])
        vector = shape[1:] == (1, 1)
        return Value(self._reshape(INPUT, *shape) if vector else INPUT, shape)

    def _metadata(self) -> dict[str, str]:
        texts = {
            "labels": self.graph.get("labels"),
            "preprocess": self.graph["input"].get("preprocess"),
        }
        return {key: json.dumps(value) for key, value in texts.items() if value is not None}

    def _make(self, op: dict[str, Any]) -> Value | Code:
        """Call the method of the op's kind. What it does not take, or misses, is an error."""
        fields = {key: value for key, value in op.items() if key not in ("op", "name", "inputs")}
        where = f"op {len(self.values) - 1} ({op.get('op')} {op.get('name')!r})"
        method = OPS.get(op.get("op", ""))
        if method is None:
            raise PackedFileError(f"{where}: no such op; there are {', '.join(OPS)}")
        if method is _Exporter.conv:
            fields["name"] = op.get("name", "")
        try:
            inspect.signature(method).bind(self, op.get("inputs"), **fields)
        except TypeError as error:
            raise PackedFileError(f"{where}: {error}") from None
        try:
            return method(self, op["inputs"], **fields)
        except PackedFileError as error:
            raise PackedFileError(f"{where}: {error}") from None

    def _float(self, number: int) -> Value:
        value = self.values[number]
        if isinstance(value, Code):
            raise PackedFileError(f"value {number} is a code; only conv takes one")
        return value

    def _channels(self, tensor: str) -> str:
        """A tensor (C) or (1) as a constant that broadcasts over batch and pixels."""
        return self.onnx.constant(self.tensors[tensor].reshape(-1, 1, 1))

    # Quantize

    def quantize(
        self,
        inputs: list[int],
        *,
        thresholds: str,
        strict: list[bool],
        coding: str,
        scales: list[float],
        offset: float,
    ) -> Code:
        if coding not in ("planes", "levels"):
            raise PackedFileError(f"coding {coding!r} is neither 'planes' nor 'levels'")
        x, limits = self._float(inputs[0]), self.tensors[thresholds]
        unit = self._float(inputs[1]).name if len(inputs) > 1 else None
        if coding == "levels":
            scales = scales[:1]  # the others are its doubles: one scale on the number of steps
            if len(strict) > MANY_STEPS and len(set(strict)) == 1 and unit is None:
                return self._code([self._rank(x.name, limits, strict[0])], scales, offset, x.shape)
        steps = [
            self._step_reached(x.name, limit, above, unit)
            for limit, above in zip(limits, strict, strict=True)
        ]
        common = _common_unit(scales, offset)
        if common and len(steps) == 1:
            low, high = (self.onnx.number(v / common) for v in (offset, offset + scales[0]))
            return Code([(common, self.onnx.node("Where", steps[0], high, low))], 0.0, x.shape)
        terms = [self.onnx.node("Cast", step, to=FLOAT) for step in steps]
        terms = [self._sum(terms)] if coding == "levels" else terms
        return self._code(terms, scales, offset, x.shape)

    def _code(self, terms: list[str], scales: list[float], offset: float, shape: Shape) -> Code:
        """One term where scales and offset have a common unit, so that a convolution is one, too."""
        common = _common_unit(scales, offset)
        if common is None:
            return Code(list(zip(scales, terms, strict=True)), offset, shape)
        parts = [self._scaled(t, s / common) for s, t in zip(scales, terms, strict=True)]
        if offset:
            parts.append(self.onnx.number(offset / common))
        return Code([(common, self._sum(parts))], 0.0, shape)

    def _rank(self, x: str, limits: Array, strict: bool) -> str:
        """How many of many steps are reached, by bisection: one look into the sorted thresholds a digit."""
        digits = len(limits).bit_length()
        table = np.full((limits.shape[1], 2**digits - 1), np.inf, np.float32)
        table[:, : len(limits)] = np.sort(limits, 0).T
        all_limits = self.onnx.constant(table.reshape(-1))
        first = np.arange(0, table.size, table.shape[1], dtype=np.int32).reshape(-1, 1, 1)
        start = at = self.onnx.constant(first)
        for half in (2**digit for digit in reversed(range(digits))):
            # "at" is the channel's first threshold plus the steps known to be reached.
            probe = at if half == 1 else self.onnx.node("Add", at, self._int32(half - 1))
            limit = self.onnx.node("Gather", all_limits, probe)
            above = self.onnx.node("Greater" if strict else "GreaterOrEqual", x, limit)
            more = self.onnx.node("Where", above, self._int32(half), self._int32(0))
            at = self.onnx.node("Add", at, more)
        return self.onnx.node("Cast", self.onnx.node("Sub", at, start), to=FLOAT)

    def _int32(self, value: int) -> str:
        return self.onnx.constant(np.array(value, np.int32))

    def _step_reached(self, x: str, limit: Array, strict: bool, unit: str | None) -> str:
        threshold = self.onnx.constant(limit.reshape(-1, 1, 1))
        if unit is not None:
            threshold = self.onnx.node("Mul", unit, threshold)
        return self.onnx.node("Greater" if strict else "GreaterOrEqual", x, threshold)

    def _sum(self, names: list[str]) -> str:
        return names[0] if len(names) == 1 else self.onnx.node("Sum", *names)

    def _scaled(self, name: str, factor: float) -> str:
        return name if factor == 1 else self.onnx.node("Mul", self.onnx.number(factor), name)

    # Convolutions

    def conv(
        self,
        inputs: list[int],
        *,
        name: str,
        shape: list[int],
        stride: list[int],
        dilation: list[int],
        padding: list[int],
        groups: int,
        steps: list[dict[str, Any]],
        weight: str | None = None,
        bits: str | None = None,
        scales: str | None = None,
        offset: str | None = None,
    ) -> Value:
        x = self.values[inputs[0]]
        geometry = {"strides": stride, "dilations": dilation, "pads": padding, "group": groups}
        if weight is not None and isinstance(x, Value):
            kernel = self.onnx.constant(self.tensors[weight])
            out = self.onnx.node("Conv", x.name, kernel, name=name, **geometry)
        elif bits is not None and scales is not None:
            kernels = self._signs(bits, len(self.tensors[scales]), shape)
            code = x if isinstance(x, Code) else Code([(1.0, x.name)], 0.0, x.shape)
            parts = [
                self._product(code, kernel, geometry, scale, name)
                for kernel, scale in zip(kernels, self.tensors[scales], strict=True)
            ]
            if offset is not None:
                ones = self._ones(shape, groups)
                parts.append(self._product(code, ones, geometry, self.tensors[offset], name))
            out = self._sum(parts)
        else:
            raise PackedFileError("needs weight (for a float input), or bits and scales")
        size = _conv_size(x.shape, shape, stride, dilation, padding)
        return self._steps(Value(out, (shape[0], *size)), steps, exact=bits is not None)

    def _signs(self, bits: str, bases: int, shape: list[int]) -> list[str]:
        """Unpack: ±1 kernels of ``shape``, one a base."""
        count = bases * math.prod(shape)
        packed = self.onnx.constant(self.tensors[bits].reshape(-1, 1))
        digits = self.onnx.constant(np.arange(8, dtype=np.uint8))
        one = self.onnx.constant(np.array(1, np.uint8))
        all_bits = self.onnx.node("BitShift", packed, digits, direction="RIGHT")
        flags = self.onnx.node("Cast", self.onnx.node("BitwiseAnd", all_bits, one), to=BOOL)
        signs = self.onnx.node("Where", flags, self.onnx.number(1), self.onnx.number(-1))
        if count % 8:
            signs = self.onnx.node("Reshape", signs, self.onnx.integers(-1))
            signs = self.onnx.node("Slice", signs, self.onnx.integers(0), self.onnx.integers(count))
        stacked = [bases * shape[0], *shape[1:]]
        signs = self.onnx.node("Reshape", signs, self.onnx.integers(*stacked))
        if bases == 1:
            return [signs]
        return self.onnx.nodes("Split", signs, outputs=bases, num_outputs=bases, axis=0)

    def _ones(self, shape: list[int], groups: int) -> str:
        """The kernel that sums a filter's inputs; without groups all filters have the same."""
        filters = 1 if groups == 1 else shape[0]
        size = self.onnx.integers(filters, *shape[1:])
        return self.onnx.node("Expand", self.onnx.number(1), size)

    def _product(
        self, code: Code, kernel: str, geometry: dict[str, Any], scale: Array, name: str
    ) -> str:
        """``scale · conv(code, kernel)``, integers first."""
        parts = []
        for factor, term in [*code.terms, *self._offset_term(code)]:
            out = self.onnx.node("Conv", term, kernel, name=name, **geometry)
            factors = (scale.astype(np.float64) * factor).astype(np.float32).reshape(-1, 1, 1)
            if (factors != 1).any():
                out = self.onnx.node("Mul", self.onnx.constant(factors), out)
            parts.append(out)
        return self._sum(parts)

    def _offset_term(self, code: Code) -> list[tuple[float, str]]:
        """A code's offset as an image of ones: padding is 0 and not the offset, so borders differ."""
        if code.offset == 0:
            return []
        size = self.onnx.integers(1, *code.shape)
        return [(code.offset, self.onnx.node("Expand", self.onnx.number(1), size))]

    # Steps

    def map(self, inputs: list[int], *, steps: list[dict[str, Any]]) -> Value:
        return self._steps(self._float(inputs[0]), steps)

    def _steps(self, x: Value, steps: list[dict[str, Any]], exact: bool = False) -> Value:
        """``exact``: x holds integers, or multiples of a number, which should stay that."""
        for step in steps:
            fields = {key: value for key, value in step.items() if key != "step"}
            method = STEPS.get(step.get("step", ""))
            if method is None:
                raise PackedFileError(f"no step {step.get('step')!r}; there are {', '.join(STEPS)}")
            if method is _Exporter.affine:
                fields["exact"] = exact
            try:
                inspect.signature(method).bind(self, x, **fields)
            except TypeError as error:
                raise PackedFileError(f"step {step['step']}: {error}") from None
            x = Value(method(self, x, **fields), x.shape)
        return x

    def affine(
        self, x: Value, *, scale: str | None = None, shift: str | None = None, exact: bool = False
    ) -> str:
        name = x.name
        for op, tensor in (("Mul", scale), ("Add", shift)):
            if tensor is not None:
                constant = self._channels(tensor)
                name = self.onnx.node(op, *((constant, name) if exact else (name, constant)))
        return name

    def prelu(self, x: Value, *, slope: str) -> str:
        return self.onnx.node("PRelu", x.name, self._channels(slope))

    def clamp(self, x: Value, *, low: float | None, high: float | None) -> str:
        if low is None and high is None:
            return x.name
        if low == 0 and high is None:
            return self.onnx.node("Relu", x.name)
        limits = ["" if limit is None else self.onnx.number(limit) for limit in (low, high)]
        return self.onnx.node("Clip", x.name, *limits[: 1 if high is None else 2])

    def add(self, x: Value, *, value: int) -> str:
        other = self._float(value)
        if other.shape != x.shape:
            raise PackedFileError(f"add of {other.shape} to {x.shape}")
        return self.onnx.node("Add", x.name, other.name)

    def mul(self, x: Value, *, value: int) -> str:
        other = self._float(value)
        (channels, *size), groups = x.shape, other.shape[0]
        whole = other.shape == (channels, 1, 1)
        if not whole and (channels % groups or other.shape[1:] != x.shape[1:]):
            raise PackedFileError(f"mul of {x.shape} by {other.shape}")
        if groups in (1, channels):
            return self.onnx.node("Mul", x.name, other.name)
        split = self._reshape(x.name, groups, channels // groups, *size)
        factor = self._reshape(other.name, groups, 1, *size)
        return self._reshape(self.onnx.node("Mul", split, factor), *x.shape)

    def _reshape(self, name: str, *shape: int) -> str:
        return self.onnx.node("Reshape", name, self.onnx.integers(0, *shape))  # 0: the batch

    # The rest

    def max_pool(
        self,
        inputs: list[int],
        *,
        kernel: list[int],
        stride: list[int],
        padding: list[int],
        ceil: bool,
    ) -> Value:
        x = self._float(inputs[0])
        size, extra = _pool_size(x.shape, kernel, stride, padding, ceil)
        pads = [*padding, padding[0] + extra[0], padding[1] + extra[1]]
        out = self.onnx.node("MaxPool", x.name, kernel_shape=kernel, strides=stride, pads=pads)
        return Value(out, (x.shape[0], *size))

    def avg_pool(
        self,
        inputs: list[int],
        *,
        kernel: list[int],
        stride: list[int],
        padding: list[int],
        ceil: bool,
        count_padding: bool,
    ) -> Value:
        """Padding that counts is put on first; what rounding up adds never counts."""
        x = self._float(inputs[0])
        size, extra = _pool_size(x.shape, kernel, stride, padding, ceil)
        name, before = x.name, padding
        if count_padding and any(padding):
            name = self._pad(name, [0, *padding], [0, *padding])
            before = [0, 0]
        pads = [*before, before[0] + extra[0], before[1] + extra[1]]
        out = self.onnx.node("AveragePool", name, kernel_shape=kernel, strides=stride, pads=pads)
        return Value(out, (x.shape[0], *size))

    def mean(self, inputs: list[int]) -> Value:
        x = self._float(inputs[0])
        return Value(self.onnx.node("GlobalAveragePool", x.name), (x.shape[0], 1, 1))

    def mean_abs(self, inputs: list[int], *, over: str, groups: int = 1) -> Value:
        x = self._float(inputs[0])
        magnitude = self.onnx.node("Abs", x.name)
        if over == "sample":
            axes = self.onnx.integers(1, 2, 3)
            return Value(self.onnx.node("ReduceMean", magnitude, axes), (1, 1, 1))
        if over != "channels":
            raise PackedFileError(f"over {over!r} is neither 'channels' nor 'sample'")
        channels, height, width = x.shape
        split = self._reshape(magnitude, groups, channels // groups, height, width)
        out = self.onnx.node("ReduceMean", split, self.onnx.integers(2), keepdims=0)
        return Value(out, (groups, height, width))

    def concat(self, inputs: list[int]) -> Value:
        parts = [self._float(number) for number in inputs]
        out = self.onnx.node("Concat", *[part.name for part in parts], axis=1)
        return Value(out, (sum(part.shape[0] for part in parts), *parts[0].shape[1:]))

    def slice(
        self, inputs: list[int], *, start: list[int], stop: list[int], step: list[int]
    ) -> Value:
        x = self._float(inputs[0])
        ranges = [self.onnx.integers(*numbers) for numbers in (start, stop, (1, 2, 3), step)]
        sizes = [len(range(*bounds)) for bounds in zip(start, stop, step, strict=True)]
        return Value(self.onnx.node("Slice", x.name, *ranges), (sizes[0], sizes[1], sizes[2]))

    def pad(self, inputs: list[int], *, before: list[int], after: list[int]) -> Value:
        x = self._float(inputs[0])
        c, h, w = (n + b + a for n, b, a in zip(x.shape, before, after, strict=True))
        return Value(self._pad(x.name, before, after), (c, h, w))

    def _pad(self, name: str, before: list[int], after: list[int]) -> str:
        return self.onnx.node("Pad", name, self.onnx.integers(0, *before, 0, *after))

    def flatten(self, inputs: list[int]) -> Value:
        x = self._float(inputs[0])
        features = math.prod(x.shape)
        return Value(self._reshape(x.name, features, 1, 1), (features, 1, 1))

    def softmax(self, inputs: list[int]) -> Value:
        x = self._float(inputs[0])
        return Value(self.onnx.node("Softmax", x.name, axis=1), x.shape)

    def log_softmax(self, inputs: list[int]) -> Value:
        x = self._float(inputs[0])
        return Value(self.onnx.node("LogSoftmax", x.name, axis=1), x.shape)

    def curve(self, inputs: list[int], *, function: str) -> Value:
        x = self._float(inputs[0])
        if function not in CURVES:
            raise PackedFileError(f"function {function!r} is none of {', '.join(CURVES)}")
        return Value(CURVES[function](self, x.name), x.shape)

    def _gelu(self, x: str) -> str:
        """x · (1 + erf(x / √2)) / 2: ONNX has an operator for it from opset 20 on."""
        edge = self.onnx.node("Erf", self._times(x, math.sqrt(0.5)))
        return self.onnx.node("Mul", x, self._times(self._plus(edge, 1.0), 0.5))

    def _gelu_tanh(self, x: str) -> str:
        cube = self.onnx.node("Mul", x, self.onnx.node("Mul", x, x))
        inner = self.onnx.node("Add", x, self._times(cube, 0.044715))
        gate = self._sigmoid(self._times(inner, 2 * math.sqrt(2 / math.pi)))
        return self.onnx.node("Mul", x, gate)

    def _sigmoid(self, x: str) -> str:
        return self.onnx.node("Sigmoid", x)

    def _times(self, x: str, factor: float) -> str:
        return self.onnx.node("Mul", x, self.onnx.number(factor))

    def _plus(self, x: str, term: float) -> str:
        return self.onnx.node("Add", x, self.onnx.number(term))

    def normalize(self, inputs: list[int], *, groups: int, epsilon: float) -> Value:
        """Each group is one channel of an image; its mean and variance are those of that channel."""
        x = self._float(inputs[0])
        split = self._reshape(x.name, groups, -1, 1)
        ones, zeros = (self.onnx.constant(np.full(groups, v, np.float32)) for v in (1, 0))
        out = self.onnx.node("InstanceNormalization", split, ones, zeros, epsilon=epsilon)
        return Value(self._reshape(out, *x.shape), x.shape)

    def upsample(self, inputs: list[int], *, factor: list[int]) -> Value:
        """A pixel becomes a row of equal ones: no Resize, whose rounding is an attribute of its own."""
        x, (high, wide) = self._float(inputs[0]), factor
        c, h, w = x.shape
        split = self._reshape(x.name, c, h, 1, w, 1)
        spread = self.onnx.node("Expand", split, self.onnx.integers(1, c, h, high, w, wide))
        return Value(self._reshape(spread, c, h * high, w * wide), (c, h * high, w * wide))

    def resize(self, inputs: list[int], *, size: list[int], align_corners: bool) -> Value:
        x, (high, wide) = self._float(inputs[0]), size
        out = self.onnx.node(
            "Resize",
            x.name,
            "",  # the region of interest and the scales, which the size makes needless
            "",
            self.onnx.integers(high, wide),
            axes=[2, 3],
            mode="linear",
            coordinate_transformation_mode="align_corners" if align_corners else "half_pixel",
        )
        return Value(out, (x.shape[0], high, wide))

    def pixel_shuffle(self, inputs: list[int], *, factor: list[int]) -> Value:
        x, (high, wide) = self._float(inputs[0]), factor
        channels, h, w = x.shape
        c = channels // (high * wide)
        split = self._reshape(x.name, c, high, wide, h, w)
        moved = self.onnx.node("Transpose", split, perm=[0, 1, 4, 2, 5, 3])
        return Value(self._reshape(moved, c, h * high, w * wide), (c, h * high, w * wide))

    def channel_shuffle(self, inputs: list[int], *, groups: int) -> Value:
        x = self._float(inputs[0])
        channels, h, w = x.shape
        split = self._reshape(x.name, groups, channels // groups, h, w)
        moved = self.onnx.node("Transpose", split, perm=[0, 2, 1, 3, 4])
        return Value(self._reshape(moved, *x.shape), x.shape)


CURVES: dict[str, Callable[[_Exporter, str], str]] = {
    "sigmoid": _Exporter._sigmoid,
    "tanh": lambda exporter, x: exporter.onnx.node("Tanh", x),
    "silu": lambda exporter, x: exporter.onnx.node("Mul", x, exporter._sigmoid(x)),
    "gelu": _Exporter._gelu,
    "gelu_tanh": _Exporter._gelu_tanh,
    "elu": lambda exporter, x: exporter.onnx.node("Elu", x),
    "mish": lambda exporter, x: exporter.onnx.node("Mish", x),
}

OPS: dict[str, Callable[..., Value | Code]] = {
    method.__name__: method
    for method in (
        _Exporter.quantize,
        _Exporter.conv,
        _Exporter.map,
        _Exporter.max_pool,
        _Exporter.avg_pool,
        _Exporter.mean,
        _Exporter.mean_abs,
        _Exporter.concat,
        _Exporter.slice,
        _Exporter.pad,
        _Exporter.flatten,
        _Exporter.softmax,
        _Exporter.log_softmax,
        _Exporter.curve,
        _Exporter.normalize,
        _Exporter.upsample,
        _Exporter.pixel_shuffle,
        _Exporter.channel_shuffle,
        _Exporter.resize,
    )
}
STEPS: dict[str, Callable[..., str]] = {
    method.__name__: method
    for method in (
        _Exporter.affine,
        _Exporter.prelu,
        _Exporter.clamp,
        _Exporter.add,
        _Exporter.mul,
    )
}


def _for_user(shape: Shape) -> list[int]:
    return list(shape[:1] if shape[1:] == (1, 1) else shape)


def _common_unit(scales: list[float], offset: float) -> float | None:
    """A number of which all scales and the offset are small multiples, or None: then a code has no integers."""
    exact = [Fraction(number) for number in (*scales, offset) if number]
    if not exact:
        return 1.0
    smallest = min(abs(number) for number in exact)
    for unit in (smallest, smallest / 2):
        ratios = [number / unit for number in exact]
        if all(ratio.denominator == 1 and abs(ratio) < 2**10 for ratio in ratios):
            return float(unit)
    return None


def _conv_size(
    shape: Shape, kernel: list[int], stride: list[int], dilation: list[int], padding: list[int]
) -> tuple[int, int]:
    h, w = (
        (shape[1 + i] + padding[i] + padding[2 + i] - dilation[i] * (kernel[2 + i] - 1) - 1)
        // stride[i]
        + 1
        for i in (0, 1)
    )
    return h, w


def _pool_size(
    shape: Shape, kernel: list[int], stride: list[int], padding: list[int], ceil: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The output's height and width, and what rounding up adds below and to the right."""
    sizes, extras = [], []
    for i in (0, 1):
        padded = shape[1 + i] + 2 * padding[i]
        size = (padded - kernel[i]) // stride[i] + 1
        rest = (padded - kernel[i]) % stride[i]
        if ceil and rest and size * stride[i] < shape[1 + i] + padding[i]:
            size += 1
        sizes.append(size)
        extras.append(max(0, (size - 1) * stride[i] + kernel[i] - padded))
    return (sizes[0], sizes[1]), (extras[0], extras[1])
