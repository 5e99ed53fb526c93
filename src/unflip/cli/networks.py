"""``unflip networks`` and ``unflip push``: trained networks of ours, and yours for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unflip.cli.app import app, needs, print_table
from unflip.cli.options import AsJson, Uses
from unflip.hints import known
from unflip.tables import Table

if TYPE_CHECKING:
    from unflip.networks import Entry


@app.command("networks", epilog="Example: unflip networks resnet20-cifar10")
def list_networks(
    name: Annotated[str | None, typer.Argument(help="Describe this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """List trained networks, with accuracy, size, recipe and license.

    'unflip predict NAME cat.jpg' and unflip.load("NAME") use one.
    """
    from unflip.networks import entries

    found = entries()
    chosen = [found[known(name, found, "network")]] if name is not None else list(found.values())
    if as_json:
        print(json.dumps([entry.plain() for entry in chosen], ensure_ascii=False))
        return
    if name is not None:
        _describe(chosen[0])
        return
    rows = [
        (
            entry.name,
            f"{entry.accuracy:.2f} %",
            "" if entry.bytes is None else f"{entry.bytes:,}",
            entry.recipe,
            entry.license,
            entry.place,
        )
        for entry in chosen
    ]
    titles = ("network", "accuracy", "bytes", "recipe", "license", "where")
    print_table(Table(titles, rows, ("accuracy", "bytes")))


def _describe(entry: Entry) -> None:
    size = "no file yet" if entry.bytes is None else f"{entry.bytes:,} bytes"
    lines = {
        "accuracy": f"{entry.accuracy:.2f} % ({entry.measured})",
        "input": " × ".join(map(str, entry.input)),
        "size": size,
        "where": entry.place,
        "SHA-256": entry.sha256 or "none",
        "license": entry.license,
        "train": entry.train,
    }
    print(f"{entry.name}: {entry.about}")
    for what, text in lines.items():
        print(f"  {what:8}  {text}")


@app.command(epilog="Example: unflip push runs/images ada/cats --dry-run")
def push(
    run: Annotated[Path, typer.Argument(help="A run: its folder, or one of its seed-N folders.")],
    repository: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="The repository on the Hugging Face Hub.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The folder to write first. Default: NAME."),
    ] = None,
    license: Annotated[
        str, typer.Option(help="The license of the weights, such as mit, for the model card.")
    ] = "unknown",
    private: Annotated[
        bool, typer.Option("--private", help="Create a private repository.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only write the folder; upload nothing.")
    ] = False,
    uses: Uses = None,
) -> None:
    """Publish a trained network on the Hugging Face Hub.

    It writes the packed file, weights, recipe, metrics, hashes and a model card to a folder, and uploads them.
    """
    needs("packing", "torch")
    if not dry_run:
        needs("unflip push", "huggingface_hub")
    from unflip.networks import hub
    from unflip.publish import publish
    from unflip.runs import Run
    from unflip.uses import use_all

    use_all(uses)
    place = hub.parse(repository)
    if place.revision:
        raise ValueError(f"{repository}: 'unflip push' writes to the main branch; leave out @...")
    folder = out or Path(place.repository.partition("/")[2])
    files = publish(Run.only_one(run), place.repository, folder, license)
    for file in files:
        print(f"{(folder / file).stat().st_size:>12,}  {folder / file}")
    if dry_run:
        print(f"nothing was uploaded. unflip.load({str(folder)!r}) runs the network")
        return
    print(
        f"{hub.upload(folder, place, files, private)}\nunflip.load({str(place)!r}) runs the network"
    )
