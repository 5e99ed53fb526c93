"""The page: one HTML file with its style, script and data inside. It loads nothing else."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from unflip.runs.files import write_atomically

# Inside a script element these could end it or start a comment; in JSON they only occur in strings.
ESCAPED = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def render(data: dict[str, Any]) -> str:
    """The whole file as text."""
    page = _part("page.html").replace("/*STYLE*/", _part("page.css"))
    page = page.replace("/*SCRIPT*/", _part("page.js"))
    before, _, after = page.partition("/*DATA*/")  # last: data may hold anything
    return before + embedded(data) + after


def embedded(data: dict[str, Any]) -> str:
    """JSON that is safe inside ``<script type="application/json">`` and parses to the same value."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escape in ESCAPED.items():
        text = text.replace(character, escape)
    return text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate has no UTF-8


def write_report(data: dict[str, Any], path: Path) -> int:
    """Write the page; returns its size in bytes."""
    text = render(data).encode()
    write_atomically(path, text)
    return len(text)


def _part(name: str) -> str:
    return (resources.files("unflip.report") / name).read_text(encoding="utf-8")
