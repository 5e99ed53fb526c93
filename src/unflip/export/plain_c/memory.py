"""Where a network's values, codes and scratch are in the arena."""

from __future__ import annotations

from math import prod

import numpy as np

from unflip.export.plain_c.arena import Place, assign, ends_in_use
from unflip.export.plain_c.geometry import CodeLayout, Geometry, is_stem, is_vector
from unflip.export.plain_c.plan import ByteRange, Conv, Plan, Task
from unflip.export.plain_c.shorts import Shorts
from unflip.export.plain_c.weights import copied_numbers
from unflip.packing.file import PackedFileError

F32 = np.float32

SLACK = 16  # bytes that a vector may read beyond a channel
MOST_ARENA = 2**31 - 1  # places in it are of type int
STEM_FLOATS = 90  # nine rows of ten terms


class Memory:
    """``arena`` is the size in bytes. If ``direct``, the first convolution reads the caller's input itself."""

    def __init__(self, plan: Plan, shorts: Shorts) -> None:
        self.plan, self.shorts = plan, shorts
        self.roots = _roots(plan)
        self.codes = self._layouts()
        self.direct = _reads_input_directly(plan)
        moved = self._moved()
        # Of a place in a moved code, and of a tap of a kernel or the class of a pixel.
        self.offset_bytes = 4 if max((g.plane_step for g in moved), default=0) >= 1 << 16 else 2
        self.tap_bytes = 2 if max((g.most_taps for g in moved), default=0) >= 1 << 8 else 1
        self.places, self.scratch, self.ready = self._places()
        self.arena = max(assign(self._all_places()), 8)
        if self.arena > MOST_ARENA:
            raise PackedFileError(
                f"it needs {self.arena:,} bytes of memory; in plain C at most {MOST_ARENA:,} are supported: "
                "use a smaller network"
            )
        self.ends = ends_in_use(self._all_places(), 2 * len(plan.tasks))

    def offset(self, value: int) -> int:
        return self.places[self.roots[value]].offset

    def _layouts(self) -> dict[int, CodeLayout]:
        unpacked = {t.inputs[0] for t in self.plan.tasks if t.kind == "conv" and not is_vector(t)}
        found = {}
        for value, quantizer in self.plan.quantizers.items():
            shape = self.plan.shapes[value]
            packed = shape[1:] == (1, 1) and value not in unpacked
            found[value] = CodeLayout(shape, quantizer.planes, packed)
        return found

    def is_binary(self, task: Task) -> bool:
        return task.kind == "conv" and task.inputs[0] in self.codes

    def _bytes(self, value: int) -> int:
        if value in self.codes:
            return self.codes[value].bytes
        return (2 if value in self.shorts else 4) * prod(self.plan.shapes[value])

    def _places(self) -> tuple[dict[int, Place], list[Place], dict[int, Place]]:
        """Of all values (by root), of each task's scratch, and of moved codes (by task)."""
        plan, places = self.plan, {}
        last_read = {0: -1}
        for i, task in enumerate(plan.tasks):
            for v in task.reads():
                moved = v in self.codes and not self.codes[v].packed
                last_read[self.roots[v]] = 2 * i if moved else 2 * i + 1
        for v in plan.outputs:
            last_read[self.roots[v]] = 2 * len(plan.tasks)
        if not self.direct and last_read[0] >= 0:
            places[0] = Place()
            places[0].hold(-1, last_read[0], self._bytes(0))
        scratch, ready = [], {}
        for i, task in enumerate(plan.tasks):
            own = Place()
            own.hold(2 * i + 1, 2 * i + 1, self.scratch_bytes(task))
            scratch.append(own)
            if self.is_binary(task) and not self.codes[task.inputs[0]].packed:
                ready[i] = Place()
                ready[i].hold(2 * i, 2 * i + 1, self._ready_bytes(task))
            for v in [v for v in (task.value, task.code) if v is not None and self.roots[v] == v]:
                old = self._in_place(i, task, v, last_read, places)
                places[v] = places[old] if old is not None else Place()
                places[v].hold(2 * i + 1, max(last_read.get(v, -1), 2 * i + 1), self._bytes(v))
        return places, scratch, ready

    def _in_place(
        self, i: int, task: Task, value: int, last_read: dict[int, int], places: dict[int, Place]
    ) -> int | None:
        """A value whose place the new one can take: it is not read later, nor elsewhere than it is written."""
        if value in self.codes:
            return None
        candidates = [s["value"] for s in task.steps if s["step"] == "add"]
        source = self.roots[task.inputs[0]]
        if task.kind == "conv":
            candidates = [v for v in candidates if self.roots[v] != source]
        elif task.kind in ("max_pool", "avg_pool"):
            if task.fields["padding"] != [0, 0] or any(self.roots[v] == source for v in candidates):
                return None
            candidates = [task.inputs[0]]
        elif task.kind == "pad":
            before, after = task.fields["before"], task.fields["after"]
            candidates = [task.inputs[0]] if before == [0, 0, 0] and after[1:] == [0, 0] else []
        elif task.kind in ("map", "curve"):
            candidates.append(task.inputs[0])
        for v in candidates:
            root = self.roots[v]
            same_kind = root not in self.codes and (root in self.shorts) == (value in self.shorts)
            if same_kind and root in places and last_read[root] == 2 * i + 1:
                return root
        return None

    def _all_places(self) -> list[Place]:
        unique = {id(p): p for p in (*self.places.values(), *self.scratch, *self.ready.values())}
        return list(unique.values())

    def used(self, i: int) -> int:
        """Bytes of the arena up to the highest that is in use during a task."""
        return max(self.ends[2 * i : 2 * i + 2])

    def scratch_bytes(self, task: Task) -> int:
        if task.kind in ("max_pool", "avg_pool"):
            return 4 * task.out[2]
        if task.kind != "conv":
            return 0
        conv = task.conv
        assert conv is not None
        if self.is_binary(task):
            return 0 if self.codes[task.inputs[0]].packed else self._binary_scratch(task, conv)
        if conv.bytes is not None:
            return 4 * task.out[0] * task.out[2] + 2 * (line_numbers(task) + copied_numbers(conv))
        channels = self.plan.shapes[task.inputs[0]][0]
        floats = self.levels(task) + task.out[0] * task.out[2]
        if is_stem(task):
            return 4 * (floats + task.out[0] * task.out[2] + STEM_FLOATS + 100 * channels)
        return 4 * (floats + line_numbers(task))

    def levels(self, task: Task) -> int:
        """Floats of the table that turns pixels into numbers. Bytes need none."""
        assert task.conv is not None
        if not self.direct or task.inputs[0] != 0 or task.conv.bytes is not None:
            return 0
        return 256 * self.plan.shapes[0][0]

    def _binary_scratch(self, task: Task, conv: Conv) -> int:
        code = self.codes[task.inputs[0]]
        geometry, planes, bases = Geometry(task, conv, code), code.planes, conv.bases
        numbers = 4 * (bases * geometry.classes + conv.shape[2] * conv.shape[3])
        lists = self.offset_bytes * bases * (conv.depth + 8)
        return numbers + lists + 2 * planes * geometry.pixels

    def _ready_bytes(self, task: Task) -> int:
        assert task.conv is not None
        code = self.codes[task.inputs[0]]
        return code.planes * Geometry(task, task.conv, code).plane_step + SLACK

    def _moved(self) -> list[Geometry]:
        """Of the binary convolutions whose codes are moved."""
        return [
            Geometry(t, t.conv, self.codes[t.inputs[0]])
            for t in self.plan.tasks
            if t.conv is not None and self.is_binary(t) and not self.codes[t.inputs[0]].packed
        ]


def line_numbers(task: Task) -> int:
    """Numbers of the input's rows that one row of the output of a convolution needs."""
    conv = task.conv
    assert conv is not None
    columns = (task.out[2] - 1) * conv.stride[1] + (conv.shape[3] - 1) * conv.dilation[1] + 1
    return conv.shape[2] * columns * conv.shape[1]


def _roots(plan: Plan) -> list[int]:
    """The value in whose place each value is: a flattened image is where the image is."""
    roots = list(range(len(plan.shapes)))
    for task in plan.tasks:
        if task.kind == "flatten" and task.value is not None:
            roots[task.value] = roots[task.inputs[0]]
    return roots


def _reads_input_directly(plan: Plan) -> bool:
    """Whether only one convolution of floats or pixels reads the input, so that it need not be copied."""
    readers = [t for t in plan.tasks if 0 in t.reads()]
    if len(readers) != 1 or readers[0].kind != "conv" or 0 in plan.outputs:
        return False
    [task] = readers
    assert task.conv is not None
    if task.conv.range is not None and not _are_pixels(plan, task.conv.range):
        return False
    return task.reads().count(0) == 1 and task.inputs == [0]


def _are_pixels(plan: Plan, given: ByteRange) -> bool:
    """Whether the whole number of every normalized pixel is that pixel."""
    pixels = np.arange(256, dtype=F32)
    x = np.broadcast_to(pixels / F32(255), (plan.shapes[0][0], 256))
    if plan.preprocess is not None:
        mean, std = (np.array(plan.preprocess[key], F32)[:, None] for key in ("mean", "std"))
        x = (x - mean) / std
    return bool((given.numbers(x) == pixels).all())
