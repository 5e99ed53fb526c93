"""SIGTERM as Ctrl-C: what cleans up after one cleans up after the other."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def sigterm_interrupts() -> Any:
    """From now on SIGTERM is as Ctrl-C; returns the handler to put back, None where signals cannot be handled."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, _interrupt)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    before = sigterm_interrupts()
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")
