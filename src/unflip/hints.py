"""Error messages that name the nearest right answer."""

import difflib
from collections.abc import Iterable


def known(value: str, choices: Iterable[str], what: str) -> str:
    """``value`` if it is one of ``choices``; otherwise an error that lists them."""
    options = sorted(choices)
    if value in options:
        return value
    near = difflib.get_close_matches(str(value), options, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {what} {value!r}.{hint} Known: {', '.join(options) or 'none'}.")
