"""``unflip train``, ``runs`` and ``demo``: train networks, and see what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unflip.cli.app import app, needs, print_table
from unflip.cli.options import Compile, Data, Device, EvaluateEvery, ImageWorkers
from unflip.tables import Table

if TYPE_CHECKING:
    from unflip.runs import Run


@app.command(epilog="Example: unflip train digits-dorefa epochs=10 --seeds 3")
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A shipped recipe's name ('unflip recipes' lists them), or a .yaml file."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE",
            help="Changes to the recipe, e.g. epochs=10 optimizer.lr=0.05.",
        ),
    ] = None,
    data: Data = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/RECIPE.")] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Finished run, or .safetensors file of weights, to start from, for recipes that fine-tune."
        ),
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option(help="Finished run to learn from, for recipes that distill.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Train seeds 0..N-1 side by side.")] = 1,
    device: Device = None,
    eager: Annotated[bool, typer.Option(help="On a GPU: no compilation, no CUDA graph.")] = False,
    compile: Compile = True,
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard files.")] = False,
    evaluate_every: EvaluateEvery = 1,
    image_workers: ImageWorkers = None,
) -> None:
    """Train a recipe.

    The same command resumes a run that was stopped. Ctrl-C saves first.

    If a recipe starts from the run of another recipe, or learns from one as its teacher, that run is trained first
    unless it is finished.

    For custom images: data.name=folder data.size=32 --data DIR, with DIR/train/CLASS/*.png and DIR/test/CLASS/*.png.
    All images are resized to data.size.
    """
    needs("training", "torch")
    from unflip.recipes import load_recipe
    from unflip.train import RunOptions, distributed
    from unflip.train import train as train_recipe

    loaded = load_recipe(recipe, overrides)
    folder = out or Path("runs") / loaded.name
    options = RunOptions(
        device,
        eager,
        compile,
        tensorboard,
        evaluate_every=evaluate_every,
        workers=image_workers,
    )
    results = train_recipe(
        loaded,
        loaded.data.load(data),
        folder,
        seeds=range(seeds),
        start=start,
        teacher=teacher,
        options=options,
    )
    if distributed.speaks():
        print_table(_results(loaded.name, results, folder))


def _results(name: str, results: list[dict[str, Any]], out: Path) -> Table:
    ranked = results[0].get("top5") is not None
    rows = [
        (
            str(result["seed"]),
            f"{result['accuracy']:.2f} %",
            *([f"{result['top5']:.2f} %"] if ranked else []),
            f"{result['loss']:.4f}",
            f"{result['seconds']:.0f}",
        )
        for result in results
    ]
    accuracy = f"{results[0]['evaluated_on']} accuracy"
    columns = ("seed", accuracy, *(["top-5"] if ranked else []), "loss", "seconds")
    return Table(columns, rows, columns, name, [f"in {out}"])


@app.command(epilog="Example: unflip runs runs/digits-dorefa")
def runs(root: Annotated[Path, typer.Argument(help="Folder to look in.")] = Path("runs")) -> None:
    """List runs with their state and result."""
    from unflip.runs import Run

    found = Run.below(root)
    if not found:
        raise ValueError(f"no runs in {root}; train one with 'unflip train RECIPE'")
    rows = [_row(run) for run in found]
    columns = ("run", "recipe", "seed", "state", "epoch", "accuracy")
    print_table(Table(columns, rows, ("seed", "epoch", "accuracy")))


def _row(run: Run) -> tuple[str, ...]:
    """A damaged run is listed too, with what can still be read."""
    state, (epoch, accuracy) = run.state, run.position
    try:
        recipe, seed = run.recipe, str(run.seed)
        name, epochs = str(recipe["name"]), str(recipe["epochs"])
    except ValueError:
        name, seed, epochs = "", run.folder.name.removeprefix("seed-"), "?"
    measured = "" if accuracy is None else f"{accuracy:.2f} %"
    return str(run), name, seed, state, f"{epoch}/{epochs}", measured


@app.command(epilog="Example: unflip demo --out demo")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything it makes.")] = Path("demo"),
) -> None:
    """Show the whole idea on scikit-learn's digits.

    It trains a float network and its binary twin, corrects the twin, and packs it.
    """
    needs("the demo", "torch")
    from unflip.demo import run_demo

    run_demo(out)
