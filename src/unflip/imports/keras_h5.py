"""Keras's HDF5 files, read with h5py alone: the config as text, and the weights by path.

A file of ``model.save`` has the attribute ``model_config`` and the group ``model_weights``; one of ``save_weights`` has
the groups of the layers at its root. A weight is a dataset such as ``conv/conv/kernel:0``.

An HDF5 file may point to other files and announce more than it holds. So only hard links are followed, and a dataset
is read only if all its values lie in this file, without compression, in one piece: as Keras writes it. Layout and size
are compared with the file before anything is allocated.

The HDF5 library itself loops forever or crashes on some damaged files. So a process of its own reads the file, with a
limit on its time and memory, and sends what it found: a line of JSON, the config, and the values of all arrays.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from unflip.hints import NotInstalled
from unflip.imports.errors import CannotImport
from unflip.imports.mxnet_params import Array

LARGEST_FILE = 2**31
MOST_OBJECTS = 100_000
DEEPEST = 16
LONGEST_PATH = 4096
LARGEST_CONFIG = 64_000_000
SECONDS, BYTES_PER_SECOND = 20, 10_000_000  # of processor time
MEMORY = 2**32  # bytes, besides the file
FLOATS = ("float16", "float32", "float64")


class KerasFile:
    """The config, if the file has one, and the weights."""

    def __init__(self, where: str, config: bytes | None, arrays: dict[str, Array]) -> None:
        self.where, self.config = where, config
        self.arrays = arrays
        self.used: set[str] = set()
        # Paths by a group around them, the layer (or "" for any) and the weight.
        self.places: dict[tuple[str, str, str], list[str]] = {}
        for path in arrays:
            *groups, last = path.split("/")
            for depth in range(len(groups)):
                for layer in ("", groups[-1]):
                    key = "/".join(groups[: depth + 1]), layer, last.partition(":")[0]
                    self.places.setdefault(key, []).append(path)

    def find(self, layer: tuple[str, ...], weight: str, shape: tuple[int, ...]) -> Array:
        """The weight ``kernel`` of a layer, which is named with the models around it, outermost first."""
        # The weights of a model are one group: its layers are known by the last part of their names.
        own = layer[-1].split("/")[-1] if len(layer) > 1 else ""
        found = self.places.get((layer[0], own, weight), [])
        title = f"{weight} of layer {'/'.join(layer)!r}"
        if len(found) != 1:
            problem = f"{len(found)} arrays could be it" if found else "the file does not have it"
            raise CannotImport(
                f"{title}: {problem}; save the model again with model.save('model.h5')"
            )
        array = self.arrays[found[0]]
        if array.shape != shape:
            raise CannotImport(f"{title} has shape {array.shape}; the layer needs {shape}")
        with np.errstate(over="ignore"):
            floats: Array = array.astype(np.float32)
        if not np.isfinite(floats).all():
            raise CannotImport(f"{title} contains NaN, infinity, or numbers too large for float32")
        self.used.add(found[0])
        return floats

    def unused(self) -> list[str]:
        return sorted(self.arrays.keys() - self.used)


def read_h5(path: Path) -> KerasFile:
    """Read a file of ``model.save('model.h5')`` or ``model.save_weights('weights.h5')``."""
    if not path.is_file():
        raise CannotImport(f"{path}: the file does not exist; give the path of an .h5 file")
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise CannotImport(f"{path} has {size:,} bytes; at most {LARGEST_FILE:,} are read")
    if importlib.util.find_spec("h5py") is None:
        raise NotInstalled("importing networks of Larq", "h5py")
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from unflip.imports.keras_h5 import main; main()"
    )
    seconds = SECONDS + size // BYTES_PER_SECOND
    command = [sys.executable, "-c", code, str(path), str(seconds)]
    alone = {"OPENBLAS_NUM_THREADS": "1"}  # each of its threads would reserve memory
    try:
        found = subprocess.run(
            command, capture_output=True, timeout=10 * seconds, check=False, env=os.environ | alone
        )
        failed, last = found.returncode != 0, found.stderr.decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        failed, last = True, ""
    if failed:
        reason = f" ({last.splitlines()[-1]:.200})" if last else ""
        raise CannotImport(
            f"{path}: damaged: the HDF5 library crashed, or needed more than {seconds} s{reason}; copy it again"
        )
    return _received(found.stdout, str(path))


def _received(data: bytes, where: str) -> KerasFile:
    line, _, rest = data.partition(b"\n")
    head = json.loads(line)
    if head["error"] is not None:
        raise CannotImport(head["error"])
    at = head["config"] or 0
    config = None if head["config"] is None else rest[:at]
    arrays = {}
    for name, kind, shape in head["arrays"]:
        arrays[name] = np.frombuffer(rest, kind, math.prod(shape), at).reshape(shape)
        at += arrays[name].nbytes
    return KerasFile(where, config, arrays)


# --- the process that reads the file


def main() -> None:
    path, seconds = Path(sys.argv[1]), int(sys.argv[2])
    _limit(seconds, MEMORY + 3 * path.stat().st_size)
    config, arrays, error = None, dict[str, Array](), None
    try:
        config, arrays = read_here(path)
    except CannotImport as problem:
        error = str(problem)
    found = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    head = {"error": error, "config": None if config is None else len(config), "arrays": found}
    out = sys.stdout.buffer
    out.write(json.dumps(head).encode() + b"\n" + (config or b""))
    for array in arrays.values():
        out.write(array.tobytes())


def _limit(seconds: int, memory: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def read_here(path: Path) -> tuple[bytes | None, dict[str, Array]]:
    """The config and the arrays, read in this process."""
    with _opened(path) as file:
        return _read(file, str(path), path.stat().st_size)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import h5py

    if not h5py.is_hdf5(path):
        raise CannotImport(
            f"{path} is not an HDF5 file; save the model with model.save('model.h5') and import that file"
        )
    try:
        with path.open("rb") as handle, h5py.File(handle, "r") as file:
            yield file
    except CannotImport:
        raise
    # what h5py raises for damaged files
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:
        first = str(error).strip().partition("\n")[0]
        raise CannotImport(f"{path}: cut off or damaged: {first:.200}; copy it again") from None


def _read(file: Any, where: str, size: int) -> tuple[bytes | None, dict[str, Array]]:
    config = _config(file, where, size)
    if "model_weights" in file:
        root = _member(file, "model_weights", where)
    elif "layers" in file and "vars" in file:
        raise CannotImport(
            f"{where} has the layout of Keras 3 ('.weights.h5'), which is not supported; save the model with "
            "model.save('model.h5')"
        )
    else:
        root = file
    return config, _arrays(root, where, size)


def _config(file: Any, where: str, size: int) -> bytes | None:
    """The attribute ``model_config``: one text."""
    if "model_config" not in file.attrs:
        return None
    version = file.attrs.get("keras_version", "2")
    version = version.decode("utf-8", "replace") if isinstance(version, bytes) else str(version)
    if not version.startswith(("1.", "2")):
        raise CannotImport(
            f"{where} was saved by Keras {version:.20}, whose layers differ; Larq's networks are of Keras 2"
        )
    found = file.attrs.get_id("model_config")
    if found.get_space().get_simple_extent_npoints() != 1:
        raise CannotImport(f"{where}: model_config should be one text")
    if found.get_storage_size() > min(size, LARGEST_CONFIG):
        raise CannotImport(f"{where}: model_config is larger than the file; copy it again")
    text = file.attrs["model_config"]
    text = text.encode() if isinstance(text, str) else text
    if not isinstance(text, bytes) or len(text) > LARGEST_CONFIG:
        raise CannotImport(
            f"{where}: model_config should be a text of at most {LARGEST_CONFIG:,} bytes"
        )
    return bytes(text)


def _member(group: Any, name: str, where: str) -> Any:
    """A group or dataset of this file. Links to other files, or to other places, are refused."""
    import h5py

    link = group.get(name, getlink=True)
    if type(link) is not h5py.HardLink:
        raise CannotImport(
            f"{where}: {name!r} is a link ({type(link).__name__}); links are not followed, since they may lead to "
            "other files"
        )
    return group[name]


def _arrays(root: Any, where: str, size: int) -> dict[str, Array]:
    import h5py

    arrays: dict[str, Array] = {}
    todo, seen, total = [(root, "", 0)], 0, 0
    while todo:
        group, prefix, depth = todo.pop()
        for name in group:
            seen += 1
            if seen > MOST_OBJECTS or depth >= DEEPEST:
                raise CannotImport(
                    f"{where} has more than {MOST_OBJECTS:,} objects, or groups deeper than {DEEPEST} levels"
                )
            found, path = _member(group, name, where), f"{prefix}{name}"
            if len(path) > LONGEST_PATH:
                raise CannotImport(f"{where}: a name has {len(path):,} letters: {path[:60]!r}...")
            if isinstance(found, h5py.Group):
                todo.append((found, f"{path}/", depth + 1))
            elif isinstance(found, h5py.Dataset):
                total += _checked_size(found, path, where)
                if total > size:
                    raise CannotImport(
                        f"{where}: its arrays announce more bytes than the file has, {size:,}; copy it again"
                    )
                arrays[path] = found[()]
    return arrays


def _checked_size(dataset: Any, path: str, where: str) -> int:
    """The bytes of a dataset whose values all lie in this file."""
    import h5py

    # The layout first: asking a virtual dataset for its shape may open other files.
    plan = dataset.id.get_create_plist()
    if (
        plan.get_layout() not in (h5py.h5d.CONTIGUOUS, h5py.h5d.COMPACT)
        or plan.get_external_count()
    ):
        raise CannotImport(
            f"{where}: {path!r} is stored in pieces, compressed, or in other files; only arrays as Keras writes them "
            "are read"
        )
    dtype = dataset.dtype
    if dtype.name not in FLOATS:
        raise CannotImport(f"{where}: {path!r} has type {str(dtype)!r:.60}; weights are {FLOATS}")
    declared = math.prod(dataset.shape) * dtype.itemsize
    stored = dataset.id.get_storage_size()
    if declared != stored:
        raise CannotImport(
            f"{where}: {path!r} of shape {dataset.shape} needs {declared:,} bytes, but {stored:,} are stored; copy it "
            "again"
        )
    return declared
