"""Tasks done by worker processes, with results in the order of the tasks, whatever the number of processes."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from unflip.hints import Foreseen

AHEAD = 2  # tasks that a worker has at a time: one that it does, and one that waits

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkerError(Foreseen, RuntimeError):
    """A worker process ended, or raised an error that nobody foresaw."""


def results(
    function: Callable[[Shared, Task], Result],
    shared: Shared,
    tasks: Iterable[Task],
    workers: int,
) -> Generator[Result, None, None]:
    """``function(shared, task)`` for each task, in their order. With one worker, in this process.

    Closing the generator ends the processes.
    """
    if workers == 1:
        try:
            yield from (function(shared, task) for task in tasks)
        except MemoryError:
            raise _no_memory() from None
        return
    with ExitStack() as stack:
        pool = [stack.enter_context(_Worker(function, shared)) for _ in range(workers)]
        # Task k goes to worker k % workers, which keeps their order: so do the results.
        given = 0
        waiting = iter(tasks)
        for task in itertools.islice(waiting, workers * AHEAD):
            pool[given % workers].send(task)
            given += 1
        taken = 0
        while taken < given:
            worker = pool[taken % workers]
            result = worker.receive()
            taken += 1
            for task in itertools.islice(waiting, 1):
                pool[given % workers].send(task)
                given += 1
            yield result


class _Worker:
    """A process that answers tasks one after another, until its pipe is closed."""

    def __init__(self, function: Callable[[Any, Any], Any], shared: Any) -> None:
        # Not forked: a progress bar has threads. And a pipe that no other process inherits closes with this one.
        context = multiprocessing.get_context("spawn")
        self.pipe, its_end = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(its_end, function, shared), daemon=True
        )
        self.process.start()
        its_end.close()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *raised: object) -> None:
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()

    def send(self, task: Any) -> None:
        try:
            self.pipe.send(task)
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self) -> Any:
        try:
            result, error = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._ended() from None
        if error is not None:
            raise error
        return result

    def _ended(self) -> WorkerError:
        self.process.join(5)
        return WorkerError(
            f"a worker process ended with exit code {self.process.exitcode}. If memory ran out, use fewer workers: "
            "--workers N. The same command resumes."
        )


def _no_memory() -> WorkerError:
    return WorkerError(
        "memory ran out. Use fewer workers (--workers N), or end other programs. The same command resumes."
    )


def _serve(pipe: Connection, function: Callable[[Any, Any], Any], shared: Any) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all; the main process ends the others
    warnings.simplefilter("ignore")  # once per process would be once per worker
    try:
        while True:
            pipe.send(_answer(function, shared, pipe.recv()))
    except (EOFError, OSError):
        return  # the main process has ended


def _answer(function: Callable[[Any, Any], Any], shared: Any, task: Any) -> tuple[Any, Any]:
    try:
        return function(shared, task), None
    except (Foreseen, ValueError) as error:
        return None, error
    except MemoryError:
        return None, _no_memory()
    except Exception:
        return None, WorkerError(traceback.format_exc())
