"""Packing: write a trained network to one small file that runs without torch. docs/format.md describes the format.

Reading a file needs only numpy, so torch is imported where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unflip.packing.file import Packed, PackedFileError, read, write
from unflip.packing.ir import CannotPack

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["CannotPack", "Packed", "PackedFileError", "make_packed", "pack", "read"]


def pack(
    model: nn.Module,
    example_input: Tensor,
    path: str | os.PathLike[str],
    *,
    labels: Sequence[str] | None = None,
    preprocess: Mapping[str, Sequence[float]] | None = None,
) -> int:
    """Write ``model`` to ``path`` as a packed network and return the file's size in bytes.

    model          a binary model, trainable or frozen. It is packed as in evaluation mode, and not changed.
    example_input  a batch of inputs with the height and width to run with (any number of images). The packed network
                   is compared with the model on it, operation by operation.
    labels         the names of the classes, in the order of the output's channels. If there are several outputs, the
                   labels belong to every output with as many channels
    preprocess     {"mean": ..., "std": ...}, one number per channel. An image with values 0 .. 255 becomes the input
                   (pixel / 255 − mean) / std

    A model may return a tensor, or a flat tuple, list, namedtuple or dict of tensors.
    An operation that the file format does not support raises CannotPack with its name and place in the model.
    """
    return write(path, make_packed(model, example_input, labels=labels, preprocess=preprocess))


def make_packed(
    model: nn.Module,
    example_input: Tensor,
    *,
    labels: Sequence[str] | None = None,
    preprocess: Mapping[str, Sequence[float]] | None = None,
) -> Packed:
    """The packed network that :func:`pack` writes, in memory."""
    from unflip.packing.make import make

    return make(model, example_input, labels, preprocess)
