"""Which networks' kernels have passed their checks on this machine, so that the next process need not check them again.

One small file per network, in ``$UNFLIP_CACHE/kernels`` (default: ``~/.cache/unflip/kernels``). Its name is a hash of
everything that a check depends on: the sources of kernels, layers and methods, torch, Triton, CUDA, the driver, the
GPU, and the networks with the shapes of their inputs. It contains the choices that were measured. If a file is missing
or damaged, or cannot be written, the kernels are only checked again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Iterable
from typing import Any

import torch

from unflip.disk import cache_folder
from unflip.kernels import tuning


class Passed:
    """The record of networks with this ``description`` on this device."""

    def __init__(self, description: Iterable[str], device: torch.device) -> None:
        text = "\n".join([*_machine(device), *description])
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        folder = cache_folder("kernels")
        self.path = None if folder is None else folder / f"{name}.json"

    def recall(self) -> bool:
        """Whether the kernels have passed; restores what was measured then."""
        if self.path is None:
            return False
        try:
            content = json.loads(self.path.read_text())
            rows = {tuple(key): int(value) for key, value in content["rows"]}
        except (OSError, ValueError, TypeError, KeyError):
            return False
        tuning.chosen_rows.update(rows)
        return True

    def remember(self) -> None:
        if self.path is None:
            return
        content = {"rows": [[list(key), value] for key, value in tuning.chosen_rows.items()]}
        part = self.path.with_suffix(f".{uuid.uuid4().hex}.part")
        with contextlib.suppress(OSError):
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(content))
            part.replace(self.path)


def _machine(device: torch.device) -> list[str]:
    versions: list[Any] = [device, torch.__version__, tuning.triton_version()]
    if device.type == "cuda":
        versions += [torch.version.cuda, torch.backends.cudnn.version()]
        versions += [torch.cuda.get_device_properties(device), _driver()]
    return [str(version) for version in versions]


def _driver() -> Any:
    """The driver's version; None if this torch does not tell it."""
    return getattr(torch._C, "_cuda_getDriverVersion", lambda: None)()
