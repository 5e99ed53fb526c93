"""Processes that share a GPU: they compile side by side, and one at a time trains.

Two captured graphs on one GPU only slow each other down, and the seconds per epoch of both are meaningless. Compilation
is work for the CPU, so it needs no lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unflip.disk import try_lock

POLL_SECONDS = 0.05


@contextmanager
def hold_gpu(path: Path | None, stop: Sequence[int] = ()) -> Iterator[None]:
    """Hold the file's lock while the block runs (None: nobody to wait for).

    However the process ends, the lock is released. A signal noted in ``stop`` ends the wait: before the first step
    there is nothing to save.
    """
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        while not try_lock(file):
            if stop:
                raise KeyboardInterrupt("stopped while waiting for the GPU")
            time.sleep(POLL_SECONDS)
        yield
