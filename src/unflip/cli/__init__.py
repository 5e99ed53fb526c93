"""The ``unflip`` command: each verb is one public function. What trains is here, the rest in files beside."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from unflip import __version__, methods, models
from unflip.cli import deploy, export, predict, report, study
from unflip.cli.app import app, console
from unflip.cli.study import EvaluateEvery
from unflip.cost import Cost
from unflip.cost import cost as count_cost
from unflip.data import Dataset
from unflip.runs.checkpoint import CheckpointError
from unflip.runs.run import find_runs
from unflip.train import distributed
from unflip.train.loop import TrainingStopped
from unflip.train.loop import train as train_recipe
from unflip.train.recipe import Recipe, load_recipe, named_in, recipe_names, run_name
from unflip.train.weights import is_weights
from unflip.uses import ModuleMissing, use

__all__ = ["app", "deploy", "export", "predict", "report", "run", "study"]

STOPPED = 130  # what shells expect after Ctrl-C

FORESEEN = (ValueError, TypeError, CheckpointError, TrainingStopped, ModuleMissing, OSError)

Uses = Annotated[
    list[str] | None,
    typer.Option(help="A Python module with methods or networks of your own (repeat for more)."),
]


def run() -> None:
    """Run the command; errors we foresee are one line, without a traceback."""
    try:
        code = app(standalone_mode=False) or 0
    except typer.Exit as stop:
        code = stop.exit_code
    except (typer.Abort, KeyboardInterrupt):  # typer makes one of these, or a code, of Ctrl-C
        code = STOPPED
    except FORESEEN as error:
        print(f"unflip: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        shown = getattr(error, "format_message", None)  # click's usage errors
        if shown is None:
            raise
        if shown():  # without arguments, click has printed the help already
            print(f"unflip: {shown()}\nTry 'unflip --help'.", file=sys.stderr)
        sys.exit(2)
    if code == STOPPED:
        print("\nunflip: stopped; run the same command to go on", file=sys.stderr)
    if code:
        sys.exit(code)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command("methods")
def list_methods(
    name: Annotated[str | None, typer.Argument(help="Describe this one.")] = None,
    uses: Uses = None,
) -> None:
    """List the binarization methods, or describe one: formulas, paper, options."""
    _use(uses)
    if name is not None:
        cls = methods.config_class(name)
        print(inspect.getdoc(inspect.getmodule(cls)))
        print("\nOptions")
        for field in dataclasses.fields(cls):
            print(f"  {field.name} = {field.default!r}   ({field.type})")
        return
    table = Table("method", "what it does", box=None)
    for method in methods.names():
        table.add_row(method, (methods.config_class(method).__doc__ or "").splitlines()[0])
    console.print(table)


@app.command("recipes")
def list_recipes() -> None:
    """List the recipes that ship with unflip."""
    table = Table("recipe", "about", box=None)
    for name in recipe_names():
        table.add_row(name, load_recipe(name).about)
    console.print(table)


@app.command()
def cost(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(models.names())}.")],
    method: Annotated[str, typer.Option(help="A method, or 'float' for the float twin.")] = "float",
    option: Annotated[
        list[str] | None,
        typer.Option(help="Method option, e.g. --option input_bits=2 (repeat for more)."),
    ] = None,
    model_option: Annotated[
        list[str] | None, typer.Option(help="Model option, e.g. --model-option variant=bireal.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    uses: Uses = None,
) -> None:
    """Count memory (bits) and FLOPs as the papers do, on one image of the model's published size."""
    _use(uses)
    chosen: Any = {"name": method, **_pairs(option)} if option else method
    with torch.device("meta"):  # shapes are all that counts: nothing is allocated
        network = models.create(model, chosen, **_pairs(model_option))
        counted = count_cost(network, torch.empty(1, *models.input_shape(model)))
    if as_json:
        print(json.dumps({"model": model, "method": method, **dataclasses.asdict(counted)}))
        return
    _print_cost(f"{model}, {method}", counted)


def _use(modules: list[str] | None) -> None:
    for module in modules or []:
        use(module)


def _print_cost(title: str, counted: Cost) -> None:
    table = Table(
        "layer", "kind", "weight bits", "input bits", "Kbit", "M MACs", "M FLOPs", title=title
    )
    for layer in counted.layers:
        table.add_row(
            layer.name,
            layer.kind,
            str(layer.weight_bits),
            str(layer.input_bits),
            f"{layer.memory_bits / 1e3:,.1f}",
            f"{layer.macs / 1e6:,.2f}",
            f"{layer.flops / 1e6:,.2f}",
        )
    console.print(table)
    console.print(
        f"memory {counted.memory_bits / 1e6:.2f} Mbit ({counted.memory_bits / 2**20:.1f} Mibit, "
        f"{counted.memory_bits / 8e6:.2f} MB)   FLOPs {counted.flops / 1e6:.1f} M"
    )


def _pairs(texts: list[str] | None) -> dict[str, Any]:
    """key=value texts; numbers and true/false become what they say."""
    pairs: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"option {text!r} should look like name=value")
        try:
            pairs[key] = json.loads(value)
        except json.JSONDecodeError:
            pairs[key] = value
    return pairs


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a .yaml file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="field=value, e.g. epochs=10 optimizer.lr=0.05")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the images.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/RECIPE")] = None,
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
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda if there.")] = None,
    eager: Annotated[bool, typer.Option(help="On a GPU: no compilation, no CUDA graph.")] = False,
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard files.")] = False,
    evaluate_every: EvaluateEvery = 1,
) -> None:
    """Train a recipe. The same command goes on where it was killed; Ctrl-C saves first.

    A recipe that starts from another one (LNS from its baseline), or learns from one as its teacher, trains that
    first if it has not been.

    Images of your own: data.name=folder data.size=32 --data DIR, with DIR/train/CLASS/*.png and DIR/test/CLASS/*.png;
    data.size brings them to one size.
    """
    loaded = load_recipe(recipe, overrides)
    folder = out or Path("runs") / loaded.name
    images = loaded.data.load(data)
    how: dict[str, Any] = {
        "device": device,
        "eager": eager,
        "tensorboard": tensorboard,
        "evaluate_every": evaluate_every,
    }
    left = bool(loaded.start or loaded.distill) and _unfinished(folder, seeds, device)

    def beside(field: str, name: str, parts: tuple[str, ...], why: str, seeds: int) -> Path | None:
        """The run of a recipe that this one needs, trained now if it has not been; a finished one needs it no more."""
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
    """The recipe that another needs, with the other's ``parts``, and with the modules that these may come from."""
    plain = recipe.plain()
    fields = [f"{part}.{k}={json.dumps(v)}" for part in parts for k, v in plain[part].items()]
    modules = list(dict.fromkeys([*load_recipe(source).uses, *recipe.uses]))
    return load_recipe(source, [*fields, f"uses={json.dumps(modules)}"])


def _still_beside(folder: Path, name: str, seeds: int, device: str | None) -> Path | None:
    """The run that a finished one came from, which is to be the same still; a finished one needs it no more."""
    out = folder.parent / run_name(name)
    return None if _unfinished(out, seeds, device) else out


def _train_first(
    recipe: Recipe, why: str, images: Dataset, out: Path, seeds: int, how: dict[str, Any]
) -> None:
    """Train what another recipe needs, unless it has been."""
    if not _unfinished(out, seeds, how["device"]):
        return
    if recipe.start or recipe.distill:
        other = recipe.start or (recipe.distill and recipe.distill.teacher)
        raise ValueError(
            f"{why} {recipe.name}, which is not finished in {out} and needs a run of {other} itself: train it first, "
            f"with --out {out}"
        )
    if _speaks():
        print(f"{why} {recipe.name}, which is not finished in {out}: first that")
    _train(recipe, images, out, seeds, how)


def _speaks() -> bool:
    """Under torchrun one process speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0


def _unfinished(folder: Path, seeds: int, device: str | None) -> bool:
    """Whether a seed has no result; under torchrun, as rank 0 sees the folder."""
    missing = any(not (folder / f"seed-{s}" / "result.json").exists() for s in range(seeds))
    with distributed.process_group(device):
        return bool(distributed.from_rank_0(missing))


def _train(
    recipe: Recipe,
    images: Dataset,
    out: Path,
    seeds: int,
    how: dict[str, Any],
    start: Path | None = None,
    teacher: Path | None = None,
) -> None:
    results = train_recipe(
        recipe, images, out, seeds=range(seeds), start=start, teacher=teacher, **how
    )
    if not _speaks():
        return
    table = Table(
        "seed", f"{results[0]['evaluated_on']} accuracy", "loss", "seconds", title=recipe.name
    )
    for result in results:
        table.add_row(
            str(result["seed"]),
            f"{result['accuracy']:.2f} %",
            f"{result['loss']:.4f}",
            f"{result['seconds']:.0f}",
        )
    console.print(table)
    console.print(f"in {out}")


@app.command()
def runs(root: Annotated[Path, typer.Argument(help="Folder to look in.")] = Path("runs")) -> None:
    """List runs with their state and result."""
    found = find_runs(root)
    if not found:
        raise ValueError(f"no runs in {root}; train one with 'unflip train RECIPE'")
    table = Table("run", "recipe", "seed", "state", "epoch", "accuracy", box=None)
    for run_ in found:
        table.add_row(
            str(run_.folder),
            run_.recipe,
            str(run_.seed),
            run_.state,
            f"{run_.epoch}/{run_.epochs}",
            "" if run_.accuracy is None else f"{run_.accuracy:.2f} %",
        )
    console.print(table)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where everything it makes goes.")] = Path("demo"),
) -> None:
    """The whole idea on scikit-learn's digits: a float network, its binary twin, and LNS."""
    from unflip.demo import run_demo

    run_demo(out)
