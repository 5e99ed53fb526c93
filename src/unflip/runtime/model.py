"""``unflip.load``: a packed network as something to call."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from unflip.runtime.profile import Profile, summarize

if TYPE_CHECKING:
    from unflip.runtime._native import Network


class NativePartMissing(ImportError):
    """The native library is not built; the message says how to get it."""


def load(path: str | os.PathLike[str], threads: int = 1) -> Model:
    """A packed network (an ``.unflip`` file), checked and ready to run.

    ``threads`` are those that share one call's work; 0 takes as many as the machine has cores. Any number of threads
    may call one model at the same time. The instruction set is the best the CPU has; the environment
    variable ``UNFLIP_ISA`` names another. ValueError says what is wrong with a file.
    """
    native = _native()
    if not Path(path).exists():
        raise FileNotFoundError(f"{os.fspath(path)}: there is no such file")
    source = _Source(Path(path))
    return Model(native.Network(os.fsencode(path), _whole(threads)), Path(path).name, source)


def _from_bytes(data: bytes, threads: int, name: str) -> Model:
    """What a pickled model becomes."""
    return Model(_native().Network.from_bytes(data, threads), name, _Kept(data))


class _Source:
    """The file a model was loaded from, to be read again should the model be pickled."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.state = self._state()

    def _state(self) -> tuple[int, int]:
        found = self.path.stat()
        return found.st_mtime_ns, found.st_size

    def content(self) -> bytes:
        # A file of the same name that was written since may hold another network.
        if not self.path.exists() or self._state() != self.state:
            raise ValueError(
                f"{self.path} was changed or removed after it was loaded, and a model is pickled by its file: "
                "load it anew"
            )
        return self.path.read_bytes()


class _Kept:
    """As above, for a model that came without a file."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def content(self) -> bytes:
        return self.data


def _whole(threads: int) -> int:
    # Beyond an int the native call could only say that the arguments do not match.
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= 1024:
        raise ValueError(
            f"threads must be 1 .. 1024, or 0 for as many as there are cores, not {threads!r}"
        )
    return threads


def _native() -> ModuleType:
    try:
        from unflip.runtime import _native as native
    except ImportError as error:
        raise NativePartMissing(
            f"unflip's native library cannot be loaded ({error}). It is built when unflip is installed: "
            "'pip install .' or, to work on unflip itself, 'pip install -e .' in a checkout; "
            "both need a C++ compiler. A wheel ('make wheel') has it built in."
        ) from error
    return native


def c_folder() -> Path:
    """Where ``unflip.h`` and ``libunflip.so`` are, for a program in C. In a checkout that is not beside this file."""
    return Path(str(_native().__file__)).parent


class Model:
    """A network that is ready to run. :func:`load` makes it.

    ``model(x)`` takes float32 on the CPU, as a numpy array or a torch tensor, and returns the same kind:

    - ``(N, C, H, W)``, a batch, gives ``(N, classes)``, or ``(N, C, H, W)`` where the output is an image;
    - ``(C, H, W)``, one sample, gives one result: the same without N;
    - where the input is a vector (F x 1 x 1), ``(N, F)`` and ``(F,)`` are a batch and a sample as well.

    What the model returned before it was packed, this returns: a tensor (an array), a dict of them, or a tuple, which a
    list and a namedtuple become. ``structure`` says which; a value that has several names is an array for each.

    No value is converted on the way in: what would need it is refused, and the message says what to call. An input in
    C order is read where it is; another (channels_last, every second image) is copied into that order first.
    NaN is refused. The GIL is released while the network runs.

    A model can be pickled and copied; its file is read again for that.
    """

    def __init__(self, network: Network, name: str, source: _Source | _Kept) -> None:
        self._network = network
        self._name = name
        self._source = source
        self.input_shape: tuple[int, int, int] = network.input_shape
        """Channels, height, width of a sample."""
        self.output_shapes: dict[str, tuple[int, ...]] = {
            name: _without_pixels(shape) for name, shape in network.outputs
        }
        """Of one sample's results, by name and in order: (classes,), or channels, height, width. A tuple's names are
        "0", "1", ... or a namedtuple's fields; what a model returned alone is called "output"."""
        self.structure: str = network.structure
        """What a call returns: "tensor", "tuple" or "dict"."""
        self.labels: list[str] | None = json.loads(network.labels)
        """The classes' names, where the file has them."""
        self.preprocess: dict[str, list[float]] | None = json.loads(network.preprocess)
        """``(pixel / 255 - mean) / std`` makes an input of an image: {"mean": ..., "std": ...}, or None."""
        self.threads: int = network.threads
        self.isa: str = network.isa
        """Instruction set of the kernels in use."""
        self.ops: tuple[str, ...] = tuple(network.ops)
        """What the network is made of: "kind name" for each op."""

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of one sample's result, where there is one."""
        if len(self.output_shapes) != 1:
            raise AttributeError(
                f"{self._name} has {len(self.output_shapes)} outputs, so it has no output_shape: see output_shapes"
            )
        return next(iter(self.output_shapes.values()))

    def __call__(self, x: Any) -> Any:
        ready, outputs = self._prepared(x)
        self._network.run(ready, *outputs)
        if self.structure == "tensor":
            return outputs[0]
        return (
            dict(zip(self.output_shapes, outputs, strict=True))
            if self.structure == "dict"
            else tuple(outputs)
        )

    def __reduce__(self) -> Any:
        return _from_bytes, (self._source.content(), self.threads, self._name)

    def profile(self, x: Any, runs: int = 10) -> Profile:
        """Time spent in each layer, as medians of ``runs`` calls after a first one that does not count."""
        if runs < 1:
            raise ValueError(f"runs must be 1 or more, not {runs}")
        ready, outputs = self._prepared(x)
        self._network.run(ready, *outputs)
        return summarize(self.ops, [self._network.profile(ready, *outputs) for _ in range(runs)])

    def _prepared(self, x: Any) -> tuple[Any, list[Any]]:
        """The input in C order, once it is known to be right, and an array of its kind for each output."""
        torch = sys.modules.get("torch")  # whoever has a tensor has imported it
        if torch is not None and isinstance(x, torch.Tensor):
            _check_tensor(x, torch)
            shapes = self._result_shapes(x.shape)
            return x.contiguous(), [torch.empty(shape, dtype=torch.float32) for shape in shapes]
        if isinstance(x, np.ndarray):
            _check_array(x)
            shapes = self._result_shapes(x.shape)
            return np.ascontiguousarray(x), [np.empty(shape, np.float32) for shape in shapes]
        raise TypeError(
            f"the input must be a numpy array or a torch tensor, not {type(x).__qualname__}"
        )

    def _result_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        batch = self._batch(shape)
        return [(*batch, *output) for output in self.output_shapes.values()]

    def _batch(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """(N,) of a batch, () of one sample."""
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
            shape if self.structure == "tensor" else f"{name}: {shape}"
            for name, shape in outputs.items()
        ]
        shapes = f"{_text(self.input_shape)} -> {', '.join(named)}"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"<unflip.Model {self._name}: {shapes}, {len(self.ops)} ops, {threads}, {self.isa}>"


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _without_pixels(shape: tuple[int, int, int]) -> tuple[int, ...]:
    return shape[:1] if shape[1:] == (1, 1) else shape


def _check_array(x: Any) -> None:
    if x.dtype != np.float32 or not x.dtype.isnative:
        raise TypeError(f"the input must be float32, not {x.dtype}: x.astype(np.float32)")


def _check_tensor(x: Any, torch: Any) -> None:
    if x.device.type != "cpu":
        raise ValueError(f"the input must be on the CPU, not on {x.device}: x.cpu()")
    if x.dtype != torch.float32:
        raise TypeError(f"the input must be float32, not {x.dtype}: x.float()")
    if x.layout != torch.strided:
        raise ValueError(f"the input must be dense, not {x.layout}: x.to_dense()")
    if x.requires_grad:
        raise ValueError("a packed network has no gradients: x.detach()")
