"""Attributes that a module has only inside a scope."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def attached(modules: Iterable[nn.Module], **values: Any) -> Iterator[None]:
    """Inside, each of the modules has these attributes; afterwards those it had before, also after an error."""
    before = []
    try:
        for module in modules:
            own = vars(module)
            before.append((own, {name: own[name] for name in values if name in own}))
            own.update(values)
        yield
    finally:
        for own, old in reversed(before):
            for name in values:
                own.pop(name, None)
            own.update(old)
