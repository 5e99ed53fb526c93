"""``unflip study ...``: many runs as one resumable piece of work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from unflip import methods, models
from unflip.cli.app import app
from unflip.hints import known
from unflip.study.paper import EXPERIMENTS, Experiment
from unflip.study.study import Study, run_study, write_tables
from unflip.train.recipe import load_recipe

GPU_AT_ONCE = 10  # runs in one captured graph: enough to keep a large GPU busy with small networks

study = typer.Typer(
    help="Studies: many runs as one resumable piece of work. The same command goes on where it was killed; what is "
    "finished is not run again.",
    no_args_is_help=True,
)
app.add_typer(study, name="study")

Data = Annotated[Path | None, typer.Option(help="Folder of the images.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda if there.")]
Engine = Annotated[
    str,
    typer.Option(
        help="together: this process, runs side by side. pool: --workers processes, each with an arm or more; on a GPU "
        "they compile at the same time and take turns to train. ray: the same on a Ray cluster."
    ),
]
WorkerCount = Annotated[
    int, typer.Option(min=1, help="Processes at once, with --engine pool or ray.")
]
EvaluateEvery = Annotated[
    int, typer.Option(min=1, help="Measure accuracy in every N-th epoch, and in the last.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        help="field=value for every arm's recipe, e.g. model.width=4 (repeat for more). What an arm is about stays.",
    ),
]


Seeds = Annotated[int, typer.Option(min=1, help="Seeds 0..N-1 of every arm.")]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Only this arm, and what it starts from (repeat for more)."),
]
EpochsScale = Annotated[float, typer.Option(help="Multiplies the epochs of every recipe.")]
Teacher = Annotated[
    Path | None, typer.Option(help="Finished run that arms which distill learn from.")
]
TablesOnly = Annotated[
    bool,
    typer.Option("--tables-only", help="Tables and figures of what is finished; train nothing."),
]
AtOnce = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Runs side by side in one process. Default: the seeds of one arm; with --engine together on a GPU "
        f"{GPU_AT_ONCE}.",
    ),
]


def _add(experiment: Experiment) -> None:
    """Every experiment of the paper is a command, all with the same options."""

    def command(
        seeds: Seeds = 5,
        only: Only = None,
        epochs_scale: EpochsScale = 1.0,
        override: Overrides = None,
        baseline: Annotated[
            Path | None,
            typer.Option(
                help="Folder with a finished baseline's seed-0, seed-1, ..., instead of training one."
            ),
        ] = None,
        teacher: Teacher = None,
        tables_only: TablesOnly = False,
        data: Data = None,
        out: Annotated[
            Path | None, typer.Option(help="Where runs and table go. Default: runs/STUDY.")
        ] = None,
        device: Device = None,
        engine: Engine = "together",
        workers: WorkerCount = 2,
        evaluate_every: EvaluateEvery = 1,
        at_once: AtOnce = None,
    ) -> None:
        chosen = experiment.study(
            out or Path("runs") / experiment.name,
            seeds,
            epochs_scale=epochs_scale,
            overrides=override or [],
            baseline=baseline,
            teacher=teacher,
            tables_only=tables_only,
        )
        _run(chosen, data, only, tables_only, engine, device, workers, at_once, evaluate_every)

    command.__doc__ = experiment.help()
    study.command(experiment.name)(command)


def _run(
    chosen: Study,
    data: Path | None,
    only: list[str] | None,
    tables_only: bool,
    engine: str,
    device: str | None,
    workers: int,
    at_once: int | None,
    evaluate_every: int,
) -> None:
    """Train what is left of a study, or only write its tables; print the table."""
    if only and tables_only:
        raise ValueError(
            "--tables-only shows every arm that has runs, and trains none: leave out --only"
        )
    if tables_only:
        write_tables(chosen)
        _show(chosen.out)
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if at_once is None and engine == "together" and on_gpu:
        at_once = GPU_AT_ONCE
    run_study(
        chosen,
        data,
        only=only or [],
        engine=engine,
        device=device,
        workers=workers,
        at_once=at_once,
        evaluate_every=evaluate_every,
    )
    _show(chosen.out)


for _experiment in EXPERIMENTS.values():
    _add(_experiment)


def _show(out: Path) -> None:
    print((out / "table.md").read_text())
    print(f"in {out}")


@study.command("compare")
def compare_recipes(
    recipes: Annotated[
        list[str],
        typer.Argument(help="Shipped recipes' names, or .yaml files; the first is the reference."),
    ],
    seeds: Seeds = 5,
    only: Only = None,
    epochs_scale: EpochsScale = 1.0,
    override: Overrides = None,
    teacher: Teacher = None,
    tables_only: TablesOnly = False,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Where runs and table go.")] = Path("runs/compare"),
    device: Device = None,
    engine: Engine = "together",
    workers: WorkerCount = 2,
    evaluate_every: EvaluateEvery = 1,
    at_once: AtOnce = None,
) -> None:
    """Train recipes of your own for the same seeds, and write one table with tests: the others against the first.

    A recipe that one of them starts from is trained too, before it.
    """
    from unflip.study.compare import compare

    chosen = compare(
        recipes,
        out,
        seeds,
        overrides=override or [],
        epochs_scale=epochs_scale,
        teacher=teacher,
    )
    _run(chosen, data, only, tables_only, engine, device, workers, at_once, evaluate_every)


@study.command("methods")
def compare_methods(
    epochs: Annotated[int, typer.Option(min=1, help="The same for every method.")],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0..N-1, side by side.")] = 3,
    recipe: Annotated[
        str, typer.Option(help="What to train; its method is replaced.")
    ] = "cifar10-resnet20-dorefa",
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this method (repeat for more); others that are finished stay in the table."
        ),
    ] = None,
    override: Overrides = None,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Where runs and table go.")] = Path("runs/methods"),
    device: Device = None,
    engine: Engine = "together",
    workers: WorkerCount = 2,
) -> None:
    """Train every method on the same recipe and seeds, and write one table.

    On a GPU, --engine pool --workers 4 compiles four methods at the same time while one trains; seconds per epoch are
    medians, and no two methods train at once.
    """
    from unflip.study.methods import compared, study_methods

    chosen = load_recipe(recipe, [*(override or []), f"epochs={epochs}"])
    models.check_names(chosen.model.name, chosen.model.options)
    names = [
        known(name, ["float", *compared()], "method to compare") for name in only or compared()
    ]
    study_methods(
        chosen,
        data,
        out,
        names=names,
        seeds=seeds,
        engine=engine,
        workers=workers,
        device=device,
        overrides=override or [],
        source=recipe,
    )
    _show(out)


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
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Where runs and table go.")] = Path("runs/autobnn"),
    device: Device = None,
) -> None:
    """Search the widths of a network under a FLOPs budget by evolution, and write one table."""
    from unflip.study.autobnn import Search
    from unflip.study.autobnn import search_widths as evolve

    replaced = methods.resolve(method).options()
    chosen = load_recipe(recipe, [f"epochs={epochs}"]).model_copy(update={"method": replaced})
    search = Search(population, generations, budget, seed=seed)
    images = chosen.data.load(data)
    evolve(chosen, images, out, search=search, device=device)
    _show(out)
