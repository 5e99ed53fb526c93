"""``unflip export model.unflip --html page.html``: one page that runs a packed network, without a server."""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

from unflip.export.plain_c.plan import make_plan
from unflip.export.plain_c.source import make_source
from unflip.packing.file import Packed, PackedFileError, read, write_whole
from unflip.runtime import Model, load

MODULES = ("relaxed", "simd", "scalar")
# In the order in which they are joined to one script: page.js starts the page, so it is last.
SCRIPTS = ("pictures.js", "unflip.js", "samples.js", "page.js")


class ModulesMissing(FileNotFoundError):
    """The WebAssembly modules were not built."""


def export_html(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    max_memory: int | None = None,
    max_work: int | None = None,
) -> int:
    """Write a page that runs the packed network ``source`` and return its size in bytes.

    ``unflip.load`` checks the file first; the limits are its limits.
    """
    check_classifies_images(load(source, max_memory=max_memory, max_work=max_work))
    path = Path(source)
    data = {
        "name": path.stem,
        "network": _compressed(path.read_bytes()),
        "modules": {name: _compressed(module(name)) for name in MODULES},
        "c": _as_c(read(source), path.name),
    }
    page = page_of(data).encode(errors="replace")  # in the file's name, bytes may be no UTF-8
    write_whole(Path(target), page)
    return len(page)


def check_classifies_images(network: Model) -> None:
    """The page shows an image and the scores of its classes: other networks need their own page."""
    shapes = list(network.output_shapes.values())
    if network.input_shape[0] not in (1, 3) or len(shapes[0]) != 1:
        raise ValueError(
            f"--html needs a network that classifies images: an input of 1 or 3 channels, and scores of classes. "
            f"This one has the input {_shape(network.input_shape)} and the output {_shape(shapes[0])}. "
            "Write a page with the npm package instead (docs/browser.md)"
        )


def module(name: str) -> bytes:
    """A WebAssembly module: ``relaxed``, ``simd`` or ``scalar``."""
    file = resources.files("unflip.export.web") / f"unflip-{name}.wasm"
    if not file.is_file():
        raise ModulesMissing(
            f"unflip-{name}.wasm, a part of the page, was not built with this installation of unflip; install a wheel "
            "of unflip, or run 'make web' in its source folder"
        )
    return file.read_bytes()


def page_of(data: dict[str, Any]) -> str:
    """The page with its style, scripts and data inside."""
    script = "\n".join(re.sub(r"(?m)^import .*\n", "", _part(name)) for name in SCRIPTS)
    if "</script" in script:
        raise ValueError("a script of the page contains '</script', which would end it")
    parts = {
        "TITLE": html.escape(data["name"]),
        "STYLE": _part("page.css"),
        "DATA": json.dumps(data).replace("<", "\\u003c"),
        "SCRIPT": script,
    }
    return re.sub(
        r"/\*(TITLE|STYLE|DATA|SCRIPT)\*/", lambda found: parts[found[1]], _part("page.html")
    )


def _as_c(packed: Packed, name: str) -> dict[str, Any]:
    """What the network needs as plain C, or why it cannot be written so."""
    try:
        source = make_source(make_plan(packed), "network")
    except (PackedFileError, ValueError) as error:
        return {"refused": str(error)}
    command = f"unflip export {shlex.quote(name)} --c FOLDER"
    return {"flash": source.flash, "arena": source.arena, "command": command}


def _compressed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()


def _part(name: str) -> str:
    return (resources.files("unflip.export.web") / name).read_text(encoding="utf-8")


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
