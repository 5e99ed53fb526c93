"""CUDA C++ compiled at run time by NVRTC, through torch: one kernel of a source file, for given constants.

torch's function is private (``torch.cuda._compile_kernel``, since 2.9) and may be missing or fail, so every caller must
work without the kernel. The exception says what is missing. No CUDA toolkit is needed, only the NVRTC library that
comes with torch's own packages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

DEFAULT_SHARED_BYTES = 48 * 1024  # a block has these without asking


@cache
def compiled(file: Path, name: str, device: int, shared_bytes: int, /, **constants: int) -> Any:
    """The function ``name`` of ``file``, loaded on the current device, whose number is ``device``.

    Call it with ``grid=``, ``block=``, ``args=`` and ``shared_mem=``; it runs on the current stream. Loading is not
    allowed while a CUDA graph is captured, so the first call for each set of constants has to come before the capture.
    """
    if not hasattr(torch.cuda, "_compile_kernel"):
        raise RuntimeError(f"torch {torch.__version__} cannot compile CUDA C++ at run time")
    _preload_nvrtc()
    with _any_cuda_home():
        kernel = torch.cuda._compile_kernel(
            file.read_text(encoding="utf-8"),
            name,
            nvcc_options=[f"-D{key}={value}" for key, value in constants.items()],
        )
    if shared_bytes >= DEFAULT_SHARED_BYTES:
        kernel.set_shared_memory_config(shared_bytes)
    return kernel


def _preload_nvrtc() -> None:
    """Load NVRTC from torch's packages where the system cannot find it: torch then finds the loaded library by name."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    try:
        ctypes.CDLL(name)
    except OSError as error:
        packages = Path(torch.__file__).parents[1] / "nvidia"
        found = sorted(packages.glob(f"*/lib/{name}"))
        if not found:
            raise RuntimeError(
                f"{name} is neither in the system's library path nor under {packages}"
            ) from error
        ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)


@contextmanager
def _any_cuda_home() -> Iterator[None]:
    """torch refuses to compile without a toolkit's headers, which our sources do not need."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    if home is None:
        cpp_extension.CUDA_HOME = str(Path(torch.__file__).parent)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = home
