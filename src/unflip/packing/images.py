"""Packing a network with what is known of the images it was trained on."""

from __future__ import annotations

import os

import torch
from torch import nn

from unflip.data import ImageSet
from unflip.packing import pack


def pack_for(images: ImageSet, model: nn.Module, path: str | os.PathLike[str]) -> int:
    """Pack with the set's classes, mean and std; two of its images are the example."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (images.mean, images.std))
    return pack(
        model,
        (images.test_images[:2] / 255 - mean) / std,
        path,
        labels=images.classes,
        preprocess={"mean": images.mean, "std": images.std},
    )
