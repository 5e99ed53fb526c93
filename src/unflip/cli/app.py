"""The command line's root, which every module of commands adds itself to."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

app = typer.Typer(
    help="Train, correct and deploy 1-bit neural networks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In a file or a pipe nothing is wrapped: a row of a table stays one line. Folders may be called [x] or :x:, so there is
# no markup anywhere.
console = Console(
    soft_wrap=True,
    width=None if sys.stdout.isatty() else 200,
    markup=False,
    emoji=False,
)
