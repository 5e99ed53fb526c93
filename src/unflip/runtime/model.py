"""``unflip.load``: a packed network as a callable model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from unflip.networks import locate
from unflip.printable import printable
from unflip.runtime.profile import Profile, summarize

if TYPE_CHECKING:
    from unflip.runtime._native import Network


class NativePartMissing(ImportError):
    """The native library is missing. The message says how to get it."""


def load(
    path: str | os.PathLike[str],
    threads: int = 1,
    max_memory: int | None = None,
    max_work: int | None = None,
) -> Model:
    """A packed network (an ``.unflip`` file), checked and ready to run.

    ``path``: the file; or, as text, a folder that ``unflip push`` wrote, a name that ``unflip networks`` lists, a URL
    (``https://...``), or ``hub:OWNER/NAME`` on the Hugging Face Hub. Downloads are kept in a cache. Their hashes are
    checked.

    ``threads``: how many threads share the work of one call; 0 for one per core. Any number of threads may call one
    model at the same time. The environment variable ``UNFLIP_ISA`` selects an instruction set; the default is the best
    one of the CPU. A file that is not valid raises ValueError.

    A small file can describe a huge network. So its needs are computed before memory is allocated, and a file that
    exceeds a limit raises ValueError. ``max_memory``: bytes for loading the network and running one sample (default:
    2**30, 1 GiB). ``max_work``: work for one sample, in units of about a nanosecond (default: 10**10, about ten
    seconds). Raise them only for files that you trust.
    """
    native = _native()
    limits = _limit("max_memory", max_memory), _limit("max_work", max_work)
    file = locate(path)
    if not file.exists():
        raise FileNotFoundError(f"{os.fspath(path)}: the file does not exist")
    source = _Source(file)
    network = native.Network(os.fsencode(file), _whole(threads), *limits)
    return Model(network, file.name, source, limits)


def _from_bytes(data: bytes, threads: int, name: str, limits: tuple[int, int] = (0, 0)) -> Model:
    """Restore a pickled model."""
    network = _native().Network.from_bytes(data, threads, *limits)
    return Model(network, name, _Kept(data), limits)


def _limit(name: str, value: int | None) -> int:
    """For the native library 0 is the default, and larger numbers than 2^63 do not fit."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of 1 or more, or None, not {value!r}")
    return min(value, 2**63 - 1)


class _Source:
    """The file of a model, which is read again if the model is pickled."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.state = self._state()

    def _state(self) -> tuple[int, int]:
        found = self.path.stat()
        return found.st_mtime_ns, found.st_size

    def content(self) -> bytes:
        # A file that was written since then may contain another network.
        if not self.path.exists() or self._state() != self.state:
            raise ValueError(
                f"{self.path} was changed or removed after it was loaded, so the model cannot be pickled; "
                "load it again"
            )
        return self.path.read_bytes()


class _Kept:
    """The content of a model that was loaded without a file."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def content(self) -> bytes:
        return self.data


def _whole(threads: int) -> int:
    # For larger integers the native call would only report mismatched arguments.
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= 1024:
        raise ValueError(f"threads must be 1 .. 1024, or 0 for one per core, not {threads!r}")
    return threads


def _native() -> ModuleType:
    try:
        from unflip.runtime import _native as native
    except ImportError as error:
        raise NativePartMissing(
            f"unflip's native library cannot be loaded ({error}). It is built when unflip is installed: "
            "'pip install .' or, to work on unflip itself, 'pip install -e .' in a checkout; "
            "both need a C++ compiler. Wheels have it built in."
        ) from error
    return native


def c_folder() -> Path:
    """The folder of ``unflip.h`` and the library, for C programs. In a checkout it is not this file's folder."""
    return Path(_native().PATH).parent


class Model:
    """A network that is ready to run, made by :func:`load`.

    ``model(x)`` takes float32 on the CPU, as a numpy array or a torch tensor, and returns the same kind. If
    ``takes_pixels``, it also takes images of uint8 that are not normalized:

    - a batch ``(N, C, H, W)`` gives ``(N, classes)``, or ``(N, C, H, W)`` if the output is an image;
    - one sample ``(C, H, W)`` gives one result, without N;
    - if the input is a vector (F x 1 x 1), ``(N, F)`` and ``(F,)`` are also accepted.

    It returns what the model returned before packing: a tensor (an array), a dict, or a tuple (also for a list or
    namedtuple), see ``structure``. A value with several names is returned as one array per name.

    Inputs are never converted: another dtype or device raises an error that says what to call. An input in C order is
    read in place; others (channels_last, every second image) are copied to C order first. NaN and infinities raise an
    error. The GIL is released while the network runs.

    A model can be pickled and copied, which reads its file again.
    """

    def __init__(
        self, network: Network, name: str, source: _Source | _Kept, limits: tuple[int, int] = (0, 0)
    ) -> None:
        self._network = network
        self._name = name
        self._source = source
        self._limits = limits
        self.input_shape: tuple[int, int, int] = network.input_shape
        """Channels, height, width of a sample."""
        self.output_shapes: dict[str, tuple[int, ...]] = {
            name: shape[:dims]
            for (name, shape), dims in zip(network.outputs, network.output_dims, strict=True)
        }
        """The shapes of one sample's results, by name and in order: (classes,), or channels, height, width. The names
        of a tuple are "0", "1", ... or a namedtuple's fields; the name of a single tensor is "output"."""
        self.structure: str = network.structure
        """The kind of a call's result: "tensor", "tuple" or "dict"."""
        self.labels: list[str] | None = network.labels
        """The names of the classes, or None if the file has none."""
        self.preprocess: dict[str, list[float]] | None = network.preprocess
        """{"mean": ..., "std": ...}: the input is ``(pixel / 255 - mean) / std``. None if the file has none."""
        self.takes_pixels: bool = network.takes_pixels
        """Whether images of uint8 may be given instead of normalized floats, as to networks with 8-bit ends. The
        results are the same, to the last bit."""
        self.threads: int = network.threads
        self.isa: str = network.isa
        """The instruction set of the kernels in use."""
        self.ops: tuple[str, ...] = tuple(network.ops)
        """The ops of the network, each as "kind name"."""
        self.memory_needed: int = network.memory_needed
        """A bound on the bytes for loading the network and running one sample, with its input and outputs."""
        self.work_needed: int = network.work_needed
        """A bound on the work for one sample, in units of about a nanosecond."""

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of one sample's result, for networks with one output."""
        if len(self.output_shapes) != 1:
            raise AttributeError(
                f"{self._name} has {len(self.output_shapes)} outputs, so it has no output_shape; use output_shapes"
            )
        return next(iter(self.output_shapes.values()))

    def __call__(self, x: Any) -> Any:
        ready, outputs = self._prepared(x)
        run = self._network.run_pixels if _is_bytes(ready) else self._network.run
        run(ready, *outputs)
        if self.structure == "tensor":
            return outputs[0]
        return (
            dict(zip(self.output_shapes, outputs, strict=True))
            if self.structure == "dict"
            else tuple(outputs)
        )

    def __reduce__(self) -> Any:
        return _from_bytes, (self._source.content(), self.threads, self._name, self._limits)

    def profile(self, x: Any, runs: int = 10) -> Profile:
        """The time of each layer: medians of ``runs`` calls, after one call that is not counted."""
        if runs < 1:
            raise ValueError(f"runs must be 1 or more, not {runs}")
        ready, outputs = self._prepared(x)
        profile = self._network.profile_pixels if _is_bytes(ready) else self._network.profile
        profile(ready, *outputs)
        return summarize(self.ops, [profile(ready, *outputs) for _ in range(runs)])

    def _prepared(self, x: Any) -> tuple[Any, list[Any]]:
        """The validated input in C order, and one array of the same kind per output."""
        torch = sys.modules.get("torch")  # a tensor can exist only if torch was imported
        if torch is not None and isinstance(x, torch.Tensor):
            _check_tensor(x, torch, self.takes_pixels)
            shapes = self._result_shapes(x.shape)
            return x.resolve_neg().contiguous(), [
                torch.empty(shape, dtype=torch.float32) for shape in shapes
            ]
        if isinstance(x, np.ndarray):
            _check_array(x, self.takes_pixels)
            shapes = self._result_shapes(x.shape)
            return np.ascontiguousarray(x), [np.empty(shape, np.float32) for shape in shapes]
        raise TypeError(
            f"the input must be a numpy array or a torch tensor, not {type(x).__qualname__}"
        )

    def _result_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        batch = self._batch(shape)
        return [(*batch, *output) for output in self.output_shapes.values()]

    def _batch(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """(N,) for a batch, () for one sample."""
        samples: list[tuple[int, ...]] = [self.input_shape]
        if self.input_shape[1:] == (1, 1):
            samples.append(self.input_shape[:1])
        for sample in samples:
            if shape == sample:
                return ()
            if shape[1:] == sample and shape[0] > 0:
                return shape[:1]
        allowed = [f"(N, {', '.join(map(str, s))})" for s in samples] + [str(s) for s in samples]
        raise ValueError(
            f"the input must have the shape {' or '.join(allowed)} with N of 1 or more, not {tuple(shape)}"
        )

    def __repr__(self) -> str:
        outputs = {name: _text(shape) for name, shape in self.output_shapes.items()}
        named = [
            shape if self.structure == "tensor" else f"{printable(name)}: {shape}"
            for name, shape in outputs.items()
        ]
        shapes = f"{_text(self.input_shape)} -> {', '.join(named)}"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"<unflip.Model {printable(self._name)}: {shapes}, {len(self.ops)} ops, {threads}, {self.isa}>"


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _is_bytes(x: Any) -> bool:
    return bool(x.itemsize == 1)


def _check_array(x: Any, pixels: bool) -> None:
    if pixels and x.dtype == np.uint8:
        return
    if x.dtype != np.float32 or not x.dtype.isnative:
        raise TypeError(f"the input must be float32, not {x.dtype}: x.astype(np.float32)")


def _check_tensor(x: Any, torch: Any, pixels: bool) -> None:
    if x.device.type != "cpu":
        raise ValueError(f"the input must be on the CPU, not on {x.device}: x.cpu()")
    if x.dtype != torch.float32 and not (pixels and x.dtype == torch.uint8):
        raise TypeError(f"the input must be float32, not {x.dtype}: x.float()")
    if x.layout != torch.strided:
        raise ValueError(f"the input must be dense, not {x.layout}: x.to_dense()")
    if x.requires_grad:
        raise ValueError("a packed network has no gradients: x.detach()")
