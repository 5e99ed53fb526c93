"""Ctrl-C and SIGTERM, for what has something to save or to clean up. Python gives them to the main thread alone."""

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
    """Collects Ctrl-C and SIGTERM so that the loop can save between two steps."""
    received: list[int] = []
    put_back = _handle(lambda number, frame: received.append(number), signal.SIGINT, signal.SIGTERM)
    try:
        yield received
    finally:
        put_back()


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """What cleans up after Ctrl-C cleans up after SIGTERM too."""
    put_back = sigterm_interrupts()
    try:
        yield
    finally:
        put_back()


def sigterm_interrupts() -> Callable[[], None]:
    """From now on SIGTERM is as Ctrl-C, until what is returned is called."""
    return _handle(interrupt, signal.SIGTERM)


def interrupt(number: int, frame: FrameType | None = None) -> NoReturn:
    """End as Ctrl-C does, and say which signal asked for it."""
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")


def _handle(handler: Handler, *numbers: signal.Signals) -> Callable[[], None]:
    """Handle these signals, until what is returned is called; nothing beside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = {number: signal.signal(number, handler) for number in numbers}

    def put_back() -> None:
        for number, previous in before.items():
            if previous is not None:  # a library's in C, which Python cannot put back
                signal.signal(number, previous)

    return put_back
