"""Refuses a forward pass that depends on the batch size.

A model is traced with two images, so ``if len(x) > 1`` or ``x / x.size(0)`` would be packed for two images and be
silently wrong for every other batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unflip.packing.ir import CannotPack
from unflip.packing.outputs import is_tensor, structure_of

OTHER_SIZES = (1, 3)  # with one image, `len(x) > 1` and squeeze() differ from two


def refuse_dependence(
    model: nn.Module, example: Tensor, answer: Any, traces_alike: Callable[[Tensor], bool]
) -> None:
    """Compare ``answer``, the model's output for the two images of ``example``, with the same images in other batches.

    Torch may sum in a different order for another batch, so a value near a threshold may change its bit. If outputs
    differ, ``traces_alike`` decides: whether a batch gives the same packed network.
    """
    for size in OTHER_SIZES:
        batch = torch.cat([example, example])[:size]
        found = _answer(model, batch.clone())
        if not _same(found, answer, size) and not traces_alike(batch):
            raise CannotPack(
                f"the forward pass depends on the batch size: the output for an image differs between a batch of "
                f"{size} and a batch of {len(example)}; process each image independently (check uses of x.shape[0], "
                "x.size(0) and len(x))"
            )


def _answer(model: nn.Module, batch: Tensor) -> Any:
    try:
        with torch.no_grad():
            return model(batch)
    except Exception as error:
        raise CannotPack(
            f"the forward pass depends on the batch size: it fails for a batch of {len(batch)} but not for a batch of "
            f"2: {error}"
        ) from error


def _same(found: Any, answer: Any, size: int) -> bool:
    """Whether every output equals ``answer`` for the first ``size`` images of the repeated example."""
    structure, expected = structure_of(found, is_tensor), structure_of(answer, is_tensor)
    if structure != expected:
        return False
    pairs = zip(structure.parts(found), structure.parts(answer), strict=True)
    return all(_equal(here, torch.cat([there, there])[:size]) for here, there in pairs)


def _equal(found: Tensor, expected: Tensor) -> bool:
    """Dims of size 1 do not count: squeeze() also removes a batch dim of one."""
    return found.squeeze().shape == expected.squeeze().shape and torch.allclose(
        found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6, equal_nan=True
    )
