"""What the tests of training share."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
def compile_for_sm_90() -> Callable[..., None]:
    """Compile a Triton kernel for a GPU that is not there: the interpreter takes Python that the compiler refuses."""
    triton = pytest.importorskip("triton")
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def compile_it(
        kernel: Any, constants: dict[str, Any], kinds: dict[str, str], **options: int
    ) -> None:
        """``kinds``: of arguments that are no constants, and as "" of all others."""
        signature = {
            name: "constexpr" if name in constants else kinds.get(name, kinds[""])
            for name in kernel.arg_names
        }
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = compiler.ASTSource(kernel, signature, places)
        assert triton.compile(source, target=target, options=options).asm["ptx"]

    return compile_it


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
