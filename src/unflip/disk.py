"""Files: new ones, locks, making a rename durable, and the folder of caches."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO, Any, BinaryIO


def open_new(path: Path) -> BinaryIO:
    """A new file for writing. What an earlier try left there is removed, and a link there is not followed."""
    path.unlink(missing_ok=True)
    return open(path, "xb")


if sys.platform == "win32":
    import msvcrt

    LOCKED_BYTE = 2**30  # after the end of our files: Windows refuses to read a locked byte

    def try_lock(file: IO[Any]) -> bool:
        """Take the file's lock until it is closed; False if another process holds it."""
        descriptor = file.fileno()
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        finally:
            os.lseek(descriptor, position, os.SEEK_SET)
        return True

    def sync_folder(folder: Path) -> None:
        """Windows cannot open a folder, so it has no such call."""

else:
    import fcntl

    def try_lock(file: IO[Any]) -> bool:
        """Take the file's lock until it is closed; False if another process holds it.

        It ends with the process, however that ends. OSError: this file system has no locks.
        """
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def sync_folder(folder: Path) -> None:
        """Make a rename in this folder durable."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def cache_folder(part: str) -> Path | None:
    """The folder of what can be made or downloaded again: ``$UNFLIP_CACHE/part``, or ``~/.cache/unflip/part``.

    None where there is no home folder.
    """
    chosen, base = os.environ.get("UNFLIP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen) / part
    try:
        return (Path(base) if base else Path.home() / ".cache") / "unflip" / part
    except RuntimeError:
        return None
