"""The C API of the native library as one class. The user interface is in :mod:`unflip.runtime.model`.

It uses ctypes, so one wheel per platform fits every version of Python. Importing this module loads the library, and
raises ImportError if there is none. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import math
import sys
from ctypes import POINTER, c_char_p, c_double, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

Shape = tuple[int, int, int]

NAMES = {"darwin": "libunflip.dylib", "win32": "unflip.dll"}
NAME = NAMES.get(
    sys.platform, "libunflip.so.0"
)  # the number is UNFLIP_ABI in native/CMakeLists.txt

Three = c_int * 3
MOST_SAMPLES = 2**31 - 1


class Limits(ctypes.Structure):
    """``unflip_limits``. 0 is the default."""

    _fields_ = (("max_memory", c_uint64), ("max_work", c_uint64))


# Every function of unflip.h that is used here: the type that it returns, and the types of its arguments.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "error": (c_char_p,),
    "version": (c_char_p,),
    "load": (c_void_p, c_char_p, c_int, POINTER(Limits)),
    "load_memory": (c_void_p, c_char_p, c_size_t, c_int, POINTER(Limits)),
    "free": (None, c_void_p),
    "memory_needed": (c_uint64, c_void_p),
    "work_needed": (c_uint64, c_void_p),
    "input_shape": (c_int, c_void_p, POINTER(c_int)),
    "ops": (c_int, c_void_p),
    "op_name": (c_char_p, c_void_p, c_int),
    "outputs": (c_int, c_void_p),
    "output_name": (c_char_p, c_void_p, c_int),
    "shape_of_output": (c_int, c_void_p, c_int, POINTER(c_int)),
    "output_dims": (c_int, c_void_p, c_int),
    "structure": (c_char_p, c_void_p),
    "run_outputs": (c_int, c_void_p, c_void_p, c_int, POINTER(c_void_p)),
    "profile_outputs": (c_int, c_void_p, c_void_p, c_int, POINTER(c_void_p), POINTER(c_double)),
    "has_preprocess": (c_int, c_void_p),
    "preprocess": (c_int, c_void_p, POINTER(c_double), POINTER(c_double)),
    "labels": (c_int, c_void_p),
    "label": (c_char_p, c_void_p, c_int),
    "isa": (c_char_p, c_void_p),
    "threads": (c_int, c_void_p),
}


def _find() -> Path:
    """In an editable install, the package has two folders: the sources, and the one with built files."""
    folders = [Path(folder) for folder in sys.modules[__package__].__path__]
    for folder in folders:
        if (folder / NAME).exists():
            return folder / NAME
    raise ImportError(f"{NAME} is not in {folders[0]}")


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, *arguments) in SIGNATURES.items():
            function = getattr(library, f"unflip_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:  # built for another system, or of another version
        raise ImportError(f"{path}: {error}") from error
    return library


PATH = _find()
_C = _load(PATH)


def version() -> str:
    return _text(_C.unflip_version())


def _text(data: bytes) -> str:
    """Messages contain names from files and paths, and a shortened message may end in the middle of a character."""
    return data.decode("utf-8", "replace")


class Network:
    """A network that is ready to run. Limits of 0 are the defaults."""

    def __init__(self, path: bytes, threads: int, max_memory: int = 0, max_work: int = 0) -> None:
        self._adopt(_C.unflip_load(path, threads, Limits(max_memory, max_work)))

    @classmethod
    def from_bytes(
        cls, data: bytes, threads: int, max_memory: int = 0, max_work: int = 0
    ) -> Network:
        network = cls.__new__(cls)
        limits = Limits(max_memory, max_work)
        network._adopt(_C.unflip_load_memory(data, len(data), threads, limits))
        return network

    def _adopt(self, model: int | None) -> None:
        if model is None:
            raise ValueError(_text(_C.unflip_error()))
        self._model = model
        self.input_shape: Shape = self._shape(_C.unflip_input_shape)
        numbers = range(_C.unflip_outputs(model))
        self.outputs = [
            (_text(_C.unflip_output_name(model, i)), self._shape(_C.unflip_shape_of_output, i))
            for i in numbers
        ]
        self.output_dims = [int(_C.unflip_output_dims(model, i)) for i in numbers]
        """For each output 1 if the model returned a vector, or 3 if it returned an image."""
        self._sample = math.prod(self.input_shape)
        self._results = [math.prod(shape) for _, shape in self.outputs]
        self._pointers = c_void_p * len(numbers)

    def __del__(self, free: Any = _C.unflip_free) -> None:
        free(self.__dict__.pop("_model", None))

    def _shape(self, function: Any, *number: int) -> Shape:
        sizes = Three()
        function(self._model, *number, sizes)
        return sizes[0], sizes[1], sizes[2]

    def run(self, x: Any, *outputs: Any) -> None:
        """All are float32 arrays, or torch tensors, in C order on the CPU. They are not converted."""
        if _C.unflip_run_outputs(self._model, *self._places(x, outputs)):
            raise ValueError(_text(_C.unflip_error()))

    def profile(self, x: Any, *outputs: Any) -> list[float]:
        """Like :meth:`run`; returns the seconds spent in each op."""
        seconds = (c_double * _C.unflip_ops(self._model))()
        if _C.unflip_profile_outputs(self._model, *self._places(x, outputs), seconds):
            raise ValueError(_text(_C.unflip_error()))
        return list(seconds)

    def _places(self, x: Any, outputs: tuple[Any, ...]) -> tuple[int, int, Any]:
        """Pointer and batch of the input, and the pointers of the outputs. :class:`unflip.Model` checks shapes and
        reports errors. The checks here only prevent a bug there from writing out of bounds."""
        source, size = _place(x, "the input must be a float32 array in C order on the CPU")
        places = [_place(output, WRITABLE, writable=True) for output in outputs]
        batch, rest = divmod(size, self._sample)
        fits = not rest and batch <= MOST_SAMPLES
        if not fits or [n for _, n in places] != [batch * n for n in self._results]:
            raise ValueError("input and outputs must have the model's shapes and the same batch")
        return source, batch, self._pointers(*[place for place, _ in places])

    @property
    def structure(self) -> str:
        return _text(_C.unflip_structure(self._model))

    @property
    def ops(self) -> list[str]:
        count = _C.unflip_ops(self._model)
        return [_text(_C.unflip_op_name(self._model, i)) for i in range(count)]

    @property
    def preprocess(self) -> dict[str, list[float]] | None:
        if not _C.unflip_has_preprocess(self._model):
            return None
        numbers = c_double * self.input_shape[0]
        mean, std = numbers(), numbers()
        _C.unflip_preprocess(self._model, mean, std)
        return {"mean": list(mean), "std": list(std)}

    @property
    def labels(self) -> list[str] | None:
        count = _C.unflip_labels(self._model)
        return [_text(_C.unflip_label(self._model, i)) for i in range(count)] or None

    @property
    def isa(self) -> str:
        return _text(_C.unflip_isa(self._model))

    @property
    def threads(self) -> int:
        return int(_C.unflip_threads(self._model))

    @property
    def memory_needed(self) -> int:
        return int(_C.unflip_memory_needed(self._model))

    @property
    def work_needed(self) -> int:
        return int(_C.unflip_work_needed(self._model))


WRITABLE = "an output must be a float32 array in C order on the CPU that can be written"


def _place(array: Any, wanted: str, writable: bool = False) -> tuple[int, int]:
    """Pointer to the first number, and how many numbers there are."""
    if isinstance(array, np.ndarray):
        flags = array.flags
        if array.dtype == np.float32 and flags.c_contiguous and (flags.writeable or not writable):
            return _pointer(array, flags.writeable), array.size
    elif _is_tensor(array) and array.device.type == "cpu" and array.is_contiguous():
        return array.data_ptr(), array.numel()
    raise TypeError(wanted)


def _is_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")  # a tensor can exist only if torch was imported
    return torch is not None and isinstance(array, torch.Tensor) and array.dtype == torch.float32


def _pointer(array: Any, writable: bool) -> int:
    """What ``array.ctypes.data`` is, a microsecond sooner."""
    if writable and array.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    return int(array.ctypes.data)
