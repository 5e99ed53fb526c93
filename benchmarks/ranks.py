"""Whether several processes compute what one process computes with the whole batch, and how fast they are.

    torchrun --nproc-per-node N benchmarks/ranks.py [--pixels 64] [--batch 64] [--width 64] [--steps 20]

Runs on N GPUs, on fewer (processes then share them and communicate through gloo), or on CPUs. ResNet-18, random images.
Each process also computes alone, on its own device, what it compares with:

float64      binary ResNet-18 with LNS, synchronized BatchNorm, eager. All digits agree, and so does the accuracy.
half         float ResNet-18, synchronized BatchNorm, compiled. The gradients agree as well as those of half precision
             and of float32 agree in one process.
kernels      binary ResNet-18, BatchNorm per rank, with our kernels: the mean of the gradients of the ranks' shares.
             It is not compiled: the compiler rounds otherwise where its graph is cut into pieces, and a rounding
             changes signs in a binary network. The speed is then measured compiled.

The last two need GPUs. Prints one line per case, and exits with 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch import Tensor

from unflip.data import ImageSet
from unflip.data.source import MemorySource
from unflip.recipes.build import build_model
from unflip.recipes.schema import Recipe
from unflip.train import distributed
from unflip.train.distributed import ALONE, Ranks
from unflip.train.engine import Engine
from unflip.train.learner import Learner

DOREFA = {"name": "dorefa", "inputs": "pm1"}
LNS = {"name": "lns", "base": DOREFA, "mapping": "residual"}
TESTED = 101  # images that are evaluated: a prime number, so no parts are equal

Gradients = dict[str, Tensor]


def random_images(count: int, pixels: int) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, pixels, pixels)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator).numpy()
    labels = torch.randint(0, 10, (count,), generator=generator).numpy()
    half, quarter = (0.5,) * 3, (0.25,) * 3
    tested = images[:TESTED], labels[:TESTED]
    return ImageSet(images, labels, *tested, tuple("0123456789"), half, quarter, 0, flip=True)


class Comparison:
    """The same network trained by all ranks, and by this process alone."""

    def __init__(self, device: torch.device, pixels: int, batch: int, width: int) -> None:
        self.device, self.batch, self.width = device, batch, width
        self.data = random_images(max(2 * batch, TESTED), pixels)
        self.failed = False

    def learner(
        self,
        method: Any,
        ranks: Ranks,
        batch: int | None = None,
        dtype: torch.dtype = torch.float16,
        sync: bool = True,
    ) -> Learner:
        variant = "plain" if method == "float" else "bireal-prelu"
        recipe = Recipe.model_validate(
            {
                "name": "ranks",
                "data": {"name": "cifar10"},
                "model": {"name": "resnet18", "variant": variant, "width": self.width},
                "method": method,
                "epochs": 1,
                "batch_size": batch or self.batch,
                "optimizer": {"lr": 0.01},
                "precision": "float16" if dtype == torch.float16 else "float32",
                "sync_batchnorm": sync,
            }
        )
        model = build_model(recipe, self.data.spec, seed=0)
        source = MemorySource(self.data, self.device)
        if dtype == torch.float64:
            model = model.double()
            source.mean, source.std = source.mean.double(), source.std.double()
        return Learner(recipe, model, source, self.device, ranks=ranks)

    def report(
        self, case: str, found: Gradients, expected: Gradients, tolerance: float, more: str = ""
    ) -> None:
        error = difference(found, expected)
        good = error <= tolerance and all(torch.isfinite(g).all() for g in found.values())
        problem = distributed.together().first_problem(None if good else f"off by {error:.2g}")
        self.failed |= problem is not None
        if distributed.speaks():
            verdict = "ok" if problem is None else f"FAIL: {problem}"
            print(
                f"{case:<8} error {error:.1e}, at most {tolerance:.1e}{more}: {verdict}", flush=True
            )

    # ------------------------------------------------------------------------------------------ the cases

    def float64(self) -> None:
        together = self.learner(LNS, distributed.together(), dtype=torch.float64)
        alone = self.learner(LNS, ALONE, dtype=torch.float64)
        found, expected = gradients(together), gradients(alone)
        accuracies = together.evaluate(exact=True).top1, alone.evaluate(exact=True).top1
        equal = accuracies[0] == accuracies[1]
        more = f", accuracy {accuracies[0]:.4f} and {accuracies[1]:.4f} %"
        self.report("float64", found, expected, 1e-8 if equal else 0.0, more)

    def half(self) -> None:
        expected = gradients(self.learner("float", ALONE))
        noise = difference(expected, gradients(self.learner("float", ALONE, dtype=torch.float32)))
        together = self.learner("float", distributed.together())
        with Engine([together], compiled=True, captured=False) as engine:
            self.report("half", gradients(together), expected, 1.5 * noise, f", {engine.mode}")

    def kernels(self, steps: int) -> None:
        ranks = distributed.together()
        alone = self.learner(DOREFA, ALONE, batch=self.batch // ranks.world, sync=False)
        plan = alone.source.plan(0, 0, self.batch)[0].to(self.device)
        shares = [Ranks(rank, ranks.world).share(plan) for rank in range(ranks.world)]
        with Engine([alone], compiled=False, captured=False):
            expected = mean([gradients(alone, share) for share in shares])
        together = self.learner(DOREFA, ranks, sync=False)
        with Engine([together], compiled=False, captured=False) as engine:
            self.report("kernels", gradients(together), expected, 1e-3, f", {engine.mode}")
        with Engine([together], compiled=True, captured=False) as engine:
            self.measure(engine, steps)

    def measure(self, engine: Engine, steps: int) -> None:
        for count in (3, steps):
            torch.cuda.synchronize()
            began = time.monotonic()
            for _ in range(count):
                engine.learners[0].position.zero_()
                engine.step()
            torch.cuda.synchronize()
        seconds = (time.monotonic() - began) / steps
        if distributed.speaks():
            print(
                f"speed    {self.batch / seconds:.0f} images/s by all ranks, {seconds * 1000:.1f} ms per step"
            )


def gradients(learner: Learner, row: Tensor | None = None) -> Gradients:
    """Of the first batch of epoch 0, or of the given row of a plan. The learner is left as it was."""
    snapshot = learner.snapshot()
    learner.start_epoch(0, 0, 1.0)
    if row is not None:
        learner.plan[0].copy_(row)
    learner.backward()
    found = {
        name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None
    }
    learner.zero_grad()
    learner.restore(snapshot)
    return found


def mean(parts: list[Gradients]) -> Gradients:
    return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}


def difference(found: Gradients, expected: Gradients) -> float:
    """The norm of the difference over the norm, of all gradients together."""
    assert found.keys() == expected.keys()
    apart = torch.stack([(found[name] - expected[name]).norm() for name in expected]).norm()
    return (apart / torch.stack([g.norm() for g in expected.values()]).norm()).item()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64, help="of all ranks together")
    parser.add_argument("--width", type=int, default=64, help="of the first stage; a CPU wants 8")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with distributed.process_group(None) as chosen:
        device = torch.device(chosen or "cpu")
        comparison = Comparison(device, options.pixels, options.batch, options.width)
        comparison.float64()
        if comparison.device.type == "cuda":
            comparison.half()
            comparison.kernels(options.steps)
    return 1 if comparison.failed else 0


if __name__ == "__main__":
    sys.exit(main())
