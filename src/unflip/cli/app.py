"""The root of the command line: where commands register, how tables are printed, what becomes of errors."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from unflip import __version__
from unflip.hints import EXTRAS, Foreseen, NotInstalled
from unflip.printable import printable

if TYPE_CHECKING:
    from unflip.tables import Table

STOPPED = 130  # what shells expect after Ctrl-C

FORESEEN = (Foreseen, ValueError, TypeError, OSError)

app = typer.Typer(
    help="Train, correct and deploy 1-bit neural networks.",
    epilog="Example: unflip demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich takes as long as everything else that a help text needs
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def run() -> None:
    """Run the command. Errors we foresee are one line, without a traceback."""
    try:
        code = app(standalone_mode=False) or 0
    except typer.Exit as stop:
        code = stop.exit_code
    except (typer.Abort, KeyboardInterrupt):  # typer turns Ctrl-C into one of these, or into a code
        code = STOPPED
    except FORESEEN as error:
        _fail(error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        _fail(NotInstalled("this command", package))
    except Exception as error:
        shown = getattr(error, "format_message", None)  # click's usage errors
        if shown is None:
            raise
        print(_usage(shown()), file=sys.stderr)
        sys.exit(2)
    if code == STOPPED:
        print("\nunflip: stopped; run the same command to resume", file=sys.stderr)
    if code:
        sys.exit(code)


def _usage(message: str) -> str:
    """Without arguments, click's message is the help text."""
    return message if message.startswith("Usage:") else f"unflip: {message}\nTry 'unflip --help'."


def _fail(error: Exception) -> NoReturn:
    lines = [printable(line) for line in str(error).split("\n")]  # they may quote a file
    print("unflip:", "\n".join(lines), file=sys.stderr)
    sys.exit(1)


def needs(what: str, package: str) -> None:
    """Refuse, before anything is read or written, what needs a package that is not installed."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise NotInstalled(what, package)


def print_table(table: Table) -> None:
    """With rich on a terminal; elsewhere as text, so that a row stays one line."""
    if not sys.stdout.isatty():
        print(table)
        return
    from rich.console import Console

    Console().print(table)
