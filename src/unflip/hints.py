"""Error messages that name the nearest right answer, or the command that installs what is missing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Package, as it is imported -> the extra that installs it.
EXTRAS = {
    "torch": "train",
    "pydantic": "train",
    "yaml": "train",
    "sklearn": "train",
    "matplotlib": "train",
    "tensorboard": "tensorboard",
    "onnx": "onnx",
    "ray": "ray",
    "pyarrow": "parquet",
    "h5py": "larq",
    "huggingface_hub": "hub",
}


class Foreseen(Exception):
    """An error whose message says all a person needs. The command line prints it as one line, without a traceback."""


class NotInstalled(Foreseen, ModuleNotFoundError):
    """A package that an extra installs is missing; the message says how to install it."""

    def __init__(self, what: str, package: str) -> None:
        self.what = what
        super().__init__(
            f"{what} needs {package}, which is not installed. pip install 'unflip[{EXTRAS[package]}]'",
            name=package,
        )

    def __reduce__(self) -> tuple[type[NotInstalled], tuple[str, str]]:
        """So that a worker process can send it."""
        return NotInstalled, (self.what, str(self.name))


def known(value: str, choices: Iterable[str], what: str) -> str:
    """``value`` if it is one of ``choices``; otherwise an error that lists them."""
    options = sorted(choices)
    if value in options:
        return value
    near = difflib.get_close_matches(str(value), options, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {what} {value!r}.{hint} Known: {', '.join(options) or 'none'}.")
