"""Where values are in the caller's arena: memory is reused after the last reader of a value.

Time runs in half tasks: a binary convolution first moves its code (2 i), then computes (2 i + 1). A value that is
computed in place of another keeps its place; what a place holds may become smaller, and others use the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

ALIGNMENT = 8


@dataclass
class Place:
    """One place in the arena: how many bytes are used from one time to another (both included)."""

    spans: list[tuple[int, int, int]] = field(default_factory=list)  # first, last, bytes
    offset: int = -1

    def hold(self, first: int, last: int, size: int) -> None:
        self.spans.append((first, last, -(-size // ALIGNMENT) * ALIGNMENT))

    @property
    def most(self) -> int:
        return max(size for _, _, size in self.spans)

    def clashes(self, other: Place) -> list[tuple[int, int]]:
        """(bytes of this, bytes of the other) for all times at which both are used."""
        return [
            (mine, theirs)
            for a, b, mine in self.spans
            for c, d, theirs in other.spans
            if a <= d and c <= b
        ]


def assign(places: Iterable[Place]) -> int:
    """Set all offsets and return the size of the arena: the better of two orders."""
    found = list(places)
    orders = [
        sorted(found, key=lambda p: -p.most),
        sorted(found, key=lambda p: (min(s[0] for s in p.spans), -p.most)),
    ]
    sizes = [_assign_in(order) for order in orders]
    return _assign_in(orders[sizes.index(min(sizes))])


def _assign_in(order: list[Place]) -> int:
    placed: list[Place] = []
    for place in order:
        place.offset = _lowest(place, placed)
        placed.append(place)
    return max((p.offset + p.most for p in placed), default=0)


def _lowest(place: Place, placed: list[Place]) -> int:
    taken = [
        (other.offset - mine + 1, other.offset + theirs)
        for other in placed
        for mine, theirs in place.clashes(other)
    ]
    offset = 0
    for first, last in sorted(taken):
        if first <= offset < last:
            offset = last
    return offset
