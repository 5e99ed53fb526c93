"""The outputs of a model: a tensor, or a flat tuple, list or dict of tensors.

A packed network returns a tuple for a list or namedtuple. The fields of a namedtuple are the names of the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unflip.packing.file import ONE_OUTPUT
from unflip.packing.ir import CannotPack

LONGEST_NAME, MOST_OUTPUTS = 4096, 4096
FLAT = "a packed network can return a tensor, or one flat tuple, list or dict of tensors"


@dataclass(frozen=True)
class Structure:
    """The kind of container and the names of its parts."""

    kind: str  # "tensor", "tuple" or "dict"
    names: tuple[str, ...]
    places: tuple[str, ...]  # for messages: "outputs['boxes']", "outputs[1]"

    def parts(self, answer: Any) -> list[Any]:
        """The parts of a container of this structure, in the order of the names."""
        if self.kind == "tensor":
            return [answer]
        return list(answer.values() if self.kind == "dict" else answer)


def is_tensor(part: Any) -> bool:
    return isinstance(part, Tensor)


def structure_of(answer: Any, is_output: Callable[[Any], bool]) -> Structure:
    """``is_output`` decides whether a part is an output: a tensor, or an object that stands for one."""
    if is_output(answer):
        return Structure("tensor", (ONE_OUTPUT,), (ONE_OUTPUT,))
    items = _items(answer)
    if items is None:
        raise CannotPack(f"the model returns {_what(answer)}; {FLAT}")
    if not 1 <= len(items) <= MOST_OUTPUTS:
        raise CannotPack(
            f"the model returns a {type(answer).__name__} of {len(items):,}; it must have 1 .. {MOST_OUTPUTS:,} outputs"
        )
    for _, place, part in items:
        if not is_output(part):
            raise _refusal(place, part)
    kind = "dict" if isinstance(answer, dict) else "tuple"
    names = tuple(_checked(name, place) for name, place, _ in items)
    return Structure(kind, names, tuple(place for _, place, _ in items))


def _items(answer: Any, place: str = "outputs") -> list[tuple[Any, str, Any]] | None:
    """(name, place, part) of each part of a container, or None if it is not a container."""
    if isinstance(answer, dict):
        return [(key, f"{place}[{key!r}]", part) for key, part in answer.items()]
    fields = getattr(answer, "_fields", None)
    if isinstance(answer, tuple) and fields is not None:
        return [(name, f"{place}.{name}", getattr(answer, name)) for name in fields]
    if isinstance(answer, tuple | list):
        return [(str(i), f"{place}[{i}]", part) for i, part in enumerate(answer)]
    return None


def _refusal(place: str, part: Any) -> CannotPack:
    items = _items(part, place)
    if items is None:
        return CannotPack(f"the model's {place} is {_what(part)}; {FLAT}: remove it")
    while items:  # down to the first part that is not a container
        _, place, part = items[0]
        items = _items(part, place)
    return CannotPack(
        f"the model's {place} is nested; {FLAT}: return it next to the others, with its own name"
    )


def _what(answer: Any) -> str:
    return "None" if answer is None else f"a value of type {type(answer).__name__}"


def _checked(name: Any, place: str) -> str:
    """A name that C and ONNX can store."""
    if not isinstance(name, str):
        raise CannotPack(
            f"the model's {place} has a key of type {type(name).__name__}; the key must be a string"
        )
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= LONGEST_NAME or any(c == "\0" or "\ud800" <= c <= "\udfff" for c in name):
        raise CannotPack(
            f"the name of the model's {place[:100]} must be 1 .. {LONGEST_NAME:,} bytes of UTF-8 without a NUL"
        )
    return name
