"""``unflip study ...``: many runs as one resumable piece of work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unflip import methods
from unflip.cli.app import app
from unflip.data import load as load_data
from unflip.hints import known
from unflip.train.recipe import load_recipe

study = typer.Typer(help="Studies: many runs as one resumable piece of work.", no_args_is_help=True)
app.add_typer(study, name="study")


@study.command("methods")
def compare_methods(
    epochs: Annotated[int, typer.Option(min=1, help="The same for every method.")],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0..N-1, side by side.")] = 3,
    recipe: Annotated[
        str, typer.Option(help="What to train; its method is replaced.")
    ] = "cifar10-resnet20-dorefa",
    only: Annotated[
        list[str] | None, typer.Option(help="Only this method (repeat for more).")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the images.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs and table go.")] = Path("runs/methods"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda if there.")] = None,
) -> None:
    """Train every method on the same recipe and seeds, and write one table."""
    from unflip.study.methods import compared, study_methods, table

    chosen = load_recipe(recipe, [f"epochs={epochs}"])
    names = [
        known(name, ["float", *compared()], "method to compare") for name in only or compared()
    ]
    images = load_data(chosen.data.name, data)
    rows = study_methods(chosen, images, out, names=names, seeds=seeds, device=device)
    print(table(rows, chosen))
    print(f"in {out}")


@study.command("autobnn")
def search_widths(
    epochs: Annotated[int, typer.Option(min=1, help="Of each candidate's training.")],
    generations: Annotated[int, typer.Option(min=0, help="After the first population.")] = 5,
    population: Annotated[int, typer.Option(min=2, help="Candidates a generation.")] = 8,
    budget: Annotated[
        float, typer.Option(help="Most FLOPs, over those of the recipe's own network.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the search; training has seed 0.")] = 0,
    recipe: Annotated[
        str, typer.Option(help="What to train; its method is replaced.")
    ] = "cifar10-resnet20-dorefa",
    method: Annotated[str, typer.Option(help="What binarizes the candidates.")] = "autobnn",
    data: Annotated[Path | None, typer.Option(help="Folder of the images.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs and table go.")] = Path("runs/autobnn"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda if there.")] = None,
) -> None:
    """Search the widths of a network under a FLOPs budget by evolution, and write one table."""
    from unflip.study.autobnn import Search
    from unflip.study.autobnn import search_widths as evolve

    replaced = methods.resolve(method).options()
    chosen = load_recipe(recipe, [f"epochs={epochs}"]).model_copy(update={"method": replaced})
    search = Search(population, generations, budget, seed=seed)
    images = load_data(chosen.data.name, data)
    evolve(chosen, images, out, search=search, device=device)
    print((out / "table.md").read_text())
    print(f"in {out}")
