"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Uses = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE",
        help="A Python module with custom methods, networks or data sets (repeat for more).",
    ),
]
Data = Annotated[Path | None, typer.Option(help="Folder of the images, or a pack of them.")]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda. Default: cuda if the machine has a GPU.")
]
EvaluateEvery = Annotated[
    int, typer.Option(min=1, help="Measure accuracy in every N-th epoch, and in the last.")
]
Compile = Annotated[
    bool, typer.Option(help="On a GPU: compile steps. Without it a run starts sooner.")
]
ImageWorkers = Annotated[
    int | None,
    typer.Option(
        "--image-workers",
        min=1,
        help="Processes that decode images, for the data set images. Default: one per CPU.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Packed = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A packed network: a file (.unflip) of 'unflip pack', a name of 'unflip networks', a URL, or "
        "hub:OWNER/NAME.",
    ),
]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads. 0: one per core.")]
MaxMemory = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Refuse a network that needs more bytes to load and run one sample. Default: 1 GiB (1,073,741,824).",
    ),
]
MaxWork = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Refuse a network with more work per sample, in units of about a nanosecond. Default: 10,000,000,000.",
    ),
]
