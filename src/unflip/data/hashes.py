"""Short hashes that tell one data set from another."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


def short_hash(*parts: bytes | memoryview | npt.NDArray[Any]) -> str:
    """16 hexadecimal digits of all the bytes, one part after another."""
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        total.update(np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else part)
    return total.hexdigest()


def classes_in_words(classes: Iterable[str]) -> str:
    """Number, first names and hash of the classes."""
    names = tuple(classes)
    shown = textwrap.shorten(", ".join(names), 60, placeholder=" …")
    return f"{len(names)}: {shown} ({short_hash('/'.join(names).encode(errors='surrogateescape'))})"


def fingerprint_of(train: str, test: str, classes: Iterable[str]) -> dict[str, str]:
    """``Dataset.fingerprint``, from texts that tell the images apart."""
    return {
        "training images": train,
        "test images": test,
        "classes": classes_in_words(classes),
    }
