"""What is to be trained, and how. Importing this does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from unflip.recipes.schema import Recipe
from unflip.runs.provenance import Origins
from unflip.runs.run import Run


@dataclass(frozen=True)
class Job:
    """A run to train: a recipe and a seed, the folder of the recipe's seeds, and the finished runs that it starts from
    (or a file of weights) and learns from."""

    recipe: Recipe
    seed: int
    out: Path
    start: Path | None = None
    teacher: Path | None = None

    @property
    def run(self) -> Run:
        return Run.of_seed(self.out, self.seed)

    @property
    def origins(self) -> Origins:
        return Origins(self.seed, self.start, self.teacher, self.recipe.uses)


@dataclass(frozen=True)
class RunOptions:
    """How runs are trained, as far as it does not change their result.

    device              cpu or cuda; None: cuda if available
    eager               on a GPU: no compilation, no CUDA graph
    compile             on a GPU: compile steps. Without it a run starts sooner, and its steps are slower
    tensorboard         also write TensorBoard files
    checkpoint_seconds  the least time between two checkpoints
    evaluate_every      measure accuracy in every N-th epoch, and in the last; otherwise it is null in the metrics
    quiet               print nothing
    workers             processes that decode images, for data sets that are streamed; None: one per CPU
    gpu_lock            a file that processes sharing a GPU have in common: they compile side by side, and one at a
                        time runs its epochs
    """

    device: str | None = None
    eager: bool = False
    compile: bool = True
    tensorboard: bool = False
    checkpoint_seconds: float = 20.0
    evaluate_every: int = 1
    quiet: bool = False
    workers: int | None = None
    gpu_lock: Path | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers} should be at least 1")
        if self.evaluate_every < 1:
            raise ValueError(f"evaluate_every={self.evaluate_every} should be at least 1")
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={self.device!r} should be cpu, cuda or cuda:N")
