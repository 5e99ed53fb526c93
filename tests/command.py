"""The ``unflip`` command with ``ARGUMENTS`` in a process of its own (see conftest.py); it prints to ``FOLDER``."""

import functools
import os
import signal
import sys
import time
from typing import Any

import torch

import unflip.train.job
from unflip.__main__ import main
from unflip.train.engine import Engine
from unflip.train.job import RunOptions

torch.set_num_threads(1)


def begin(arguments: list[str], folder: str, options: dict[str, Any]) -> None:
    for stream, name in ((1, "stdout"), (2, "stderr")):
        path = os.path.join(folder, name)
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.chdir(options.get("inside", folder))
    # As for the ``unflip`` script: Python does not look for modules in the current folder.
    sys.path = [path for path in sys.path if path not in ("", os.getcwd())]
    sys.argv = ["unflip", *arguments]
    if "checkpoint_seconds" in options:  # the command line has no option for it
        seconds = options["checkpoint_seconds"]
        options_of = functools.partial(RunOptions, checkpoint_seconds=seconds)
        unflip.train.job.RunOptions = options_of  # type: ignore[assignment, misc]
    if "die_at_write" in options:
        _die_at_write(options["die_at_write"])
    if "step_seconds" in options:
        _slow_down(options["step_seconds"])


def _slow_down(seconds: float) -> None:
    """So that a test which waits for something in a run does not find it finished."""
    step = Engine.step

    def slow_step(engine: Engine) -> None:
        time.sleep(seconds)
        step(engine)

    Engine.step = slow_step  # type: ignore[method-assign]


def _die_at_write(number: int) -> None:
    """kill -9 just before the file of that number would get its final name."""
    replace, seen = os.replace, []

    def replace_or_die(*paths: Any) -> None:
        seen.append(paths)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)

    os.replace = replace_or_die  # type: ignore[assignment]


begin(ARGUMENTS, FOLDER, OPTIONS)  # type: ignore[name-defined]  # noqa: F821
main()
