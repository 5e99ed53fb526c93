"""What the tests of the GPU kernels share."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unflip import models
from unflip.kernels import Trial, shared_predictions
from unflip.kernels.sign_conv import cuda_kernels
from unflip.kernels.tuning import INTERPRETED
from unflip.layers import auxiliary_losses


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if INTERPRETED and item.get_closest_marker("at_length"):
            item.add_marker(pytest.mark.nightly)


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
def in_the_interpreter() -> Callable[..., None]:
    """Run a file of kernel tests in a process of its own: Triton's interpreter is chosen before Triton is imported."""

    def run(file: str, marked: str = "not nightly") -> None:
        pytest.importorskip("triton")
        pytest.importorskip("numpy")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, file],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]

    return run


@pytest.fixture
def make_trial() -> Callable[..., Trial]:
    """A small network in training, and how to try a step with it."""

    def make(
        method: Any = "dorefa",
        seed: int = 0,
        device: str = "cpu",
        half: bool = True,
        **options: Any,
    ) -> Trial:
        torch.manual_seed(seed)
        model = models.create("resnet20", method, **{"width": 16, "in_channels": 1, **options})
        model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.randn(2, 1, 8, 8, device=device)

        def forward() -> Tensor:
            with torch.autocast(device, torch.float16, enabled=half), shared_predictions(model):
                logits = model(x)
                return logits.float().sum() + sum(auxiliary_losses(model).values())

        def snapshot() -> dict[str, Tensor]:
            return {name: value.clone() for name, value in model.state_dict().items()}

        @torch.no_grad()
        def restore(state: dict[str, Tensor]) -> None:
            for name, value in model.state_dict().items():
                value.copy_(state[name])

        return Trial(model, half, str(method), forward, snapshot, restore)

    return make


class Launch(ctypes.Structure):
    """How ``warp_emulator.h`` launches a kernel, and what it counts."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("late_copies", ctypes.c_int),
        ("backwards", ctypes.c_int),
        ("arguments", ctypes.c_uint64 * 8),
        ("bytes", ctypes.c_uint64 * 8),
        ("ldmatrix", ctypes.c_int64),
        ("mma", ctypes.c_int64),
        ("wavefronts", ctypes.c_int64),
        ("copy_conflicts", ctypes.c_int64),
    )


class Emulated:
    """Kernels that are compiled for a CPU."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def __call__(
        self,
        name: str,
        grid: tuple[int, ...],
        threads: int,
        shared_bytes: int,
        arguments: list[Tensor | int],
        late_copies: bool = True,
        backwards: bool = False,
    ) -> Launch:
        """Runs a kernel. Any problem is an AssertionError that says what it was."""
        launch = Launch(grid, threads, shared_bytes, late_copies, backwards)
        for i, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                launch.arguments[i] = argument.data_ptr()
                launch.bytes[i] = argument.numel() * argument.element_size()
            else:
                launch.arguments[i] = argument
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        problem = function(ctypes.byref(launch)).decode()
        assert not problem, problem
        return launch


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Emulated]:
    """Compile CUDA C++ with g++ against ``warp_emulator.h``. The source may include our kernels; what it has to define
    are functions of a launch: ``extern "C" const char* NAME(emulator::Launch& launch)``.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile kernels for the CPU")
    folder = tmp_path_factory.mktemp("emulated")
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    options += [f"-I{Path(__file__).parent}", f"-I{cuda_kernels.HERE}"]
    built: dict[str, Emulated] = {}

    def build(source: str) -> Emulated:
        if source not in built:
            library = folder / f"{len(built)}.so"
            done = subprocess.run(
                [compiler, *options, "-x", "c++", "-", "-o", str(library)],
                input='#include "warp_emulator.h"\n' + source,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            built[source] = Emulated(library)
        return built[source]

    return build
