"""Making and locking the folders of runs that are about to be trained."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from unflip.disk import try_lock
from unflip.runs.files import RunError


@contextmanager
def new_folders(folders: Sequence[Path]) -> Iterator[Callable[[], None]]:
    """Make the folders. If the block fails before it calls the yielded function, those that are new are removed."""
    new = [folder for folder in folders if not folder.exists()]
    above = [parent for folder in folders[:1] for parent in folder.parents if not parent.exists()]
    begun: list[bool] = []
    try:
        for folder in folders:
            _make(folder)
        yield lambda: begun.append(True)
    except BaseException:
        if not begun:
            for folder in new:
                shutil.rmtree(folder, ignore_errors=True)
            for folder in above:
                with suppress(OSError):  # another process has put something there
                    folder.rmdir()
        raise


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}") from error


@contextmanager
def locked(folders: Sequence[Path]) -> Iterator[None]:
    """Hold the folders for this process; refused if another process trains in one of them."""
    with ExitStack() as stack:
        for folder in folders:
            try:
                file = stack.enter_context(open(folder / ".lock", "w"))
            except OSError as error:
                raise RunError(f"cannot write to {folder}: {error.strerror}") from error
            if not _lock_patiently(file):
                raise RunError(f"another process is training in {folder}: wait for it, or stop it")
        yield


def _lock_patiently(file: IO[str]) -> bool:
    """Wait up to a second, because `unflip runs` holds the lock for a moment to look."""
    for _ in range(10):
        if try_lock(file):
            return True
        time.sleep(0.1)
    return False
