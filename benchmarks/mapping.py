"""The cost of LNS's mapping networks in a training step of ResNet-20, by our kernels and by batched matrix products.

    python benchmarks/mapping.py [--seeds 5] [--widths 16 32 64] [--steps-only] [--seconds 150] [--json FILE]

First the mappings alone: µs of f(W) and of f(W) with its gradients, both compiled, as the median of replays of a CUDA
graph, after a comparison with float64. Then whole steps under the engine (compiled, CUDA graph, random images): LNS,
LNS without the kernels, and fine-tuning, which is the same step without mappings; and the kernels that take most of the
time of a step. Parts that do not fit into ``--seconds`` are left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sign_conv import microseconds
from train_speed import DOREFA, random_images, recipe
from unflip import models
from unflip.data import ImageSet
from unflip.kernels import check, mapping, tuning
from unflip.kernels.attach import attached
from unflip.kernels.mapping_conv import operator as mapping_conv
from unflip.recipes.build import build_model
from unflip.train.engine import Engine
from unflip.train.learner import Learner

LNS = {"name": "lns", "base": DOREFA}
Mapped = list[Any]  # binary layers
FUSED = partial(mapping_conv.predict_fused, networks=1)


def mapped_layers(model: nn.Module, channels: int | None = None) -> Mapped:
    mapped = mapping.mapped_layers(model).values()
    return [layer for layer in mapped if channels in (None, layer.weight.shape[1])]


def predictions(mapped: Mapped) -> list[Tensor]:
    """As in a training step, and in the order of the layers: ResNet-20's layers of one shape follow each other."""
    found: list[Tensor] = []
    for fused, group in mapping.groups(mapped):
        predict = FUSED if fused else mapping.predict_together
        mappings = [layer.weight_binarizer.mapping for layer in group]
        found += predict(mappings, [layer.weight for layer in group])
    return found


def leaves(mapped: Mapped) -> list[Tensor]:
    return [
        tensor
        for layer in mapped
        for tensor in (layer.weight, *layer.weight_binarizer.mapping.parameters())
    ]


def probes(mapped: Mapped) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(w.shape, generator=generator).to(w, memory_format=torch.channels_last)
        for w in (layer.weight for layer in mapped)
    ]


def errors(mapped: Mapped) -> tuple[float, float]:
    """The largest relative error of a prediction and of a gradient, against each mapping alone in float64."""
    exact: Mapped = [copy.deepcopy(layer).double() for layer in mapped]
    expected = [layer.weight_binarizer.mapping(layer.weight) for layer in exact]
    found, given = predictions(mapped), probes(mapped)
    expected_grads = torch.autograd.grad(expected, leaves(exact), [p.double() for p in given])
    found_grads = torch.autograd.grad(found, leaves(mapped), given)
    pairs = ((found, expected), (found_grads, expected_grads))
    values, gradients = (
        max(((a - b).norm() / b.norm()).item() for a, b in zip(*pair, strict=True))
        for pair in pairs
    )
    return values, gradients


def time_mappings(model: nn.Module, widths: Sequence[int]) -> dict[str, dict[str, float]]:
    """µs for the layers of some widths and for all, forward and with the gradients."""
    rows = {}
    for channels in (*widths, None):
        mapped = mapped_layers(model, channels)
        label = f"{len(mapped)} layers, c = {channels or '16, 32, 64'}"
        row: dict[str, float] = {}
        for name, kernel in (("kernels", FUSED), ("bmm", None)):
            torch._dynamo.reset()
            function = torch.compile(predictions, dynamic=False, options={"combo_kernels": True})
            with attached(mapped, fused_predict=kernel):
                for kind, call in _calls(function, mapped).items():
                    row[f"{name} {kind}"] = microseconds(call, 10)
        rows[label] = row
        print(f"  {label:24} " + "   ".join(f"{k} {v:6.1f}" for k, v in row.items()), flush=True)
    return rows


def _calls(
    function: Callable[[Mapped], list[Tensor]], mapped: Mapped
) -> dict[str, Callable[[], Any]]:
    given, into = probes(mapped), leaves(mapped)
    return {
        "forward": lambda: function(mapped),
        "with gradients": lambda: torch.autograd.grad(function(mapped), into, given),
    }


def time_kernels(model: nn.Module) -> None:
    """µs of each launch, all layers, not compiled."""
    mapped = mapped_layers(model)
    call = _calls(predictions, mapped)["with gradients"]
    with attached(mapped, fused_predict=FUSED):
        call()
        show(profiled(call, 10), 12)


def profiled(call: Callable[[], Any], times: int) -> dict[str, tuple[float, float]]:
    """Kernel -> (launches, µs) of one call."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    totals: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, total = totals[event.name]
            totals[event.name] = (count + 1 / times, total + event.device_time / times)
    return totals


def show(totals: dict[str, tuple[float, float]], most: int) -> None:
    launches, total = (sum(v[i] for v in totals.values()) for i in (0, 1))
    print(f"    {launches:.0f} launches, {total:.0f} µs of kernels; the longest:")
    for name, (count, time_) in sorted(totals.items(), key=lambda item: -item[1][1])[:most]:
        print(f"    {time_:7.1f} µs  {count:5.1f} ×  {name[:110]}")
    sys.stdout.flush()


def engine_of(method: Any, seeds: int, data: ImageSet, kernels: bool, stack: ExitStack) -> Engine:
    torch._dynamo.reset()
    chosen, device = recipe(method, True), torch.device("cuda")
    images = data.source(device)
    learners = [
        Learner(chosen, build_model(chosen, data.spec, seed), images, device)
        for seed in range(seeds)
    ]
    compare = check.check_mapping if kernels else _refuse
    with mock.patch.object(check, "check_mapping", compare):
        return stack.enter_context(Engine(learners, compiled=True, captured=True))


def _refuse(*_: object) -> None:
    raise RuntimeError("they are left out on purpose")


def step_milliseconds(engine: Engine) -> float:
    """Of one seed's step: the median over epochs of 100 steps."""
    times = []
    for epoch in range(6):
        for seed, learner in enumerate(engine.learners):
            learner.start_epoch(seed, epoch, 1.0)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(engine.learners[0].steps):
            engine.step()
        torch.cuda.synchronize()
        steps = engine.learners[0].steps * len(engine.learners)
        times.append(1000 * (time.perf_counter() - began) / steps)
    return statistics.median(times[1:])


def time_steps(data: ImageSet, seeds: int, late: Callable[[], bool]) -> dict[str, float]:
    rows: dict[str, float] = {}
    for label, method, count, kernels in (
        ("fine-tuning, 1 seed", DOREFA, 1, True),
        ("LNS, 1 seed", LNS, 1, True),
        (f"LNS, {seeds} seeds, each", LNS, seeds, True),
        (f"fine-tuning, {seeds} seeds, each", DOREFA, seeds, True),
        ("LNS without kernels, 1 seed", LNS, 1, False),
    ):
        if late():
            print(f"  {label}: left out, no time")
            continue
        with ExitStack() as stack:
            began = time.perf_counter()
            engine = engine_of(method, count, data, kernels, stack)
            ready = time.perf_counter() - began
            mapped = mapped_layers(engine.learners[0].model)
            used = ", our mappings" if mapped and mapped[0].fused_predict is not None else ""
            rows[label] = step_milliseconds(engine)
            how = f"{engine.mode}{used}, ready in {ready:.0f} s"
            print(f"  {label}: {rows[label]:.3f} ms per step  ({how})")
            if count == 1 and kernels:
                engine.learners[0].start_epoch(0, 9, 1.0)
                show(profiled(engine.step, 10), 40)
        del engine
        torch.cuda.empty_cache()
    for some in ("1 seed", f"{seeds} seeds, each"):
        pair = [rows.get(f"{kind}, {some}") for kind in ("LNS", "fine-tuning")]
        if pair[0] is not None and pair[1] is not None:
            rows[f"LNS / fine-tuning, {some}"] = pair[0] / pair[1]
    return rows


def lns_model() -> nn.Module:
    torch.manual_seed(0)
    model = models.create("resnet20", LNS)
    return model.cuda().to(memory_format=torch.channels_last)


def tuned(lines: dict[str, dict[tuple[Any, ...], str]]) -> Sequence[str]:
    return [
        f"    {k} {key}  {config}" for k, found in lines.items() for key, config in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--widths", type=int, nargs="*", default=[64], help="of 16, 32, 64: also time these alone"
    )
    parser.add_argument("--steps-only", action="store_true", help="whole steps, no mappings alone")
    parser.add_argument("--seconds", type=float, default=150, help="start nothing new after this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available() or not tuning.available() or tuning.INTERPRETED:
        sys.exit("This benchmark needs a CUDA device and Triton, without TRITON_INTERPRET.")
    torch.backends.cudnn.allow_tf32 = False
    began = time.perf_counter()

    def elapsed() -> float:
        return time.perf_counter() - began

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    model = lns_model()
    mapped = mapped_layers(model)
    with attached(mapped, fused_predict=FUSED):
        value, gradient = errors(mapped)
    print(
        f"largest relative error against float64: f(W) {value:.1e}, gradients {gradient:.1e} "
        f"(tuned and compared after {elapsed():.0f} s)"
    )
    print("\n".join(tuned(mapping_conv.tuned())))
    alone: dict[str, dict[str, float]] = {}
    if not options.steps_only:
        print("\nmappings alone, µs:", flush=True)
        alone = time_mappings(model, options.widths)
        print(f"  each launch ({elapsed():.0f} s):")
        time_kernels(model)
    print(f"\nsteps of ResNet-20, batch 128 ({elapsed():.0f} s):", flush=True)
    steps = time_steps(random_images(12_800), options.seeds, lambda: elapsed() > options.seconds)
    print("\n" + "\n".join(f"| {label} | {value:.3f} |" for label, value in steps.items()))
    print(f"\n{elapsed():.0f} s")
    if options.json:
        found = {"errors": [value, gradient], "mappings_us": alone, "steps_ms": steps}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
