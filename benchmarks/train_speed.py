"""Seconds per epoch of binary ResNet-20 at CIFAR-10's size: a plain eager PyTorch loop and ours.

    python benchmarks/train_speed.py [--seeds 5] [--epochs 5] [--json FILE]

Speed does not depend on what the images show, so they are random: 50,000 of 3×32×32, batch 128. Both
loops train the same network on the same GPU in the same run. The plain loop is what most code does,
minus its worst habits: images already on the GPU, no host synchronisation, fp32, torch's own SGD.
Evaluation and checkpoints are outside the timed part of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from unflip import models
from unflip.data import ImageSet
from unflip.methods.lns import warm_start
from unflip.recipes.build import build_model
from unflip.recipes.schema import Recipe
from unflip.runs.provenance import unflip_version
from unflip.train.engine import Engine
from unflip.train.learner import Learner

DOREFA = {"name": "dorefa", "inputs": "pm1"}


def random_images(count: int) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator).numpy()
    labels = torch.randint(0, 10, (count,), generator=generator).numpy()
    classes = tuple("0123456789")
    return ImageSet(
        images,
        labels,
        images[:1000],
        labels[:1000],
        classes,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        crop_padding=4,
        flip=True,
    )


def recipe(method: Any, start: bool) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "speed",
            "data": {"name": "cifar10"},
            "model": {"name": "resnet20"},
            "method": method,
            "start": "baseline" if start else None,
            "epochs": 400,
            "optimizer": {"lr": 0.01 if start else 0.1},
        }
    )


def seconds_per_epoch(run_epoch: Callable[[int], None], epochs: int) -> float:
    run_epoch(0)
    times = []
    for epoch in range(1, epochs + 1):
        _synchronize()
        began = time.perf_counter()
        run_epoch(epoch)
        _synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def plain_loop(data: ImageSet, device: torch.device, epochs: int) -> float:
    """As one would write it: eager, fp32, one kernel per operation."""
    model = models.create("resnet20", DOREFA).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mean = torch.tensor(data.mean, device=device).view(3, 1, 1) * 255
    std = torch.tensor(data.std, device=device).view(3, 1, 1) * 255
    images = F.pad(
        (torch.from_numpy(data.train_images).to(device).float() - mean) / std, (4, 4, 4, 4)
    )
    labels = torch.from_numpy(data.train_labels).to(device)

    def epoch(_: int) -> None:
        order = torch.randperm(len(labels), device=device)
        for index in order.split(128)[: len(labels) // 128]:
            top, left = torch.randint(0, 9, (2,)).tolist()
            batch = images[index][:, :, top : top + 32, left : left + 32]
            flip = torch.rand(len(index), 1, 1, 1, device=device) < 0.5
            batch = torch.where(flip, batch.flip(3), batch)
            loss = F.cross_entropy(model(batch), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return seconds_per_epoch(epoch, epochs)


def our_loop(
    data: ImageSet, device: torch.device, epochs: int, method: Any, seeds: int, start: bool
) -> tuple[float, str, float]:
    """Seconds per epoch of all seeds together, how the steps were run, and the time to get ready."""
    began = time.perf_counter()
    chosen = recipe(method, start)
    source = data.source(device)
    learners = [
        Learner(chosen, build_model(chosen, data.spec, seed), source, device)
        for seed in range(seeds)
    ]
    if start and isinstance(method, dict) and method["name"] == "lns":
        for learner in learners:
            warm_start(learner.model, steps=20)
    with Engine(learners, compiled=True, captured=True) as engine:
        _synchronize()
        ready = time.perf_counter() - began

        def epoch(number: int) -> None:
            for seed, learner in enumerate(learners):
                learner.start_epoch(seed, number, 1.0)
            for _ in range(learners[0].steps):
                engine.step()

        seconds, mode = seconds_per_epoch(epoch, epochs), engine.mode
    losses = [learner.loss_sum.item() / learner.steps for learner in learners]
    assert all(0 < loss < 10 for loss in losses), f"the timed loop did not learn sanely: {losses}"
    return seconds, mode, ready


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="seeds in one process (default 5)")
    parser.add_argument(
        "--epochs", type=int, default=5, help="timed epochs, of which the median counts"
    )
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--skip-plain", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, {args.images} images, batch 128", flush=True)
    data = random_images(args.images)
    lns = {"name": "lns", "base": DOREFA}
    rows: dict[str, float] = {}
    if not args.skip_plain:
        rows["plain eager loop"] = plain_loop(data, device, max(1, args.epochs // 3))
        print(f"plain eager loop: {rows['plain eager loop']:.3f} s", flush=True)
    for label, method, seeds, start in (
        ("baseline, 1 seed", DOREFA, 1, False),
        (f"baseline, {args.seeds} seeds, each", DOREFA, args.seeds, False),
        ("fine-tuning, 1 seed", DOREFA, 1, True),
        ("LNS, 1 seed", lns, 1, True),
        (f"LNS, {args.seeds} seeds, each", lns, args.seeds, True),
    ):
        seconds, mode, ready = our_loop(data, device, args.epochs, method, seeds, start)
        rows[label] = seconds / seeds
        print(f"{label}: {rows[label]:.3f} s  ({mode}, ready in {ready:.0f} s)", flush=True)
    if "plain eager loop" in rows:
        rows["plain / ours, 1 seed"] = rows["plain eager loop"] / rows["baseline, 1 seed"]
    rows["LNS / fine-tuning, 1 seed"] = rows["LNS, 1 seed"] / rows["fine-tuning, 1 seed"]
    print("\n" + "\n".join(f"| {label} | {value:.3f} |" for label, value in rows.items()))
    if args.json:
        args.json.write_text(
            json.dumps(
                {"device": name, "torch": torch.__version__, **unflip_version(), **rows}, indent=1
            )
        )


if __name__ == "__main__":
    main()
