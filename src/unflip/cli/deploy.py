"""``unflip pack`` and ``unflip show``: from a trained run to a file, and what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from unflip.cli.app import app, console
from unflip.data import Dataset
from unflip.packing.describe import Description, describe
from unflip.packing.file import read, sha256
from unflip.packing.images import pack_for
from unflip.runs import checkpoint as checkpoints
from unflip.runs import provenance
from unflip.train.learner import build_model, model_state
from unflip.train.recipe import recipe_in


@app.command()
def pack(
    run: Annotated[Path, typer.Argument(help="A run: its folder, or one of its seed-N folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of the images it was trained on.")
    ] = None,
) -> None:
    """Pack a trained network into one file that runs without torch."""
    folder = seed_folder(run)
    recipe = recipe_in(folder)
    images = recipe.data.load(data)
    _refuse_other_images(folder, recipe.data.of(images))
    model = build_model(recipe, images, seed=0)
    model.load_state_dict(model_state(checkpoints.load_usable(folder).tensors))
    size = pack_for(images.spec, model, out)
    console.print(f"{out}: {size:,} bytes ({8 * size / 1e6:.3f} Mbit), from {folder}")


def _refuse_other_images(folder: Path, images: Dataset) -> None:
    """The file's class names and normalisation are those of the images: of others they would be wrong, and nothing
    would say so."""
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
            f"{run} is no run: it has neither recipe.json nor seed-N folders; 'unflip runs' lists runs"
        )
    if len(seeds) > 1:
        names = ", ".join(path.name for path in seeds)
        raise ValueError(f"{run} has several seeds ({names}): name one of them, such as {seeds[0]}")
    return seeds[0]


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A packed network.")],
) -> None:
    """Show what is in a packed network: ops, shapes, bytes and work."""
    packed = read(file)
    found = describe(packed)
    console.print(_table(found))
    size = file.stat().st_size
    console.print(
        f"{file}: {size:,} bytes ({8 * size / 1e6:.3f} Mbit), {found.float_bytes / size:.1f} times smaller than "
        f"with float weights ({found.float_bytes:,} bytes)"
    )
    labels, preprocess = packed.graph["labels"], packed.graph["input"]["preprocess"]
    console.print(
        f"input {_shape(packed.graph['input']['shape'])}, "
        f"{'with' if preprocess else 'without'} preprocessing, "
        f"{len(labels) if labels else 'no'} labels"
    )
    for name, shape in found.outputs.items():
        console.print(f"{_output(name, packed.graph)} {_shape(shape)}", markup=False)
    console.print(f"SHA-256 {sha256(file)} (verified)")


def _output(name: str, graph: dict[str, Any]) -> str:
    """A name that the model gave, or its place in a tuple; what is returned alone has none."""
    return f"output {name}:" if "outputs" in graph else "output"


def _table(found: Description) -> Table:
    table = Table("op", "name", "output", "bits", "bytes", "binary MACs", "float MACs", box=None)
    for row in found.rows:
        table.add_row(
            row.op,
            row.name,
            _shape(row.shape),
            "" if row.weight_bits is None else str(row.weight_bits),
            f"{row.bytes:,}" if row.bytes else "",
            f"{row.binary_macs:,}" if row.binary_macs else "",
            f"{row.float_macs:,}" if row.float_macs else "",
        )
    table.add_row(
        "total",
        "",
        "",
        "",
        f"{sum(row.bytes for row in found.rows):,}",
        f"{sum(row.binary_macs for row in found.rows):,}",
        f"{sum(row.float_macs for row in found.rows):,}",
    )
    for column in table.columns[3:]:
        column.justify = "right"
    return table


def _shape(shape: list[int] | tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
