"""CUDA C++ compiled at run time by NVRTC, through torch: one kernel of a file beside this one, for given constants.

torch keeps this to itself (``torch.cuda._compile_kernel``, since 2.9), so anything may be missing: whoever asks for a
kernel has to do without one. What is missing is said by the exception. No CUDA toolkit is needed, only the library
that torch's own packages bring.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent / "sign_conv"
SHARED_BYTES = 48 * 1024  # what a block has without asking


@cache
def compiled(file: str, name: str, device: int, shared_bytes: int, /, **constants: int) -> Any:
    """The function ``name`` of ``file``, loaded on the current device, whose number is ``device``. Call it with
    ``grid=``, ``block=``, ``args=`` and ``shared_mem=``; it goes to the current stream.

    Loading is not allowed while a CUDA graph is captured: the first call for each set of constants has to be before.
    """
    if not hasattr(torch.cuda, "_compile_kernel"):
        raise RuntimeError(f"torch {torch.__version__} cannot compile CUDA C++ at run time")
    _preload_nvrtc()
    with _any_cuda_home():
        kernel = torch.cuda._compile_kernel(
            (HERE / file).read_text(encoding="utf-8"),
            name,
            nvcc_options=[f"-D{key}={value}" for key, value in constants.items()],
        )
    if shared_bytes >= SHARED_BYTES:
        kernel.set_shared_memory_config(shared_bytes)
    return kernel


def _preload_nvrtc() -> None:
    """torch looks NVRTC up by its name. Where the system does not know it, a loaded one has that name too."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    try:
        ctypes.CDLL(name)
    except OSError as error:
        packages = Path(torch.__file__).parents[1] / "nvidia"
        found = sorted(packages.glob(f"*/lib/{name}"))
        if not found:
            raise RuntimeError(f"{name} is neither known here nor under {packages}") from error
        ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)


@contextmanager
def _any_cuda_home() -> Iterator[None]:
    """torch refuses to compile without a toolkit's headers, which our files do not need."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    if home is None:
        cpp_extension.CUDA_HOME = str(Path(torch.__file__).parent)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = home
