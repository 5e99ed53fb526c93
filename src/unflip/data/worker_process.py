"""A worker process: takes pieces of batches from a pipe, decodes them into shared memory, reports on another pipe.

``worker_pool.py`` starts it. All workers read the same pipe of tasks. A message is short enough to be written and read
in one piece, so no lock is needed, and a worker that is killed cannot leave one locked.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import sys
import traceback
from dataclasses import dataclass

import numpy as np

from unflip.data.decoder import Decoder, RingShape, Rows, Use
from unflip.data.errors import DataError
from unflip.resize import Pixels

# Ring: offset in the file, slots, batch. Piece: ticket, slot, use, first row, count.
TASK = struct.Struct("8q")
# Ticket, slot, images, and the number of bytes of an error message, which follow.
REPORT = struct.Struct("4q")
LONGEST_ERROR = 16_000
IDLE = -1
DATA_ERROR, OTHER_ERROR = b"D", b"E"  # an error message begins with one of these
# For each worker, the use and number of the image it is decoding.
CONTROL_BYTES = mmap.ALLOCATIONGRANULARITY
MOST_WORKERS = CONTROL_BYTES // 16


@dataclass(frozen=True)
class Worker:
    """What a worker has: its number, the decoder, the file of the shared memory, and the rings it has mapped so far."""

    number: int
    decoder: Decoder
    memory_fd: int
    rings: dict[int, Pixels]

    def serve(self, task_fd: int, report_fd: int) -> None:
        """Work until the pipe of tasks is closed, which also happens when the parent process dies."""
        while message := os.read(task_fd, TASK.size):
            offset, slots, batch, ticket, slot, use, first, count = TASK.unpack(message)
            shape = RingShape(slots, batch, self.decoder.transform.size)
            if offset not in self.rings:
                self.rings[offset] = mapped(self.memory_fd, offset, shape.bytes)
            memory, error = self.rings[offset], b""
            if shape.ticket(memory)[0] == ticket:  # otherwise the stream was closed
                images, _, rows = shape.slot(memory, slot)
                piece = slice(first, first + count)
                error = self._fill(Use(use), rows[piece], images[piece])
            os.write(report_fd, REPORT.pack(ticket, slot, count, len(error)) + error)

    def _fill(self, use: Use, rows: Rows, images: Pixels) -> bytes:
        """Decode one piece; returns an error message, empty if there was none."""
        current = mapped(self.memory_fd, 0, CONTROL_BYTES).view(np.int64).reshape(-1, 2)

        def begin(index: int) -> None:
            current[self.number] = use, index

        try:
            self.decoder.fill(use, rows, images, begin)
        except DataError as error:
            return DATA_ERROR + str(error).encode(errors="backslashreplace")[:LONGEST_ERROR]
        except Exception:
            return (
                OTHER_ERROR
                + traceback.format_exc().encode(errors="backslashreplace")[-LONGEST_ERROR:]
            )
        finally:
            current[self.number] = IDLE
        return b""


def mapped(fd: int, offset: int, length: int) -> Pixels:
    """A part of the shared memory; it is unmapped when the last view of it is gone."""
    return np.frombuffer(mmap.mmap(fd, length, offset=offset), np.uint8)


def main() -> None:
    number, task_fd, report_fd, memory_fd, decoder_fd = map(int, sys.argv[1:6])
    decoder = pickle.loads(os.pread(decoder_fd, os.fstat(decoder_fd).st_size, 0))
    try:
        Worker(number, decoder, memory_fd, {}).serve(task_fd, report_fd)
    except BrokenPipeError:  # the parent process is gone
        return
