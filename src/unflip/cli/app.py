"""The root of the command line: where commands register, how tables are printed, what becomes of errors."""

from __future__ import annotations

import importlib.util
import io
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from unflip import __version__
from unflip.hints import EXTRAS, Foreseen, NotInstalled
from unflip.printable import printable

if TYPE_CHECKING:
    from unflip.tables import Table

STOPPED = 130  # what shells expect after Ctrl-C

FORESEEN = (Foreseen, ValueError, TypeError, OSError)

WELCOME = """\
unflip {version}: train, correct and deploy 1-bit neural networks.

{first}  unflip doctor                          what this machine can do, and what is missing
  unflip demo                            the whole idea on digits, in about six minutes
  unflip networks                        trained networks, to use at once
  unflip train images --data DIR         train a network on your own images
  unflip pack RUN -o model.unflip        a trained network as one small file
  unflip predict model.unflip cat.jpg    classify images with it

All commands: unflip --help"""
INSTALL = "  pip install 'unflip[train]'            PyTorch, for training and the demo\n"

app = typer.Typer(
    help="Train, correct and deploy 1-bit neural networks.",
    epilog="Example: unflip demo",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich takes as long as everything else that a help text needs
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


@app.callback(invoke_without_command=True)
def _without_a_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(WELCOME.format(version=__version__, first="" if installed("torch") else INSTALL))


def run() -> None:
    """Run the command. Errors we foresee are one line, without a traceback."""
    # As Python does for stderr: files on Windows have an encoding of few letters.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
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
        if not hasattr(error, "format_message"):  # click's usage errors have one
            raise
        print(_usage(error), file=sys.stderr)
        sys.exit(2)
    if code == STOPPED:
        print("\nunflip: stopped; run the same command to resume", file=sys.stderr)
    if code:
        sys.exit(code)


def _usage(error: Any) -> str:
    """Without arguments, click's message is the help text."""
    message: str = error.format_message()
    if message.startswith("Usage:"):
        return message
    context = getattr(error, "ctx", None)
    return f"unflip: {message}\nTry '{context.command_path if context else 'unflip'} --help'."


def _fail(error: Exception) -> NoReturn:
    lines = [printable(line) for line in str(error).split("\n")]  # they may quote a file
    print("unflip:", "\n".join(lines), file=sys.stderr)
    sys.exit(1)


def installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def needs(what: str, package: str) -> None:
    """Refuse, before anything is read or written, what needs a package that is not installed."""
    if not installed(package):
        raise NotInstalled(what, package)


def print_table(table: Table) -> None:
    """With rich on a terminal; elsewhere as text, so that a row stays one line."""
    if not sys.stdout.isatty():
        print(table)
        return
    from rich.console import Console

    Console().print(table)
