"""The model of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from unflip.recipes.build import build_model
from unflip.recipes.load import checked
from unflip.runs.checkpoint import Checkpoint
from unflip.runs.run import Run

if TYPE_CHECKING:
    from torch import Tensor, nn


def load_run(folder: str | os.PathLike[str], seed: int = 0) -> nn.Module:
    """The network of a run with its trained weights, in evaluation mode, on the CPU.

    ``folder`` is a run's folder, or the folder that holds the seeds of a recipe (``runs/NAME`` with seed-0, seed-1,
    ...). A run that is not finished gives the weights of its last checkpoint. If its recipe ``uses`` modules, import
    them first: this function does not, because the run may be from a stranger.
    """
    run = Run.find(folder, seed)
    others = [] if run.exists else [str(other.seed) for other in Run.seeds_of(folder)]
    if others:
        raise ValueError(f"{folder} has no run of seed {seed}, only of {', '.join(others)}")
    return model_of(run)


def model_of(run: Run, checkpoint: Checkpoint | None = None, *, trusted: bool = False) -> nn.Module:
    """The network of a run at a checkpoint (None: its last one), in evaluation mode. Only if it is ``trusted``, modules
    that its recipe uses are imported here."""
    recipe = checked(run.recipe, f"of {run}", None if trusted else run)
    model = build_model(recipe, run.inputs, seed=run.seed)
    tensors = model_state((checkpoint or run.load_checkpoint()).tensors)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:  # missing tensors, or tensors of other shapes
        raise ValueError(f"the checkpoint of {run} does not fit its recipe.json: {error}") from None
    return model.eval()


def model_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's part of a checkpoint, under the model's own names."""
    return {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
