"""Distillation: a trained network's answers to every picture that training can show, computed once.

Hinton et al., *Distilling the Knowledge in a Neural Network*, 2015, arXiv:1503.02531:

    L = (1 − λ) · CE(z, y) + λ · T² · KL(softmax(t / T) ‖ softmax(z / T)),   z the student's logits, t the teacher's

A picture is an image, a crop and a flip, so there are finitely many: 162 of an image for crops of 4 pixels' padding.
The table of all answers (CIFAR-10: 0.16 GB in float16) is made before the first step; in a step a teacher costs no
more than reading it, whatever the teacher's size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from unflip.data import ImageSet
from unflip.data.source import Images
from unflip.runs import checkpoint as checkpoints
from unflip.runs import provenance
from unflip.runs.files import read_saved
from unflip.train.learner import build_model, model_state
from unflip.train.recipe import Recipe

MOST_BYTES = 8 * 2**30
BATCH = 2000


class Teacher:
    """``table``: (images, rows, columns, flips, classes) of logits."""

    def __init__(self, model: nn.Module, images: Images, device: torch.device) -> None:
        shifts, flips = 2 * images.padding + 1, 2 if images.flip else 1
        kept = torch.float16 if device.type == "cuda" else torch.float32
        model = model.eval().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        classes = self._logits(model, images, torch.zeros(1, 4, dtype=torch.int64, device=device))
        shape = (len(images), shifts, shifts, flips, classes.shape[1])
        _refuse_large(shape, kept)
        self.table = torch.empty(shape, dtype=kept, device=device)
        for top in range(shifts):
            for left in range(shifts):
                for flip in range(flips):
                    self._fill(model, images, top, left, flip)

    def _fill(self, model: nn.Module, images: Images, top: int, left: int, flip: int) -> None:
        device = self.table.device
        for index in torch.arange(len(images), device=device).split(BATCH):
            rest = torch.tensor([top, left, flip], device=device).expand(len(index), 3)
            plan = torch.cat([index[:, None], rest], dim=1)
            self.table[index, top, left, flip] = self._logits(model, images, plan).to(
                self.table.dtype
            )

    @torch.no_grad()
    def _logits(self, model: nn.Module, images: Images, plan: Tensor) -> Tensor:
        half = plan.device.type == "cuda"
        with torch.autocast(plan.device.type, torch.float16, enabled=half, cache_enabled=False):
            return model(images.batch(plan)[0])

    def answers(self, plan: Tensor) -> Tensor:
        """The logits for the pictures of a row of the plan."""
        index, top, left, flip = plan.unbind(-1)
        return self.table[index, top, left, flip]


def _refuse_large(shape: tuple[int, ...], kept: torch.dtype) -> None:
    size = kept.itemsize
    for extent in shape:
        size *= extent
    if size > MOST_BYTES:
        raise ValueError(
            f"distill: the teacher's answers to {shape[0]:,} images in {shape[1] * shape[2] * shape[3]} crops and "
            f"flips would take {size / 2**30:.1f} GiB, more than {MOST_BYTES / 2**30:.0f}"
        )


def load_teacher(
    folder: Path, recipe: Recipe, data: ImageSet, images: Images, device: torch.device
) -> Teacher:
    """The teacher of ``recipe.distill`` from its finished run, which must have seen no image that is held out here."""
    assert recipe.distill is not None
    if not (folder / "result.json").exists():
        raise ValueError(
            f"recipe {recipe.name} learns from a finished run of {recipe.distill.teacher}; {folder} is not one. "
            f"Run: unflip train {recipe.distill.teacher}"
        )
    saved = read_saved(folder / "recipe.json", "recipe", "seed")
    there = Recipe.model_validate(saved["recipe"])
    differ = provenance.other_images(folder, recipe, data)
    if differ:
        raise ValueError(
            f"recipe {recipe.name} has data {differ[1]}, its teacher in {folder} {differ[0]}: "
            "it may have been trained on images that are held out here"
        )
    model = build_model(there, data, saved["seed"])
    model.load_state_dict(model_state(checkpoints.load_usable(folder).tensors))
    return Teacher(model, images, device)
