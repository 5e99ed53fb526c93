"""Refuses a forward pass that depends on how many images it is given.

A model is traced with two images, so ``if len(x) > 1`` or ``x / x.size(0)`` would be packed as they are for two, and
every other batch would be wrong without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unflip.packing.ir import CannotPack
from unflip.packing.outputs import is_tensor, structure_of

OTHER_SIZES = (1, 3)  # one image is what `> 1` and squeeze() tell from two


def refuse_dependence(
    model: nn.Module, example: Tensor, answer: Any, traces_alike: Callable[[Tensor], bool]
) -> None:
    """``answer`` is the model's for the two images of ``example``; the same images in other batches are compared.

    Torch may sum in another order for another batch, and a value beside a threshold then changes its bit. So where
    answers differ, ``traces_alike`` decides: whether a batch makes the same packed network.
    """
    for size in OTHER_SIZES:
        batch = torch.cat([example, example])[:size]
        found = _answer(model, batch.clone())
        if not _same(found, answer, size) and not traces_alike(batch):
            raise CannotPack(
                f"the forward pass depends on the batch size: it answers differently for the same image in a batch of "
                f"{size} and of {len(example)}; packing needs one that treats every image alone "
                "(is there an x.shape[0], x.size(0) or len(x) in it?)"
            )


def _answer(model: nn.Module, batch: Tensor) -> Any:
    try:
        with torch.no_grad():
            return model(batch)
    except Exception as error:
        raise CannotPack(
            f"the forward pass depends on the batch size: it fails for a batch of {len(batch)}, though not for one "
            f"of 2: {error}"
        ) from error


def _same(found: Any, answer: Any, size: int) -> bool:
    """Whether every output is what it was in ``answer``, for the first ``size`` images, over and over."""
    structure, expected = structure_of(found, is_tensor), structure_of(answer, is_tensor)
    if structure != expected:
        return False
    pairs = zip(structure.parts(found), structure.parts(answer), strict=True)
    return all(_equal(here, torch.cat([there, there])[:size]) for here, there in pairs)


def _equal(found: Tensor, expected: Tensor) -> bool:
    """squeeze() also takes away a batch of one: the numbers count, not the shape."""
    return found.numel() == expected.numel() and torch.allclose(
        found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6, equal_nan=True
    )
