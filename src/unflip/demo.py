"""The demo: on scikit-learn's digits, a float network, its binary baseline, fine-tuning and LNS."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import unflip
from unflip.binarize import flips_by_layer
from unflip.cost import Cost, cost
from unflip.data import ImageSet
from unflip.data.digits import load_digits
from unflip.freeze import freeze
from unflip.packing.file import read
from unflip.packing.images import pack_for
from unflip.packing.reference import evaluate
from unflip.recipes import Recipe, load_recipe
from unflip.runs import Run
from unflip.runs.files import write_atomically
from unflip.train import RunOptions, train

RECIPES = ("digits-float", "digits-dorefa", "digits-finetune", "digits-lns")
LABELS = ("float network", "binary baseline (DoReFa)", "fine-tuning", "LNS")
SEEDS = (0, 1, 2)
T_95 = 4.303  # of Student's t with two degrees of freedom, for the means of three seeds

console = Console(soft_wrap=True, markup=False, emoji=False)  # as unflip.cli.app has it


@dataclass(frozen=True)
class Trained:
    """The finished runs of one recipe. ``model`` and ``run`` are those of the first seed."""

    label: str
    recipe: Recipe
    model: nn.Module
    accuracies: list[float]
    cost: Cost
    run: Run


def run_demo(out: Path) -> None:
    """Train the four networks, print what came out, and leave a frozen model and a picture."""
    _forget_finished(out)
    data = load_digits()
    console.print(
        f"{len(data.train_labels):,} handwritten digits to learn from, {len(data.test_labels)} to test\n"
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # images are so small that threads only wait for each other
    trained = [_train(name, label, data, out) for name, label in zip(RECIPES, LABELS, strict=True)]
    torch.set_num_threads(threads)
    _print_comparison(trained)
    console.print(difference(trained[3].accuracies, trained[2].accuracies) + "\n")
    _print_flips(trained[1], trained[2], trained[3])
    _save_frozen(trained[0], trained[3], data, out)
    _pack_and_run(trained[0], trained[3], data, out)
    picture = draw_curves(trained, out / "curves.png")
    console.print(f"Curves of loss, accuracy and flip rate: {picture}")


def _forget_finished(out: Path) -> None:
    """A finished demo starts again; an interrupted one resumes."""
    folders = [out / name for name in RECIPES]
    if all(Run.of_seed(folder, seed).finished for folder in folders for seed in SEEDS):
        for folder in folders:
            shutil.rmtree(folder)


def _train(name: str, label: str, data: ImageSet, out: Path) -> Trained:
    recipe = load_recipe(name)
    start = out / recipe.start if recipe.start else None
    options = RunOptions(device="cpu")
    results = train(recipe, data, out / name, seeds=SEEDS, start=start, options=options)
    model = unflip.load_run(out / name)
    counted = cost(model, torch.from_numpy(data.test_images[:1]).float())
    accuracies = [result["accuracy"] for result in results]
    return Trained(label, recipe, model, accuracies, counted, Run.of_seed(out / name, SEEDS[0]))


def _print_comparison(trained: list[Trained]) -> None:
    baseline = trained[1]
    table = Table("network", "test accuracy", "memory", "FLOPs", "signs changed since the baseline")
    for one in trained:
        changed = "" if one is trained[0] or one is baseline else _changed(baseline, one)
        table.add_row(
            one.label,
            f"{statistics.mean(one.accuracies):.1f} ± {statistics.stdev(one.accuracies):.1f} %",
            f"{one.cost.memory_bits / 1e3:,.0f} Kbit",
            f"{one.cost.flops / 1e6:.2f} M",
            changed,
        )
    console.print(table)
    console.print(f"Accuracy: mean ± std of {len(SEEDS)} seeds. All else is of the first seed.")


def difference(lns: Sequence[float], finetuned: Sequence[float]) -> str:
    """What LNS gained over fine-tuning from the same baselines, and whether that is more than chance."""
    gained = [a - b for a, b in zip(lns, finetuned, strict=True)]
    mean, std = statistics.mean(gained), statistics.stdev(gained)
    text = f"LNS over fine-tuning, from the same {len(gained)} baselines: {mean:+.1f} ± {std:.1f} points."
    if abs(mean) <= T_95 * std / math.sqrt(len(gained)):
        return (
            f"{text} Zero is within the 95 % interval of this mean, so these few runs do not show which of the two is "
            "better."
        )
    which = "better" if mean > 0 else "worse"
    return (
        f"{text} Zero is outside the 95 % interval of this mean: on these digits and with these settings, LNS is "
        f"{which}. docs/lns-study.md has the runs on CIFAR-10."
    )


def _changed(before: Trained, after: Trained) -> str:
    flips = flips_by_layer(before.model, after.model)
    flipped, total = (sum(v[i] for v in flips.values()) for i in (0, 1))
    return f"{flipped:,} of {total:,} ({flipped / total:.2%})"


def _print_flips(baseline: Trained, finetuned: Trained, lns: Trained) -> None:
    table = Table("layer", "weights", "changed by fine-tuning", "changed by LNS")
    plain = flips_by_layer(baseline.model, finetuned.model)
    mapped = flips_by_layer(baseline.model, lns.model)
    for name, (flipped, count) in mapped.items():
        table.add_row(name, f"{count:,}", f"{plain[name][0]:,}", f"{flipped:,}")
    console.print("Signs changed since the binary baseline, layer by layer")
    console.print(table)


def _save_frozen(float_twin: Trained, lns: Trained, data: ImageSet, out: Path) -> None:
    frozen = freeze(lns.model)
    images = _test_inputs(data)
    with torch.no_grad():
        same = torch.equal(frozen(images), lns.model(images))
    if not same:
        raise RuntimeError("the logits of the frozen network differ from those of the trained one")
    paths = {
        out / "digits-lns.safetensors": frozen,
        out / "digits-float.safetensors": float_twin.model,
    }
    for path, model in paths.items():
        data_bytes = safetensors.torch.save(
            {k: v.contiguous() for k, v in model.state_dict().items()}
        )
        write_atomically(path, data_bytes)
    small, large = (path.stat().st_size for path in paths)
    console.print(
        f"\nFrozen LNS network: {out / 'digits-lns.safetensors'}, {small:,} bytes (the float twin: "
        f"{large:,}). Its outputs on all {len(images)} test images equal the trained network's exactly."
    )


def _test_inputs(data: ImageSet) -> Tensor:
    return (torch.from_numpy(data.test_images) / 255 - data.mean[0]) / data.std[0]


def _pack_and_run(float_twin: Trained, lns: Trained, data: ImageSet, out: Path) -> None:
    """Pack the network into one file, and run it without torch beside the float twin in torch."""
    path = out / "digits-lns.unflip"
    size = pack_for(data.spec, lns.model, path)
    images = _test_inputs(data)
    try:
        packed: Callable[[Tensor], Tensor] | None = unflip.load(path, threads=1)
        problem = ""
    except ImportError as error:
        packed, problem = None, str(error)
    with torch.no_grad():
        answers = lns.model(images).argmax(1)
        found = packed(images) if packed else evaluate(read(path), images).flatten(1)
        same = int((found.argmax(1) == answers).sum())
        table = Table("network", "file", "one image, one thread")
        table.add_row("LNS, packed", f"{size:,} bytes", _time(packed, images) if packed else "–")
        float_size = (out / "digits-float.safetensors").stat().st_size
        table.add_row(
            "float twin, in torch", f"{float_size:,} bytes", _time(float_twin.model, images)
        )
    console.print(table)
    console.print(
        "At 8 × 8 pixels much of torch's time is what each layer costs before it computes."
    )
    console.print(
        f"{path} gives the trained network's answer on {same} of {len(images)} test images."
    )
    if problem:
        console.print(f"It was run by the reference in torch, and not timed: {problem}")


def _time(network: Callable[[Tensor], Tensor], images: Tensor) -> str:
    """The median over single images."""
    threads, seconds = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for number in range(60):
        one = images[number % len(images)][None].contiguous()
        start = time.perf_counter()
        network(one)
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return f"{1e6 * statistics.median(seconds[10:]):,.0f} µs"


def draw_curves(trained: list[Trained], path: Path) -> Path:
    """Training loss, test accuracy and flip rate of every network, by epoch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    keys = (
        ("loss", "training loss"),
        ("accuracy", "test accuracy, %"),
        ("flip_rate", "signs flipped in the epoch, %"),
    )
    for number, one in enumerate(trained):
        lines = one.run.metrics
        before = trained[1].recipe.epochs if one.recipe.start else 0  # it continues the baseline
        for axis, (key, _) in zip(axes, keys, strict=True):
            if key in lines[0]:
                factor = 100 if key == "flip_rate" else 1
                axis.plot(
                    [before + line["epoch"] for line in lines],
                    [factor * line[key] for line in lines],
                    color=f"C{number}",
                    label=one.label,
                )
    for axis, (_, title) in zip(axes, keys, strict=True):
        axis.set_title(title)
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[2].set_yscale("symlog", linthresh=0.001)
    axes[1].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
