"""The catalog of trained networks, catalog.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOME = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    """A trained network. ``bytes``, ``sha256`` and ``found`` are None if it is not published."""

    name: str
    about: str
    data: str
    input: list[int]
    accuracy: float
    measured: str
    recipe: str
    train: str
    license: str
    bytes: int | None
    sha256: str | None
    found: str | None
    """Where it is: ``package:FILE``, ``https://...`` or ``hub:OWNER/NAME@REVISION``."""

    @property
    def place(self) -> str:
        """Where it is, in words."""
        if self.found is None:
            return "not published: train it"
        return "installed with unflip" if self.found.startswith("package:") else self.found

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return dict(self.__dict__)


def entries() -> dict[str, Entry]:
    """The networks by name, in the order of the file."""
    rows = json.loads((HOME / "catalog.json").read_text(encoding="utf-8"))
    return {row["name"]: Entry(**row) for row in rows}
