"""What a network and its packed file need to know of their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class InputSpec:
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def plain(self) -> dict[str, Any]:
        return {k: list(v) for k, v in asdict(self).items()}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> InputSpec:
        return cls(*(tuple(values[k]) for k in ("shape", "classes", "mean", "std")))
