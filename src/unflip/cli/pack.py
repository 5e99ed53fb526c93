"""``unflip pack`` and ``unflip export``: from a trained run to a file, and from that to other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unflip.cli.app import app, needs
from unflip.cli.options import MaxMemory, MaxWork, Packed


@app.command(epilog="Example: unflip pack runs/digits-dorefa -o digits.unflip")
def pack(
    run: Annotated[Path, typer.Argument(help="A run: its folder, or one of its seed-N folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
) -> None:
    """Pack a trained network into one file.

    The file runs without torch: see 'unflip predict' and unflip.load.
    """
    needs("packing", "torch")
    from unflip.packing.images import pack_for
    from unflip.runs import Run
    from unflip.runs.load import model_of

    chosen = Run.only_one(run)
    size = pack_for(chosen.inputs, model_of(chosen), out)
    print(f"{out}: {size:,} bytes ({8 * size / 1e6:.3f} Mbit), from {chosen}")


@app.command(epilog="Example: unflip export digits.unflip -o digits.onnx")
def export(
    model: Packed,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Default: MODEL with the suffix .onnx.")
    ] = None,
    max_memory: MaxMemory = None,
    max_work: MaxWork = None,
) -> None:
    """Write a packed network as an ONNX file.

    It has standard operators; weights are stored as bits.
    """
    target = out or model.with_suffix(".onnx")
    if target.suffix != ".onnx":
        raise ValueError(f"-o {target} should end in .onnx, the only format that is supported")
    if target.resolve() == model.resolve():
        raise ValueError(f"{target} is the packed network itself: give another file with -o")
    needs("writing ONNX files", "onnx")
    from unflip.export.onnx import export as to_onnx

    size = to_onnx(model, target, max_memory, max_work)
    print(f"{target}: {size:,} bytes ({model.name}: {model.stat().st_size:,})")
