"""Text from a file, made safe for a terminal."""

from __future__ import annotations

# Letters and marks that show nothing, though Python calls them printable. native/src/printable.cpp has the same.
INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")


def printable(text: str) -> str:
    """Replace control characters, invisible ones and those that change the direction of text by escapes (``\\x1b``)."""
    return "".join(c if c.isprintable() and c not in INVISIBLE else ascii(c)[1:-1] for c in text)
