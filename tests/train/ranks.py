"""What test_distributed.py runs in each process of torchrun, once for all its tests, because importing torch takes
long. ``gradients`` also runs in the test's own process."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from unflip import binarize
from unflip.data import ImageSet
from unflip.data import load as load_data
from unflip.data.source import MemorySource
from unflip.kernels import check, tuning
from unflip.layers import binary_layers
from unflip.models import resnet18
from unflip.train import distributed, load_recipe, train
from unflip.train import engine as engines
from unflip.train.distributed import Ranks
from unflip.train.engine import Engine
from unflip.train.job import RunOptions
from unflip.train.learner import Learner

CPU = torch.device("cpu")
STEPS = 5  # of an epoch with 1,000 of the digits held out
EPOCHS = 4
LNS = {"name": "lns", "base": {"name": "dorefa", "inputs": "pm1"}}
TESTED = 449  # an odd number: the ranks' parts are not equal


def digits() -> ImageSet:
    data = load_data("digits", None)
    return replace(
        data, test_images=data.test_images[:TESTED], test_labels=data.test_labels[:TESTED]
    )


def resnet() -> nn.Module:
    """Its shortcuts have norms beside those of the convolutions."""
    return resnet18(LNS, width=4, in_channels=1, num_classes=10, variant="bireal-prelu")


def small() -> nn.Module:
    body = [nn.Conv2d(1, 4, 3), nn.Hardtanh(), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Hardtanh()]
    head = [nn.Flatten(), nn.Linear(96, 8), nn.BatchNorm1d(8), nn.Hardtanh(), nn.Linear(8, 10)]
    return binarize(nn.Sequential(*body, *head), LNS, quiet=True)


def learner(data: ImageSet, ranks: Ranks, network: Callable[[], nn.Module]) -> Learner:
    """LNS in float64, with BatchNorm's statistics of the whole batch."""
    torch.manual_seed(ranks.rank)  # the ranks must agree in spite of that
    model = network().double()
    source = MemorySource(data, CPU)
    source.mean, source.std = source.mean.double(), source.std.double()
    overrides = ["batch_size=32", "optimizer.lr=0.1", "sync_batchnorm=true"]
    made = Learner(load_recipe("digits-lns", overrides), model, source, CPU, ranks=ranks)
    made.take_from_rank_0()
    made.start_epoch(seed=0, epoch=0, factor=1.0)
    return made


def gradients(out: Path) -> None:
    """Write the gradients of the first batch, and what :func:`steps` and :func:`norms` find."""
    ranks = distributed.together()
    made = learner(digits(), ranks, resnet)
    batch, rows = made.source.batch, []
    made.source.batch = lambda plan: (rows.append(plan[:, 0]), batch(plan))[1]  # type: ignore[assignment]
    loss, auxiliary = made.backward()
    tensors = {
        "images": torch.cat(rows),
        "auxiliary": auxiliary,
        "loss": ranks.average(loss.clone()),
    }
    for name, parameter in made.model.named_parameters():
        assert parameter.grad is not None, name
        tensors[f"gradient.{name}"] = parameter.grad.clone()
    tensors |= steps(ranks) | norms(ranks)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    out.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, out / f"rank-{ranks.rank}.safetensors")


def steps(ranks: Ranks) -> dict[str, Tensor]:
    """A network after some steps, and its accuracy. Only a small one: in a ResNet a rounding soon changes a sign."""
    made = learner(digits(), ranks, small)
    for _ in range(STEPS):
        made.step()
    if ranks.rank == 1:  # as if its statistics were its own: rank 0's count
        made.model.get_buffer("3.running_mean").add_(100)
    tested: list[int] = []
    test_batches = made.source.test_batches
    made.source.test_batches = lambda *given: _counted(test_batches(*given), tested)  # type: ignore[method-assign]
    accuracy = torch.tensor(made.evaluate(exact=True).top1, dtype=torch.float64)
    after = {f"after.{name}": value for name, value in made.model.state_dict().items()}
    sums = {"sum of losses": made.loss_sum}
    return {"accuracy": accuracy, "tested": torch.tensor(tested), **sums, **after}


def norms(ranks: Ranks) -> dict[str, Tensor]:
    """Output, gradients and buffers of this rank's part of a batch after each kind of norm."""
    kinds: list[tuple[type[nn.Module], tuple[int, ...], dict[str, Any]]] = [
        (nn.BatchNorm2d, (8, 3, 4, 5), {"dtype": torch.float64}),
        (nn.BatchNorm2d, (8, 3, 4, 5), {"dtype": torch.float32}),
        (nn.BatchNorm2d, (8, 3, 4, 5), {"dtype": torch.float64, "momentum": None}),
        (nn.BatchNorm2d, (8, 3, 4, 5), {"dtype": torch.float64, "track_running_stats": False}),
        (nn.BatchNorm1d, (8, 3), {"dtype": torch.float64, "affine": False}),
    ]
    found: dict[str, Tensor] = {}
    for case, (kind, shape, options) in enumerate(kinds):
        torch.manual_seed(case)
        values, probe = (torch.randn(shape, dtype=options["dtype"]) for _ in range(2))
        norm = nn.Sequential(kind(3, **options))
        for parameter in norm.parameters():
            nn.init.uniform_(parameter)
        distributed.synchronize_norms(norm, ranks)
        rows = slice(ranks.rank * 8 // ranks.world, (ranks.rank + 1) * 8 // ranks.world)
        for shift in (100, 101):  # two batches: running statistics go on from the first
            x = (values[rows] * 3 + shift).requires_grad_()
            norm.zero_grad()
            y = norm(x)
            (y * probe[rows]).sum().backward()
        assert x.grad is not None
        results = {"output": y.detach(), "input": x.grad}
        results |= {
            f"{n}.gradient": p.grad for n, p in norm.named_parameters() if p.grad is not None
        }
        results |= dict(norm.named_buffers())
        found |= {f"norm.{case}.{name}": value for name, value in results.items()}
    return found


def _counted(batches: Iterator[Any], sizes: list[int]) -> Iterator[Any]:
    for images, labels in batches:
        sizes.append(len(labels))
        yield images, labels


def failures(out: Path) -> None:
    """Write which kernels and which mode each rank has: a check fails on rank 1 only, then the compiler does."""
    ranks = distributed.together()
    made, found = learner(digits(), ranks, small), {}

    def fails_on_rank_1(*_: Any) -> None:
        if ranks.rank == 1:
            raise RuntimeError("output of 2 is off by 7")

    tuning.available = lambda: True
    tuning.runs_on = lambda device: True
    for name in ("check_product", "check_stems", "check_norm", "check_mapping"):
        setattr(check, name, lambda *_: None)
    check.check_norm = fails_on_rank_1
    compiler = partial(torch.compile, backend="eager")
    torch.compile = lambda function, **_: compiler(function, dynamic=False)  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as warned, ExitStack() as stack:
        warnings.simplefilter("always")
        engine = stack.enter_context(Engine([made], compiled=True, captured=True))
        _, layer = next(iter(binary_layers(made.model)))
        found["kernels"] = [k for k in ("fused_product", "fused_norm") if getattr(layer, k)]
        engines.check_straight_through = fails_on_rank_1
        engine._compile(stack)
        found["mode after a failure"] = engine.mode
        engines.check_straight_through = lambda *_: None
        engine._compile(stack)
        found["mode"] = engine.mode
        expected = learner(digits(), ranks, small)
        for _ in range(2):
            engine.step()
            expected.step()
        torch.testing.assert_close(made.state(), expected.state())
        found["warnings"] = [str(w.message) for w in warned if "because" in str(w.message)]
    (out / f"failures-{ranks.rank}.json").write_text(json.dumps(found))


def whole_training(out: Path) -> None:
    """A float network, whose metrics do not depend on roundings as those of a binary one do."""
    overrides = ["model={name: vgg_small, width: 4}", "method=float", "sync_batchnorm=true"]
    recipe = load_recipe("digits-dorefa", [*overrides, "data.validation=999", "epochs=2"])
    train(recipe, digits(), out, options=RunOptions(device="cpu", quiet=True))


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
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first:
        with distributed.process_group("cpu"):
            gradients(folder)
        whole_training(folder / "together")
    two_runs_one_killed(folder)
    with distributed.process_group("cpu"):
        failures(folder)  # last, because it replaces functions
