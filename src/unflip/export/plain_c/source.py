"""The C source of a plan.

The class has more than 400 lines, because every op is one of its methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from unflip.export.plain_c.constants import Constants, c_float
from unflip.export.plain_c.epilogue import Epilogue, make_epilogue
from unflip.export.plain_c.geometry import Geometry, inside_tap, is_stem
from unflip.export.plain_c.listing import (
    EPILOGUE_WORDS,
    all_layers,
    comment,
    definitions,
    entry,
    epilogue_function,
    epilogue_struct,
    kernel,
    shape_text,
)
from unflip.export.plain_c.memory import SLACK, Memory, line_numbers
from unflip.export.plain_c.plan import Plan, Task
from unflip.export.plain_c.shorts import Shorts
from unflip.export.plain_c.sums import Sums, binary_sums, whole_numbers
from unflip.export.plain_c.weights import (
    blocked_weights,
    byte_weights,
    dense_weights,
    stem_weights,
    window_numbers,
)
from unflip.packing.file import PackedFileError
from unflip.packing.ir import Shape

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32

MOST_DEPTH = 65_000  # weights of a binary filter: counts are 16 bits


@dataclass(frozen=True)
class Layer:
    """What a task needs and how it is computed, for reports."""

    task: Task
    input: Shape
    flash: int  # bytes of constants that it is the first to use
    ram: int  # bytes of the arena up to the last one in use
    binary: bool
    one_term: bool
    packed: bool  # one pixel, bits of the channels are packed
    integer: bool  # bits follow from whole numbers


@dataclass(frozen=True)
class Source:
    """The text of the file, and its sizes in bytes."""

    text: str
    arena: int
    flash: int
    layers: list[Layer]


def make_source(plan: Plan, name: str, shorts: Shorts | None = None) -> Source:
    """The C source of a network. ``name`` is a valid C identifier; ``shorts`` are values of 16 bits."""
    return _Writer(plan, name, shorts or {}).source()


class _Writer:
    """Collects constants, functions and calls, task by task."""

    def __init__(self, plan: Plan, name: str, shorts: Shorts) -> None:
        self.plan, self.name, self.shorts = plan, name, shorts
        self.constants = Constants()
        self.kernels: list[str] = ["base.c"]
        self.functions: dict[str, str] = {}  # body -> name
        self.memory = Memory(plan, shorts)
        self.codes = self.memory.codes
        self.sums = [self._sums(task) for task in plan.tasks]
        if 0 in self.memory.places:
            self._needs("input.c")
        self.widest = [1, 1, 1]  # arrays of struct u_epilogue
        self.epilogues = 0
        self._integer = False
        self.layers: list[Layer] = []

    def _sums(self, task: Task) -> Sums | None:
        if not self.memory.is_binary(task):
            return None
        conv, q = task.conv, self.plan.quantizers[task.inputs[0]]
        assert conv is not None
        assert conv.scales is not None
        if conv.depth > MOST_DEPTH:
            raise PackedFileError(
                f"conv {task.name!r} has filters of {conv.depth:,} binary weights; in plain C at most "
                f"{MOST_DEPTH:,} are supported: use smaller layers"
            )
        return binary_sums(conv.scales, conv.offset, q.scales, q.offset, conv.depth)

    def _needs(self, *kernels: str) -> None:
        self.kernels += [k for k in kernels if k not in self.kernels]

    def _pointer(self, array: Array | None) -> str:
        return "0" if array is None else self.constants.array(array)

    def _epilogue(self, task: Task, sums: Sums | None) -> tuple[str, str, Epilogue]:
        """Names of the function and of its numbers."""
        code = self.codes[task.code] if task.code is not None else None
        whole = whole_numbers(task.conv, sums) if task.conv is not None else None
        e = make_epilogue(task, whole, code, self.plan.shapes, self.shorts)
        function = self.functions.setdefault(e.body, f"u_epilogue{len(self.functions)}")
        fields = [f".size = {task.out[1] * task.out[2]}", f".channels = {task.out[0]}"]
        if task.value is not None:
            fields.append(f".out = {self._offset(task.value)}")
        if code is not None and task.code is not None:
            fields.append(f".code = {self._offset(task.code)}")
            fields.append(f".code_channel = {code.channel_bytes}")
            fields.append(f".code_plane = {code.plane_bytes}")
        if e.floats:
            fields.append(f".floats = {{{', '.join(map(self.constants.array, e.floats))}}}")
        if e.values:
            fields.append(f".values = {{{', '.join(str(self._offset(v)) for v in e.values)}}}")
        if e.runs:
            fields.append(f".runs = {{{', '.join(map(str, e.runs))}}}")
        if e.thresholds is not None:
            fields.append(f".thresholds = {self.constants.array(e.thresholds)}")
        if e.strict is not None:
            fields.append(f".strict = {self.constants.array(e.strict)}")
        if e.intervals is not None:
            first, many = map(self.constants.array, e.intervals)
            fields.append(f".first = {first}, .many = {many}")
        self.widest = [
            max(a, b)
            for a, b in zip(self.widest, (len(e.floats), len(e.values), len(e.runs)), strict=True)
        ]
        self.epilogues += 1
        return function, self.constants.text("struct u_epilogue", "", ", ".join(fields), 0), e

    def _offset(self, value: int) -> int:
        return self.memory.offset(value)

    def _at(self, value: int) -> str:
        return f"(const float *)(const void *)(arena + {self._offset(value)})"

    def _to(self, value: int) -> str:
        return f"(float *)(void *)(arena + {self._offset(value)})"

    def source(self) -> Source:
        calls: list[str] = []
        for i, task in enumerate(self.plan.tasks):
            before = self.constants.bytes
            calls.append(f"  /* {i + 1}. {task.kind} {comment(task.name)} */")
            calls += [f"  {line}" for line in self._calls(i, task)]
            calls.append(f"  UNFLIP_AFTER({i});")
            self.layers.append(self._layer(i, task, before))
        text = self._listing(calls)
        return Source(text, self.memory.arena, self.constants.bytes, self.layers)

    def _layer(self, i: int, task: Task, before: int) -> Layer:
        sums = self.sums[i]
        return Layer(
            task,
            self.plan.shapes[task.inputs[0]],
            flash=self.constants.bytes - before,
            ram=self.memory.used(i),
            binary=sums is not None,
            one_term=sums is not None and sums.one_term,
            packed=sums is not None and self.codes[task.inputs[0]].packed,
            integer=self._integer,
        )

    def _calls(self, i: int, task: Task) -> list[str]:
        self._integer = False
        return MAKERS[task.kind](self, i, task)

    def _conv(self, i: int, task: Task) -> list[str]:
        if self.memory.is_binary(task):
            packed = self.codes[task.inputs[0]].packed
            return self._packed_layer(i, task) if packed else self._binary_layer(i, task)
        if task.conv is not None and task.conv.bytes is not None:
            return self._byte_layer(i, task)
        return self._float_layer(i, task)

    def _terms(self, sums: Sums, one_term: bool) -> str:
        texts = [
            f"{{{'0' if one_term else self.constants.array(t.scale)}, {t.base}, {t.first_plane}, {t.planes}, "
            f"{int(t.of_window)}, {t.signs_times}}}"
            for t in sums.terms
        ]
        size = 12 * len(texts)
        return self.constants.text("struct u_term", f"[{len(texts)}]", ", ".join(texts), size)

    def _binary_layer(self, i: int, task: Task) -> list[str]:
        sums, conv, code = self.sums[i], task.conv, self.codes[task.inputs[0]]
        assert sums is not None
        assert conv is not None
        assert conv.signs is not None
        g = Geometry(task, conv, code)
        function, numbers, e = self._epilogue(task, sums)
        self._integer = e.intervals is not None
        self._needs("words.c", "binary.c", "one_term.c" if sums.one_term else "terms.c")
        signs = np.packbits(conv.signs.transpose(0, 1, 3, 4, 2).ravel(), bitorder="little")
        taps = np.uint16 if self.memory.tap_bytes == 2 else np.uint8
        rows, columns = (
            self.constants.text(
                "struct u_taps", f"[{len(own)}]", ", ".join(f"{{{a}, {b}}}" for a, b in own), 4
            )
            for own in (g.row_taps, g.column_taps)
        )
        body = ", ".join(
            [
                f"{{{shape_text(code.shape)}}}, {{{shape_text(task.out)}}}",
                ", ".join(map(str, (*conv.shape[2:], *conv.stride, *conv.dilation, *conv.padding[:2]))),
                f"{conv.groups}, {conv.bases}, {code.planes}",
                f"{-(-code.shape[2] // 8)}, {g.bytes}, {g.phase_rows}, {g.channel_step}, {g.plane_step}",
                self.constants.array(signs),
                self.constants.array(np.array(sums.multiples, np.int32)),
                f"{self._terms(sums, sums.one_term)}, {len(sums.terms)}, {rows}, {columns}",
                self.constants.array(np.array(g.row_class, taps)),
                self.constants.array(np.array(g.column_class, taps)),
                f"{len(g.row_taps)}, {len(g.column_taps)}",
                f"{g.rows[0]}, {g.rows[1]}, {g.columns[0]}, {g.columns[1]}, {g.center}",
            ]
        )  # fmt: skip
        layer = self.constants.text("struct u_binary", "", body, 4 * 40)
        ready, scratch = self.memory.ready[i].offset, self.memory.scratch[i].offset
        call = "u_binary_conv" if sums.one_term else "u_binary_terms"
        return [
            f"u_prepare(&{layer}, arena + {self._offset(task.inputs[0])}, arena + {ready});",
            f"{call}(&{layer}, arena + {ready}, arena + {scratch}, {function}, &{numbers}, run);",
        ]

    def _packed_layer(self, i: int, task: Task) -> list[str]:
        sums, conv, code = self.sums[i], task.conv, self.codes[task.inputs[0]]
        assert sums is not None
        assert conv is not None
        assert conv.signs is not None
        function, numbers, e = self._epilogue(task, sums)
        self._integer = e.intervals is not None
        self._needs("words.c", "packed.c")
        row, column = inside_tap(task, conv)
        own = conv.signs[..., row, column]  # (bases, filters, channels)
        words = -(-code.shape[0] // 32)
        padded = np.zeros((*own.shape[:2], 32 * words), bool)
        padded[..., : own.shape[2]] = own
        body = (
            f"{conv.shape[0]}, {words}, {conv.bases}, {code.planes}, {code.shape[0]}, "
            f"{self.constants.array(np.packbits(padded.ravel(), bitorder='little'))}, "
            f"{self.constants.array(np.array(sums.multiples, np.int32))}, "
            f"{self._terms(sums, sums.one_term)}, {len(sums.terms)}"
        )
        layer = self.constants.text("struct u_packed", "", body, 36)
        return [
            f"u_packed_layer(&{layer}, arena + {self._offset(task.inputs[0])}, {int(sums.one_term)}, {function}, "
            f"&{numbers}, run);"
        ]

    def _float_layer(self, i: int, task: Task) -> list[str]:
        conv, shape = task.conv, self.plan.shapes[task.inputs[0]]
        assert conv is not None
        function, numbers, _ = self._epilogue(task, None)
        dense = dense_weights(conv)
        self._needs("conv.c")
        scratch = self.memory.scratch[i].offset
        levels = f"(float *)(void *)(arena + {scratch})"
        after = scratch + 4 * self.memory.levels(task)
        rows = f"(float *)(void *)(arena + {after})"
        lines = ["{", *self._source(task, levels)]
        if is_stem(task):
            self._needs("stem.c")
            body = (
                f"{{{shape_text(shape)}}}, {{{shape_text(task.out)}}}, {conv.padding[0]}, {conv.padding[1]}, "
                f"{self.constants.array(stem_weights(dense))}"
            )
            layer = self.constants.text("struct u_stem", "", body, 36)
            free = f"(float *)(void *)(arena + {after + 8 * task.out[0] * task.out[2]})"
            call = f"u_stem_conv(&{layer}, &in, {free}, {rows}, {function}, &{numbers}, run);"
        else:
            self._needs("float_conv.c")
            body = (
                f"{{{shape_text(shape)}}}, {{{shape_text(task.out)}}}, "
                + ", ".join(map(str, (*conv.shape[2:], *conv.stride, *conv.dilation, *conv.padding[:2], conv.groups)))
                + f", {self.constants.array(blocked_weights(dense, conv.groups))}"
            )  # fmt: skip
            layer = self.constants.text("struct u_conv", "", body, 64)
            window = f"(float *)(void *)(arena + {after + 4 * task.out[0] * task.out[2]})"
            call = f"u_float_conv(&{layer}, &in, {window}, {rows}, {function}, &{numbers}, run);"
        return [*lines, f"  {call}", "}"]

    def _byte_layer(self, i: int, task: Task) -> list[str]:
        conv, shape = task.conv, self.plan.shapes[task.inputs[0]]
        assert conv is not None
        assert conv.range is not None
        function, numbers, e = self._epilogue(task, None)
        self._integer = e.intervals is not None
        self._needs("conv.c", "bytes.c")
        sizes = (*conv.shape[2:], *conv.stride, *conv.dilation, *conv.padding[:2], conv.groups)
        scale, shift, zero = conv.range.scale, conv.range.shift, conv.range.zero
        body = (
            f"{{{shape_text(shape)}}}, {{{shape_text(task.out)}}}, {', '.join(map(str, sizes))}, "
            f"{window_numbers(conv) // 4}, {int(len(zero) > 1)}, {self.constants.array(byte_weights(conv))}, "
            f"{self.constants.array(scale)}, {self.constants.array(shift)}, {self.constants.array(zero)}"
        )
        layer = self.constants.text("struct u_bytes", "", body, 84)
        row = self.memory.scratch[i].offset
        lines = row + 4 * task.out[0] * task.out[2]
        window = lines + 2 * line_numbers(task)
        places = [f"(int16_t *)(void *)(arena + {place})" for place in (lines, window)]
        places.append(f"(int32_t *)(void *)(arena + {row})")
        return [
            "{",
            *self._source(task, "0"),
            f"  u_byte_conv(&{layer}, &in, {', '.join(places)}, {function}, &{numbers}, run);",
            "}",
        ]

    def _source(self, task: Task, levels: str) -> list[str]:
        if not (self.memory.direct and task.inputs[0] == 0):
            return [f"  const struct u_source in = {{{self._at(task.inputs[0])}, 0, 0}};"]
        lines = [f"  const struct u_source in = {{run->floats, run->pixels, {levels}}};"]
        if self.memory.levels(task):
            lines.append(f"  if (run->pixels) {self._make_levels(levels)}")
        return lines

    def _make_levels(self, levels: str) -> str:
        mean, std = self._preprocess()
        return f"u_make_levels({mean}, {std}, {self.plan.shapes[0][0]}, {levels});"

    def _preprocess(self) -> tuple[str, str]:
        if self.plan.preprocess is None:
            return "0", "0"
        mean, std = (self.plan.preprocess[key] for key in ("mean", "std"))
        return self.constants.array(np.array(mean, F32)), self.constants.array(np.array(std, F32))

    def _map(self, i: int, task: Task) -> list[str]:
        self._needs("map.c")
        function, numbers, _ = self._epilogue(task, None)
        image = f"(struct u_image){{{shape_text(task.out)}}}"
        return [f"u_map({image}, {self._at(task.inputs[0])}, {function}, &{numbers}, run);"]

    _quantize = _map

    def _max_pool(self, i: int, task: Task) -> list[str]:
        self._needs("pool.c", f"{task.kind}.c")
        function, numbers, _ = self._epilogue(task, None)
        f, shape = task.fields, self.plan.shapes[task.inputs[0]]
        sizes = (*f["kernel"], *f["stride"], *f["padding"], int(f.get("count_padding", False)))
        body = f"{{{shape_text(shape)}}}, {{{shape_text(task.out)}}}, {', '.join(map(str, sizes))}"
        layer = self.constants.text("struct u_pool", "", body, 52)
        row = f"(float *)(void *)(arena + {self.memory.scratch[i].offset})"
        return [
            f"u_{task.kind}(&{layer}, {self._reader(task.inputs[0])}, {row}, {function}, &{numbers}, run);"
        ]

    _avg_pool = _max_pool

    def _simple(self, task: Task, *arguments: str) -> list[str]:
        """A call that reads one image and writes another."""
        self._needs(f"{task.kind}.c")
        assert task.value is not None
        shape = self.plan.shapes[task.inputs[0]]
        texts = [f"(struct u_image){{{shape_text(shape)}}}", *arguments]
        return [
            f"u_{task.kind}({', '.join(texts)}, {self._at(task.inputs[0])}, {self._to(task.value)});"
        ]

    def _reader(self, value: int) -> str:
        """A value of floats or of 16 bits."""
        scale = c_float(self.shorts[value]) if value in self.shorts else "0"
        return f"(struct u_reader){{arena + {self._offset(value)}, {scale}}}"

    def _mean(self, i: int, task: Task) -> list[str]:
        self._needs("mean.c")
        assert task.value is not None
        image = f"(struct u_image){{{shape_text(self.plan.shapes[task.inputs[0]])}}}"
        return [f"u_mean({image}, {self._reader(task.inputs[0])}, {self._to(task.value)});"]

    def _mean_abs(self, i: int, task: Task) -> list[str]:
        self._needs("mean_abs.c")
        assert task.value is not None
        shape, source = self.plan.shapes[task.inputs[0]], task.inputs[0]
        image, sample = f"(struct u_image){{{shape_text(shape)}}}", task.fields["over"] == "sample"
        whole = int(source == 0 or shape[0] % 8 == 0)
        more = whole if sample else task.fields["groups"]
        call = "u_mean_abs_sample" if sample else "u_mean_abs_channels"
        return [f"{call}({image}, {more}, {self._at(source)}, {self._to(task.value)});"]

    def _concat(self, i: int, task: Task) -> list[str]:
        assert task.value is not None
        at, lines = self._offset(task.value), []
        for v in task.inputs:
            size = 4 * prod(self.plan.shapes[v])
            lines.append(f"u_copy(arena + {at}, arena + {self._offset(v)}, {size});")
            at += size
        return lines

    def _triple(self, task: Task, *keys: str) -> list[str]:
        return [self.constants.array(np.array(task.fields[key], np.int32)) for key in keys]

    def _move(self, task: Task, *keys: str) -> list[str]:
        """An op that copies floats, or integers of 16 bits."""
        image = f"(struct u_image){{{shape_text(task.out)}}}"
        if task.value not in self.shorts:
            return self._simple(task, image, *self._triple(task, *keys))
        self._needs(f"{task.kind}_shorts.c")
        assert task.value is not None
        source = f"(struct u_image){{{shape_text(self.plan.shapes[task.inputs[0]])}}}"
        offsets = (self._offset(task.inputs[0]), self._offset(task.value))
        places = [f"(int16_t *)(void *)(arena + {offset})" for offset in offsets]
        texts = [source, image, *self._triple(task, *keys), *places]
        return [f"u_{task.kind}_shorts({', '.join(texts)});"]

    def _slice(self, i: int, task: Task) -> list[str]:
        return self._move(task, "start", "step")

    def _pad(self, i: int, task: Task) -> list[str]:
        return self._move(task, "before")

    def _flatten(self, i: int, task: Task) -> list[str]:
        return []  # channels are outermost in memory: nothing moves

    def _upsample(self, i: int, task: Task) -> list[str]:
        return self._simple(task, *map(str, task.fields["factor"]))

    _pixel_shuffle = _upsample

    def _channel_shuffle(self, i: int, task: Task) -> list[str]:
        return self._simple(task, str(task.fields["groups"]))

    def _resize(self, i: int, task: Task) -> list[str]:
        image = f"(struct u_image){{{shape_text(task.out)}}}"
        return self._simple(task, image, str(int(task.fields["align_corners"])))

    def _normalize(self, i: int, task: Task) -> list[str]:
        return self._simple(task, str(task.fields["groups"]), c_float(F32(task.fields["epsilon"])))

    def _softmax(self, i: int, task: Task) -> list[str]:
        self._needs("exp.c")
        return self._simple(task)

    _log_softmax = _softmax

    def _curve(self, i: int, task: Task) -> list[str]:
        self._needs("curve.c")
        assert task.value is not None
        size, function = prod(task.out), task.fields["function"]
        return [
            "{",
            f"  const float *from = {self._at(task.inputs[0])};",
            f"  float *to = {self._to(task.value)};",
            "  int i;",
            f"  for (i = 0; i < {size}; i++) {{",
            f"    const float x = from[i], y = u_{function}(x);",
            "    to[i] = x == x ? y : x; /* NaN stays NaN */",
            "  }",
            "}",
        ]

    def _listing(self, calls: list[str]) -> str:
        """The whole file, without its includes."""
        outputs, at = [], 0
        for v in self.plan.outputs:
            size = prod(self.plan.shapes[v])
            outputs.append(f"  u_copy(scores + {at}, arena + {self._offset(v)}, {4 * size});")
            at += size
        entries = [
            *all_layers([*calls, *outputs]),
            *entry(self.name, "", "const uint8_t *pixels", self._read_pixels()),
            *entry(self.name, "_floats", "const float *input", self._read_floats()),
        ]
        self.constants.bytes += self.epilogues * (4 * EPILOGUE_WORDS + 4 * sum(self.widest))
        bases = max([t.conv.bases for t in self.plan.tasks if t.conv is not None], default=1)
        parts = [
            definitions(
                self.memory.offset_bytes,
                self.memory.tap_bytes,
                SLACK,
                max(bases, 1),
                bool(self.shorts),
            ),
            *map(kernel, self.kernels),
            epilogue_struct(self.widest),
            *(epilogue_function(name, body) for body, name in self.functions.items()),
            *self.constants.lines,
            *entries,
        ]
        return "\n".join(parts)

    def _read_pixels(self) -> list[str]:
        """Lines that convert the caller's pixels, unless the first convolution does."""
        if 0 not in self.memory.places:
            return []
        mean, std = self._preprocess()
        image = f"(struct u_image){{{shape_text(self.plan.shapes[0])}}}"
        to = f"(float *)(void *)(run.arena + {self._offset(0)})"
        return [f"  u_convert({image}, {mean}, {std}, pixels, {to});"]

    def _read_floats(self) -> list[str]:
        if 0 not in self.memory.places:
            return []
        return [f"  u_copy(run.arena + {self._offset(0)}, input, {4 * prod(self.plan.shapes[0])});"]


MAKERS: dict[str, Callable[[_Writer, int, Task], list[str]]] = {
    "conv": _Writer._conv,
    "quantize": _Writer._quantize,
    "map": _Writer._map,
    "max_pool": _Writer._max_pool,
    "avg_pool": _Writer._avg_pool,
    "mean": _Writer._mean,
    "mean_abs": _Writer._mean_abs,
    "concat": _Writer._concat,
    "slice": _Writer._slice,
    "pad": _Writer._pad,
    "flatten": _Writer._flatten,
    "softmax": _Writer._softmax,
    "log_softmax": _Writer._log_softmax,
    "curve": _Writer._curve,
    "normalize": _Writer._normalize,
    "upsample": _Writer._upsample,
    "pixel_shuffle": _Writer._pixel_shuffle,
    "channel_shuffle": _Writer._channel_shuffle,
    "resize": _Writer._resize,
}
