"""The page: one HTML file with its style, scripts and data inside. It loads nothing from the network."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from unflip.runs.files import write_atomically

# The page's scripts, in the order in which they are joined: main.js draws the page, so it is last.
SCRIPTS = (
    *("dom", "results", "tables", "scales", "ranges", "chart", "curves"),
    *("sweep", "kernels", "signs", "main"),
)

# Inside a script element these could end it or start a comment. In JSON they occur only in strings.
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
    page = page.replace("/*SCRIPT*/", "\n".join(_part(f"js/{name}.js") for name in SCRIPTS))
    before, _, after = page.partition("/*DATA*/")  # last: the data may contain anything
    return before + embedded(data) + after


def embedded(data: dict[str, Any]) -> str:
    """JSON that is safe inside ``<script type="application/json">`` and parses to the same value."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escape in ESCAPED.items():
        text = text.replace(character, escape)
    return text.encode("utf-8", "backslashreplace").decode()  # lone surrogates are not UTF-8


def write_report(data: dict[str, Any], path: Path) -> int:
    """Write the page and return its size in bytes."""
    text = render(data).encode()
    write_atomically(path, text)
    return len(text)


def _part(name: str) -> str:
    return (resources.files("unflip.report") / name).read_text(encoding="utf-8")
