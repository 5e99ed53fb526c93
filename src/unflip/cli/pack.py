"""``unflip pack`` and ``unflip export``: from a trained run to a file, and from that to other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unflip.cli.app import app, needs
from unflip.cli.options import Packed

if TYPE_CHECKING:
    from unflip.data import ImageSet


@app.command(epilog="Example: unflip pack runs/digits-dorefa -o digits.unflip")
def pack(
    run: Annotated[Path, typer.Argument(help="A run: its folder, or one of its seed-N folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of the images it was trained on.")
    ] = None,
) -> None:
    """Pack a trained network into one file.

    The file runs without torch: see 'unflip predict' and unflip.load.
    """
    needs("packing", "torch")
    from unflip.data import load as load_data
    from unflip.packing.images import pack_for
    from unflip.runs import checkpoint as checkpoints
    from unflip.train.learner import build_model, model_state
    from unflip.train.recipe import recipe_in

    folder = seed_folder(run)
    recipe = recipe_in(folder)
    images = load_data(recipe.data.name, data, recipe.data.size)
    _refuse_other_images(folder, recipe.data.of(images))
    model = build_model(recipe, images, seed=0)
    model.load_state_dict(model_state(checkpoints.load_usable(folder).tensors))
    size = pack_for(images, model, out)
    print(f"{out}: {size:,} bytes ({8 * size / 1e6:.3f} Mbit), from {folder}")


def _refuse_other_images(folder: Path, images: ImageSet) -> None:
    """The file takes its class names and normalization from the images: those of other images would be wrong."""
    from unflip.runs import provenance

    given = provenance.read(folder)
    for part, there, here in provenance.changed(given, images) if given else ():
        raise ValueError(
            f"the run in {folder} has {part} {there}, those of --data have {here}: give the images it was trained on"
        )


def seed_folder(run: Path) -> Path:
    """The folder of the one seed that ``run`` means."""
    if (run / "recipe.json").is_file():
        return run
    seeds = sorted(path.parent for path in run.glob("seed-*/recipe.json"))
    if not seeds:
        raise ValueError(
            f"{run} is not a run: it has neither recipe.json nor seed-N folders; 'unflip runs' lists runs"
        )
    if len(seeds) > 1:
        names = ", ".join(path.name for path in seeds)
        raise ValueError(f"{run} has several seeds ({names}): name one of them, such as {seeds[0]}")
    return seeds[0]


@app.command(epilog="Example: unflip export digits.unflip -o digits.onnx")
def export(
    model: Packed,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Default: MODEL with the suffix .onnx.")
    ] = None,
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

    size = to_onnx(model, target)
    print(f"{target}: {size:,} bytes ({model.name}: {model.stat().st_size:,})")
