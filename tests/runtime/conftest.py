"""What the runtime's tests share: small networks of every op, and builds of the native part for tests."""

from __future__ import annotations

import copy
import fcntl
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import unflip
from unflip.packing.file import Packed, write

ROOT = Path(__file__).parents[2]
SEEDS = runpy.run_path(str(ROOT / "native" / "fuzz" / "seeds.py"))["seeds"]()


@pytest.fixture
def networks() -> dict[str, Packed]:
    """Every op, step and field of the format; a test may change them."""
    return {name: Packed(copy.deepcopy(p.graph), dict(p.tensors)) for name, p in SEEDS.items()}


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("networks")
    for name, packed in SEEDS.items():
        write(folder / f"{name}.unflip", packed)
    return {name: folder / f"{name}.unflip" for name in SEEDS}


@pytest.fixture(scope="session")
def instruction_sets(files: dict[str, Path]) -> list[str]:
    """Those of this CPU and build, the best one first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNFLIP_ISA", "?")
        with pytest.raises(ValueError, match="UNFLIP_ISA is '\\?'") as caught:
            unflip.load(files["vector"])
    found = re.search("support only (.*)$", str(caught.value))
    assert found is not None
    return found[1].split(", ")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two test runs in one checkout must not build in one folder at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def build() -> Callable[..., Path]:
    """``build("sanitized", ["fuzz_load"], UNFLIP_FUZZ="ON")`` gives the folder with the programs.

    It is kept, so that a second run builds only what has changed.
    """

    def make(name: str, targets: list[str], **options: str) -> Path:
        if shutil.which("cmake") is None:
            pytest.skip("needs CMake")
        folder = ROOT / "build" / f"test-{name}"
        with _alone(folder):
            settings = [f"-D{key}={value}" for key, value in options.items()]
            run("cmake", "-S", ROOT / "native", "-B", folder, *settings)
            run("cmake", "--build", folder, "--parallel", os.cpu_count(), "--target", *targets)
        return folder

    return make


def run(*command: Any, **options: Any) -> str:
    """The command's output; if it fails, all it said is in the test's message."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def command() -> Callable[..., str]:
    return run
