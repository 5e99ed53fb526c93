"""The C function that applies a task's steps and stores floats, bits, or both.

Tasks with the same steps share one function. Their numbers are in a ``struct u_epilogue``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unflip.export.plain_c.constants import TYPES
from unflip.export.plain_c.geometry import CodeLayout
from unflip.export.plain_c.intervals import find_intervals
from unflip.export.plain_c.plan import Fields, Quantizer, Task
from unflip.export.plain_c.shorts import Shorts
from unflip.export.plain_c.sums import Whole
from unflip.packing.ir import Shape

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32
FEW_STEPS = 4  # up to this many thresholds are compared without a loop


@dataclass
class Epilogue:
    """The body of the function, and the numbers of one task."""

    body: str
    floats: list[Array] = field(default_factory=list)  # per channel, or one
    values: list[int] = field(default_factory=list)  # other values that steps read
    runs: list[int] = field(default_factory=list)  # channels per channel of a factor
    thresholds: Array | None = None
    strict: Array | None = None  # only if some steps are strict and some are not
    intervals: tuple[Array, Array] | None = None  # first number, and how many, that reach a step


def make_epilogue(
    task: Task,
    whole: Whole | None,
    code: CodeLayout | None,
    shapes: list[Shape],
    shorts: Shorts,
) -> Epilogue:
    """``whole``: of a convolution whose whole numbers the function gets. Otherwise it gets floats."""
    intervals = None
    if whole is not None and _only_levels(task):
        intervals = find_intervals(task, whole)
    e = Epilogue("", intervals=intervals)
    head: list[str] = []
    lines: list[str] = []
    if intervals is None:
        lines = _float_lines(e, task, whole, shapes, head, shorts)
    if task.value is not None:
        kind = "int16_t" if task.value in shorts else "float"
        head.append(f"{kind} *out = ({kind} *)(void *)(run->arena + e->out) + c * e->size + at;")
        lines.append(_store(e, head, shorts.get(task.value)))
    if code is None:
        kind = "int32_t" if whole is not None else "float"
        e.body = _plain_loop(kind, head, lines)
        return e
    quantizer = task.quantizer
    assert quantizer is not None
    lines += _bits(e, quantizer, head)
    e.body = _bits_loop(
        "int32_t" if whole is not None else "float", head, lines, quantizer.planes, code.packed
    )
    return e


def _store(e: Epilogue, head: list[str], scale: float | None) -> str:
    if scale is None:
        return "out[i] = v;"
    return f"out[i] = u_short(v * {_number(e, head, np.array([1 / scale], F32))});"


def _only_levels(task: Task) -> bool:
    """Whether bits follow from a whole number alone."""
    kinds = {step["step"] for step in task.steps}
    if task.quantizer is None or task.quantizer.unit is not None or task.value is not None:
        return False
    return kinds <= {"affine", "prelu", "clamp"}


def _float_lines(
    e: Epilogue,
    task: Task,
    whole: Whole | None,
    shapes: list[Shape],
    head: list[str],
    shorts: Shorts,
) -> list[str]:
    lines = ["float v = x[i];"]
    if whole is not None:
        lines = [f"float v = {_number(e, head, whole.scale)} * (float)x[i];"]
    for step in task.steps:
        lines += _step(e, step, task.out, shapes, head, shorts)
    return lines


def _number(e: Epilogue, head: list[str], array: Array) -> str:
    """A constant of the channel."""
    index = len(e.floats)
    e.floats.append(np.asarray(array, F32).ravel())
    head.append(f"const float k{index} = e->floats[{index}][{'c' if array.size > 1 else '0'}];")
    return f"k{index}"


def _step(
    e: Epilogue, step: Fields, out: Shape, shapes: list[Shape], head: list[str], shorts: Shorts
) -> list[str]:
    kind = step["step"]
    if kind == "affine":
        lines = []
        if "scale" in step:
            lines.append(f"v = v * {_number(e, head, step['scale'])};")
        if "shift" in step:
            lines.append(f"v = v + {_number(e, head, step['shift'])};")
        return lines
    if kind == "prelu":
        return [f"v = v >= 0 ? v : v * {_number(e, head, step['slope'])};"]
    if kind == "clamp":
        lines = []
        if step["low"] is not None:
            low = _number(e, head, np.array([step["low"]], F32))
            lines.append(f"v = {low} > v ? {low} : v;")
        if step["high"] is not None:
            high = _number(e, head, np.array([step["high"]], F32))
            lines.append(f"v = v > {high} ? {high} : v;")
        return lines
    if step["value"] in shorts:
        return _short_operand(e, step["value"], shorts[step["value"]], head)
    return _operand(e, step, out, shapes[step["value"]], head)


def _short_operand(e: Epilogue, value: int, scale: float, head: list[str]) -> list[str]:
    """A value of 16 bits that is added."""
    index = len(e.values)
    e.values.append(value)
    place = f"(const int16_t *)(const void *)(run->arena + e->values[{index}])"
    head.append(f"const int16_t *o{index} = {place} + c * e->size + at;")
    return [f"v = v + (float)o{index}[i] * {_number(e, head, np.array([scale], F32))};"]


def _operand(e: Epilogue, step: Fields, out: Shape, shape: Shape, head: list[str]) -> list[str]:
    """A step that reads another value."""
    index = len(e.values)
    e.values.append(step["value"])
    base = f"(const float *)(const void *)(run->arena + e->values[{index}])"
    if step["step"] == "add":
        head.append(f"const float *o{index} = {base} + c * e->size + at;")
        return [f"v = v + o{index}[i];"]
    if shape == (out[0], 1, 1):
        head.append(f"const float o{index} = ({base})[c];")
        return [f"v = v * o{index};"]
    run = len(e.runs)
    e.runs.append(out[0] // shape[0])
    head.append(f"const float *o{index} = {base} + c / e->runs[{run}] * e->size + at;")
    return [f"v = v * o{index}[i];"]


def _bits(e: Epilogue, q: Quantizer, head: list[str]) -> list[str]:
    """Lines that set the bits of a pixel: b[plane], the newest bit on top."""
    steps = len(q.strict)
    if e.intervals is not None:
        kind = TYPES[str(e.intervals[0].dtype)]
        head += [f"const {kind} *{n} = (const {kind} *)e->{n} + c;" for n in ("first", "many")]
        reached = [
            f"((uint32_t)(x[i] - first[{s} * e->channels]) < (uint32_t)many[{s} * e->channels])"
            for s in range(steps)
        ]
        if steps > FEW_STEPS or q.levels:
            return _count_lines(
                steps, q.planes, q.levels,
                "((uint32_t)(x[i] - first[s * e->channels]) < (uint32_t)many[s * e->channels])",
            )  # fmt: skip
        return [f"if ({r}) b[{p}] |= 1u << (j);" for p, r in enumerate(reached)]
    e.thresholds = q.thresholds
    shared = q.thresholds.shape[1] == 1
    place = "s" if shared else "s * e->channels"
    head.append(f"const float *t = e->thresholds{'' if shared else ' + c'};")
    factor = ""
    if q.unit is not None:
        index = len(e.values)
        e.values.append(q.unit)
        head.append(
            f"const float unit = *(const float *)(const void *)(run->arena + e->values[{index}]);"
        )
        factor = " * unit"
    if len(set(q.strict)) > 1:
        e.strict = np.array(q.strict, np.uint8)
        test = f"(e->strict[s] ? v > t[{place}]{factor} : v >= t[{place}]{factor})"
    else:
        test = f"(v {'>' if q.strict[0] else '>='} t[{place}]{factor})"
    if steps > FEW_STEPS or q.levels or len(set(q.strict)) > 1:
        return _count_lines(steps, q.planes, q.levels, test)
    for s in range(steps):
        at = str(s) if shared else (f"{s} * e->channels" if s else "0")
        head.append(f"const float t{s} = t[{at}]{factor};")
    sign = ">" if q.strict[0] else ">="
    return [f"if (v {sign} t{s}) b[{s}] |= 1u << (j);" for s in range(steps)]


def _count_lines(steps: int, planes: int, levels: bool, test: str) -> list[str]:
    if not levels:
        return [
            f"for (s = 0; s < {steps}; s++) b[s] |= (unsigned){test} << (j);",
        ]
    return [
        f"for (s = 0, level = 0; s < {steps}; s++) level += {test};",
        f"for (s = 0; s < {planes}; s++) b[s] |= (unsigned)(level >> s & 1) << (j);",
    ]


def _plain_loop(kind: str, head: list[str], lines: list[str]) -> str:
    own = "\n  ".join(head)
    loop = "\n    ".join(lines)
    return f"""  const {kind} *x = (const {kind} *)source;
  {own}
  int i;
  (void)byte;
  for (i = 0; i < count; i++) {{
    {loop}
  }}
"""


def _bits_loop(kind: str, head: list[str], lines: list[str], planes: int, packed: bool) -> str:
    """Eight pixels at a time, because their bits are one byte. ``lines`` computes pixel i, whose bit is j."""
    body = [line.replace("[i]", "[i + (j)]") for line in lines]
    text = " \\\n    ".join(body)
    names = [n for n in ("s", "level") if f"({n} = 0" in text or f"{n} = 0;" in text]
    if planes > 1 or packed:
        names = list(dict.fromkeys(["s", *names]))
    own = "\n  ".join(head)
    none = "b[0] = 0;" if planes == 1 else f"for (s = 0; s < {planes}; s++) b[s] = 0;"
    if packed:
        where = "run->arena + e->code + (c >> 3)"
        store = f"""for (s = 0; s < {planes}; s++)
      to[s * e->code_plane] = (uint8_t)(to[s * e->code_plane] | b[s] << (c & 7));"""
        own += f"\n  if (c == 0) u_zero(run->arena + e->code, (size_t){planes} * (size_t)e->code_plane);"
    else:
        where = "run->arena + e->code + c * e->code_channel + byte"
        store = f"""for (s = 0; s < {planes}; s++) to[s * e->code_plane] = (uint8_t)b[s];
    to++;"""
        if planes == 1:
            store = "*to++ = (uint8_t)b[0];"
    return f"""  const {kind} *x = (const {kind} *)source;
  uint8_t *to = {where};
  int {", ".join(["i", "k", *names])};
  {own}
  (void)at, (void)byte;
#define U_PIXEL(j) \\
  do {{ \\
    {text} \\
  }} while (0)
  for (i = 0; i < count; i += 8) {{
    unsigned b[{planes}];
    {none}
    if (count - i >= 8) {{
      U_PIXEL(0);
      U_PIXEL(1);
      U_PIXEL(2);
      U_PIXEL(3);
      U_PIXEL(4);
      U_PIXEL(5);
      U_PIXEL(6);
      U_PIXEL(7);
    }} else {{
      for (k = 0; i + k < count; k++) U_PIXEL(k);
    }}
    {store}
  }}
#undef U_PIXEL
"""
