"""Docstrings for the site: paragraphs whose columns are aligned, such as lists of arguments, keep their lines.

Sphinx's roles become plain code, and powers such as 2**30 do not become bold text.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ALIGNED = re.compile(r"\S {2,}\S|^ +\S", re.MULTILINE)
LIST = re.compile(r"- .*(\n(- |  \S).*)*")
ROLE = re.compile(r":(?:func|class|meth|mod|data):`~?")
POWER = re.compile(r"(?<=\d)\*\*(?=\d)")


class KeepColumns(griffe.Extension):
    """Used by mkdocstrings, see mkdocs.yml."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = laid_out(obj.docstring.value)


def laid_out(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", ROLE.sub("`", text))
    return "\n\n".join(_block(part) if _is_aligned(part) else _prose(part) for part in paragraphs)


def _is_aligned(paragraph: str) -> bool:
    return ALIGNED.search(paragraph) is not None and LIST.fullmatch(paragraph.strip()) is None


def _prose(paragraph: str) -> str:
    return POWER.sub(r"\\*\\*", paragraph)


def _block(paragraph: str) -> str:
    return "\n".join(["```text", paragraph.rstrip().replace("``", ""), "```"])
