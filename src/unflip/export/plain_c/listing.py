"""Fixed parts of the C source: kernels from files, definitions, and the functions that callers see."""

from __future__ import annotations

from importlib import resources

from unflip.packing.ir import Shape

EPILOGUE_WORDS = 10  # of struct u_epilogue, without its arrays


def kernel(name: str) -> str:
    """A file of the folder kernels."""
    return resources.files("unflip.export.plain_c").joinpath("kernels", name).read_text("utf-8")


def comment(text: str) -> str:
    """Text from the packed file, safe inside a C comment."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._- ") else "_" for c in text[:80])


def shape_text(shape: Shape) -> str:
    return ", ".join(map(str, shape))


def definitions(offset_bytes: int, tap_bytes: int, slack: int, bases: int, shorts: bool) -> str:
    return f"""#ifndef UNFLIP_AFTER
#define UNFLIP_AFTER(layer) /* define it to time layers */
#endif
typedef uint{8 * offset_bytes}_t u_offset; /* a place in a moved code */
typedef uint{8 * tap_bytes}_t u_tap; /* a tap of a kernel, or the class of a pixel */
#define U_SLACK {slack} /* bytes that a word may read beyond a channel */
#define U_BASES {bases}
#define U_SHORTS {int(shorts)} /* whether some values are 16-bit integers */
"""


def epilogue_struct(widest: list[int]) -> str:
    """``widest``: the most floats, values and runs of a layer."""
    floats, values, runs = widest
    return f"""struct u_epilogue {{
  int size, channels; /* pixels of a channel; channels */
  uint32_t out, code; /* places in the arena */
  int code_channel, code_plane;
  const float *floats[{floats}];
  uint32_t values[{values}];
  int runs[{runs}];
  const float *thresholds;
  const uint8_t *strict;
  const void *first, *many; /* whole numbers that reach a step, of 16 or 32 bits */
}};
"""


def epilogue_function(name: str, body: str) -> str:
    return f"""static void {name}(const struct u_epilogue *e, const struct u_run *run, int c, int at, int byte,
                        int count, const void *source) {{
{body}}}
"""


def all_layers(calls: list[str]) -> list[str]:
    return [
        "",
        "static void u_all(const struct u_run *run, float *scores) {",
        "  uint8_t *arena = run->arena;",
        *calls,
        "}",
        "",
    ]


def entry(name: str, suffix: str, argument: str, read: list[str]) -> list[str]:
    """A function for callers. ``read`` are the lines that copy the input to the arena."""
    given = argument.split("*")[1]
    check = f"!{given} || !scores || !arena || (uintptr_t)arena % {name.upper()}_ARENA_ALIGNMENT"
    return [
        f"int {name}_run{suffix}({argument}, float *scores, void *arena) {{",
        "  struct u_run run;",
        f"  if ({check}) return 1;",
        "  run.arena = (uint8_t *)arena;",
        f"  run.pixels = {'0' if suffix else given};",
        f"  run.floats = {given if suffix else '0'};",
        *read,
        "  u_all(&run, scores);",
        "  return 0;",
        "}",
        "",
    ]
