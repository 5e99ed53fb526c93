"""The figure of the README, docs/speed.svg, drawn from the files beside this script.

python results/figure.py --write    # a test checks that it is current
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIGURE = HERE.parent / "docs" / "speed.svg"
WIDTH, LEFT, ROW, BAR = 720, 190, 26, 16
SCALE_END = 590  # where the longest bar ends
# Label and the peers of which the fastest counts; the first is ours.
ENGINES = (
    ("unflip, 1 bit", ("unflip",)),
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
    ours = floats / found["compression"]["resnet18"]
    return [("unflip, 1 bit", ours), ("int8", floats / 4), ("float", floats)]


def bars(title: str, unit: str, values: list[tuple[str, float]], top: int) -> list[str]:
    lines = [f'<text class="t" x="8" y="{top}">{title}</text>']
    most = max(value for _, value in values)
    for place, (label, value) in enumerate(values):
        y = top + 12 + place * ROW
        width = max(2.0, value / most * (SCALE_END - LEFT))
        kind = "a" if place == 0 else "b"
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{label}</text>',
            f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3"/>',
            f'<text x="{LEFT + width + 6:.1f}" y="{y + 13}">{value:.1f} {unit}</text>',
        ]
    return lines


def figure() -> str:
    first, second = times(), sizes()
    below = 20 + 12 + len(first) * ROW + 24
    height = below + 12 + len(second) * ROW + 8
    parts = [
        *bars("Time per image: ResNet-18, one CPU thread", "ms", first, 20),
        *bars("Size of the file", "MB", second, below),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        FIGURE.write_text(figure(), encoding="utf-8")
    else:
        print(figure())
