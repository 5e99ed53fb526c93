"""``signs.json.gz``: what the page shows of a run's changed signs, kept where its checkpoints are not.

A checkpoint is many times larger than the run's other files, and its baseline's is needed too. The file holds the
counts of every layer and the filters shown weight by weight, as the page has them, so the page of a run whose
checkpoints are gone is the same. It says of which run and baseline it is, and is refused beside any other.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unflip.report.read import ReportError, explain, read_json
from unflip.runs.checkpoint import write_atomically

NAME = "signs.json.gz"
FORMAT = 1


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Filter(_Part):
    """One filter weight by weight; what the numbers are: ``signs.py``."""

    index: int = Field(ge=0)
    changed: int = Field(ge=0)
    off_sign: int = Field(ge=0)
    channels: list[int] = Field(min_length=1)
    w: list[float]
    f: list[float] | None
    before: str = Field(pattern=r"^[+-]+$")
    after: str = Field(pattern=r"^[+-]+$")


class Kernels(_Part):
    """The filters of a layer that are shown."""

    name: str
    filters_in_layer: int = Field(ge=1)
    channels_in_filter: int = Field(ge=1)
    kernel: list[int] = Field(min_length=2, max_length=2)
    filters: list[Filter] = Field(min_length=1)

    @model_validator(mode="after")
    def _complete(self) -> Kernels:
        for one in self.filters:
            weights = len(one.channels) * math.prod(self.kernel)
            parts = [one.w, one.before, one.after, *([] if one.f is None else [one.f])]
            if any(len(part) != weights for part in parts):
                raise ValueError(f"filter {one.index} should have {weights} weights")
        return self


class Layer(_Part):
    """How many signs of a layer differ from the baseline's."""

    name: str
    changed: int = Field(ge=0)
    weights: int = Field(ge=1)


class Kept(_Part):
    """The whole file; ``run`` and ``baseline`` are :func:`identity`'s."""

    format: Literal[1]
    run: str
    baseline: str
    epoch: int = Field(ge=0)
    layers: list[Layer] = Field(min_length=1)
    kernels: list[Kernels]


def keep(folder: Path, baseline: Path, seed: dict[str, Any], kernels: list[dict[str, Any]]) -> Path:
    """Write what ``signs.py`` found of a run beside it."""
    layers = [{key: layer[key] for key in Layer.model_fields} for layer in seed["layers"]]
    kept = {
        "format": FORMAT,
        "run": identity(folder),
        "baseline": identity(baseline),
        "epoch": seed["epoch"],
        "layers": layers,
        "kernels": kernels,
    }
    text = json.dumps(kept, separators=(",", ":")).encode()
    write_atomically(folder / NAME, gzip.compress(text, mtime=0))  # no clock: the same bytes again
    return folder / NAME


def read_kept(folder: Path, baseline: Path) -> Kept:
    """What was kept of a run that started from that baseline."""
    path = folder / NAME
    try:
        kept = Kept.model_validate_json(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, zlib.error) as error:
        raise ReportError(f"{path} cannot be read: {error}") from None
    except ValidationError as error:
        raise ReportError(
            f"{path} is not what 'unflip report --keep-signs' writes: {explain(error)}"
        ) from None
    for what, expected, where in (("run", kept.run, folder), ("baseline", kept.baseline, baseline)):
        if identity(where) != expected:
            raise ReportError(f"{path} was made of another {what} than {where}: its recipe differs")
    return kept


def identity(folder: Path) -> str:
    """A run's recipe and seed, hashed: the file says whose it is without a path."""
    text = json.dumps(read_json(folder / "recipe.json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
