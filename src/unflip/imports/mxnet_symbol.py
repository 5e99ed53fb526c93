"""MXNet's symbol JSON: the graph that belongs to a ``.params`` file.

A node refers to nodes before it, so a cycle cannot be written; a file with one is refused. Attributes are texts, as
MXNet writes them: ``"(3, 3)"``, ``"True"``, ``"2e-05"``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unflip.imports.errors import CannotImport
from unflip.imports.mxnet_params import read_limited

MOST_NODES = 5_000
LARGEST_NUMBER = 1_048_576
LARGEST_JSON = 16_000_000
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
PAIR = re.compile(r"[(\[] ?(\d{1,7})L?, ?(\d{1,7})L?,? ?[)\]]")


@dataclass(frozen=True)
class Node:
    """One node of the graph. ``op`` is "null" for the input and for arrays."""

    op: str
    name: str
    inputs: tuple[int, ...]
    attributes: Mapping[str, str]

    @property
    def title(self) -> str:
        return f"{self.op} {self.name!r}"

    def whole(self, key: str, default: int | None = None) -> int:
        text = self.attributes.get(key, None if default is None else str(default))
        if text is None or not re.fullmatch(r"\d{1,7}", text) or int(text) > LARGEST_NUMBER:
            raise self.wrong(key, f"a whole number up to {LARGEST_NUMBER:,}")
        return int(text)

    def number(self, key: str, default: float) -> float:
        try:
            value = float(self.attributes.get(key, default))
        except ValueError:
            value = math.nan
        if not 0 <= value < 1e6:
            raise self.wrong(key, "a number from 0 to 1e6")
        return value

    def flag(self, key: str, default: bool) -> bool:
        text = self.attributes.get(key, str(default))
        if text not in ("True", "False", "1", "0"):
            raise self.wrong(key, "True or False")
        return text in ("True", "1")

    def pair(self, key: str, default: tuple[int, int] | None = None) -> tuple[int, int]:
        text = self.attributes.get(key)
        if text in (None, "()") and default is not None:
            return default
        found = PAIR.fullmatch(text or "")
        if not found:
            raise self.wrong(key, "two whole numbers, such as (3, 3)")
        return int(found[1]), int(found[2])

    def wrong(self, key: str, right: str) -> CannotImport:
        value = self.attributes.get(key)
        return CannotImport(f"{self.title}: {key}={value!r:.60} should be {right}")


def read_symbol(path: Path) -> list[Node]:
    """The nodes in order; the last one that anything needs is the output."""
    return parse_symbol(read_limited(path, LARGEST_JSON), str(path))


def parse_symbol(data: bytes, where: str) -> list[Node]:
    """The nodes of a file with this content, up to its head."""
    try:
        symbol = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CannotImport(f"{where}: not a symbol file: bad JSON: {error!s:.200}") from None
    entries = symbol.get("nodes") if isinstance(symbol, dict) else None
    if not isinstance(entries, list) or not entries:
        raise CannotImport(f"{where}: not a symbol file: it has no list of nodes")
    if len(entries) > MOST_NODES:
        raise CannotImport(f"{where}: {len(entries):,} nodes; at most {MOST_NODES:,} are read")
    nodes = [_node(entry, number, where) for number, entry in enumerate(entries)]
    names = [node.name for node in nodes]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CannotImport(f"{where}: two nodes have the name {twice!r}; names must differ")
    return nodes[: _head(symbol, len(nodes), where) + 1]


def _node(entry: Any, number: int, where: str) -> Node:
    place = f"{where}: node {number}"
    if not isinstance(entry, dict):
        raise CannotImport(f"{place} is not an object")
    op, name = entry.get("op"), entry.get("name")
    if not isinstance(op, str) or not isinstance(name, str) or not NAME.fullmatch(name):
        raise CannotImport(
            f"{place} has op {op!r:.60} and name {name!r:.60}; both should be texts, and a name has only letters, "
            "digits and _"
        )
    inputs = _references(entry.get("inputs", []))
    if inputs is None:
        raise CannotImport(f"{place} ({name}): inputs should be a list of [node, 0, version]")
    late = [source for source in inputs if source >= number]
    if late:
        raise CannotImport(
            f"{place} ({name}) takes the result of node {late[0]}, which is not before it: the graph has a cycle"
        )
    # MXNet renamed the field twice
    attributes: Any = next((entry[key] for key in ("attrs", "attr", "param") if key in entry), {})
    if not isinstance(attributes, dict) or not all(
        isinstance(text, str) for text in attributes.values()
    ):
        raise CannotImport(f"{place} ({name}): its attributes should be texts")
    if "subgraphs" in entry:
        raise CannotImport(f"{place} ({name}) contains a graph; such nodes are not supported")
    return Node(op, name, inputs, attributes)


def _references(found: Any) -> tuple[int, ...] | None:
    """The numbers of nodes in [[node, output, version], ...], all of them first outputs; None if it is not that."""
    if not isinstance(found, list):
        return None
    right = all(
        isinstance(part, list)
        and len(part) in (2, 3)
        and all(type(value) is int for value in part)
        and part[0] >= 0
        and part[1] == 0
        for part in found
    )
    return tuple(part[0] for part in found) if right else None


def _head(symbol: dict[str, Any], count: int, where: str) -> int:
    heads = _references(symbol.get("heads"))
    if heads is None or len(heads) != 1 or heads[0] >= count:
        raise CannotImport(f"{where}: heads should be one node of the graph: one output")
    return heads[0]
