"""``unflip show``, ``predict``, ``evaluate`` and ``bench``: packed networks, without torch."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unflip.cli.app import app, print_table
from unflip.cli.options import AsJson, Data, MaxMemory, MaxWork, Packed, Threads, Uses
from unflip.cli.target import needs_of
from unflip.printable import printable
from unflip.tables import Table

if TYPE_CHECKING:
    from unflip.data import Dataset, InputSpec
    from unflip.packing.describe import Description
    from unflip.runtime import Model

EVALUATED_AT_ONCE = 100
SHOWN_LABELS = 10
COMPARED_NETWORK = "resnet20-cifar10"  # docs/community.md compares machines with it
RUNS, REPORTED_RUNS = 50, 2000


@app.command(epilog="Example: unflip show digits.unflip")
def show(
    model: Packed,
    target: Annotated[
        str | None,
        typer.Option(help="Show flash, RAM and cycles in plain C instead, on this CPU: cortex-m4."),
    ] = None,
    max_memory: MaxMemory = None,
    max_work: MaxWork = None,
) -> None:
    """Show the ops, shapes and bytes of a packed network, and the memory and work that it needs."""
    from unflip.networks import locate
    from unflip.packing.describe import describe
    from unflip.packing.file import read, sha256

    path = locate(model)
    network = _loaded(path, 1, max_memory, max_work)  # checks the file
    if target is not None:
        table, notes = needs_of(path, target)
        print_table(table)
        print(*notes, sep="\n")
        return
    packed = read(path)
    found = describe(packed)
    print_table(_description(found))
    size = path.stat().st_size
    print(
        f"{printable(str(path))}: {size:,} bytes ({8 * size / 1e6:.3f} Mbit), "
        f"{found.float_bytes / size:.1f} times smaller than with float weights ({found.float_bytes:,} bytes)"
    )
    labels, preprocess = packed.graph["labels"], packed.graph["input"]["preprocess"]
    print(
        f"input {_shape(packed.graph['input']['shape'])}, "
        f"{'with' if preprocess else 'without'} preprocessing, "
        f"{len(labels) if labels else 'no'} labels"
    )
    if preprocess:
        mean, std = (", ".join(f"{v:.6g}" for v in preprocess[key]) for key in ("mean", "std"))
        print(f"preprocessing (pixel / 255 − mean) / std: mean {mean}; std {std}")
    if labels:
        shown = ", ".join(map(printable, labels[:SHOWN_LABELS]))
        print(f"labels {shown}{', ...' if labels[SHOWN_LABELS:] else ''}")
    for name, shape in found.outputs.items():
        print(f"{_output(name, packed.graph)} {_shape(shape)}")
    print(
        f"needs at most {network.memory_needed:,} bytes of memory to load and run one sample, and "
        f"{network.work_needed:,} units of work per sample (about a nanosecond each)"
    )
    for key, text in packed.graph.get("source", {}).items():
        print(f"source {printable(key)}: {printable(text)}")
    print(f"SHA-256 {sha256(path)} (verified)")


def _output(name: str, graph: dict[str, Any]) -> str:
    """A name that the model gave, or its place in a tuple. A result that is returned alone has no name."""
    return f"output {printable(name)}:" if "outputs" in graph else "output"


def _description(found: Description) -> Table:
    rows = [
        (
            row.op,
            printable(row.name),
            _shape(row.shape),
            "" if row.weight_bits is None else str(row.weight_bits),
            *_counts(row.bytes, row.binary_macs, row.byte_macs, row.float_macs),
        )
        for row in found.rows
    ]
    totals = [
        sum(getattr(row, name) for row in found.rows)
        for name in ("bytes", "binary_macs", "byte_macs", "float_macs")
    ]
    rows.append(("total", "", "", "", *(f"{total:,}" for total in totals)))
    numbers = ("bits", "bytes", "binary MACs", "8-bit MACs", "float MACs")
    return Table(("op", "name", "output", *numbers), rows, numbers)


def _counts(*counts: int) -> list[str]:
    return [f"{count:,}" if count else "" for count in counts]


def _shape(shape: list[int] | tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


@app.command(epilog="Example: unflip predict digits.unflip photo.png --top 3")
def predict(
    model: Packed,
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    top: Annotated[int, typer.Option(min=1, help="Print this many classes per image.")] = 5,
    threads: Threads = 1,
    max_memory: MaxMemory = None,
    max_work: MaxWork = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Machine-readable output: one line per image.")
    ] = False,
) -> None:
    """Classify images with a packed network.

    The shorter side of an image is resized to the model's input, then the center is cropped. A model with one input
    channel gets the image in gray. The file says how pixels are normalized.
    """
    network = _classifier(model, threads, max_memory, max_work)
    for path in images:
        found = _best(network, path, top)
        if as_json:
            print(_json({"image": str(path), "classes": found}))
            continue
        print(printable(str(path)))
        for label, probability in found:
            print(f"  {probability:7.2%}  {printable(label)}")


def _json(content: Any) -> str:
    """As ASCII if it would contain control characters."""
    text = json.dumps(content, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(content)


def _loaded(
    path: str | Path, threads: int, max_memory: int | None = None, max_work: int | None = None
) -> Model:
    from unflip.runtime import NativePartMissing, load

    try:
        return load(path, threads, max_memory, max_work)
    except NativePartMissing as error:  # one line, like other errors we foresee
        raise ValueError(str(error)) from None


def _classifier(path: str, threads: int, max_memory: int | None, max_work: int | None) -> Model:
    network = _loaded(path, threads, max_memory, max_work)
    if network.structure != "tensor":
        names = ", ".join(map(printable, network.output_shapes))
        raise ValueError(
            f"{path} returns a {network.structure} ({names}). This command needs a network that returns only the "
            "scores of classes; unflip.load runs any network"
        )
    if network.output_shape[1:] not in ((), (1, 1)):
        raise ValueError(f"{path} is not a classifier: its output is {network.output_shape}")
    if network.output_shape[0] == 1:  # the largest of one number is always the first
        raise ValueError(f"{path} has one output, so there are no classes to choose from")
    return network


def _best(network: Model, path: Path, top: int) -> list[tuple[str, float]]:
    import numpy as np

    from unflip.runtime.images import probabilities, read_image

    chances = probabilities(network(read_image(path, network)).ravel(), network)
    order = np.argsort(-chances, kind="stable")[:top]
    labels = network.labels or [f"class {i}" for i in range(len(chances))]
    return [(labels[i], float(chances[i])) for i in order]


@app.command(epilog="Example: unflip evaluate digits.unflip digits")
def evaluate(
    model: Packed,
    dataset: Annotated[
        str,
        typer.Argument(
            help="Data set whose test images are used: cifar10, digits, folder or images (with --data), "
            "or a custom one (--uses)."
        ),
    ],
    data: Data = None,
    size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Image size for the data sets folder and images: data.size in the recipe. "
            "Default for images: the network's input.",
        ),
    ] = None,
    resize: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Short side before the crop, for the data set images: data.resize in the recipe. "
            "Default: 8/7 of the size.",
        ),
    ] = None,
    uses: Uses = None,
    threads: Threads = 1,
    max_memory: MaxMemory = None,
    max_work: MaxWork = None,
    as_json: AsJson = False,
) -> None:
    """Measure the accuracy of a packed network.

    The test images run through the native kernels, as they do on a device. The file says how pixels are normalized.
    """
    from unflip.data import load as load_images
    from unflip.uses import use_all

    use_all(uses)
    network = _classifier(model, threads, max_memory, max_work)
    if dataset == "images" and size is None:
        size = network.input_shape[-1]
    given = {"size": size, "resize": resize}
    images = load_images(dataset, data, **{k: v for k, v in given.items() if v is not None})
    batches = _test_batches(images, dataset)
    _refuse_others(network, model, images.spec, dataset)
    count, right, seconds = _count_right(network, batches)
    accuracy, each = 100 * right / count, seconds / count
    if as_json:
        found = {"accuracy": accuracy, "right": right, "images": count, "seconds": seconds}
        print(json.dumps(found | _cropped(images)))
        return
    print(
        f"{accuracy:.2f} % of {count:,} test images of {dataset} are right; {each * 1e3:.3f} ms per image "
        f"({network.threads} thread{'s' if network.threads > 1 else ''}, {network.isa})"
    )
    if crop := _cropped(images):
        print(
            f"their short side was resized to {crop['resize']} pixels, and the center of {crop['size']} was cropped; "
            "--resize should be data.resize of the recipe"
        )


def _cropped(images: Dataset) -> dict[str, int]:
    """How test images were prepared. A packed network does not record it, and accuracy depends on it."""
    from unflip.data.images import ImagesDataset

    if not isinstance(images, ImagesDataset):
        return {}
    return {"size": images.transform.size, "resize": images.transform.resize}


def _refuse_others(network: Model, path: str, spec: InputSpec, dataset: str) -> None:
    """With images of another shape, or other classes, the accuracy would mean nothing."""
    shape, classes = spec.shape, list(spec.classes)
    if shape != network.input_shape:
        raise ValueError(
            f"{path} takes images of {network.input_shape}, those of {dataset} are {shape}"
        )
    if network.output_shape[0] != len(classes):
        raise ValueError(
            f"{path} has {network.output_shape[0]:,} outputs, and {dataset} has {len(classes):,} classes"
        )
    labels = network.labels or classes
    if labels != classes:
        first = next(
            n for n, pair in enumerate(zip(labels, classes, strict=True)) if len({*pair}) > 1
        )
        raise ValueError(
            f"{path} and {dataset} have different classes: class {first} of {len(classes):,} is {labels[first]!r} in "
            f"the file and {classes[first]!r} in the data set"
        )


def _test_batches(images: Dataset, dataset: str) -> Iterator[tuple[Any, Any]]:
    """Pixels N,C,H,W and labels of the test images, a few at a time."""
    from unflip.data import ImageSet
    from unflip.data.images import ImagesDataset

    if isinstance(images, ImageSet):
        parts = range(0, len(images.test_labels), EVALUATED_AT_ONCE)
        at_once = (slice(start, start + EVALUATED_AT_ONCE) for start in parts)
        return ((images.test_images[part], images.test_labels[part]) for part in at_once)
    if isinstance(images, ImagesDataset):
        batches = images.test_batches(EVALUATED_AT_ONCE)
        return ((pixels.transpose(0, 3, 1, 2), labels) for pixels, labels in batches)
    raise ValueError(
        f"{dataset} is streamed, and 'unflip evaluate' needs a data set that is held in memory, or 'images'. "
        "'unflip predict' classifies image files"
    )


def _count_right(network: Model, batches: Iterator[tuple[Any, Any]]) -> tuple[int, int, float]:
    """How many images there are, how many are classified right, and the seconds the network ran."""
    from unflip.runtime.images import normalized

    count, right, seconds = 0, 0, 0.0
    for pixels, labels in batches:
        x = normalized(pixels.astype("float32"), network)
        began = time.perf_counter()
        scores = network(x).reshape(len(labels), -1)
        seconds += time.perf_counter() - began
        count += len(labels)
        right += int((scores.argmax(axis=1) == labels).sum())
    return count, right, seconds


@app.command(epilog="Example: unflip bench digits.unflip --threads 2")
def bench(
    model: Packed = COMPARED_NETWORK,
    threads: Threads = 1,
    batch: Annotated[int, typer.Option(min=1, help="Images per call.")] = 1,
    runs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Timed calls; medians are shown. Default: {RUNS}; with --report {REPORTED_RUNS:,}.",
        ),
    ] = None,
    max_memory: MaxMemory = None,
    max_work: MaxWork = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print times and machine as a block for an issue.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time a packed network, as a whole and layer by layer."""
    import numpy as np

    from unflip.networks import locate

    if report and as_json:
        raise ValueError("--report and --json are two forms of the output: give one of them")
    runs = runs or (REPORTED_RUNS if report else RUNS)
    path = locate(model)
    network = _loaded(path, threads, max_memory, max_work)
    x = np.random.default_rng(0).normal(size=(batch, *network.input_shape)).astype(np.float32)
    seconds = _times(network, x, runs)
    if report:
        from unflip.cli.bench_report import block

        print(block(path, network, batch, seconds))
        return
    layers = network.profile(x, runs)
    median = statistics.median(seconds)
    if as_json:
        rows = [row._asdict() for row in layers]
        print(json.dumps({"median": median, "seconds": seconds, "layers": rows}))
        return
    shown = [(printable(row.name), row.kind, *_time(row.seconds, row.share)) for row in layers]
    print_table(
        Table(("layer", "kind", "µs", "share"), shown, ("µs", "share"), printable(str(model)))
    )
    print(network)
    print(
        f"batch {batch}: median {median * 1e3:.3f} ms of {runs} runs "
        f"(least {min(seconds) * 1e3:.3f}, most {max(seconds) * 1e3:.3f}), {batch / median:.1f} images/s"
    )


def _time(seconds: float, share: float) -> tuple[str, str]:
    """A layer that was fused into the one before it has no time."""
    return ("fused", "") if seconds == 0 else (f"{seconds * 1e6:.1f}", f"{share:.1%}")


def _times(network: Model, x: Any, runs: int) -> list[float]:
    for _ in range(3):
        network(x)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        network(x)
        times.append(time.perf_counter() - start)
    return times
