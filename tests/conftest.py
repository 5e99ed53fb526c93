"""What several tests share: ``unflip`` as a command in a process of its own.

Importing torch takes a second or two, and some tests start dozens of processes. They are forked from one that
has imported everything, and are otherwise what ``python -m unflip`` is.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import runpy
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from unflip.data import ImageSet
from unflip.data import load as load_data
from unflip.runs import checkpoint as checkpoints

COMMAND = Path(__file__).with_name("command.py")

_server = multiprocessing.get_context("forkserver")
# Commands import what they need when they run; torch's optimizers import torch._dynamo when the first one is made.
_server.set_forkserver_preload(
    [
        "unflip.cli",
        "unflip.train.loop",
        "unflip.study.paper",
        "unflip.packing.make",
        "unflip.data.digits",
        "sklearn.datasets",
        "torch._dynamo",
    ]
)


# Tensors and networks in the tests are tiny: threads would only wait for each other. Set here, and not in the fixture
# below alone, because fixtures of a module run before it.
torch.set_num_threads(1)


# Files with few but long tests. Begun last, one of them would keep one core waiting for the other.
LONG = ("runtime/test_native.py", "kernels/test_mapping_conv.py", "kernels/test_sign_conv.py")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is nightly
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; with --no-loadscope-reorder, xdist keeps that order."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))
    _thin(items)


def _thin(items: list[pytest.Item]) -> None:
    """``thinned(n)``: by day every n-th case of a test, all of them at night."""
    seen: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("thinned")
        if marker is None:
            continue
        test = item.nodeid.split("[")[0]
        if seen[test] % marker.args[0]:
            item.add_marker(pytest.mark.nightly)
        seen[test] += 1


@pytest.fixture(autouse=True)
def _fixed_seed_and_one_thread() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)  # a test may have changed it


@pytest.fixture(autouse=True)
def _cache_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What a test remembers about kernels, no other test and no user must find."""
    folder = tmp_path_factory.getbasetemp() / "cache" / uuid.uuid4().hex
    monkeypatch.setenv("UNFLIP_CACHE", str(folder))


@dataclass
class Command:
    """A running ``unflip`` command."""

    process: BaseProcess
    folder: Path

    def wait(self, seconds: float = 120) -> Command:
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running: {self.out}{self.err}"
        return self

    def wait_for(self, happened: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not happened():
            assert self.process.is_alive(), f"ended too early: {self.out}{self.err}"
            assert time.monotonic() < end, f"waited in vain: {self.out}{self.err}"
            time.sleep(0.002)

    def send(self, number: signal.Signals) -> Command:
        assert self.process.pid is not None
        if self.process.is_alive():
            os.kill(self.process.pid, number)
        return self.wait()

    @property
    def code(self) -> int:
        """The exit code; minus the signal's number if one ended it."""
        assert self.process.exitcode is not None
        return self.process.exitcode

    @property
    def out(self) -> str:
        return self._read("stdout")

    @property
    def err(self) -> str:
        return self._read("stderr")

    def _read(self, stream: str) -> str:
        """Empty where the process died before it had opened the file."""
        path = self.folder / stream
        return path.read_text() if path.exists() else ""


Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """``start("train", "digits-dorefa", ...)`` begins the command in a folder of its own.

    Options: inside, another folder; checkpoint_seconds; die_at_write, the number of the file at which it kills itself;
    step_seconds, to wait before each step.
    """
    started: list[Command] = []

    def begin(*arguments: object, **options: object) -> Command:
        folder = tmp_path_factory.mktemp("command")
        settings = {
            "ARGUMENTS": [str(a) for a in arguments],
            "FOLDER": str(folder),
            "OPTIONS": options,
        }
        process = _server.Process(target=runpy.run_path, args=(str(COMMAND), settings, "__main__"))
        process.start()
        started.append(Command(process, folder))
        return started[-1]

    yield begin
    for command in started:
        if command.process.is_alive():
            command.send(signal.SIGKILL)


@pytest.fixture
def unflip(start: Start) -> Start:
    """Runs the command to its end."""
    return lambda *arguments, **options: start(*arguments, **options).wait()


@pytest.fixture(scope="session")
def digits() -> ImageSet:
    return load_data("digits", None)


@pytest.fixture(scope="session")
def weights_hash() -> Callable[[Path], str]:
    """SHA-256 of the model in the newest checkpoint of a run's folder."""

    def digest(folder: Path) -> str:
        saved, problems = checkpoints.load_latest(folder)
        assert saved is not None, problems
        total = hashlib.sha256()
        names = sorted(name for name in saved.tensors if name.startswith("model."))
        assert names
        for name in names:
            total.update(name.encode())
            total.update(saved.tensors[name].numpy().tobytes())
        return total.hexdigest()

    return digest
