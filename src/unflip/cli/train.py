"""``unflip train``, ``runs`` and ``demo``: train networks, and see what was trained."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from unflip.cli.app import app, needs, print_table
from unflip.cli.options import Compile, Data, Device, EvaluateEvery, ImageWorkers
from unflip.printable import printable
from unflip.tables import Table

if TYPE_CHECKING:
    from unflip.runs import Run


OWN_TEACHER = Path(":train")  # what --teacher without a value means


class _TeacherWithoutValue(TyperCommand):
    """``--teacher`` alone is allowed, also before field=value; click wants a value for an option that may have one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        after = [*args, "--"][1:]
        alone = [
            word == "--teacher" and (following.startswith("-") or _is_override(following))
            for word, following in zip(args, after, strict=True)
        ]
        words = [
            f"--teacher={OWN_TEACHER}" if is_alone else word
            for word, is_alone in zip(args, alone, strict=True)
        ]
        return super().parse_args(ctx, words)


def _is_override(word: str) -> bool:
    return "=" in word and not Path(word).exists()


@app.command(epilog="Example: unflip train images --data photos", cls=_TeacherWithoutValue)
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
        Path | None,
        typer.Option(
            metavar="[RUN]",
            help="Finished run to learn from, for recipes that distill. Without RUN: train the teacher first.",
        ),
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

    For your own images: unflip train images --data DIR, with DIR/CLASS/*.jpg, or DIR/train/CLASS and DIR/val/CLASS.
    It chooses size, network and epochs; overrides change them. With --teacher, a float network is trained first.
    """
    needs("training", "torch")
    from unflip.recipes import load_recipe
    from unflip.recipes.fit import is_fitted
    from unflip.train import RunOptions, distributed
    from unflip.train import train as train_recipe

    loaded = load_recipe(recipe, _fitted(recipe, overrides, data, out, teacher))
    if teacher == OWN_TEACHER and loaded.distill is None:
        raise ValueError(f"recipe {loaded.name} has no teacher: leave --teacher out")
    flat = loaded.schedule.never_falls(loaded.epochs)
    if flat and distributed.speaks():
        print(
            f"warning: {flat}. Give other steps, or 'schedule={{name: cosine}}', which fits any length."
        )
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
        teacher=None if teacher == OWN_TEACHER else teacher,
        options=options,
    )
    if distributed.speaks():
        print_table(_results(loaded.name, results, folder))
        if is_fitted(recipe, overrides):
            chosen = folder if seeds == 1 else folder / "seed-0"
            modules = "".join(f" --uses {module}" for module in loaded.uses)
            print(f"Next: unflip pack {shlex.quote(str(chosen))} -o {loaded.name}.unflip{modules}")


def _fitted(
    recipe: str,
    overrides: list[str] | None,
    data: Path | None,
    out: Path | None,
    teacher: Path | None,
) -> list[str] | None:
    """The recipe ``images`` is fitted to the images in ``data``; overrides come last and win."""
    from unflip.recipes.fit import TEACHER, fit_images, is_fitted
    from unflip.train import distributed

    if not is_fitted(recipe, overrides):
        return overrides
    if data is None:
        raise ValueError(
            "the recipe 'images' needs a folder with one folder of images per class: give --data DIR"
        )
    beside = Path("runs") if out is None else out.parent
    epochs = re.findall(r"^epochs=([1-9]\d*)$", "\n".join(overrides or []), re.MULTILINE)
    wanted = int(epochs[-1]) if epochs else None  # the teacher's epochs follow
    fit = fit_images(data, None if teacher is None else beside / f"{TEACHER}.yaml", wanted)
    if distributed.speaks():
        changed = f" Changed by you: {' '.join(overrides)}." if overrides else ""
        print(f"{fit.words}{changed}", flush=True)
    return [*fit.overrides, *(overrides or [])]


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
    return (
        printable(str(run)),
        printable(name),
        seed,
        state,
        f"{epoch}/{printable(epochs)}",
        measured,
    )


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
