"""Data sets: read on the host without torch, then handed to training as a source of batches.

`load` reads one by name, `register_data` adds one. An `ImageSet` holds all its images in memory: the
sets that 1-bit networks are studied on fit in a GPU's memory, where training crops and flips them.
A larger set implements `Dataset` and streams its batches (see `unflip.data.source`). `open_store` reads the
encoded images of a large set from disk.

Only the modules `source`, `images_source` and `feed` import torch. scikit-learn and Pillow are
imported only by the loaders that need them, when they read.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unflip.data.dataset import Dataset
    from unflip.data.errors import DataError
    from unflip.data.image_set import ImageSet, channel_statistics, stratified_order
    from unflip.data.registry import load, names, option_names, register_data
    from unflip.data.spec import InputSpec
    from unflip.data.store import ImageStore, open_store

_HOMES = {
    "dataset": ("Dataset",),
    "errors": ("DataError",),
    "image_set": ("ImageSet", "channel_statistics", "stratified_order"),
    "registry": ("load", "names", "option_names", "register_data"),
    "spec": ("InputSpec",),
    "store": ("ImageStore", "open_store"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DataError",
    "Dataset",
    "ImageSet",
    "ImageStore",
    "InputSpec",
    "channel_statistics",
    "load",
    "names",
    "open_store",
    "option_names",
    "register_data",
    "stratified_order",
]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: listing runs does not need numpy."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
