"""Runs in a process of its own (see conftest.py): the ``unflip`` command with ``ARGUMENTS`` in ``FOLDER``."""

import functools
import os
import signal
import sys
from typing import Any

import torch

import unflip.cli
from unflip.__main__ import main

torch.set_num_threads(1)


def begin(
    arguments: list[str], folder: str, checkpoint_seconds: float | None, die_at_write: int | None
) -> None:
    os.chdir(folder)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.argv = ["unflip", *arguments]
    if checkpoint_seconds is not None:  # the command line has no option for it
        train = functools.partial(unflip.cli.train_recipe, checkpoint_seconds=checkpoint_seconds)
        unflip.cli.train_recipe = train  # type: ignore[assignment]
    if die_at_write is not None:
        _die_at_write(die_at_write)


def _die_at_write(number: int) -> None:
    """kill -9 just before the file of that number would get its final name."""
    replace, seen = os.replace, []

    def replace_or_die(*paths: Any) -> None:
        seen.append(paths)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)

    os.replace = replace_or_die  # type: ignore[assignment]


begin(ARGUMENTS, FOLDER, CHECKPOINT_SECONDS, DIE_AT_WRITE)  # type: ignore[name-defined]  # noqa: F821
main()
