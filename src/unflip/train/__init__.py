"""Training: several seeds, GPUs or machines at once, resumable after any kill.

job.py          what to train and how: Job, RunOptions (without torch)
loop.py         train, train_together: epochs, checkpoints, resuming
live_run.py     a run while it is trained: its files and its learner
learner.py      one network: objective, optimizer, a step that a CUDA graph can hold
engine.py       runs steps: plainly, or compiled and captured in one CUDA graph
start.py        where first weights come from: a run, a file, the method's preparation
teacher.py      distillation
health.py       ends a run that has stopped learning, with a reason
flips.py        counts signs that flipped
distributed.py  several GPUs or machines, through torchrun
progress.py     what a person sees
signals.py      Ctrl-C and SIGTERM
gpu_lock.py     processes that share a GPU
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unflip.recipes import Recipe, RecipeError, load_recipe, recipe_names
    from unflip.train.health import TrainingStopped
    from unflip.train.job import Job, RunOptions
    from unflip.train.loop import train, train_together

_HOMES = {
    "unflip.recipes": ("Recipe", "RecipeError", "load_recipe", "recipe_names"),
    "unflip.train.health": ("TrainingStopped",),
    "unflip.train.job": ("Job", "RunOptions"),
    "unflip.train.loop": ("train", "train_together"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Job",
    "Recipe",
    "RecipeError",
    "RunOptions",
    "TrainingStopped",
    "load_recipe",
    "recipe_names",
    "train",
    "train_together",
]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: a job or a recipe can be made without torch."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
