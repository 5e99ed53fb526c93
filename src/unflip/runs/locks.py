"""Locks on files, which end with the process that holds them, however it ends."""

from __future__ import annotations

import fcntl
from typing import IO


def try_lock(file: IO[str]) -> bool:
    """Take the file's lock until it is closed; False if another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
