"""The tasks of a packed network, in order: which ops are computed together, as in the runtime.

The fusions are those of native/src/engine/plan.cpp and engine.cpp. They matter for the bits of results: a factor after
a binary convolution is multiplied with its scales first, and steps move behind a max pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from unflip.export.whole_steps import can_be_folded
from unflip.packing.describe import tensor_names, value_shapes
from unflip.packing.file import Packed, PackedFileError, outputs_of
from unflip.packing.ir import Shape

Array = np.ndarray[Any, np.dtype[Any]]
Fields = dict[str, Any]

POOLED_BYTES = 256 << 10  # rows of a convolution that the runtime keeps for a pool
# To write them as text takes 32 and 128 bytes of memory each.
MOST_SIGNS, MOST_FLOATS = 2**25, 2**23
F32 = np.float32


@dataclass(frozen=True)
class ByteRange:
    """Floats to whole numbers 0 .. 255 (to_bytes). Each array has one element, or each has one per channel."""

    scale: Array
    shift: Array
    zero: Array  # uint8

    def numbers(self, x: Array) -> Array:
        """Of floats (channels, count), computed as in the runtime."""
        place = x * self.scale[:, None] + self.shift[:, None]
        return np.rint(np.clip(place, 0, 255))


@dataclass
class Conv:
    """A convolution with arrays; scales are (bases, filters), the offset is one number per filter.

    Weights are floats, signs, or bytes; those with bytes have one row of scales.
    """

    shape: tuple[int, int, int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int, int, int]  # top, left, bottom, right
    groups: int
    weight: Array | None = None
    signs: Array | None = None  # bool: (bases, *shape)
    bytes: Array | None = None  # int8: shape
    range: ByteRange | None = None  # of the inputs, if the weights are bytes
    scales: Array | None = None
    offset: Array | None = None

    @property
    def bases(self) -> int:
        """0 for weights that are not binary."""
        return 0 if self.signs is None else len(self.signs)

    @property
    def depth(self) -> int:
        return prod(self.shape[1:])

    @property
    def depthwise(self) -> bool:
        return self.shape[1] == 1 and self.shape[0] == self.groups


@dataclass
class Quantizer:
    """Floats to bit planes, see docs/format.md."""

    thresholds: Array  # (steps, channels) or (steps, 1)
    strict: list[bool]
    levels: bool
    scales: list[float]
    offset: float
    unit: int | None = None

    @property
    def planes(self) -> int:
        return len(self.scales)


@dataclass
class Task:
    """An op with its epilogue: steps, then a float value, a code, or both."""

    kind: str
    name: str
    fields: Fields
    inputs: list[int]
    out: Shape
    steps: list[Fields] = field(default_factory=list)  # arrays instead of names of tensors
    value: int | None = None
    code: int | None = None
    quantizer: Quantizer | None = None
    conv: Conv | None = None

    def reads(self) -> list[int]:
        """The values that it reads, codes included."""
        found = [*self.inputs, *(s["value"] for s in self.steps if "value" in s)]
        if self.quantizer is not None and self.quantizer.unit is not None:
            found.append(self.quantizer.unit)
        return found


@dataclass
class Plan:
    """The tasks, the shapes of all values, and the returned values in order."""

    tasks: list[Task]
    shapes: list[Shape]
    outputs: list[int]
    quantizers: dict[int, Quantizer]  # of the values that are codes
    preprocess: dict[str, list[float]] | None


class _Planner:
    def __init__(self, packed: Packed) -> None:
        self.ops: list[Fields] = packed.graph["ops"]
        self.tensors = packed.tensors
        self.shapes = value_shapes(packed.graph)
        self.outputs = [value for _, value, _ in outputs_of(packed.graph)]
        self.needed = self._needed()
        self.users: list[list[int]] = [[] for _ in self.shapes]
        for i, op in enumerate(self.ops):
            if i + 1 in self.needed:
                for v in _reads(op):
                    self.users[v].append(i)
        self.returned = set(self.outputs)
        self.done: set[int] = set()

    def _needed(self) -> set[int]:
        needed = set(self.outputs)
        for v in range(len(self.ops), 0, -1):
            if v in needed:
                needed.update(_reads(self.ops[v - 1]))
        return needed

    def tasks(self) -> list[Task]:
        found: list[Task] = []
        for i, op in enumerate(self.ops):
            if i + 1 not in self.needed or i in self.done or op["op"] == "to_bytes":
                continue  # the convolutions that read bytes convert floats themselves
            task = self._task(i, op)
            if op["op"] == "quantize":
                task.value = None
                self._emit_code(task, i)
                found.append(task)
            else:
                found += self._fused(i, task)
        return found

    def _task(self, i: int, op: Fields) -> Task:
        inputs = op["inputs"][:1] if op["op"] == "quantize" else list(op["inputs"])
        task = Task(op["op"], op["name"], op, inputs, self.shapes[i + 1], value=i + 1)
        task.steps = [self._step(s) for s in op.get("steps", [])]
        if op["op"] == "conv":
            task.conv = self._conv(op)
        if "bytes" in op:
            task.inputs = list(self.ops[inputs[0] - 1]["inputs"])
        return task

    def _step(self, step: Fields) -> Fields:
        arrays: Fields = {
            k: self.tensors[step[k]] for k in ("scale", "shift", "slope") if k in step
        }
        return step | arrays

    def _conv(self, op: Fields) -> Conv:
        conv = Conv(
            tuple(op["shape"]),
            tuple(op["stride"]),
            tuple(op["dilation"]),
            tuple(op["padding"]),
            op["groups"],
        )
        if "weight" in op:
            conv.weight = np.array(self.tensors[op["weight"]], F32)
            return conv
        filters, scales = conv.shape[0], np.asarray(self.tensors[op["scales"]], F32)
        conv.scales = np.broadcast_to(scales, (len(scales), filters)).copy()
        if "bytes" in op:
            conv.bytes = self.tensors[op["bytes"]].view(np.int8)
            conv.range = self._range(self.ops[op["inputs"][0] - 1])
            return conv
        bits = np.unpackbits(self.tensors[op["bits"]], bitorder="little")
        conv.signs = bits[: len(scales) * prod(conv.shape)].reshape(len(scales), *conv.shape) == 1
        if "offset" in op:
            offset = np.asarray(self.tensors[op["offset"]], F32)
            conv.offset = np.broadcast_to(offset, (filters,)).copy()
        return conv

    def _range(self, op: Fields) -> ByteRange:
        arrays = [self.tensors[op[key]] for key in ("scale", "shift", "zero")]
        return ByteRange(*(array.copy() for array in np.broadcast_arrays(*arrays)))

    def _emit_code(self, task: Task, quantize: int) -> None:
        op = self.ops[quantize]
        task.code = quantize + 1
        task.quantizer = self.quantizer(op)
        self.done.add(quantize)

    def quantizer(self, op: Fields) -> Quantizer:
        unit = op["inputs"][1] if len(op["inputs"]) > 1 else None
        thresholds = np.asarray(self.tensors[op["thresholds"]], F32)
        levels = op["coding"] == "levels"
        return Quantizer(thresholds, op["strict"], levels, op["scales"], op["offset"], unit)

    def _fused(self, i: int, task: Task) -> list[Task]:
        if task.kind in ("conv", "map"):
            while self._fuse_map(i, task):
                pass
        if task.conv is not None and task.conv.signs is not None:
            _fold_scale(task.conv, task.steps)
        pool = self._fuse_pool(task) if task.kind == "conv" else None
        last = pool or task
        if last.kind in ("conv", "map", "max_pool", "avg_pool"):
            self._fuse_quantize(i, last)
        return [task, pool] if pool else [task]

    def _only_user(self, value: int | None) -> int | None:
        if value is None or value in self.returned or len(self.users[value]) != 1:
            return None
        return self.users[value][0]

    def _fuse_map(self, i: int, task: Task) -> bool:
        """A map that is the only reader of the value and needs nothing that is computed later."""
        user = self._only_user(task.value)
        if user is None or self.ops[user]["op"] != "map":
            return False
        op = self.ops[user]
        if op["inputs"][0] != task.value or any(v != task.value and v > i for v in _reads(op)):
            return False
        task.steps += [self._step(s) for s in op["steps"]]
        task.value = user + 1
        self.done.add(user)
        return True

    def _fuse_pool(self, task: Task) -> Task | None:
        """A pool that is the only reader of a convolution of floats or bytes; rising steps move behind a max pool."""
        user = self._only_user(task.value)
        if user is None or self._is_code(task.inputs[0]) or task.conv is None:
            return None
        op = self.ops[user]
        if op["op"] not in ("max_pool", "avg_pool") or not _pools_rows(task, op):
            return None
        pool = self._task(user, op)
        self.done.add(user)
        if op["op"] == "max_pool" and _make_rising(task.conv, task.steps):
            pool.steps, task.steps = task.steps, []
        return pool

    def _is_code(self, value: int) -> bool:
        return value > 0 and self.ops[value - 1]["op"] == "quantize"

    def _fuse_quantize(self, i: int, task: Task) -> None:
        value = task.value
        assert value is not None
        for user in self.users[value]:
            op = self.ops[user]
            if op["op"] != "quantize" or op["inputs"][0] != value:
                continue
            if len(op["inputs"]) > 1 and op["inputs"][1] > i:
                continue
            self._emit_code(task, user)
            self.users[value].remove(user)
            if not self.users[value] and value not in self.returned:
                task.value = None
            return


def _reads(op: Fields) -> list[int]:
    return [*op["inputs"], *(s["value"] for s in op.get("steps", []) if "value" in s)]


def _pools_rows(task: Task, pool: Fields) -> bool:
    channels, _, width = task.out
    conv, padded = task.conv, -(-channels // 8) * 8
    assert conv is not None
    if (conv.groups != 1 and (not conv.depthwise or conv.bytes is not None)) or width == 1:
        return False
    if any(s["step"] in ("add", "mul") for s in task.steps):
        return False
    if pool["stride"][0] > pool["kernel"][0] or pool["padding"][0] >= pool["kernel"][0]:
        return False
    return width * padded * 4 * pool["kernel"][0] <= POOLED_BYTES


def _fold_scale(conv: Conv, steps: list[Fields]) -> None:
    """A factor that directly follows binary weights becomes part of their scales, if no product loses digits."""
    if not steps or steps[0]["step"] != "affine" or "scale" not in steps[0]:
        return
    assert conv.scales is not None
    factor = steps[0]["scale"]
    if not can_be_folded(conv.scales, conv.offset, factor):
        return
    steps[0] = {k: v for k, v in steps[0].items() if k != "scale"}
    conv.scales = conv.scales * factor
    if conv.offset is not None:
        conv.offset = conv.offset * factor


def _make_rising(conv: Conv, steps: list[Fields]) -> bool:
    """Negate filters with a negative factor, and the factor. Returns whether all steps are monotone then."""
    if steps and steps[0]["step"] == "affine" and conv.signs is None and "scale" in steps[0]:
        scale = np.broadcast_to(steps[0]["scale"], (conv.shape[0],))
        sign = np.where(scale < 0, F32(-1), F32(1))
        if conv.weight is not None:
            conv.weight = conv.weight * sign[:, None, None, None]
        else:
            assert conv.scales is not None
            conv.scales = conv.scales * sign
        steps[0] = {**steps[0], "scale": scale * sign}
    return all(_is_rising(step) for step in steps)


def _is_rising(step: Fields) -> bool:
    if step["step"] == "affine":
        return "scale" not in step or bool((step["scale"] >= 0).all())
    return step["step"] == "clamp" or (step["step"] == "prelu" and bool((step["slope"] >= 0).all()))


def _refuse_many_weights(packed: Packed) -> None:
    signs = floats = 0
    for op in packed.graph["ops"]:
        source = op["inputs"][0]
        if "bits" not in op:
            floats += sum(packed.tensors[name].size for name in tensor_names(op, packed))
        elif source and packed.graph["ops"][source - 1]["op"] == "quantize":
            signs += len(packed.tensors[op["scales"]]) * prod(op["shape"])
        else:  # they become floats
            floats += prod(op["shape"])
    for count, most, kind in (
        (signs, MOST_SIGNS, "binary weights"),
        (floats, MOST_FLOATS, "floats"),
    ):
        if count > most:
            raise PackedFileError(
                f"it has {count:,} {kind}; in plain C at most {most:,} are supported: use a smaller network"
            )


def make_plan(packed: Packed) -> Plan:
    """The tasks of a network that the checked loader accepted."""
    _refuse_many_weights(packed)
    planner = _Planner(packed)
    codes = {
        v: planner.quantizer(op)
        for v, op in enumerate(planner.ops, 1)
        if op["op"] == "quantize" and v in planner.needed
    }
    tasks = planner.tasks()
    preprocess = packed.graph["input"]["preprocess"]
    return Plan(tasks, planner.shapes, planner.outputs, codes, preprocess)
