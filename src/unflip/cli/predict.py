"""``unflip predict`` and ``unflip bench``: what a packed network says, and how fast."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.table import Table

from unflip.cli.app import app, console
from unflip.runtime import Model, NativePartMissing, load
from unflip.runtime.images import normalized, probabilities, read_image

if TYPE_CHECKING:
    from unflip.data import InputSpec

EVALUATED_AT_ONCE = 100


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A packed network (.unflip).")],
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    top: Annotated[int, typer.Option(min=1, help="Print this many classes of each image.")] = 5,
    threads: Annotated[int, typer.Option(min=0, help="0: as many as there are cores.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Machine-readable: a line an image.")
    ] = False,
) -> None:
    """Classify images with a packed network.

    An image's shorter side is resized to the model's input, then the middle is cut out; models of one channel get it in
    grey. Pixels are prepared as the file says.
    """
    network = _classifier(model, threads)
    for path in images:
        found = _best(network, path, top)
        if as_json:
            print(json.dumps({"image": str(path), "classes": found}, ensure_ascii=False))
            continue
        console.print(str(path), highlight=False)
        for label, probability in found:
            console.print(f"  {probability:7.2%}  {label}", highlight=False)


def _loaded(path: Path, threads: int) -> Model:
    try:
        return load(path, threads)
    except NativePartMissing as error:  # one line, like other errors we foresee
        raise ValueError(str(error)) from None


def _classifier(path: Path, threads: int) -> Model:
    network = _loaded(path, threads)
    if network.structure != "tensor":
        names = ", ".join(network.output_shapes)
        raise ValueError(
            f"{path} returns a {network.structure} ({names}): a network that returns the scores of classes and nothing "
            "else is needed here; unflip.load runs any"
        )
    if len(network.output_shape) != 1:
        raise ValueError(f"{path} is no classifier: its output is {network.output_shape}")
    if network.output_shape == (1,):  # the largest of one number is always the first
        raise ValueError(f"{path} has one output, so there are no classes to choose from")
    return network


def _best(network: Model, path: Path, top: int) -> list[tuple[str, float]]:
    chances = probabilities(network(read_image(path, network)), network)
    order = np.argsort(-chances, kind="stable")[:top]
    labels = network.labels or [f"class {i}" for i in range(len(chances))]
    return [(labels[i], float(chances[i])) for i in order]


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="A packed network (.unflip).")],
    dataset: Annotated[
        str, typer.Argument(help="Whose test images: cifar10, digits, or folder (with --data).")
    ],
    data: Annotated[Path | None, typer.Option(help="Folder of the images.")] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Of a folder's images: the recipe's data.size.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="0: as many as there are cores.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Accuracy of a packed network on a data set's test images: what was trained is what runs here.

    Pixels are prepared as the file says, and the images go through the native kernels, not through torch.
    """
    from unflip import data as datasets

    network = _classifier(model, threads)
    images = datasets.load(dataset, data, **({} if size is None else {"size": size}))
    if not isinstance(images, datasets.ImageSet):
        raise ValueError(
            f"{dataset} is not held in memory, and 'unflip evaluate' needs a data set that is; "
            "'unflip predict' classifies image files"
        )
    _refuse_others(network, model, images.spec, dataset)
    seconds, right = 0.0, 0
    pixels, labels = images.test_images, images.test_labels
    for start in range(0, len(labels), EVALUATED_AT_ONCE):
        part = slice(start, start + EVALUATED_AT_ONCE)
        x = normalized(pixels[part].astype(np.float32), network)
        began = time.perf_counter()
        scores = network(x)
        seconds += time.perf_counter() - began
        right += int((scores.argmax(axis=1) == labels[part]).sum())
    accuracy, each = 100 * right / len(labels), seconds / len(labels)
    if as_json:
        found = {"accuracy": accuracy, "right": right, "images": len(labels), "seconds": seconds}
        print(json.dumps(found))
        return
    console.print(
        f"{accuracy:.2f} % of {len(labels):,} test images of {dataset} are right; {each * 1e3:.3f} ms an image "
        f"({network.threads} thread{'s' if network.threads > 1 else ''}, {network.isa})",
        highlight=False,
        soft_wrap=True,
    )


def _refuse_others(network: Model, path: Path, spec: InputSpec, dataset: str) -> None:
    """Images of another shape, or other classes, would give a number that means nothing."""
    shape, classes = spec.shape, list(spec.classes)
    if shape != network.input_shape:
        raise ValueError(
            f"{path} takes images of {network.input_shape}, those of {dataset} are {shape}"
        )
    if (network.labels or classes) != classes or network.output_shape != (len(classes),):
        raise ValueError(
            f"{path} knows the classes {network.labels or network.output_shape}, {dataset} has {classes}"
        )


@app.command()
def bench(
    model: Annotated[Path, typer.Argument(help="A packed network (.unflip).")],
    threads: Annotated[int, typer.Option(min=0, help="0: as many as there are cores.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Samples in a call.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Timed calls; medians are shown.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Time a packed network on this machine: as a whole, and layer by layer."""
    network = _loaded(model, threads)
    x = np.random.default_rng(0).normal(size=(batch, *network.input_shape)).astype(np.float32)
    seconds = _times(network, x, runs)
    layers = network.profile(x, runs)
    median = statistics.median(seconds)
    if as_json:
        rows = [row._asdict() for row in layers]
        print(json.dumps({"median": median, "seconds": seconds, "layers": rows}))
        return
    table = Table("layer", "kind", "µs", "share", title=str(model))
    for row in layers:
        fused = row.seconds == 0  # into the layer before it
        shown = ("fused", "") if fused else (f"{row.seconds * 1e6:.1f}", f"{row.share:.1%}")
        table.add_row(row.name, row.kind, *shown)
    console.print(table)
    console.print(network, highlight=False)
    console.print(
        f"batch {batch}: median {median * 1e3:.3f} ms of {runs} runs "
        f"(least {min(seconds) * 1e3:.3f}, most {max(seconds) * 1e3:.3f}), {batch / median:.1f} samples/s"
    )


def _times(
    network: Model, x: np.ndarray[tuple[int, ...], np.dtype[np.float32]], runs: int
) -> list[float]:
    for _ in range(3):
        network(x)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        network(x)
        times.append(time.perf_counter() - start)
    return times
