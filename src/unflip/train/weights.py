"""A file of weights that a run starts from, in place of a finished run.

What such weights have seen nobody knows: that they have not seen images which are held out here is the person's word.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import safetensors
import safetensors.torch
from torch import nn

from unflip.binarize import load_twin

ACCEPTED = "a .safetensors file of the network's weights"
OTHERS = (".pt", ".pth", ".ckpt", ".bin", ".npz", ".onnx", ".unflip")
HOW = (
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'weights.safetensors') makes one of torch's "
    "state dict"
)


def is_weights(name: str | Path) -> bool:
    return Path(name).suffix == ".safetensors"


def load_weights(model: nn.Module, path: Path) -> None:
    """Take over the weights of the same network, float or of another method; all names must fit."""
    try:
        state = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"start {path} should be {ACCEPTED}: {error}") from None
    if "sums.loss" in state:
        raise ValueError(
            f"start {path} is a checkpoint of a run, which holds more than weights: give the run's folder"
        )
    try:
        load_twin(model, state)
    except ValueError as error:
        raise ValueError(f"start {path}: {error}") from None
    except RuntimeError as error:  # torch names what is missing, unexpected or of another shape
        lines = [textwrap.shorten(line, 300) for line in str(error).splitlines()[1:6]]
        raise ValueError(
            f"start {path} is of another network than the recipe's: {' '.join(lines)}"
        ) from None
