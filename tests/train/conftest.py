"""What the tests of training share."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from unflip.data import ImageSet
from unflip.data import load as load_data
from unflip.train import checkpoint as checkpoints


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


@pytest.fixture
def in_the_interpreter() -> Callable[[str], None]:
    """Run a file of kernel tests in a process of its own: Triton's interpreter is chosen before Triton is imported."""

    def run(file: str) -> None:
        pytest.importorskip("triton")
        pytest.importorskip("numpy")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]

    return run
