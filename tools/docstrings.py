"""Docstrings for the site: paragraphs whose columns are aligned, such as lists of arguments, keep their lines."""

from __future__ import annotations

import re
from typing import Any

import griffe

ALIGNED = re.compile(r"\S {2,}\S|^ +\S", re.MULTILINE)
ROLE = re.compile(r":(?:func|class|meth|mod|data):(?=`)")


class KeepColumns(griffe.Extension):
    """Used by mkdocstrings, see mkdocs.yml."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = laid_out(obj.docstring.value)


def laid_out(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", ROLE.sub("", text))
    return "\n\n".join(_block(part) if ALIGNED.search(part) else part for part in paragraphs)


def _block(paragraph: str) -> str:
    return "\n".join(["```text", paragraph.rstrip(), "```"])
