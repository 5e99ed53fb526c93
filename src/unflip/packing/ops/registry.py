"""The table of handlers, and what several of them use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unflip.packing.convert import Handler, Ref

HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Decorator: registers a handler for the operations of these names."""

    def add(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, function))
        return function

    return add


def pair(value: Any) -> list[int]:
    values = [int(v) for v in value] if isinstance(value, list | tuple) else [int(value)]
    return values if len(values) == 2 else values * 2


def dims_of(x: Ref, dims: Any) -> list[int]:
    return sorted(int(d) % x.tensor.dim() for d in dims or ())
