"""Text from a file, made safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Replace control characters, invisible ones and those that change the direction of text by escapes (``\\x1b``)."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
