"""Where a network's time goes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One layer: the median of its times, and its part of their sum."""

    name: str
    kind: str
    seconds: float
    share: float


class Profile(list[Row]):
    """A row for each layer, in the order in which they run. ``print`` shows a table.

    What was fused into the layer before it has no time of its own.
    """

    @property
    def seconds(self) -> float:
        """All layers together."""
        return sum(row.seconds for row in self)

    def __str__(self) -> str:
        width = max([len(row.name) for row in self] + [5])
        lines = [f"{'layer':{width}}  {'kind':8}  {'µs':>9}  {'share':>6}"]
        lines += [
            f"{row.name:{width}}  {row.kind:8}  {row.seconds * 1e6:9.1f}  {row.share:6.1%}"
            for row in self
        ]
        lines.append(f"{'all':{width}}  {'':8}  {self.seconds * 1e6:9.1f}")
        return "\n".join(lines)


def summarize(ops: Sequence[str], runs: Sequence[Sequence[float]]) -> Profile:
    """``ops`` are "kind name"; ``runs`` hold seconds for each op. Medians, so that one hiccup changes nothing."""
    medians = [statistics.median(times) for times in zip(*runs, strict=True)]
    total = sum(medians) or 1.0
    rows = Profile()
    for op, seconds in zip(ops, medians, strict=True):
        kind, _, name = op.partition(" ")
        rows.append(Row(name, kind, seconds, seconds / total))
    return rows
