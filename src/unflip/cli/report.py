"""``unflip report``: studies and runs as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unflip.cli.app import app, needs
from unflip.cli.options import Uses


@app.command(epilog="Example: unflip report runs/ablation -o report.html")
def report(
    sources: Annotated[
        list[Path], typer.Argument(metavar="RUN_OR_STUDY...", help="Folders of runs or studies.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="Run to compare the signs with. Default: the run that the recipe starts from."
        ),
    ] = None,
    filters: Annotated[
        int, typer.Option(min=0, help="Filters per layer that are shown weight by weight.")
    ] = 8,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    date: Annotated[str | None, typer.Option(help="Date on the page.")] = None,
    keep_signs: Annotated[
        bool,
        typer.Option(
            "--keep-signs",
            help="Keep the changed signs in each run's folder, for reports without its checkpoints.",
        ),
    ] = False,
    uses: Uses = None,
) -> None:
    """Write studies and runs as one HTML page.

    The page has tables, curves and changed signs, and opens offline.
    """
    needs("a report", "yaml")
    from unflip.report import report_data, write_report
    from unflip.uses import use_all

    use_all(uses)
    data = report_data(
        sources,
        baseline=baseline,
        filters=filters,
        title=title,
        date=date,
        keep_signs=keep_signs,
    )
    size = write_report(data, out)
    print(f"{out}, {size / 1e6:.2f} MB")
