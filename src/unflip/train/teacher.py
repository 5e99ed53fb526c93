"""Distillation: a trained network's logits for every picture that training can show, computed once.

Hinton et al., *Distilling the Knowledge in a Neural Network*, 2015, arXiv:1503.02531:

    L = (1 − λ) · CE(z, y) + λ · T² · KL(softmax(t / T) ‖ softmax(z / T)),   z the student's logits, t the teacher's

A picture is an image with its crop and flip, so there are finitely many: 162 per image for crops from a border of 4
pixels. The table of all logits (CIFAR-10: 0.16 GB in float16) is computed before the first step. In a step, a teacher
of any size then costs no more than reading the table.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from unflip.data import Dataset
from unflip.data.source import FinitePictures, Source
from unflip.recipes.schema import Recipe
from unflip.runs import provenance
from unflip.runs.load import model_of
from unflip.runs.run import Run

MAX_TABLE_BYTES = 8 * 2**30
BATCH_SIZE = 2000


class Teacher:
    """The logits of ``model`` for every picture of ``source``.

    ``table`` has one dimension per column of a plan (image, then crop and flip), and then the classes.
    """

    def __init__(self, model: nn.Module, source: Source, device: torch.device) -> None:
        if not isinstance(source, FinitePictures):
            raise ValueError(
                "distill: a teacher computes its logits for every crop and flip before training, and these images are "
                "cropped in more ways than can be counted. Remove distill from the recipe, or use a data set that is "
                "held in memory."
            )
        pictures = source.pictures()
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        shape = (*pictures, len(source.spec.classes))
        _refuse_large(shape, dtype)
        model = model.eval().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.table = torch.empty(shape, dtype=dtype, device=device)
        for change in itertools.product(*map(range, pictures[1:])):
            self._fill(model, source, change)

    @torch.no_grad()
    def _fill(self, model: nn.Module, source: Source, change: tuple[int, ...]) -> None:
        """The logits for all images with the same crop and flip."""
        device = self.table.device
        for index in torch.arange(len(self.table), device=device).split(BATCH_SIZE):
            rest = torch.tensor(change, dtype=torch.int64, device=device).expand(
                len(index), len(change)
            )
            images, _ = source.batch(torch.cat([index[:, None], rest], dim=1))
            half = device.type == "cuda"
            with torch.autocast(device.type, torch.float16, enabled=half, cache_enabled=False):
                self.table[(index, *change)] = model(images).to(self.table.dtype)

    def logits(self, plan: Tensor) -> Tensor:
        """The logits for the pictures of some rows of a plan."""
        return self.table[plan.unbind(-1)]


def _refuse_large(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size = dtype.itemsize * math.prod(shape)
    if size > MAX_TABLE_BYTES:
        raise ValueError(
            f"distill: the teacher's logits for {shape[0]:,} images in {math.prod(shape[1:-1])} crops and flips would "
            f"take {size / 2**30:.1f} GiB, more than {MAX_TABLE_BYTES / 2**30:.0f}. Remove distill from the recipe, or "
            "use fewer images."
        )


def load_teacher(
    run: Run, recipe: Recipe, data: Dataset, source: Source, device: torch.device
) -> Teacher:
    """The teacher of ``recipe.distill`` from its finished run, which must not have seen images held out here."""
    assert recipe.distill is not None
    if not run.finished:
        raise ValueError(
            f"recipe {recipe.name} learns from a finished run of {recipe.distill.teacher}; {run} is not one. "
            f"Run: unflip train {recipe.distill.teacher}"
        )
    differ = provenance.other_images(run, recipe.plain()["data"], data.fingerprint)
    if differ:
        raise ValueError(
            f"recipe {recipe.name} has data {differ[1]}, but its teacher in {run} has {differ[0]}. The teacher may "
            "have been trained on images that are held out here: train it on the same data."
        )
    return Teacher(model_of(run), source, device)
