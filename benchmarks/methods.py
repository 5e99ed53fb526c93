"""How large and how fast a network of each method is, packed.

    python benchmarks/methods.py [--network resnet20] [--rounds 7] [--json FILE]

Random weights, as in inference.py: time does not depend on them. One image, one thread. In each round every network
runs for a short while, and the table has the median over the rounds, so that other work disturbs all alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import unflip
from inference import calibrated, machine, random_images
from unflip import models
from unflip.study.methods import compared

SECONDS = 0.3  # of a network in a round


def packed(network: str, method: str, folder: Path) -> tuple[Any, int]:
    """The network, ready to run, and the bytes of its file."""
    torch.manual_seed(0)
    images = random_images(models.input_shape(network))
    path = folder / f"{method}.unflip"
    unflip.pack(calibrated(models.create(network, method), images), images[:1], path)
    return unflip.load(path, threads=1), path.stat().st_size


def milliseconds(model: Any, image: Any) -> float:
    """The median run of a round."""
    runs, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        model(image)
        runs.append(1000 * (time.perf_counter() - start))
    return statistics.median(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", default="resnet20", choices=models.names())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    image = random_images(models.input_shape(args.network))[:1].numpy()
    with tempfile.TemporaryDirectory() as folder:
        ready = {name: packed(args.network, name, Path(folder)) for name in compared()}
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(args.rounds):
        for name, (model, _) in ready.items():
            times[name].append(milliseconds(model, image))
    isa = next(iter(ready.values()))[0].isa
    rows = [
        {"method": name, "ms": statistics.median(times[name]), "bytes": size}
        for name, (_, size) in ready.items()
    ]
    rows.sort(key=lambda row: row["ms"])
    print(f"{args.network}, {machine()['cpu']}, {isa}\n\n| method | ms | bytes |\n|---|---|---|")
    for row in rows:
        print(f"| `{row['method']}` | {row['ms']:.3f} | {row['bytes']:,} |")
    if args.json:
        found = {"machine": machine(), "network": args.network, "isa": isa, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
