"""``unflip study ...``: many runs as one resumable piece of work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from unflip.cli.app import app, needs
from unflip.cli.options import Compile, Data, Device, EvaluateEvery, ImageWorkers
from unflip.printable import printable

if TYPE_CHECKING:
    from unflip.study.experiment import Experiment
    from unflip.study.runner import StudyEngine
    from unflip.study.study import Study
    from unflip.train import RunOptions


class StudyGroup(TyperGroup):
    """Adds the paper's experiments when ``unflip study`` is called: reading them imports packages of [train]."""

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        self.commands.update(_experiments())
        return super().make_context(*arguments, **settings)


study = typer.Typer(
    cls=StudyGroup,
    help="Studies: many runs as one resumable piece of work. The same command resumes a study that was stopped; "
    "finished runs are not repeated.",
    epilog="Example: unflip study compare digits-dorefa digits-float --seeds 3",
    no_args_is_help=True,
)
app.add_typer(study, name="study")

Engine = Annotated[
    str,
    typer.Option(
        help="together: this process, runs side by side. pool: --workers processes, each with one arm or more; on a "
        "GPU they compile at the same time and take turns to train. ray: the same on a Ray cluster."
    ),
]
WorkerCount = Annotated[
    int, typer.Option(min=1, help="Processes at once, with --engine pool or ray.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        metavar="FIELD=VALUE",
        help="field=value for every arm's recipe, e.g. model.width=4 (repeat for more). Fields in which the arms "
        "differ are not changed.",
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="Seeds 0..N-1 of every arm.")]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Only this arm, and the arms it starts from (repeat for more)."),
]
BestOf = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Only the controls, and the three other arms that are best in this finished study of held-out images.",
    ),
]
EpochsScale = Annotated[float, typer.Option(help="Multiplies the epochs of every recipe.")]
Teacher = Annotated[
    Path | None, typer.Option(help="Finished run to learn from, for arms that distill.")
]
TablesOnly = Annotated[
    bool,
    typer.Option("--tables-only", help="Tables and figures of the finished runs; train nothing."),
]
AtOnce = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Runs side by side in one process. Default: the seeds of one arm; with --engine together on a GPU 10.",
    ),
]


def _experiments() -> dict[str, Any]:
    """name -> command. Every experiment of the paper is a command, all with the same options."""
    needs("a study", "torch")
    from unflip.study import cifar, imagenet, paper

    group = typer.Typer(rich_markup_mode=None)
    every = (paper.EXPERIMENTS, cifar.EXPERIMENTS, imagenet.EXPERIMENTS)
    for experiment in (one for group_of in every for one in group_of.values()):
        group.command(experiment.name, help=experiment.help())(_command(experiment))
    return dict(get_group(group).commands)


def _command(experiment: Experiment) -> Any:
    def command(
        seeds: Seeds = experiment.seeds,
        only: Only = None,
        epochs_scale: EpochsScale = 1.0,
        override: Overrides = None,
        baseline: Annotated[
            Path | None,
            typer.Option(
                help="Folder with a finished baseline (seed-0, seed-1, ...) to use instead of training one."
            ),
        ] = None,
        best_of: BestOf = None,
        teacher: Teacher = None,
        tables_only: TablesOnly = False,
        data: Data = None,
        out: Annotated[
            Path | None, typer.Option(help="Folder of the runs and the table. Default: runs/STUDY.")
        ] = None,
        device: Device = None,
        engine: Engine = "together",
        workers: WorkerCount = 2,
        evaluate_every: EvaluateEvery = 1,
        image_workers: ImageWorkers = None,
        compile: Compile = True,
        at_once: AtOnce = None,
    ) -> None:
        from unflip.study.runner import StudyEngine
        from unflip.train import RunOptions

        chosen = experiment.study(
            out or Path("runs") / experiment.name,
            seeds,
            epochs_scale=epochs_scale,
            overrides=override or [],
            baseline=baseline,
            teacher=teacher,
            tables_only=tables_only,
        )
        if best_of is not None:
            only = _best_of(best_of, chosen, only)
        if tables_only:
            _tables(chosen, only)
        else:
            _require_images(chosen, data)
            _run(
                chosen,
                data,
                only,
                StudyEngine(engine, workers, at_once),
                RunOptions(
                    device, compile=compile, evaluate_every=evaluate_every, workers=image_workers
                ),
            )

    return command


def _best_of(folder: Path, chosen: Study, only: list[str] | None) -> list[str]:
    from unflip.study.experiment import best_of

    if only:
        raise ValueError("--best-of chooses the arms: leave out --only")
    names = best_of(folder, chosen)
    print(f"{chosen.name}: by {folder}, the arms are {', '.join(names)}", flush=True)
    return names


def _require_images(chosen: Study, data: Path | None) -> None:
    if chosen.pack and data is None and chosen.arms[0].recipe.data.name == "images":
        raise ValueError(
            f"study {chosen.name} has no images: give --data {chosen.pack.file} ({chosen.pack.command})"
        )


def _tables(chosen: Study, only: list[str] | None) -> None:
    """Write and print the table of what is finished."""
    from unflip.study.runner import write_tables

    if only:
        raise ValueError(
            "--tables-only shows every arm that has runs and trains none: leave out --only"
        )
    write_tables(chosen)
    _show(chosen.out)


def _run(
    chosen: Study,
    data: Path | None,
    only: list[str] | None,
    engine: StudyEngine,
    options: RunOptions,
) -> None:
    """Train the unfinished runs of a study; print the table."""
    from unflip.study.runner import run_study

    for arm in (chosen.only(only) if only else chosen).arms:
        if flat := arm.recipe.schedule.never_falls(arm.recipe.epochs):
            print(f"warning: {arm.name}: {flat}. --epochs-scale moves the steps, too.")
    run_study(chosen, data, only=only or [], engine=engine, options=options)
    _show(chosen.out)


def _show(out: Path) -> None:
    for line in (out / "table.md").read_text(encoding="utf-8").splitlines():
        print(printable(line))
    print(f"in {out}")


@study.command(
    "compare",
    epilog="Example: unflip study compare digits-dorefa digits-finetune --seeds 3 --epochs-scale 0.5",
)
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
    out: Annotated[Path, typer.Option(help="Folder of the runs and the table.")] = Path(
        "runs/compare"
    ),
    device: Device = None,
    engine: Engine = "together",
    workers: WorkerCount = 2,
    evaluate_every: EvaluateEvery = 1,
    image_workers: ImageWorkers = None,
    compile: Compile = True,
    at_once: AtOnce = None,
) -> None:
    """Train recipes for the same seeds and compare them.

    Writes one table with statistical tests of the others against the first. If one of them starts from another
    recipe, that is trained first.
    """
    needs("a study", "torch")
    from unflip.study.compare import compare
    from unflip.study.runner import StudyEngine
    from unflip.train import RunOptions

    chosen = compare(
        recipes,
        out,
        seeds,
        overrides=override or [],
        epochs_scale=epochs_scale,
        teacher=teacher,
    )
    if tables_only:
        _tables(chosen, only)
    else:
        _run(
            chosen,
            data,
            only,
            StudyEngine(engine, workers, at_once),
            RunOptions(
                device, compile=compile, evaluate_every=evaluate_every, workers=image_workers
            ),
        )


@study.command(
    "methods",
    epilog="Example: unflip study methods --recipe digits-dorefa --epochs 5 --only dorefa --only xnor",
)
def compare_methods(
    epochs: Annotated[int, typer.Option(min=1, help="Epochs, the same for every method.")],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0..N-1, side by side.")] = 3,
    recipe: Annotated[
        str, typer.Option(help="Recipe to train; its method is replaced.")
    ] = "cifar10-resnet20-cosine",
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this method (repeat for more); finished runs of others stay in the table."
        ),
    ] = None,
    override: Overrides = None,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs and the table.")] = Path(
        "runs/methods"
    ),
    device: Device = None,
    engine: Engine = "together",
    workers: WorkerCount = 2,
) -> None:
    """Train every method on the same recipe and seeds.

    On a GPU, --engine pool --workers 4 compiles four methods at the same time. Only one method trains at a time;
    seconds per epoch are medians.
    """
    needs("a study", "torch")
    from unflip import models
    from unflip.hints import known
    from unflip.recipes import load_recipe
    from unflip.study.methods import compared, study_methods
    from unflip.study.runner import StudyEngine
    from unflip.train import RunOptions

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
        engine=StudyEngine(engine, workers),
        run_options=RunOptions(device),
        overrides=override or [],
        source=recipe,
    )
    _show(out)


@study.command(
    "autobnn",
    epilog="Example: unflip study autobnn --recipe digits-dorefa --epochs 2 --generations 3",
)
def search_widths(
    epochs: Annotated[int, typer.Option(min=1, help="Epochs per candidate.")],
    generations: Annotated[int, typer.Option(min=0, help="Generations after the first.")] = 5,
    population: Annotated[int, typer.Option(min=2, help="Candidates per generation.")] = 8,
    budget: Annotated[
        float, typer.Option(help="Most FLOPs, as a multiple of those of the recipe's network.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search; training uses seed 0.")] = 0,
    recipe: Annotated[
        str, typer.Option(help="Recipe to train; its method is replaced.")
    ] = "cifar10-resnet20-cosine",
    method: Annotated[str, typer.Option(help="Method that binarizes the candidates.")] = "autobnn",
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs and the table.")] = Path(
        "runs/autobnn"
    ),
    device: Device = None,
) -> None:
    """Search the widths of a network by evolution.

    Candidates stay under a budget of FLOPs. The result is one table.
    """
    needs("a study", "torch")
    from unflip import methods
    from unflip.recipes import load_recipe
    from unflip.study.autobnn import Search
    from unflip.study.autobnn import search_widths as evolve

    replaced = methods.resolve(method).options()
    chosen = load_recipe(recipe, [f"epochs={epochs}"]).model_copy(update={"method": replaced})
    search = Search(population, generations, budget, seed=seed)
    evolve(chosen, chosen.data.load(data), out, search=search, device=device)
    _show(out)
