"""Data sets: read on the host without torch, then handed to training as a source of batches.

`load` reads one by name, `register_data` adds one. An `ImageSet` holds all its images in memory: the
sets that 1-bit networks are studied on fit in a GPU's memory, where training crops and flips them.
A larger set implements `Dataset` and streams its batches (see `unflip.data.source`).

Only `unflip.data.source` imports torch. scikit-learn and Pillow are imported only by the loaders
that need them, when they read.
"""

from unflip.data.dataset import Dataset
from unflip.data.errors import DataError
from unflip.data.image_set import ImageSet, channel_statistics, stratified_order
from unflip.data.registry import load, names, option_names, register_data
from unflip.data.spec import InputSpec

__all__ = [
    "DataError",
    "Dataset",
    "ImageSet",
    "InputSpec",
    "channel_statistics",
    "load",
    "names",
    "option_names",
    "register_data",
    "stratified_order",
]
