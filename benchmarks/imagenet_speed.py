"""Training speed of ResNet-18 at ImageNet's size: plain PyTorch loops and ours, in one run.

    python benchmarks/imagenet_speed.py [--data PACK] [--only engine lns] [--eager] [--json FILE]

224 pixels, 1,000 classes, batch 256. Each part is a process of its own, so that memory and start-up are its own:

float     torchvision's float ResNet-18, bfloat16 autocast, compiled; images on the GPU
plain     our ±1 ResNet-18 (Bi-Real Net with PReLU, DoReFa), float16 autocast, compiled; images on the GPU
engine    the same network as `unflip train` trains it; images on the GPU
captured  the same without compilation (--no-compile)
again     engine, started a second time: seconds from the start of the process to the end of its first step
lns       engine with LNS: warm start until 99.95 % of the signs agree, and the time of a step
pack      engine on images that worker processes read from a pack, decode and crop. Without --data, images of
          benchmarks/loader_speed.py: short side 256, JPEG quality 90, 27 KB each

--eager also times the two plain loops without compilation. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BEGAN = float(os.environ.get("UNFLIP_BENCH_BEGAN") or time.time())

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

BATCH, PIXELS, CLASSES, STEPS = 256, 224, 1000, 20
DOREFA = {"name": "dorefa", "inputs": "pm1"}
PARTS = ("float", "plain", "engine", "captured", "again", "lns", "pack")


class OnDevice:
    """A source whose batches are always the same random images, as bytes on the device."""

    resident = True
    test_count = 0

    def __init__(self, device: torch.device) -> None:
        from unflip.data import InputSpec

        classes = tuple(map(str, range(CLASSES)))
        self.spec = InputSpec((3, PIXELS, PIXELS), classes, (0.5,) * 3, (0.25,) * 3)
        generator = torch.Generator(device).manual_seed(0)
        shape, options = (BATCH, PIXELS, PIXELS, 3), {"generator": generator, "device": device}
        self.images = torch.randint(256, shape, dtype=torch.uint8, **options)
        self.labels = torch.randint(CLASSES, (BATCH,), **options)

    def __len__(self) -> int:
        return STEPS * BATCH

    def plan(self, seed: int, epoch: int, batch_size: int) -> Tensor:
        return torch.zeros(STEPS, BATCH, 1, dtype=torch.int64)

    def batch(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        images = (self.images.float() / 255 - 0.5) / 0.25
        return images.permute(0, 3, 1, 2), self.labels

    def test_batches(self, size: int, part: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(())


class Repeated:
    """A streamed source with many epochs as one: a pack of few images is not started again every few steps."""

    resident = False

    def __init__(self, source: Any, epochs: int) -> None:
        self.source, self.epochs = source, epochs
        self.spec, self.test_count = source.spec, source.test_count
        self.stream, self.normalize, self.batch = source.stream, source.normalize, source.batch
        self.test_batches, self.close = source.test_batches, source.close

    def __len__(self) -> int:
        return self.epochs * (len(self.source) // BATCH * BATCH)

    def plan(self, seed: int, epoch: int, batch_size: int) -> Tensor:
        first = epoch * self.epochs
        plans = (self.source.plan(seed, first + i, batch_size) for i in range(self.epochs))
        return torch.cat(list(plans))


def seconds_per_step(step: Callable[[], None], steps: int, repeats: int = 5) -> float:
    """The median over ``repeats`` of the mean over ``steps``."""
    step()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / steps)
    return statistics.median(times)


def figures(seconds: float, **more: Any) -> dict[str, Any]:
    memory = torch.cuda.max_memory_reserved() / 2**30
    return {"images_per_s": BATCH / seconds, "ms": 1e3 * seconds, "gib": memory, **more}


# ------------------------------------------------------------------------------------------ plain loops


def plain_loop(which: str, compiled: bool) -> dict[str, Any]:
    """Channels last, autocast, fused SGD, cuDNN's fastest algorithms; images are already on the GPU."""
    import torchvision

    from unflip import models

    device, half = torch.device("cuda"), torch.bfloat16 if which == "float" else torch.float16
    torch.backends.cudnn.benchmark = True
    if which == "float":
        model = torchvision.models.resnet18()
    else:
        model = models.create("resnet18", DOREFA, variant="bireal-prelu")
    model = model.to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    images, labels = OnDevice(device).batch(torch.zeros(0))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", half):
            return F.cross_entropy(model(x).float(), y)

    function = torch.compile(loss) if compiled else loss

    def step() -> None:
        optimizer.zero_grad()
        function(images, labels).backward()
        optimizer.step()

    return figures(seconds_per_step(step, STEPS))


# ----------------------------------------------------------------------------------------------- ours


def recipe(lns: bool, batch: int = BATCH) -> Any:
    from unflip.recipes.schema import Recipe

    return Recipe.model_validate(
        {
            "name": "speed",
            "data": {"name": "images"},
            "model": {"name": "resnet18", "variant": "bireal-prelu"},
            "method": {"name": "lns", "base": DOREFA} if lns else DOREFA,
            "start": "baseline" if lns else None,
            "epochs": 120,
            "batch_size": batch,
            "optimizer": {"lr": 0.01},
        }
    )


def our_loop(source: Any, *, lns: bool = False, compiled: bool = True) -> dict[str, Any]:
    from unflip.recipes.build import build_model
    from unflip.train.engine import Engine
    from unflip.train.learner import Learner

    device, chosen = torch.device("cuda"), recipe(lns)
    model = build_model(chosen, source.spec, seed=0).to(device)
    more: dict[str, Any] = {}
    if lns:
        more["warm_start_s"] = warm_start_seconds(model, device)
        more["warm_start_gib"] = torch.cuda.max_memory_reserved() / 2**30
        torch.cuda.reset_peak_memory_stats()
    learner = Learner(chosen, model, source, device)
    with Engine([learner], compiled=compiled, captured=True) as engine:
        epoch = 0

        def step() -> None:
            nonlocal epoch
            if not source.resident and int(learner.position) == learner.steps:
                epoch += 1
                learner.start_epoch(0, epoch, 1.0)
            engine.step()

        learner.start_epoch(0, 0, 1.0)
        step()
        torch.cuda.synchronize()
        more["first_step_s"] = time.time() - BEGAN
        learner.position.zero_()
        seconds = timed(learner, step, source)
        more["mode"] = engine.mode
    assert torch.isfinite(learner.loss_sum), "the timed loop diverged"
    return figures(seconds, **more)


def timed(learner: Any, step: Callable[[], None], source: Any) -> float:
    if not source.resident:
        return seconds_per_step(step, steps=100, repeats=3)

    def from_the_first() -> None:
        learner.position.zero_()  # the plan is short
        step()

    return seconds_per_step(from_the_first, STEPS)


def warm_start_seconds(model: Any, device: torch.device) -> float:
    from unflip.kernels import prediction_kernels
    from unflip.methods.lns import warm_start

    model.to(memory_format=torch.channels_last)
    began = time.perf_counter()
    with prediction_kernels(model, device):
        warm_start(model)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def from_pack(path: Path | None) -> dict[str, Any]:
    from unflip import data

    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            import loader_speed

            path = loader_speed.make_pack(Path(folder))
        source: Any = data.load("images", path, size=PIXELS).source(torch.device("cuda"))
        try:
            return our_loop(Repeated(source, epochs=1 + 1000 * BATCH // len(source)))
        finally:
            source.close()


# --------------------------------------------------------------------------------------- all the parts


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    name, _, mode = part.partition("-")
    if name in ("float", "plain"):
        return plain_loop(name, compiled=mode != "eager")
    if name == "pack":
        return from_pack(options.data)
    source = OnDevice(torch.device("cuda"))
    return our_loop(source, lns=name == "lns", compiled=name != "captured")


def in_a_process(part: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--part", part]
    command += ["--data", str(options.data)] if options.data else []
    environment = {**os.environ, "UNFLIP_BENCH_BEGAN": str(time.time())}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"failed": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def line(part: str, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"{part:12} failed with exit status {found['failed']}"
    text = f"{part:12} {found['images_per_s']:10,.0f} {found['ms']:8.2f} {found['gib']:7.1f}"
    text += f" {found['first_step_s']:12.1f}" if "first_step_s" in found else ""
    text += f"   warm start {found['warm_start_s']:.1f} s" if "warm_start_s" in found else ""
    return text + (f"   {found['mode']}" if "mode" in found else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a pack for the part 'pack'; default: made here")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--eager", action="store_true", help="also the plain loops, not compiled")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(measure(options.part, options)))
        return
    from unflip.runs.provenance import unflip_version

    parts = [p for p in PARTS if p in options.only]
    if options.eager:
        parts += [f"{p}-eager" for p in ("float", "plain") if p in parts]
    gpu = torch.cuda.get_device_name()
    print(f"ResNet-18, {PIXELS} px, batch {BATCH}, {gpu}, torch {torch.__version__}")
    print("part           images/s       ms     GiB first step s")
    found: dict[str, Any] = {}
    for part in parts:
        found[part] = in_a_process(part, options)
        print(line(part, found[part]), flush=True)
        if options.json:
            about = {"gpu": gpu, "torch": torch.__version__, "unflip": unflip_version()}
            options.json.write_text(json.dumps({**about, "parts": found}, indent=1))
    if {"lns", "engine"} <= found.keys() and "ms" in found["lns"]:
        print(
            f"a step with LNS takes {found['lns']['ms'] / found['engine']['ms']:.2f} × one without"
        )
    if {"pack", "engine"} <= found.keys() and "ms" in found["pack"]:
        share = found["pack"]["images_per_s"] / found["engine"]["images_per_s"]
        print(f"from the pack: {share:.1%} of the speed with images on the GPU")


if __name__ == "__main__":
    main()
