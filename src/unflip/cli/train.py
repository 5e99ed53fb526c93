"""``unflip train``, ``runs`` and ``demo``: train networks, and see what was trained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unflip.cli.app import app, needs, print_table
from unflip.cli.options import Data, Device, EvaluateEvery
from unflip.tables import Table

if TYPE_CHECKING:
    from unflip.data import ImageSet
    from unflip.train.recipe import Recipe


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
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard files.")] = False,
    evaluate_every: EvaluateEvery = 1,
) -> None:
    """Train a recipe.

    The same command resumes a run that was stopped. Ctrl-C saves first.

    If a recipe starts from the run of another recipe, or learns from one as its teacher, that run is trained first
    unless it is finished.

    For custom images: data.name=folder data.size=32 --data DIR, with DIR/train/CLASS/*.png and DIR/test/CLASS/*.png.
    All images are resized to data.size.
    """
    needs("training", "torch")
    from unflip.data import load as load_data
    from unflip.train.recipe import load_recipe, named_in
    from unflip.train.weights import is_weights

    loaded = load_recipe(recipe, overrides)
    folder = out or Path("runs") / loaded.name
    images = load_data(loaded.data.name, data, loaded.data.size)
    how: dict[str, Any] = {
        "device": device,
        "eager": eager,
        "tensorboard": tensorboard,
        "evaluate_every": evaluate_every,
    }
    left = bool(loaded.start or loaded.distill) and _unfinished(folder, seeds, device)

    def beside(field: str, name: str, parts: tuple[str, ...], why: str, seeds: int) -> Path | None:
        """The run of a recipe that this one needs, trained now unless it is finished."""
        if field == "start" and is_weights(name):
            file = Path(named_in(recipe, field, name, overrides))
            return file if left or file.exists() else None
        if not left:
            return _still_beside(folder, name, seeds, device)
        needed = _needed(named_in(recipe, field, name, overrides), loaded, *parts)
        place = folder.parent / needed.name
        _train_first(needed, f"{loaded.name} {why}", images, place, seeds, how)
        return place

    if loaded.start and start is None:
        start = beside("start", loaded.start, ("data", "model"), "starts from", seeds)
    if loaded.distill and teacher is None:
        teacher = beside("distill", loaded.distill.teacher, ("data",), "learns from", 1)
    _train(loaded, images, folder, seeds, how, start, teacher)


def _needed(source: str | Path, recipe: Recipe, *parts: str) -> Recipe:
    """The recipe that another needs, with the other's ``parts`` and the modules that these may come from."""
    from unflip.train.recipe import load_recipe

    plain = recipe.plain()
    fields = [f"{part}.{k}={json.dumps(v)}" for part in parts for k, v in plain[part].items()]
    modules = list(dict.fromkeys([*load_recipe(source).uses, *recipe.uses]))
    return load_recipe(source, [*fields, f"uses={json.dumps(modules)}"])


def _still_beside(folder: Path, name: str, seeds: int, device: str | None) -> Path | None:
    """The run that a finished one came from, to check that it is the same. None if it is not finished or gone."""
    from unflip.train.recipe import run_name

    out = folder.parent / run_name(name)
    return None if _unfinished(out, seeds, device) else out


def _train_first(
    recipe: Recipe, why: str, images: ImageSet, out: Path, seeds: int, how: dict[str, Any]
) -> None:
    """Train what another recipe needs, unless it is finished."""
    if not _unfinished(out, seeds, how["device"]):
        return
    if recipe.start or recipe.distill:
        other = recipe.start or (recipe.distill and recipe.distill.teacher)
        raise ValueError(
            f"{why} {recipe.name}, which is not finished in {out} and needs a run of {other} itself: train it first, "
            f"with --out {out}"
        )
    if _speaks():
        print(f"{why} {recipe.name}, which is not finished in {out}: training it first")
    _train(recipe, images, out, seeds, how)


def _speaks() -> bool:
    """Under torchrun only the first process prints."""
    return int(os.environ.get("RANK", "0")) == 0


def _unfinished(folder: Path, seeds: int, device: str | None) -> bool:
    """Whether a seed has no result; under torchrun, as rank 0 sees the folder."""
    from unflip.train import distributed

    missing = any(not (folder / f"seed-{s}" / "result.json").exists() for s in range(seeds))
    with distributed.process_group(device):
        return bool(distributed.from_rank_0(missing))


def _train(
    recipe: Recipe,
    images: ImageSet,
    out: Path,
    seeds: int,
    how: dict[str, Any],
    start: Path | None = None,
    teacher: Path | None = None,
) -> None:
    from unflip.train.loop import train as train_recipe

    results = train_recipe(
        recipe, images, out, seeds=range(seeds), start=start, teacher=teacher, **how
    )
    if not _speaks():
        return
    measured = f"{results[0]['evaluated_on']} accuracy"
    rows = [
        (
            str(result["seed"]),
            f"{result['accuracy']:.2f} %",
            f"{result['loss']:.4f}",
            f"{result['seconds']:.0f}",
        )
        for result in results
    ]
    columns = ("seed", measured, "loss", "seconds")
    print_table(Table(columns, rows, columns, recipe.name, [f"in {out}"]))


@app.command(epilog="Example: unflip runs runs/digits-dorefa")
def runs(root: Annotated[Path, typer.Argument(help="Folder to look in.")] = Path("runs")) -> None:
    """List runs with their state and result."""
    from unflip.runs.run import find_runs

    found = find_runs(root)
    if not found:
        raise ValueError(f"no runs in {root}; train one with 'unflip train RECIPE'")
    rows = [
        (
            str(run.folder),
            run.recipe,
            str(run.seed),
            run.state,
            f"{run.epoch}/{run.epochs}",
            "" if run.accuracy is None else f"{run.accuracy:.2f} %",
        )
        for run in found
    ]
    columns = ("run", "recipe", "seed", "state", "epoch", "accuracy")
    print_table(Table(columns, rows, ("seed", "epoch", "accuracy")))


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
