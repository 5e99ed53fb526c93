"""Tries an action in a child process with limits on time and memory, before this process does the same.

A pickle of a kilobyte can ask for any time and memory, also if it may only make tensors: tuples of tuples take time
that doubles with each level. On other systems than Linux there is no such trial.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

LONGEST = 10_000  # bytes of a message
INSTEAD = "; the file should contain only names and tensors"


def problem_of(action: Callable[[], object], name: str, seconds: float, memory: int) -> str | None:
    """What goes wrong if ``action`` runs with ``memory`` more bytes, or None. Its own errors are returned as text.

    ``name``: the action in messages, such as "reading model.pth".
    """
    if not sys.platform.startswith("linux"):
        return None
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child needs none
        child = os.fork()
    if child == 0:
        _try(action, name, memory, writer)
    os.close(writer)
    ended = bool(select.select([reader], [], [], seconds)[0])
    text = os.read(reader, LONGEST) if ended else b""
    os.close(reader)
    if not ended:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not ended:
        return f"{name} takes more than {seconds:g} seconds{INSTEAD}"
    if text:
        return text.decode(errors="replace")
    return f"{name} ends the process with status {status}{INSTEAD}" if status else None


def _try(action: Callable[[], object], name: str, memory: int, writer: int) -> NoReturn:
    """In the child: run the action, and report its error."""
    problem = ""
    try:
        warnings.simplefilter("ignore")
        _limit_memory(memory)
        action()
    except MemoryError:
        problem = f"{name} needs more than {memory:,} bytes of memory{INSTEAD}"
    except BaseException as error:
        problem = str(error) or type(error).__name__
    finally:
        os.write(writer, problem.encode(errors="replace")[:LONGEST])
        os._exit(0)


def _limit_memory(more: int) -> None:
    import resource

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))
