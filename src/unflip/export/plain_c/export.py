"""``unflip export model.unflip --c DIR``: a packed network as one C header and one C source."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from unflip.export.plain_c.listing import comment
from unflip.export.plain_c.plan import Plan, make_plan
from unflip.export.plain_c.shorts import Shorts
from unflip.export.plain_c.source import Source, make_source
from unflip.packing.file import Packed, PackedFileError, outputs_of, read, sha256, write_whole
from unflip.runtime import load

KEYWORDS = (
    "auto break case char const continue default do double else enum extern float for goto if inline int long "
    "register restrict return short signed sizeof static struct switch typedef union unsigned void volatile while "
    "asm bool class delete export friend namespace new operator private protected public template this throw try "
    "using virtual main"
)
MOST_NAME = 40
ARENA_ALIGNMENT = 8


@dataclass(frozen=True)
class CFiles:
    """The text of both files, and the sizes in bytes."""

    name: str
    header: str
    source: str
    arena: int
    flash: int

    def with_note(self, text: str) -> CFiles:
        """The same files, with a sentence in the header."""
        header = self.header.replace("\n */\n", f"\n *\n * {text}\n */\n", 1)
        return dataclasses.replace(self, header=header)


def export_c(
    model: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    name: str,
    *,
    replace: bool = False,
    max_memory: int | None = None,
    max_work: int | None = None,
) -> CFiles:
    """Write the packed network ``model`` to ``folder/name.h`` and ``folder/name.c``.

    ``unflip.load`` checks the file first; the limits are its limits. Files that exist are replaced only if
    ``replace`` is true.
    """
    check_name(name)
    check_targets(folder, name, replace)
    load(model, max_memory=max_memory, max_work=max_work)
    packed = read(model)
    try:
        files = to_c(packed, name, sha256(model))
    except PackedFileError as error:
        raise PackedFileError(f"{model}: {error}") from None
    write_files(files, folder, replace=replace)
    return files


def write_files(files: CFiles, folder: str | os.PathLike[str], *, replace: bool) -> None:
    """Write both files, each atomically."""
    check_targets(folder, files.name, replace)
    to = Path(folder)
    to.mkdir(parents=True, exist_ok=True)
    write_whole(to / f"{files.name}.h", files.header.encode())
    write_whole(to / f"{files.name}.c", files.source.encode())


def check_targets(folder: str | os.PathLike[str], name: str, replace: bool) -> None:
    """Refuse to replace files, unless that was asked for."""
    for suffix in (".h", ".c"):
        path = Path(folder) / f"{name}{suffix}"
        if path.exists() and not replace:
            raise FileExistsError(
                f"{path} exists; choose another --name or folder, or pass --replace"
            )


def check_name(name: str) -> None:
    """Refuse names that are not C identifiers."""
    if (
        not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)
        or name in KEYWORDS.split()
        or len(name) > MOST_NAME
    ):
        raise ValueError(
            f"--name {name!r} must be a C identifier: a letter, then letters, digits and underscores, "
            f"at most {MOST_NAME} characters, not a keyword"
        )


def to_c(packed: Packed, name: str, digest: str = "", shorts: Shorts | None = None) -> CFiles:
    """The two files of a packed network that the loader accepted. ``shorts``: values of 16 bits."""
    plan = make_plan(packed)
    source = make_source(plan, name, shorts)
    header = _header(packed, plan, source, name, digest)
    text = (
        f'/* {name}.c: made by unflip; see {name}.h. Do not edit. */\n#include "{name}.h"\n\n'
        "#include <float.h>\n#include <stddef.h>\n"
        "#if defined(__ARM_FEATURE_MVE)\n#include <arm_mve.h>\n#endif\n\n" + source.text
    )
    return CFiles(name, header, text, source.arena, source.flash)


def _header(packed: Packed, plan: Plan, source: Source, name: str, digest: str) -> str:
    big, (channels, height, width) = name.upper(), plan.shapes[0]
    scores = sum(prod(plan.shapes[v]) for v in plan.outputs)
    lines, at = [], 0
    for label, value, _ in outputs_of(packed.graph):
        shape = plan.shapes[value]
        lines.append(f" *   scores[{at}] .. : {comment(label)}, {' x '.join(map(str, shape))}")
        at += prod(shape)
    labels = [
        f" *   class {i}: {comment(text)}"
        for i, text in enumerate((packed.graph["labels"] or [])[:1000])
    ]
    outputs = "\n".join([*lines, *labels])
    return f"""/* {name}.h: a binary neural network in C99, made by unflip. Do not edit.
 *
 * SHA-256 of the packed network: {digest or "unknown"}
 *
{outputs}
 */
#ifndef {big}_H
#define {big}_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

#define {big}_CHANNELS {channels}
#define {big}_HEIGHT {height}
#define {big}_WIDTH {width}
#define {big}_SCORES {scores}
#define {big}_ARENA_BYTES {source.arena}
#define {big}_ARENA_ALIGNMENT {ARENA_ALIGNMENT}
#define {big}_FLASH_BYTES {source.flash} /* constants on a 32-bit CPU; the code is not included */

/* pixels: HEIGHT x WIDTH x CHANNELS bytes, channels interleaved. scores: SCORES floats.
 * arena: ARENA_BYTES bytes, aligned to ARENA_ALIGNMENT; its content does not matter. Calls with different arenas may
 * run at the same time. Returns 0, or 1 if a pointer is null or the arena is not aligned. */
int {name}_run(const uint8_t *pixels, float *scores, void *arena);

/* The same for an input that is already normalized: CHANNELS x HEIGHT x WIDTH floats. */
int {name}_run_floats(const float *input, float *scores, void *arena);

#ifdef __cplusplus
}}
#endif

#endif
"""
