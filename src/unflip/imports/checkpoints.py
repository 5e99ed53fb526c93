"""Released PyTorch checkpoints, fitted into our networks by the tables in ``layouts.py``.

Files are read with ``weights_only=True``, so they cannot run code, and first in a process with limits on time and
memory. A checkpoint whose names or shapes do not fit is refused with the list of them.
"""

from __future__ import annotations

import fnmatch
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unflip.hints import known
from unflip.imports.errors import CannotImport, listed
from unflip.imports.layouts import LAYOUTS, Layout, Rows
from unflip.imports.rehearsal import problem_of
from unflip.imports.write import Images, cifar10, imagenet
from unflip.models import create

NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
NOT_IN_EVERY_FILE = (
    ".num_batches_tracked"  # torch before 0.4.1 did not save it, and evaluation does not use it
)
PREFIXES = ("module.", "_orig_mod.")  # of DataParallel and torch.compile
INSIDE = ("state_dict", "model", "model_state_dict")  # where training scripts put the state dict
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_BYTES = 2**31
SECONDS = 60.0  # for reading a file
MORE_MEMORY = 2**30  # besides three times the file


class Fitted(NamedTuple):
    """The network with the weights of a checkpoint, and what happened to them."""

    model: nn.Module
    layout: Layout
    images: Images
    ignored: list[str]


def load(path: Path, layout: str) -> Fitted:
    """Fit the checkpoint ``path`` into the network of ``layout``."""
    chosen = LAYOUTS[known(layout, LAYOUTS, "layout")]
    return fit(read_state(path), chosen, f"{path} does not fit layout {layout!r}")


def read_state(path: Path) -> dict[str, Tensor]:
    """The state dict in a checkpoint, without prefixes that wrappers add."""
    if not path.is_file():
        raise CannotImport(f"{path}: the file does not exist; give the path of a checkpoint")
    _check_size(path)
    memory = MORE_MEMORY + 3 * path.stat().st_size
    problem = problem_of(lambda: _tensors(path), f"reading {path}", SECONDS, memory)
    if problem is not None:
        raise CannotImport(problem)
    return _tensors(path)


def _tensors(path: Path) -> dict[str, Tensor]:
    return _state(_content(path), path)


def _content(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (
        *(pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError, TypeError),
        *(AttributeError, IndexError, OSError, RecursionError, zipfile.BadZipFile),
    ) as error:
        first = str(error).strip().partition("\n")[0]
        raise CannotImport(
            f"{path}: torch cannot read it as a file of tensors: {first:.200} (code in a checkpoint is never run)"
        ) from None


def _check_size(path: Path) -> None:
    """A compressed archive is refused: torch would read it, and its parts may be much larger than the file."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise CannotImport(f"{path} has {size:,} bytes; at most {MOST_BYTES:,} are read")
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, EOFError):
        return  # torch's older format, or a damaged file, which torch refuses
    if sum(part.file_size for part in parts) > size:
        raise CannotImport(
            f"{path}: its parts are larger than the file, so they are compressed or damaged; save it with torch.save"
        )


def _state(content: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        content = next(
            (content[key] for key in INSIDE if isinstance(content.get(key), Mapping)), content
        )
    if not isinstance(content, Mapping) or not content:
        raise CannotImport(
            f"{path} holds a {type(content).__name__}; it should be a state dict, names with tensors"
        )
    odd = [key for key, value in content.items() if not isinstance(value, Tensor)]
    if odd or not all(isinstance(key, str) for key in content):
        raise CannotImport(
            f"{path} is not a state dict: these are not tensors: {listed([str(key) for key in odd])}"
        )
    state = dict(content)
    for prefix in PREFIXES:
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def names(layout: Layout) -> dict[str, str]:
    """Every name in a checkpoint of this layout, and its name in our network."""
    found: dict[str, str] = {}
    for stage, blocks in enumerate(layout.blocks, 1):
        for block in range(blocks):
            for n in (1, 2):
                place = {"stage": stage, "block": block, "n": n, "single": 2 * block + n - 1}
                found |= _expanded(layout.rows, place)
        if stage > 1:
            found |= _expanded(layout.first_blocks, {"stage": stage})
    return found


def _expanded(rows: Rows, place: dict[str, int]) -> dict[str, str]:
    found: dict[str, str] = {}
    for theirs, ours in rows.items():
        theirs, ours = theirs.format(**place), ours.format(**place)
        if theirs.endswith(".*"):
            found |= {theirs[:-1] + part: ours[:-1] + part for part in NORM}
        else:
            found[theirs] = ours
    return found


def fit(state: Mapping[str, Tensor], layout: Layout, problem: str) -> Fitted:
    """Our network with the tensors of ``state``. ``problem`` begins the message if they do not fit."""
    model = create(layout.network, layout.method, **layout.options)
    own, table = model.state_dict(), names(layout)
    state = {_renamed(key, layout.endings): value for key, value in state.items()}
    ignored = sorted(
        k for k in state if k not in table and any(fnmatch.fnmatch(k, u) for u in layout.unused)
    )
    problems = []
    odd = sorted(state.keys() - table.keys() - set(ignored))
    if odd:
        problems.append(f"unknown: {listed(odd)}")
    missing = sorted(k for k in table.keys() - state.keys() if not k.endswith(NOT_IN_EVERY_FILE))
    if missing:
        problems.append(f"missing: {listed(missing)}")
    values, wrong = {}, []
    for theirs, ours in table.items():
        if theirs not in state:
            continue
        tensor, target = state[theirs], own[ours]
        if not _fits(tensor, target):
            wrong.append(f"{theirs} ({_form(tensor)} instead of {_form(target)})")
            continue
        value = tensor.to(target.dtype).reshape(target.shape)
        if torch.isfinite(value).all():
            values[ours] = value
        else:
            wrong.append(f"{theirs} (NaN, infinity, or numbers too large for {target.dtype})")
    if wrong:
        problems.append(f"wrong: {listed(wrong)}")
    if problems:
        raise CannotImport(f"{problem}. Names in the file: {'; '.join(problems)}")
    unfilled = sorted(k for k in own.keys() - values.keys() if not k.endswith(NOT_IN_EVERY_FILE))
    assert not unfilled, unfilled  # a table that does not cover its network
    model.load_state_dict(own | values)
    images = cifar10() if layout.images == "cifar10" else imagenet()
    return Fitted(model.eval(), layout, images, ignored)


def _renamed(key: str, endings: Rows) -> str:
    for old, new in endings.items():
        if key.endswith(old):
            return key.removesuffix(old) + new
    return key


def _fits(tensor: Tensor, target: Tensor) -> bool:
    """The same sizes, apart from sizes of 1; binary weights may also be stored as one column."""
    if not _plain(tensor) or tensor.is_floating_point() != target.is_floating_point():
        return False
    sizes, wanted = ([n for n in t.shape if n > 1] for t in (tensor, target))
    column = target.dim() == 4 and tensor.dim() == 2 and tensor.shape[1] == 1
    return sizes == wanted or (column and tensor.numel() == target.numel())


def _plain(tensor: Tensor) -> bool:
    """Integers or usual floats, with values: not sparse, nested, quantized, complex, or only a shape."""
    if tensor.is_nested or tensor.is_quantized or tensor.is_complex():
        return False
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.dtype in FLOATS if tensor.is_floating_point() else True


def _form(tensor: Tensor) -> str:
    """The type and shape of a tensor, for a message; a nested tensor has no shape."""
    if tensor.is_nested:
        return f"a nested tensor of {tensor.dtype}"
    kind = "" if _plain(tensor) else f"{tensor.layout} on {tensor.device}, "
    return f"{kind}{tensor.dtype}, {tuple(tensor.shape)}"
