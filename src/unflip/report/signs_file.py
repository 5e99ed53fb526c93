"""``signs.json.gz``: the changed signs of a run as the page shows them, for runs whose checkpoints were deleted.

A checkpoint is many times larger than the run's other files, and the baseline's is needed too. This file holds the
counts per layer and the filters that are shown weight by weight, so the page stays the same without checkpoints. It
names its run and baseline by a hash, and is refused for any other.
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

from unflip.runs.files import REMEDIES, DamagedFile, write_atomically
from unflip.runs.run import Run
from unflip.study.summary import explain

NAME = "signs.json.gz"
FORMAT = 1
MOST_BYTES = 64 << 20  # of the text
CHANNELS = 64  # shown of a filter at most: nobody compares more, and they are most of the page


class NoWeights(ValueError):
    """Signs that cannot be compared; the page shows the message in their place."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Filter(_Part):
    """One filter weight by weight; ``signs.py`` explains the numbers."""

    index: int = Field(ge=0)
    changed: int = Field(ge=0)
    off_sign: int = Field(ge=0)
    channels: list[int] = Field(min_length=1)
    w: list[float]
    f: list[float] | None
    before: str = Field(pattern=r"^[+-]+$")
    after: str = Field(pattern=r"^[+-]+$")


class Kernels(_Part):
    """The shown filters of a layer."""

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


class SignsFile(_Part):
    """The whole file. ``run`` and ``baseline`` are hashes: see :func:`identity`."""

    format: Literal[1]
    run: str
    baseline: str
    epoch: int = Field(ge=0)
    layers: list[Layer] = Field(min_length=1)
    kernels: list[Kernels]


def write(run: Run, baseline: Run, counts: dict[str, Any], kernels: list[dict[str, Any]]) -> Path:
    """Write the changed signs that ``signs.py`` found beside the run."""
    layers = [{key: layer[key] for key in Layer.model_fields} for layer in counts["layers"]]
    values = {
        "format": FORMAT,
        "run": identity(run),
        "baseline": identity(baseline),
        "epoch": counts["epoch"],
        "layers": layers,
        "kernels": kernels,
    }
    text = json.dumps(values, separators=(",", ":")).encode()
    path = run.folder / NAME
    write_atomically(path, gzip.compress(text, mtime=0))  # no clock: the same bytes every time
    return path


def read(run: Run, baseline: Run) -> SignsFile:
    """The file of a run that started from that baseline."""
    path = run.folder / NAME
    try:
        with gzip.open(path) as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise DamagedFile(path, f"it holds more than {MOST_BYTES:,} bytes")
        found = SignsFile.model_validate_json(text)
    except (OSError, EOFError, zlib.error) as error:
        raise DamagedFile(path, error) from None
    except ValidationError as error:
        raise DamagedFile(path, explain(error)) from None
    for what, expected, where in (("run", found.run, run), ("baseline", found.baseline, baseline)):
        if identity(where) != expected:
            raise ValueError(
                f"{path} belongs to another {what} than {where}: recipe or seed differ. {REMEDIES[NAME]}"
            )
    return found


def identity(run: Run) -> str:
    """A hash of recipe and seed, so that the file can name its run without a path."""
    text = json.dumps({"recipe": run.recipe, "seed": run.seed}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
