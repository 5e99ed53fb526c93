"""Where values are in the caller's arena: memory is reused after the last reader of a value.

Time runs in half tasks: a binary convolution first moves its code (2 i), then computes (2 i + 1). A value that is
computed in place of another keeps its place; what a place holds may become smaller, and others use the rest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

ALIGNMENT = 8
MOST_COMPARED = 2000  # up to so many places, all pairs are compared: that takes a second or two


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

    @property
    def first(self) -> int:
        return min(first for first, _, _ in self.spans)

    @property
    def last(self) -> int:
        return max(last for _, last, _ in self.spans)

    def clashes(self, other: Place) -> list[tuple[int, int]]:
        """(bytes of this, bytes of the other) for all times at which both are used."""
        return [
            (mine, theirs)
            for a, b, mine in self.spans
            for c, d, theirs in other.spans
            if a <= d and c <= b
        ]


def assign(places: Iterable[Place]) -> int:
    """Set all offsets and return the size of the arena: the better of two orders, or for many places a faster way."""
    found = list(places)
    for place in found:
        place.offset = 0
    found = [p for p in found if p.most]
    if len(found) > MOST_COMPARED:
        return _assign_in_time(found)
    orders = [
        sorted(found, key=lambda p: -p.most),
        sorted(found, key=lambda p: (p.first, -p.most)),
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


def _assign_in_time(places: list[Place]) -> int:
    """Each place keeps its most bytes from its first to its last use, in the smallest hole that is large enough."""
    holes, ends, size = _Holes(), list[tuple[int, int, int]](), 0
    for place in sorted(places, key=lambda p: (p.first, -p.most)):
        while ends and ends[0][0] < place.first:
            holes.give_back(*heappop(ends)[1:])
        offset = holes.take(place.most)
        place.offset = size if offset is None else offset
        size = max(size, place.offset + place.most)
        heappush(ends, (place.last, place.offset, place.most))
    return size


class _Holes:
    """Free memory below the end of the arena, with neighbors joined."""

    def __init__(self) -> None:
        self.by_offset: list[tuple[int, int]] = []  # offset, size
        self.by_size: list[tuple[int, int]] = []  # size, offset

    def take(self, size: int) -> int | None:
        at = bisect_left(self.by_size, (size, 0))
        if at == len(self.by_size):
            return None
        found, offset = self.by_size[at]
        self._remove(offset, found)
        if found > size:
            self._add(offset + size, found - size)
        return offset

    def give_back(self, offset: int, size: int) -> None:
        at = bisect_left(self.by_offset, (offset, 0))
        before, after = self.by_offset[max(at - 1, 0) : at], self.by_offset[at : at + 1]
        if after and offset + size == after[0][0]:
            self._remove(*after[0])
            size += after[0][1]
        if before and sum(before[0]) == offset:
            self._remove(*before[0])
            offset, size = before[0][0], size + before[0][1]
        self._add(offset, size)

    def _add(self, offset: int, size: int) -> None:
        insort(self.by_offset, (offset, size))
        insort(self.by_size, (size, offset))

    def _remove(self, offset: int, size: int) -> None:
        del self.by_offset[bisect_left(self.by_offset, (offset, size))]
        del self.by_size[bisect_left(self.by_size, (size, offset))]


def ends_in_use(places: Iterable[Place], times: int) -> list[int]:
    """For each time from 0 on, the end of the highest place in use."""
    spans = sorted((a, b, p.offset + size) for p in places for a, b, size in p.spans if size)
    active: list[tuple[int, int]] = []  # -end, last time
    found, next_span = [], 0
    for time in range(times):
        while next_span < len(spans) and spans[next_span][0] <= time:
            _, last, end = spans[next_span]
            heappush(active, (-end, last))
            next_span += 1
        while active and active[0][1] < time:
            heappop(active)
        found.append(-active[0][0] if active else 0)
    return found
