"""What test_distributed.py runs in each process of torchrun, once for all its tests, because importing torch takes
long. ``gradients`` also runs in the test's own process."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from unflip import binarize
from unflip.data import ImageSet
from unflip.data import load as load_data
from unflip.data.source import MemorySource
from unflip.train import distributed, load_recipe, train
from unflip.train.job import RunOptions
from unflip.train.learner import Learner

CPU = torch.device("cpu")
STEPS = 5  # of an epoch with 1,000 of the digits held out
EPOCHS = 4


def learner(data: ImageSet) -> Learner:
    """LNS in float64, without BatchNorm, whose statistics would be of a rank's own images."""
    torch.manual_seed(distributed.rank())  # the ranks must agree in spite of that
    body = [nn.Conv2d(1, 4, 3), nn.Hardtanh(), nn.Conv2d(4, 6, 3), nn.Hardtanh(), nn.Flatten()]
    model = nn.Sequential(*body, nn.Linear(96, 8), nn.Hardtanh(), nn.Linear(8, 10)).double()
    binarize(model, {"name": "lns", "base": {"name": "dorefa", "inputs": "pm1"}}, quiet=True)
    source = MemorySource(data, CPU)
    source.mean, source.std = source.mean.double(), source.std.double()
    recipe = load_recipe("digits-lns", ["batch_size=32", "optimizer.lr=0.1"])
    made = Learner(recipe, model, source, CPU)
    made.take_from_rank_0()
    made.start_epoch(seed=0, epoch=0, factor=1.0)
    return made


def gradients(out: Path) -> None:
    """Write the gradients of the first batch, and the weights after some steps."""
    made = learner(load_data("digits", None))
    batch, rows = made.source.batch, []
    made.source.batch = lambda plan: (rows.append(plan[:, 0]), batch(plan))[1]  # type: ignore[assignment]
    loss, auxiliary = made.backward()
    tensors = {
        "images": torch.cat(rows),
        "auxiliary": auxiliary,
        "loss": distributed.average(loss.clone()),
    }
    for name, parameter in made.model.named_parameters():
        assert parameter.grad is not None, name
        tensors[f"gradient.{name}"] = parameter.grad.clone()
    for _ in range(STEPS):
        made.step()
    tensors |= {f"after.{name}": p.detach() for name, p in made.model.named_parameters()}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    out.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, out / f"rank-{distributed.rank()}.safetensors")


def two_runs_one_killed(out: Path) -> None:
    """A run that nothing happens to, then the same one, in which rank 1 dies in the third epoch."""
    data = load_data("digits", None)
    network = "model={name: vgg_small, width: 8}"
    overrides = [network, "data.validation=1000", f"epochs={EPOCHS}", "batch_size=64"]
    recipe = load_recipe("digits-dorefa", overrides)
    train(recipe, data, out / "whole", options=RunOptions(checkpoint_seconds=0))
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        die_at_step(13)
    train(recipe, data, out / "killed", options=RunOptions(checkpoint_seconds=0))


def die_at_step(number: int) -> None:
    step, steps = Learner.step, []

    def step_or_die(self: Learner) -> None:
        steps.append(1)
        if len(steps) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        step(self)

    Learner.step = step_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        with distributed.process_group("cpu"):
            gradients(folder)
    two_runs_one_killed(folder)
