"""Distillation: a trained network whose logits another one learns from.

Hinton et al., *Distilling the Knowledge in a Neural Network*, 2015, arXiv:1503.02531:

    L = (1 − λ) · CE(z, y) + λ · T² · KL(softmax(t / T) ‖ softmax(z / T)),   z the student's logits, t the teacher's

With λ = 1 and T = 1 the student sees only the teacher's probabilities, as in ReActNet (arXiv:2003.03488).

A teacher comes in two forms with the same logits:

- A table. A picture is an image with its crop and flip. Where there are finitely many (162 per image for crops from a
  border of 4 pixels), all logits are computed before the first step (CIFAR-10: 0.16 GB in float16). A teacher of any
  size then costs no more than reading the table.
- The network itself, inside the step, where pictures cannot be counted (random resized crops), their table would be
  too large, or most of it would never be read: photos of 128 pixels have 2,178 pictures per image. It runs in
  evaluation mode, without gradients, on the images of the step.
"""

from __future__ import annotations

import itertools
import math
from typing import Protocol

import torch
from torch import Tensor, nn

from unflip.data import Dataset
from unflip.data.source import FinitePictures, Source
from unflip.recipes.schema import Recipe
from unflip.runs import provenance
from unflip.runs.load import model_of
from unflip.runs.run import Run
from unflip.train.learner import images_per_batch, in_half

MAX_TABLE_BYTES = 8 * 2**30
MAX_PICTURES = (
    4  # per image and epoch: a step that reads the table is faster, so some may stay unread
)
TABLE_PIXELS = 2000 * 32 * 32  # in a batch, while the table is computed


class Teacher(Protocol):
    """Gives logits, for any number of students."""

    def logits(self, plan: Tensor, images: Tensor) -> Tensor:
        """The logits for some rows of a plan; ``images`` are the pictures of these rows."""


class NetworkTeacher:
    """A network that computes its logits in the step."""

    def __init__(self, model: nn.Module, device: torch.device, half: bool) -> None:
        self.model = model.eval().requires_grad_(False).to(device)
        self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.half = half

    @torch.no_grad()
    def logits(self, plan: Tensor, images: Tensor) -> Tensor:
        kind = images.device.type
        with torch.autocast(kind, torch.float16, enabled=self.half, cache_enabled=False):
            return self.model(images)


class TableTeacher:
    """The logits of ``model`` for every picture of ``source``.

    ``table`` has one dimension per column of a plan (image, then crop and flip), and then the classes.
    """

    def __init__(self, model: nn.Module, source: Source, device: torch.device, half: bool) -> None:
        assert isinstance(source, FinitePictures)
        pictures = source.pictures()
        shape = (*pictures, len(source.spec.classes))
        self.table = torch.empty(shape, dtype=_dtype(half), device=device)
        network = NetworkTeacher(model, device, half)
        for change in itertools.product(*map(range, pictures[1:])):
            self._fill(network, source, change)

    def _fill(self, network: NetworkTeacher, source: Source, change: tuple[int, ...]) -> None:
        """The logits for all images with the same crop and flip."""
        device = self.table.device
        batch = images_per_batch(source.spec, TABLE_PIXELS)
        for index in torch.arange(len(self.table), device=device).split(batch):
            rest = torch.tensor(change, dtype=torch.int64, device=device).expand(
                len(index), len(change)
            )
            plan = torch.cat([index[:, None], rest], dim=1)
            logits = network.logits(plan, source.batch(plan)[0])
            self.table[(index, *change)] = logits.to(self.table.dtype)

    def logits(self, plan: Tensor, images: Tensor) -> Tensor:
        return self.table[plan.unbind(-1)]


def _dtype(half: bool) -> torch.dtype:
    return torch.float16 if half else torch.float32


def fits_in_table(source: Source, half: bool, epochs: int) -> bool:
    """Whether a table of the logits for all pictures of ``source`` exists, is small enough, and pays within
    ``epochs``."""
    if not isinstance(source, FinitePictures):
        return False
    pictures = source.pictures()
    if math.prod(pictures[1:]) > MAX_PICTURES * epochs:
        return False
    logits = math.prod(pictures) * len(source.spec.classes)
    return logits * _dtype(half).itemsize <= MAX_TABLE_BYTES


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
    half = in_half(recipe, device)
    if fits_in_table(source, half, recipe.epochs):
        return TableTeacher(model_of(run, trusted=True), source, device, half)
    return NetworkTeacher(model_of(run, trusted=True), device, half)
