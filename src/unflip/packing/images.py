"""Packing an image classifier with its class names and preprocessing."""

from __future__ import annotations

import os

import torch
from torch import nn

from unflip.data import InputSpec
from unflip.packing import pack


def pack_for(spec: InputSpec, model: nn.Module, path: str | os.PathLike[str]) -> int:
    """Pack with the classes, mean and std of ``spec``. Two images of noise are the example."""
    noise = torch.randint(256, (2, *spec.shape), generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (spec.mean, spec.std))
    return pack(
        model,
        (noise / 255 - mean) / std,
        path,
        labels=spec.classes,
        preprocess={"mean": spec.mean, "std": spec.std},
    )
