"""The time of each layer of a network."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from unflip.printable import printable


class Row(NamedTuple):
    """One layer: the median of its times, and its share of the total."""

    name: str
    kind: str
    seconds: float
    share: float


class Profile(list[Row]):
    """One row per layer, in the order of execution. ``print`` shows a table.

    The time of a layer that was fused into the one before it is 0: it is counted there.
    """

    @property
    def seconds(self) -> float:
        """The time of all layers."""
        return sum(row.seconds for row in self)

    def __str__(self) -> str:
        names = [printable(row.name) for row in self]
        width = max([len(name) for name in names] + [5])
        lines = [f"{'layer':{width}}  {'kind':8}  {'µs':>9}  {'share':>6}"]
        lines += [
            f"{name:{width}}  {row.kind:8}  {row.seconds * 1e6:9.1f}  {row.share:6.1%}"
            for name, row in zip(names, self, strict=True)
        ]
        lines.append(f"{'all':{width}}  {'':8}  {self.seconds * 1e6:9.1f}")
        return "\n".join(lines)


def summarize(ops: Sequence[str], runs: Sequence[Sequence[float]]) -> Profile:
    """``ops`` are "kind name"; ``runs`` contain seconds per op. Medians are robust against outliers."""
    medians = [statistics.median(times) for times in zip(*runs, strict=True)]
    total = sum(medians) or 1.0
    rows = Profile()
    for op, seconds in zip(ops, medians, strict=True):
        kind, _, name = op.partition(" ")
        rows.append(Row(name, kind, seconds, seconds / total))
    return rows
