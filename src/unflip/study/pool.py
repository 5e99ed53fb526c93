"""Engine ``pool``: processes of this machine, one per task.

Each task gets a new process (spawn), so that compiled code and memory are released with it. Its output goes to
``OUT/ARM/train.log``. It saves and stops when the process that started it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from unflip.study.task import Task
from unflip.train.signals import sigterm_interrupts

LOG = "train.log"


class Pool:
    """Up to ``capacity`` tasks at once."""

    def __init__(self, out: Path, capacity: int) -> None:
        self.out, self.capacity = out, capacity
        self.running: dict[str, tuple[BaseProcess, Connection]] = {}
        self.restore = sigterm_interrupts()

    def start(self, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        mine, its = context.Pipe(duplex=False)
        process = context.Process(
            target=_work, args=(task, its, self.log(task.name), self.capacity), name=task.name
        )
        process.start()
        its.close()
        self.running[task.name] = (process, mine)

    def log(self, name: str) -> Path:
        return self.out / name / LOG

    def wait(self) -> tuple[str, Exception | None]:
        ended = wait([process.sentinel for process, _ in self.running.values()])
        name, process, answer = next(
            (n, p, c) for n, (p, c) in self.running.items() if p.sentinel in ended
        )
        del self.running[name]
        process.join()
        with suppress(EOFError):
            if answer.poll():
                error = answer.recv()
                if error is None or isinstance(error, Exception):
                    return name, error
                raise error  # it was interrupted
        text = (
            f"the process of {name} ended with exit code {process.exitcode}; see {self.log(name)}"
        )
        return name, RuntimeError(text)

    def stop(self) -> None:
        for process, _ in self.running.values():
            process.terminate()  # SIGTERM is noticed between two steps
        for process, _ in self.running.values():
            process.join()
        self.running.clear()
        self.restore()


def _work(task: Task, answer: Connection, log: Path, workers: int) -> None:
    error: BaseException | None = None
    try:
        _print_to(log)
        _stop_with_parent()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
        task.run()
    except KeyboardInterrupt as raised:
        print(raised, flush=True)  # it was asked for
        error = raised
    except BaseException as raised:
        traceback.print_exc()  # to the log: only the error itself goes back
        error = _portable(raised)
    with suppress(BrokenPipeError):  # nobody listens any more
        answer.send(error)


def _print_to(log: Path) -> None:
    """Lines of several processes mixed in one terminal would be unreadable."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())


def _stop_with_parent() -> None:
    """A person who kills a study should not have to look for its processes."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _portable(error: BaseException) -> BaseException:
    """The error itself if it can be sent to another process, otherwise one with the same text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
