"""Worker processes that decode images ahead of training, into a ring of batches in shared memory.

Images never pass through a pipe. A task names a piece of a slot in the ring, and its rows lie in the slot. All workers
take tasks from one pipe, so they need nothing from this process while it is busy. Each has a pipe for its reports.

The shared memory is a file without a name, and the pipes are closed with this process: when it dies, the workers end
and the memory is freed. ``subprocess`` starts the workers, not ``multiprocessing``: that would import the main module
of the program, and torch with it, in every worker.
"""

from __future__ import annotations

import mmap
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unflip.data.decoder import Decoder, RingShape, Rows, Use
from unflip.data.errors import DataError
from unflip.data.worker_process import (
    CONTROL_BYTES,
    DATA_ERROR,
    IDLE,
    MOST_WORKERS,
    REPORT,
    TASK,
    mapped,
)
from unflip.resize import Pixels

Report = tuple[int, int, int, bytes]  # ticket, slot, images, error
Batch = tuple[Pixels, npt.NDArray[np.int64]]
# Makes memory fast to copy to a GPU; returns what undoes it.
Pin = Callable[[Pixels], Callable[[], None]]

PIECE = 16  # images per task: a message costs little beside them, and many workers share a batch
HELD = 2  # slots that the consumer may still read
FEWEST_SLOTS, MOST_SLOTS = HELD + 2, HELD + 6
RING_BYTES = 2**30  # larger rings have the fewest slots
AT_ONCE = 4096 // TASK.size  # tasks per write: so many bytes are written in one piece

MAIN = "import sys; sys.path[:] = sys.argv[6:]; from unflip.data.worker_process import main; main()"
# One thread per worker. Freed memory is kept for the next image: asking the kernel for it again takes 15 % of the time.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**26),
    "MALLOC_TRIM_THRESHOLD_": str(2**26),
    "PILLOW_BLOCKS_MAX": "16",
}


def default_workers() -> int:
    """One per CPU that this process may use; processes that torchrun started share them."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cpus = os.cpu_count() or 1
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(cpus // beside, MOST_WORKERS))


@dataclass(frozen=True)
class Ring:
    """A ring in the shared memory: where it is, and how to undo its pinning."""

    shape: RingShape
    offset: int
    memory: Pixels
    unpin: Callable[[], None]


class Stream:
    """Batches on their way through a ring."""

    def __init__(self, ring: Ring, ticket: int, use: Use, rows: Iterator[Rows]) -> None:
        self.ring, self.ticket, self.use, self.rows = ring, ticket, use, rows
        self.sent = self.taken = 0  # batches
        self.counts = [0] * ring.shape.slots  # images of each slot
        self.left = [0] * ring.shape.slots  # images of each slot that are not decoded yet
        self.errors: dict[int, Exception] = {}  # the first of a slot


class WorkerPool:
    """Processes that decode for any number of streams, one after another or at the same time."""

    def __init__(self, decoder: Decoder, workers: int, pin: Pin | None = None) -> None:
        if sys.platform == "win32":
            raise DataError(
                "The data set 'images' needs Linux or macOS: its worker processes share files without names. "
                "Use data.name=folder, which holds all images in memory."
            )
        if not 1 <= workers <= MOST_WORKERS:
            raise DataError(
                f"workers={workers} must be from 1 to {MOST_WORKERS}. Set --image-workers."
            )
        self.decoder, self.pin = decoder, pin
        self.lock = threading.RLock()
        self.streams: dict[int, Stream] = {}
        self.rings: list[Ring] = []
        self.free: list[Ring] = []
        self.tickets = 0
        self.processes = _Processes(decoder)
        self.close = weakref.finalize(self, _close, self.processes, self.rings)
        with self._usable():
            self.processes.start(workers)

    @contextmanager
    def stream(self, use: Use, rows: Iterator[Rows], batch: int) -> Iterator[Iterator[Batch]]:
        """Batches of at most ``batch`` images with these rows, in order, as views of a ring.

        Decoding begins now. A batch stays valid until the next but one is asked for.
        """
        with self._usable():
            self.tickets += 1
            stream = Stream(self._ring(batch), self.tickets, use, rows)
            stream.ring.shape.ticket(stream.ring.memory)[0] = stream.ticket
            self.streams[stream.ticket] = stream
            self._send(stream)
        try:
            yield self._batches(stream)
        finally:
            self._end(stream)

    def _batches(self, stream: Stream) -> Iterator[Batch]:
        shape = stream.ring.shape
        while stream.ticket in self.streams:
            with self._usable():
                self._send(stream)
                if stream.taken == stream.sent:
                    return
                slot = stream.taken % shape.slots
                while stream.left[slot] and slot not in stream.errors:
                    self._receive()
            if slot in stream.errors:  # the batches before it were fine
                raise stream.errors[slot]
            stream.taken += 1
            images, labels, _ = shape.slot(stream.ring.memory, slot)
            yield images[: stream.counts[slot]], labels[: stream.counts[slot]]

    def _send(self, stream: Stream) -> None:
        """Fill the free slots. The consumer asks for batch number ``taken``, and may still read the one before."""
        shape, tasks = stream.ring.shape, []
        labels_of = self.decoder.part(stream.use).labels
        while stream.sent <= stream.taken + shape.slots - HELD:
            rows = next(stream.rows, None)
            if rows is None:
                break
            slot, count = stream.sent % shape.slots, len(rows)
            _, labels, into = shape.slot(stream.ring.memory, slot)
            into[:count], labels[:count] = rows, labels_of[rows[:, 0]]
            stream.left[slot] = stream.counts[slot] = count
            stream.sent += 1
            ring = (stream.ring.offset, shape.slots, shape.batch)
            for first in range(0, count, PIECE):
                piece = (stream.ticket, slot, stream.use, first, min(PIECE, count - first))
                tasks.append(TASK.pack(*ring, *piece))
        self.processes.send(tasks)

    def _receive(self) -> None:
        """Wait for reports, of whichever stream they are."""
        for ticket, slot, count, message in self.processes.reports():
            stream = self.streams[ticket]
            stream.left[slot] -= count
            if message:
                text = message[1:].decode(errors="replace")
                known = message[:1] == DATA_ERROR
                error = DataError(text) if known else RuntimeError(f"in a worker: {text}")
                stream.errors.setdefault(slot, error)

    def _end(self, stream: Stream) -> None:
        """Workers skip the tasks of a closed stream. Its ring is free when nobody works on it any more."""
        stream.ring.shape.ticket(stream.ring.memory)[0] = 0
        with self._usable():
            while any(stream.left) and self.close.alive:
                self._receive()
            del self.streams[stream.ticket]
            self.free.append(stream.ring)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """One thread at a time. After an error, the pool is closed: an interrupt can lose a report, and a worker that
        died never sends one."""
        with self.lock:
            try:
                yield
            except BaseException:
                self.close()
                raise

    def _ring(self, batch: int) -> Ring:
        """A free ring for such batches, or a new one at the end of the shared memory."""
        size = self.decoder.transform.size
        slots = RING_BYTES // RingShape(1, batch, size).slot_bytes
        shape = RingShape(max(FEWEST_SLOTS, min(MOST_SLOTS, slots)), batch, size)
        for ring in self.free:
            if ring.shape == shape:
                self.free.remove(ring)
                return ring
        offset, memory = self.processes.grow(shape.bytes)
        ring = Ring(shape, offset, memory, self.pin(memory) if self.pin else _nothing)
        self.rings.append(ring)
        return ring


def _nothing() -> None: ...


@dataclass(frozen=True)
class _Process:
    number: int
    process: subprocess.Popen[bytes]
    unread: bytearray  # the beginning of a report


class _Processes:
    """The workers, their pipes and the shared memory, which they have in common with this process."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.owner = decoder, os.getpid()
        self.memory_fd, self.memory_bytes = _nameless_file(), 0
        _, control = self.grow(CONTROL_BYTES)
        self.current = control.view(np.int64).reshape(-1, 2)
        self.current[:] = IDLE
        self.tasks_read, self.tasks_write = os.pipe()
        self.selector = selectors.DefaultSelector()

    def start(self, workers: int) -> None:
        decoder_fd = _nameless_file()
        with open(decoder_fd, "wb") as file:
            pickle.dump(self.decoder, file, protocol=pickle.HIGHEST_PROTOCOL)
            file.flush()
            for number in range(workers):
                self._start(number, decoder_fd)
        # Without a reader here, sending to workers that are all dead fails instead of waiting.
        os.close(self.tasks_read)
        self.tasks_read = -1

    def _start(self, number: int, decoder_fd: int) -> None:
        reports_read, reports_write = os.pipe()
        fds = (self.tasks_read, reports_write, self.memory_fd, decoder_fd)
        command = [sys.executable, "-c", MAIN, *map(str, (number, *fds)), *map(str, sys.path)]
        # Ctrl-C reaches all processes of a terminal, but only this one decides when workers end.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=fds, env=os.environ | ENVIRONMENT
            )
            self.selector.register(
                reports_read, selectors.EVENT_READ, _Process(number, process, bytearray())
            )
        finally:
            os.close(reports_write)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def grow(self, length: int) -> tuple[int, Pixels]:
        """More shared memory: its offset in the file, and the memory."""
        offset = self.memory_bytes
        pages = -(-length // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.memory_fd, offset, pages)  # refuses now, not on first use
            else:  # macOS
                os.ftruncate(self.memory_fd, offset + pages)
        except OSError as error:
            raise DataError(
                f"{length / 2**20:,.0f} MiB of shared memory for decoded batches are not available: {error}. "
                "Use a smaller batch_size."
            ) from error
        self.memory_bytes += pages
        return offset, mapped(self.memory_fd, offset, length)

    def send(self, tasks: list[bytes]) -> None:
        try:
            for first in range(0, len(tasks), AT_ONCE):
                os.write(self.tasks_write, b"".join(tasks[first : first + AT_ONCE]))
        except BrokenPipeError:
            [dead, *_] = self.selector.get_map().values()  # and so are all others
            raise self._died(dead.data) from None

    def reports(self) -> Iterator[Report]:
        """Waits for reports; raises DataError if a worker has died."""
        for key, _ in self.selector.select():
            read = os.read(key.fd, 2**16)
            if not read:
                raise self._died(key.data)
            unread = key.data.unread
            unread += read
            while len(unread) >= REPORT.size:
                ticket, slot, count, length = REPORT.unpack_from(unread)
                end = REPORT.size + length
                if len(unread) < end:
                    break
                yield ticket, slot, count, bytes(unread[REPORT.size : end])
                del unread[:end]

    def _died(self, worker: _Process) -> DataError:
        code = worker.process.wait()
        use, index = self.current[worker.number].tolist()
        doing = (
            "" if use == IDLE else f" while it decoded {self.decoder.part(Use(use)).name(index)}"
        )
        if code == -signal.SIGKILL:
            how, hint = "was killed", "If memory ran out, use fewer workers (--image-workers)."
        elif code < 0:
            how, hint = (
                f"ended by {signal.Signals(-code).name}",
                "Pack the images again without this one.",
            )
        else:
            how, hint = f"ended with code {code}", "Its own message is above."
        return DataError(f"Worker process {worker.process.pid} {how}{doing}. {hint}")


def _nameless_file() -> int:
    """A file that no other program can find. It is freed when the last process that has it open ends."""
    if hasattr(os, "memfd_create"):  # Linux; /dev/shm is often too small in containers
        return os.memfd_create("unflip-images")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _close(processes: _Processes, rings: list[Ring]) -> None:
    """Workers have nothing to save, so they are killed. Runs at the end of the program too."""
    if processes.owner != os.getpid():  # in a process forked from ours
        return
    workers = list(processes.selector.get_map().values())
    for key in workers:
        key.data.process.kill()
    for key in workers:
        key.data.process.wait()
        os.close(key.fd)
    processes.selector.close()
    for fd in (processes.tasks_read, processes.tasks_write, processes.memory_fd):
        if fd >= 0:
            os.close(fd)
    for ring in rings:
        ring.unpin()
    rings.clear()
