"""The figure of the README and figures of the docs, drawn from the files beside this script.

speed.svg         time and size of ResNet-18 against other engines
flips.svg         signs that change per epoch, by method
lns-filter.svg    a filter before and after LNS

python results/figure.py --write    # into docs/; a test checks that they are current
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
import sys
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
WIDTH, LEFT, ROW, BAR = 520, 190, 26, 16  # narrow, so that a phone shows its text large enough
SCALE_END = 450  # where the longest bar ends
# Label and the peers of which the fastest counts; the first OURS are ours.
OURS = 2
ENGINES = (
    ("unflip, 1 bit, 8-bit ends", ("unflip-int8",)),
    ("unflip, 1 bit, float ends", ("unflip",)),
    ("int8, best of two engines", ("ort-int8", "openvino-int8")),
    ("Larq Compute Engine, 1 bit", ("lce",)),
    ("ONNX Runtime, float", ("ort",)),
)
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.t{font-weight:600;font-size:14px}"
    ".a{fill:#0b7a75}.b{fill:#9aa7b1}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.a{fill:#3fc1b8}.b{fill:#5c6873}}"
)


def times() -> list[tuple[str, float]]:
    """Milliseconds of ResNet-18: one image, one thread."""
    found = json.loads((HERE / "inference" / "avx512.json").read_text())
    rows = [
        row
        for row in found["rows"]
        if (row["network"], row["batch"], row["threads"]) == ("resnet18", 1, 1)
        and not row["problem"]
    ]
    return [
        (label, min(row["median_ms"] for row in rows if row["peer"] in peers))
        for label, peers in ENGINES
    ]


def sizes() -> list[tuple[str, float]]:
    """Megabytes of the weights of ResNet-18; int8 is a quarter of float."""
    found = json.loads((HERE / "inference" / "avx512.json").read_text())
    floats = 46.7  # 11.7 million weights of 4 bytes
    ours = [floats / found["compression"][f"resnet18{ends}"] for ends in (", 8-bit ends", "")]
    labels = [label for label, _ in ENGINES[:OURS]]
    return [*zip(labels, ours, strict=True), ("int8", floats / 4), ("float", floats)]


def bars(title: str, unit: str, values: list[tuple[str, float]], top: int) -> list[str]:
    lines = [f'<text class="t" x="8" y="{top}">{title}</text>']
    most = max(value for _, value in values)
    for place, (label, value) in enumerate(values):
        y = top + 12 + place * ROW
        width = max(2.0, value / most * (SCALE_END - LEFT))
        kind = "a" if place < OURS else "b"
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{label}</text>',
            f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3"/>',
            f'<text x="{LEFT + width + 6:.1f}" y="{y + 13}">{value:.1f} {unit}</text>',
        ]
    return lines


def speed() -> str:
    first, second = times(), sizes()
    below = 20 + 12 + len(first) * ROW + 24
    height = below + 12 + len(second) * ROW + 8
    parts = [
        *bars("Time per image: ResNet-18, one CPU thread", "ms", first, 20),
        *bars("Size of the file", "MB", second, below),
    ]
    return drawing(WIDTH, height, STYLE, parts)


def drawing(width: int, height: int, style: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head, f"<style>{style}</style>", *parts, "</svg>"]) + "\n"


@cache
def raw(study: str) -> dict[str, bytes]:
    """The files of a study's archive."""
    with tarfile.open(HERE / "cifar10" / study / "raw.tar.xz") as archive:
        opened = ((member.name, archive.extractfile(member)) for member in archive)
        return {name: file.read() for name, file in opened if file is not None}


# Arm of the ablation, its label, its class in the style, and how far the label is below the end of its line.
FLIPS = (
    ("mapping", "mapping without supervision", "c1", 12),
    ("finetune-0.01", "fine-tuning", "c2", 0),
    ("lns", "LNS: almost none", "c3", 0),
)
LEAST_FLIPS = 1e-5  # drawn for none: a logarithm has no zero
FLIPS_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}path{fill:none;stroke-width:2}"
    ".c1{stroke:#b35900}.c2{stroke:#6b7785}.c3{stroke:#0b7a75}.g{stroke:#d0d7de;stroke-width:1}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.g{stroke:#3d444d}.c3{stroke:#3fc1b8}"
    ".c1{stroke:#f0883e}.c2{stroke:#9aa7b1}}"
)


def flip_rates(arm: str) -> list[float]:
    """The mean over the seeds, epoch by epoch."""
    files = [text for name, text in raw("ablation").items() if is_metrics(name, arm)]
    runs = [[json.loads(line)["flip_rate"] for line in text.splitlines()] for text in files]
    return [statistics.mean(rates) for rates in zip(*runs, strict=True)]


def is_metrics(name: str, arm: str) -> bool:
    return f"/ablation/{arm}/seed-" in name and name.endswith("/metrics.jsonl")


def flips() -> str:
    left, right, top, bottom = 70, 560, 34, 262
    lowest, highest = math.log10(LEAST_FLIPS), 0.0

    def y(rate: float) -> float:
        share = (math.log10(max(rate, LEAST_FLIPS)) - lowest) / (highest - lowest)
        return bottom - share * (bottom - top)

    parts = ['<text x="8" y="16">signs that change per epoch, mean of the seeds</text>']
    for power in range(-4, 1):
        at, label = y(10.0**power), f"{100 * 10.0**power:g} %"
        parts.append(f'<path class="g" d="M{left} {at:.1f}H{right}"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for arm, label, kind, below in FLIPS:
        rates = flip_rates(arm)
        step = (right - left) / (len(rates) - 1)
        points = " ".join(f"{left + n * step:.1f},{y(rate):.1f}" for n, rate in enumerate(rates))
        parts.append(f'<path class="{kind}" d="M{points}"/>')
        last = y(statistics.mean(rates[-5:]))
        parts.append(f'<text x="{right + 6}" y="{last + below:.1f}">{label}</text>')
    for epoch in (1, 40, 80, 120):
        at = left + (epoch - 1) / 119 * (right - left)
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{epoch}</text>')
    middle = (left + right) // 2
    parts.append(f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">epoch</text>')
    return drawing(760, bottom + 46, FLIPS_STYLE, parts)


LAYER, FILTER, SHOWN_CHANNELS, CELL, GAP = "layer1.0.conv1", 0, 12, 13, 8
FILTER_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.p{fill:#0b7a75}.n{fill:#d3dae0}"
    ".x{fill:none;stroke:#d1242f;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.n{fill:#4b5660}.p{fill:#3fc1b8}.x{stroke:#ff7b72}}"
)


def shown_filter() -> dict[str, Any]:
    kept = json.loads(gzip.decompress(raw("ablation")["cifar10/ablation/lns/seed-0/signs.json.gz"]))
    [layer] = [layer for layer in kept["kernels"] if layer["name"] == LAYER]
    [found] = [one for one in layer["filters"] if one["index"] == FILTER]
    return found


def cells(values: list[float], top: int, changed: list[bool]) -> list[str]:
    """A 3 × 3 kernel per channel. Opacity is the absolute value, 1 at most."""
    parts, frames = [], []
    for number, value in enumerate(values[: 9 * SHOWN_CHANNELS]):
        channel, place = divmod(number, 9)
        x = 150 + channel * (3 * CELL + GAP) + place % 3 * CELL
        y = top + place // 3 * CELL
        kind, opacity = "p" if value >= 0 else "n", 0.15 + 0.85 * min(1.0, abs(value))
        box = f'x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}"'
        parts.append(f'<rect class="{kind}" {box} opacity="{opacity:.2f}"/>')
        if changed[number]:
            frames.append(f'<rect class="x" {box}/>')
    return parts + frames


def lns_filter() -> str:
    found = shown_filter()
    before, after = ([1.0 if c == "+" else -1.0 for c in found[key]] for key in ("before", "after"))
    changed = [a != b for a, b in zip(before, after, strict=True)]
    nothing = [False] * len(changed)
    rows = (
        ("bits before", before, nothing),
        ("latent weights W", found["w"], nothing),
        ("mapping f(W)", found["f"], nothing),
        ("bits after", after, changed),
    )
    parts = []
    for number, (label, values, framed) in enumerate(rows):
        top = 14 + number * (3 * CELL + 22)
        parts.append(f'<text x="8" y="{top + 1.5 * CELL + 5}">{label}</text>')
        parts += cells(values, top, framed)
    return drawing(
        150 + SHOWN_CHANNELS * (3 * CELL + GAP) + 8, 14 + 4 * (3 * CELL + 22), FILTER_STYLE, parts
    )


FIGURES: dict[str, Callable[[], str]] = {
    "speed.svg": speed,
    "flips.svg": flips,
    "lns-filter.svg": lns_filter,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        if "--write" in sys.argv:
            (DOCS / name).write_text(draw(), encoding="utf-8")
        else:
            print(draw())
