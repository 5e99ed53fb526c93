"""What a study leaves for others to read: ``study.json``, ``table.md`` and, at the end, the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unflip.runs import checkpoint as checkpoints
from unflip.study.figures import draw
from unflip.study.summary import summarize
from unflip.study.table import table

if TYPE_CHECKING:
    from unflip.study.study import Study


def write_report(study: Study, last: bool) -> dict[str, Any]:
    """Write it all anew; returns what study.json has."""
    summary = summarize(study)
    write(study.out, summary, table(study, summary))
    if last:
        draw(study, summary)
    return summary


def write(out: Path, summary: dict[str, Any], text: str) -> None:
    data = json.dumps(summary, indent=1, allow_nan=False).encode() + b"\n"
    checkpoints.write_atomically(out / "study.json", data)
    checkpoints.write_atomically(out / "table.md", text.encode())
