"""Images per second that the data set ``images`` decodes, by number of worker processes.

    python benchmarks/loader_speed.py [--data PACK] [--workers 1 2 4] [--size 224] [--seconds 5] [--json FILE]

Without --data it makes a pack of its own: JPEG files as ``unflip data pack --size 256 --quality 90`` writes ImageNet,
with a short side of 256 pixels, quality 90 and 27 KB each on average. They show random blobs with noise; the noise is
chosen so that a file has that size, because the time to decode a JPEG grows with its bytes.

Columns: random crops with flips (training), the same with jitter 0.4 and lighting 0.1, and center crops (testing).
Training batches are copied to the device. "main" is the CPU time of the training process per image, "worker" that of
the worker processes: it hardly depends on what else the machine does.

Needs numpy, Pillow and torch. PYTHONPATH=src is enough, but then Pillow resizes, unless the native library is built
(see native/pixels/resize.cpp). The first line of the output says who decodes and who resizes.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image

from unflip import pictures, resize
from unflip.data import load
from unflip.data.decoder import Use
from unflip.data.packing import Encoding, pack_images
from unflip.data.store import open_any
from unflip.data.worker_pool import MOST_SLOTS, WorkerPool, default_workers

FILE_BYTES, SHORT, QUALITY = 27_000, 256, 90
DISTINCT = 1024  # files, 28 MB
MOST_PER_WORKER = 6000  # images per second: no plan must end too early
WAYS: dict[str, dict[str, float]] = {
    "crop, flip": {},
    "jitter, lighting": {"jitter": 0.4, "lighting": 0.1},
}


def jpeg(number: int, noise: float) -> bytes:
    random = np.random.default_rng(number)
    width, height = [(341, SHORT), (SHORT, 341), (384, SHORT), (SHORT, SHORT)][number % 4]
    blobs = random.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    smooth = Image.fromarray(blobs).resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(smooth) + random.normal(0, noise, (height, width, 1))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def fitting_noise() -> float:
    """The standard deviation of the noise with which files have FILE_BYTES on average; by bisection."""
    low, high = 0.0, 60.0
    for _ in range(12):
        middle = (low + high) / 2
        mean = np.mean([len(jpeg(number, middle)) for number in range(32)])
        low, high = (middle, high) if mean < FILE_BYTES else (low, middle)
    return low


def make_pack(folder: Path) -> Path:
    noise = fitting_noise()
    for number in range(DISTINCT + 16):
        part = "train" if number < DISTINCT else "val"
        path = folder / "files" / part / f"class-{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number, noise))
    pack_images(open_any(folder / "files"), folder / "made.pack", Encoding())
    return folder / "made.pack"


def measure(
    batches: Iterator[Any], device: torch.device, seconds: float, close: Callable[[], Any]
) -> dict[str, float]:
    """Images per second and CPU time of this process per image, once the ring has been filled.

    The CPU time of workers is known when they have ended. It includes their start, a tenth of a second each.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began, on_gpu = time.perf_counter(), device.type == "cuda"
    next(batches)
    first = time.perf_counter() - began
    for _ in range(MOST_SLOTS):
        next(batches)
    start, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - start < seconds:
        images, _ = next(batches)
        count += len(images)
        if on_gpu:
            images.to(device)
    spent, used = time.perf_counter() - start, time.process_time() - cpu
    close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    workers = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    decoded = count + 2 * MOST_SLOTS * len(images)  # with those before and after the timed ones
    return {
        "worker_us": 1e6 * workers / decoded,
        "images_per_s": count / spent,
        "main_us": 1e6 * used / count,
        "first_batch_s": first,
    }


def plan_of(source: Any, images: float, batch: int) -> torch.Tensor:
    """As many epochs as give so many images."""
    plans = [source.plan(0, epoch, batch) for epoch in range(1 + int(images / len(source)))]
    return torch.cat(plans)


def training(path: Path, workers: int, options: argparse.Namespace, way: str) -> dict[str, float]:
    source: Any = load("images", path, size=options.size, **WAYS[way]).source(
        options.device, workers
    )
    plan = plan_of(source, MOST_PER_WORKER * workers * (options.seconds + 5), options.batch)
    with source.stream(plan) as batches:
        return measure(batches, options.device, options.seconds, source.close)


def testing(path: Path, workers: int, options: argparse.Namespace) -> dict[str, float]:
    """Center crops of the training images, of which there are more; not copied to a GPU."""
    data: Any = load("images", path, size=options.size)
    pool = WorkerPool(data.decoder, workers)
    batches_of_rows = itertools.cycle([data.plan(0, 0)[: options.batch]])
    with pool.stream(Use.HELD_OUT, batches_of_rows, options.batch) as batches:
        return measure(batches, torch.device("cpu"), options.seconds, pool.close)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a pack or folder; default: generated images")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, default_workers()])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0, help="per measurement")
    parser.add_argument(
        "--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.data or make_pack(Path(folder))
        store = open_any(path)
        lengths = [len(store.train.read(i)) for i in range(min(200, len(store.train)))]
        print(
            f"{path.name}: {np.mean(lengths) / 1000:.1f} KB per file; crops of {options.size} px, "
            f"batch {options.batch}; {default_workers()} CPUs, Pillow {PIL.__version__}, "
            f"Python {platform.python_version()}, device {options.device}; "
            f"JPEG by {'simplejpeg' if pictures.has_fast_jpeg() else 'Pillow'}, "
            f"resized by {'the native library' if resize.has_library() else 'Pillow'}"
        )
        print(
            "         images per second                        µs per image, crop and flip\n"
            "workers  crop, flip  jitter, lighting     test     main  worker  first batch s"
        )
        rows = []
        for workers in options.workers:
            row: dict[str, Any] = {way: training(path, workers, options, way) for way in WAYS}
            row["test"] = testing(path, workers, options)
            rows.append({"workers": workers, **row})
            speeds = [row[way]["images_per_s"] for way in (*WAYS, "test")]
            plain = row["crop, flip"]
            print(
                f"{workers:7} {speeds[0]:11,.0f} {speeds[1]:17,.0f} {speeds[2]:8,.0f} "
                f"{plain['main_us']:8.1f} {plain['worker_us']:7.0f} {plain['first_batch_s']:14.2f}",
                flush=True,
            )
    if options.json:
        found = {"file_bytes": float(np.mean(lengths)), "size": options.size, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
