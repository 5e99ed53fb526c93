"""All architectures of larq-zoo: imported, compared with Keras, and timed next to Larq Compute Engine.

    python3.11 -m venv lce
    lce/bin/pip install larq-compute-engine==0.16.0 tensorflow-cpu==2.16.2 tf-keras==2.16.0 larq==0.14.0 larq-zoo==2.4.0
    python benchmarks/larq_import.py --python lce/bin/python [--networks QuickNet,BiRealNet] [--seconds 5] [--json FILE]

Weights are random, BatchNorm has the statistics of images (``peers/larq_keras.py``). A value that is nearly on the
threshold of a quantizer may fall on either side: a tie. One such bit changes many values after it, so outputs are
compared with the ties resolved. The imported torch model runs with Keras's bit wherever the two differ; its logits must
then equal Keras's. The same is done with the bits of the packed file in the runtime. A difference counts as a tie only
if the two values before the quantizer differ by less than 1e-4 of their root mean square.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import unflip
from peers.larq_keras import NAMES
from unflip.imports import larq
from unflip.imports.write import imagenet, packed
from unflip.layers import BinaryLayer
from unflip.packing.file import Packed, to_bytes, write
from unflip.runs.provenance import unflip_version

WORKER = Path(__file__).parent / "peers" / "larq_keras.py"
NEAR = 1e-4  # of the root mean square: two values that should be equal
EQUAL = 1e-4  # of the largest logit
ALL = [name for names in NAMES.values() for name in names]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Row:
    network: str
    binary: int  # layers
    images: int
    keras: float  # largest difference of logits to Keras, with ties resolved
    keras_ties: int
    runtime: float  # the same, torch to the runtime
    runtime_ties: int
    quantized: int  # values that quantizers saw, per image
    directly_equal: int  # images whose logits in the runtime equal Keras's as they are
    same_class: int
    bytes: int
    lce_bytes: int | None = None
    ms: float | None = None
    lce_ms: float | None = None


class Replay:
    """Runs the torch model with the bits of another engine where they differ, and counts those ties."""

    def __init__(self, model: torch.nn.Module, values: Callable[[str], Array | None]) -> None:
        self.model, self.values = model, values
        self.ties, self.seen, self.farthest = 0, 0, 0.0

    def run(self, x: Tensor) -> Array:
        hooks = [
            module.register_forward_pre_hook(self._hook(name))
            for name, module in self.model.named_modules()
            if isinstance(module, BinaryLayer)
        ]
        with torch.no_grad():
            found = self.model(x).numpy()
        for hook in hooks:
            hook.remove()
        return found

    def _hook(self, name: str) -> Callable[..., Any]:
        def replace(layer: Any, arguments: tuple[Tensor]) -> tuple[Tensor] | None:
            [x] = arguments
            given = None if layer.input_binarizer.bits == 32 else self.values(name)
            if given is None:
                return None
            other = _fitted(torch.from_numpy(given), x)
            differs = layer.input_binarizer(x) != layer.input_binarizer(other)
            self.seen += x.numel()
            if not differs.any():
                return None
            self.ties += int(differs.sum())
            far = (x - other).abs()[differs].max() / x.square().mean().sqrt()
            self.farthest = max(self.farthest, float(far))
            return (torch.where(differs, other, x),)

        return replace


def _fitted(value: Tensor, x: Tensor) -> Tensor:
    """A value of another engine in the shape of x: flattened, or with the padding that x has already."""
    if value.numel() == x.numel():
        return value.reshape(x.shape)
    high, wide = (a - b for a, b in zip(x.shape[2:], value.shape[2:], strict=True))
    return F.pad(value, (wide // 2, wide - wide // 2, high // 2, high - high // 2))


def compare(name: str, folder: Path) -> tuple[Row, Path]:
    found = larq.load(folder / f"{name}.h5")
    file = packed(found.model, imagenet(), {})
    path = folder / f"{name}.unflip"
    size = write(path, file)
    network, probe = unflip.load(path), _with_inputs_of_quantizers(file)
    reference = np.load(folder / f"{name}.npz")
    binary = sum(isinstance(m, BinaryLayer) for m in found.model.modules())
    row = Row(name, binary, 0, 0.0, 0, 0.0, 0, 0, 0, 0, size)
    for number, image in enumerate(reference["images"]):
        x = torch.from_numpy(image.transpose(2, 0, 1)[None].copy())
        keras = _replayed(found.model, x, _of_keras(reference, number), reference["logits"][number])
        inside = probe(x.numpy())
        alone = network(x.numpy())[0]
        if not np.array_equal(alone, inside["logits"][0]):
            raise RuntimeError(
                f"{name}: the runtime gives other logits if it returns the values inside"
            )
        ours = _replayed(found.model, x, inside.get, alone)
        row.images += 1
        row.keras, row.keras_ties = max(row.keras, keras[0]), row.keras_ties + keras[1]
        row.runtime, row.runtime_ties = max(row.runtime, ours[0]), row.runtime_ties + ours[1]
        row.quantized = keras[2]
        row.directly_equal += _difference(alone, reference["logits"][number]) < EQUAL
        row.same_class += int(alone.argmax() == reference["logits"][number].argmax())
    return row, path


def _replayed(
    model: torch.nn.Module, x: Tensor, values: Callable[[str], Array | None], expected: Array
) -> tuple[float, int, int]:
    replay = Replay(model, values)
    difference = _difference(replay.run(x)[0], expected.reshape(-1))
    if difference > EQUAL or replay.farthest > NEAR:
        raise RuntimeError(
            f"logits differ by {difference:.2g} with {replay.ties} ties resolved, "
            f"which are up to {replay.farthest:.2g} of the root mean square apart"
        )
    return difference, replay.ties, replay.seen


def _difference(found: Array, expected: Array) -> float:
    expected = expected.reshape(-1)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _of_keras(reference: Any, number: int) -> Callable[[str], Array | None]:
    def value(name: str) -> Array | None:
        key = name.rstrip("_")  # a layer of two parts has two names
        found = reference[key][number : number + 1]
        return np.ascontiguousarray(found.transpose(0, 3, 1, 2)) if found.ndim == 4 else found

    return value


def _with_inputs_of_quantizers(file: Packed) -> Any:
    """The network that also returns the values that its quantizers see, by the names of their layers."""
    ops = [op for op in file.graph["ops"] if op["op"] == "quantize"]
    outputs = [{"name": op["name"], "value": op["inputs"][0]} for op in ops]
    graph = {
        key: value for key, value in file.graph.items() if key not in ("output", "labels", "pixels")
    }
    outputs.append({"name": "logits", "value": file.graph["output"]})
    graph |= {"outputs": outputs, "structure": "dict", "labels": None}
    with tempfile.NamedTemporaryFile(suffix=".unflip") as temporary:
        Path(temporary.name).write_bytes(to_bytes(file._replace(graph=graph)))
        return unflip.load(temporary.name, max_memory=8 << 30)


# --- speed


def measure(row: Row, path: Path, python: str, seconds: float) -> None:
    """The fastest run of both engines, one thread, in turns."""
    lce = path.with_suffix(".tflite")
    row.lce_bytes = lce.stat().st_size if lce.is_file() else None
    network = unflip.load(path, threads=1)
    x = np.random.default_rng(0).normal(size=(1, 3, 224, 224)).astype(np.float32)
    command = [python, str(WORKER), "serve", str(lce), "1"]
    worker = None
    if row.lce_bytes:
        pipe = subprocess.PIPE
        worker = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
    ours, theirs = list[float](), list[float]()
    for _ in range(5):
        end = time.perf_counter() + seconds / 5
        while time.perf_counter() < end:
            start = time.perf_counter()
            network(x)
            ours.append(time.perf_counter() - start)
        theirs += _burst(worker, seconds / 5)
    row.ms = 1e3 * min(ours)
    row.lce_ms = 1e3 * min(theirs) if theirs else None
    if worker is not None:
        worker.communicate()


def _burst(worker: Any, seconds: float) -> list[float]:
    if worker is None:
        return []
    worker.stdin.write(f"{seconds}\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("["):
            found: list[float] = json.loads(line)
            return found
    return []


def table(rows: list[Row]) -> str:
    head = ["network", "binary layers", "logits to Keras", "ties per image", "runtime to torch"]
    head += ["file", "LCE's file", "ms", "LCE's ms"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in rows:
        ties = f"{r.keras_ties / r.images:.1f} of {r.quantized / 1e6:.2f} M"
        lce = "–" if r.lce_bytes is None else f"{r.lce_bytes / 1e6:.2f} MB"
        ms = ["–" if value is None else f"{value:.1f}" for value in (r.ms, r.lce_ms)]
        cells = [r.network, str(r.binary), f"{r.keras:.1e}", ties, f"{r.runtime:.1e}"]
        lines.append(f"| {' | '.join([*cells, f'{r.bytes / 1e6:.2f} MB', lce, *ms])} |")
    return "\n".join(lines)


def _write(path: Path, rows: list[Row]) -> None:
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    content = unflip_version() | machine | {"rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--python", required=True, help="a Python with TensorFlow, Larq and larq-zoo"
    )
    parser.add_argument("--networks", default=",".join(ALL))
    parser.add_argument(
        "--folder", type=Path, help="keep Keras's files here, and use those that are there"
    )
    parser.add_argument(
        "--seconds", type=float, default=5, help="timing per network and engine; 0: none"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(2)
    rows, failed = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        for name in given.networks.split(","):
            if not (folder / f"{name}.npz").is_file():
                subprocess.run([given.python, str(WORKER), "make", name, str(folder)], check=True)
            if given.seconds and not (folder / f"{name}.tflite").is_file():
                # without the file, the engine is left out of the table
                subprocess.run(
                    [given.python, str(WORKER), "convert", name, str(folder)], check=False
                )
            try:
                row, path = compare(name, folder)
            except (ValueError, RuntimeError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                failed += 1
                continue
            if given.seconds:
                measure(row, path, given.python, given.seconds)
            rows.append(row)
            print(asdict(row), file=sys.stderr, flush=True)
            if given.json:
                _write(given.json, rows)
    print(table(rows))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
