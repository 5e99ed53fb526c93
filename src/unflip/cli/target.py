"""``unflip show --target``: what a packed network needs on a microcontroller."""

from __future__ import annotations

from pathlib import Path

from unflip.printable import printable
from unflip.tables import Table

TARGETS = ("cortex-m4",)


def needs_of(model: Path, target: str) -> tuple[Table, list[str]]:
    """A table of the layers, and the lines below it. The file was checked by the loader."""
    from unflip.export.plain_c.cost import CYCLES_PER_INSTRUCTION, estimate
    from unflip.export.plain_c.plan import make_plan
    from unflip.export.plain_c.source import make_source
    from unflip.packing.file import read

    if target not in TARGETS:
        raise ValueError(f"--target {target} is not known; the only one is {', '.join(TARGETS)}")
    plan = make_plan(read(model))
    source = make_source(plan, "network")
    found = estimate(plan, source)
    rows = [
        (
            one.layer.task.kind,
            printable(one.layer.task.name),
            " × ".join(map(str, one.layer.task.out)),
            f"{one.layer.flash:,}",
            f"{one.layer.ram:,}",
            f"{one.cycles:,}",
        )
        for one in found
    ]
    total = sum(one.cycles for one in found)
    rows.append(("total", "", "", f"{source.flash:,}", f"{source.arena:,}", f"{total:,}"))
    numbers = ("flash", "RAM", "cycles")
    notes = [
        f"in plain C on a {target}: {source.flash:,} bytes of constants and about 10 kB of code in flash, an arena of "
        f"{source.arena:,} bytes and about 1 kB of stack in RAM",
        f"cycles are estimates: instructions per unit of work as measured on an emulated board, "
        f"times {CYCLES_PER_INSTRUCTION} (docs/microcontrollers.md)",
    ]
    return Table(("op", "name", "output", *numbers), rows, numbers), notes
