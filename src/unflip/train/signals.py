"""Ctrl-C and SIGTERM for code that has something to save or to clean up. Python delivers signals to the main thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM, so that the loop can save between two steps."""
    received: list[int] = []
    restore = _handle(lambda number, frame: received.append(number), signal.SIGINT, signal.SIGTERM)
    try:
        yield received
    finally:
        restore()


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C inside the block: what cleans up after one cleans up after the other."""
    restore = sigterm_interrupts()
    try:
        yield
    finally:
        restore()


def sigterm_interrupts() -> Callable[[], None]:
    """Treat SIGTERM as Ctrl-C from now on, until the returned function is called."""
    return _handle(interrupt, signal.SIGTERM)


def interrupt(number: int, frame: FrameType | None = None) -> NoReturn:
    """End as Ctrl-C does, naming the signal."""
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")


def _handle(handler: Handler, *numbers: signal.Signals) -> Callable[[], None]:
    """Handle these signals until the returned function is called; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = {number: signal.signal(number, handler) for number in numbers}

    def restore() -> None:
        for number, previous in before.items():
            if previous is not None:  # a handler of a C library, which Python cannot restore
                signal.signal(number, previous)

    return restore
