"""``unflip export``: a packed network for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unflip.cli.app import app


@app.command()
def export(
    model: Annotated[Path, typer.Argument(help="A packed network, made by 'unflip pack'.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Default: MODEL with .onnx as its ending.")
    ] = None,
) -> None:
    """Write a packed network as ONNX: standard operators, weights as bits."""
    from unflip.export.onnx import export as to_onnx

    target = out or model.with_suffix(".onnx")
    if target.suffix != ".onnx":
        raise ValueError(f"-o {target} should end in .onnx, the only format there is")
    if target.resolve() == model.resolve():
        raise ValueError(f"{target} is the packed network itself: give another file with -o")
    try:
        size = to_onnx(model, target)
    except ImportError as error:  # the message says what to install; a traceback says no more
        raise ValueError(str(error)) from error
    print(f"{target}: {size:,} bytes ({model.name}: {model.stat().st_size:,})")
