"""Worker processes: none is left behind, and one that dies or fails is reported with the image's name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from unflip.data import DataError
from unflip.data.decoder import Decoder, Rows, Use
from unflip.data.transforms import Transform, epoch_keys
from unflip.data.worker_pool import WorkerPool

pytest.importorskip("PIL.Image")

# Workers import it from a folder: a part of a store whose images are made up.
PARTS = '''
"""Images of 4 x 4 pixels, all gray, as bright as the last byte of their number."""
import struct
import time
import numpy as np

HEADER = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 102, 0, 0, 54, 40, 4, 4, 1, 24, 0, 48, 0, 0, 0, 0)

class Gray:
    slow = damaged = missing = -1
    ending = ""

    def __init__(self, count):
        self.labels = np.arange(count) % 7

    def __len__(self):
        return len(self.labels)

    def name(self, index):
        return f"gray/{index}.bmp{self.ending}"

    def read(self, index):
        if index == self.slow:
            time.sleep(60)
        if index == self.missing:
            raise KeyError("missing in the test")
        data = HEADER + bytes([index % 256]) * 48
        return data[:-9] if index == self.damaged else data
'''


@pytest.fixture
def gray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Decoder]]:
    (tmp_path / "gray_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    import gray_parts

    def made(count: int, **odd: object) -> Decoder:
        part = gray_parts.Gray(count)
        part.__dict__.update(odd)
        return Decoder(part, part, Transform(size=4, resize=4))

    yield made
    sys.modules.pop("gray_parts", None)


def batches_of(count: int, batch: int) -> Iterator[Rows]:
    rows = np.stack([np.arange(count), epoch_keys(0, 0, count)], axis=1)
    return iter(rows.reshape(-1, batch, 2))


def pids(pool: WorkerPool) -> list[int]:
    return [key.data.process.pid for key in pool.processes.selector.get_map().values()]


def running(pid: int) -> bool:
    """A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kilobytes(pid: int) -> int:
    """Resident memory without what is shared with other processes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_100_000_images_take_no_more_memory_than_20_000(gray: Callable[..., Decoder]) -> None:
    count, batch = 100_000, 500
    pool = WorkerPool(gray(count), 2)
    sizes = []
    with pool.stream(Use.TRAIN, batches_of(count, batch), batch) as batches:
        for step, (images, labels) in enumerate(batches):
            number = step * batch + 7
            assert (images[7] == number % 256).all()
            assert labels[7] == number % 7
            if step in (40, count // batch - 1):
                sizes.append([kilobytes(pid) for pid in (os.getpid(), *pids(pool))])
    pool.close()
    growth = np.subtract(sizes[1], sizes[0])
    assert growth.max() < 2000, f"KB of this process and the workers: {sizes}"


def test_a_killed_worker_is_reported_with_its_image(gray: Callable[..., Decoder]) -> None:
    pool = WorkerPool(gray(400, slow=20), 2)
    with pool.stream(Use.TRAIN, batches_of(400, 100), 100) as batches:
        while 20 not in (current := pool.processes.current[:2, 1].tolist()):
            time.sleep(0.01)
        began = time.monotonic()
        os.kill(pids(pool)[current.index(20)], signal.SIGKILL)
        with pytest.raises(DataError, match=r"killed while it decoded gray/20\.bmp.*memory"):
            next(batches)
    assert time.monotonic() - began < 2
    assert not pool.close.alive, "the others have ended too"


def test_a_damaged_image_is_named_and_the_workers_live_on(gray: Callable[..., Decoder]) -> None:
    pool = WorkerPool(gray(400, damaged=230, missing=10), 1)
    with pool.stream(Use.TRAIN, iter([*batches_of(400, 50)][1:]), 50) as batches:
        time.sleep(0.2)  # by now the error is known, but the batches before it are not lost
        assert [len(next(batches)[0]) for _ in range(3)] == [50] * 3
        with pytest.raises(DataError, match=r"gray/230\.bmp cannot be decoded as an image"):
            next(batches)
    with pool.stream(Use.TRAIN, iter([*batches_of(200, 50)][1:]), 50) as batches:
        assert len([*batches]) == 3
    with (
        pool.stream(Use.TEST, batches_of(400, 400), 400) as batches,
        pytest.raises(RuntimeError, match="missing in the test"),
    ):
        next(batches)
    [pid] = pids(pool)
    pool.close()
    assert not running(pid)


# Two workers, the first batch, their numbers; then the process waits, or fails.
PROGRAM = """
import sys, time
import numpy as np
from gray_parts import Gray
from unflip.data.decoder import Decoder, Use
from unflip.data.transforms import Transform
from unflip.data.worker_pool import WorkerPool

part = Gray(1000)
pool = WorkerPool(Decoder(part, part, Transform(4, 4)), 2)
rows = np.zeros((10, 100, 2), np.int64)
with pool.stream(Use.TRAIN, iter(rows), 100) as batches:
    next(batches)
    print(*(key.data.process.pid for key in pool.processes.selector.get_map().values()), flush=True)
    assert "torch" not in sys.modules
    if sys.argv[1] == "fails":
        raise ValueError("on purpose")
    time.sleep(60)
"""


@pytest.mark.usefixtures("gray")
def test_no_process_is_left_behind(tmp_path: Path) -> None:
    """After an exception, after Ctrl-C in the terminal (which all processes get), and after kill -9."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = {
        end: subprocess.Popen(
            [sys.executable, "program.py", end],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell lets its background jobs, and all that they start, ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        for end in ("fails", "SIGINT", "SIGKILL")
    }
    for end, process in started.items():
        assert process.stdout is not None
        workers = [int(word) for word in process.stdout.readline().split()]
        assert len(workers) == 2, process.communicate()
        if end == "SIGINT":
            os.killpg(process.pid, signal.SIGINT)
        elif end == "SIGKILL":
            process.kill()
        _, errors = process.communicate(timeout=20)
        until = time.monotonic() + 5
        while any(map(running, workers)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(running, workers)), end
        expected = {"fails": "on purpose", "SIGINT": "KeyboardInterrupt", "SIGKILL": ""}[end]
        assert errors.count("Traceback") == bool(expected), errors
        assert expected in errors
        assert "leaked" not in errors


def test_a_name_that_is_not_utf8_is_reported(gray: Callable[..., Decoder]) -> None:
    pool = WorkerPool(gray(10, damaged=3, ending="\udcff"), 1)
    try:
        with (
            pytest.raises(DataError, match=r"gray/3\.bmp\\udcff cannot be decoded"),
            pool.stream(Use.TRAIN, batches_of(10, 10), 10) as batches,
        ):
            next(batches)
    finally:
        pool.close()


def test_a_crop_that_fails_for_want_of_memory_names_the_image(
    gray: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crop(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Transform, "for_testing", crop)
    with pytest.raises(DataError, match=r"Memory ran out while gray/0\.bmp.*--image-workers"):
        gray(10).decoded(Use.TEST, next(batches_of(10, 10)))


def test_too_many_workers_are_refused(gray: Callable[..., Decoder]) -> None:
    with pytest.raises(DataError, match="workers=0 must be from 1 to"):
        WorkerPool(gray(10), 0)
