"""Packing: a trained network as one small file that runs without torch. The format: docs/format.md.

Reading a file needs numpy alone, so what needs torch is imported where it is used.
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
    """Write ``model`` to ``path`` as a packed network; returns the file's size in bytes.

    model          a binary model, trainable or frozen, as it is in evaluation mode. It is not changed.
    example_input  a batch of images as the model takes them, of the size it will be run with (how many is open).
                   What is packed is compared with the model on it, operation by operation.
    labels         the names of the classes, in the order of the outputs; where a model returns several, those
                   of every one that has as many channels
    preprocess     {"mean": ..., "std": ...}, a number a channel: how an image with values 0 .. 255 becomes the input,
                   (pixel / 255 − mean) / std

    A model may return a tensor, or a flat tuple, list, namedtuple or dict of tensors.
    What the file format has no form for is refused with its name and place in the model.
    """
    return write(path, make_packed(model, example_input, labels=labels, preprocess=preprocess))


def make_packed(
    model: nn.Module,
    example_input: Tensor,
    *,
    labels: Sequence[str] | None = None,
    preprocess: Mapping[str, Sequence[float]] | None = None,
) -> Packed:
    """What :func:`pack` writes, in memory."""
    from unflip.packing.make import make

    return make(model, example_input, labels, preprocess)
