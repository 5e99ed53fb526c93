"""Processes that share a GPU take turns: they compile side by side, and one at a time trains.

Two captured graphs on one GPU only slow each other down, and neither's seconds per epoch mean anything. Compilation
is work for the CPU, so it goes on beside the others.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.05


@contextmanager
def take_turn(path: Path | None, stop: Sequence[int] = ()) -> Iterator[None]:
    """Hold the file's lock while the block runs (None: no one to wait for).

    Whatever ends the process gives the turn back. A signal noted in ``stop`` ends the wait: there is nothing to save
    before the first step.
    """
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        while not _taken(file.fileno()):
            if stop:
                raise KeyboardInterrupt("stopped while waiting for a turn")
            time.sleep(POLL_SECONDS)
        yield


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
