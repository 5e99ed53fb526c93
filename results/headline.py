"""The README's tables, made from the JSON files beside this script.

python results/headline.py            # shows them
python results/headline.py --write    # puts them between the README's marks; a test checks that they are there
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
STUDIES = (
    "readings",
    "ablation",
    "sota",
    "controls",
    "beyond",
)  # in this order, those that are there


def accuracy_table(folder: Path = HERE / "cifar10") -> str:
    """Every arm of the studies on CIFAR-10 that has a finished run."""
    lines = [
        "| CIFAR-10, ResNet-20 | ours, % (seeds) | paper, % | command |",
        "|---|---|---|---|",
    ]
    for name in STUDIES:
        path = folder / name / "study.json"
        if path.exists():
            study = json.loads(path.read_text())
            lines += [_row(study, arm) for arm in study["arms"] if arm["mean"] is not None]
    return "\n".join(lines)


def _row(study: dict[str, Any], arm: dict[str, Any]) -> str:
    runs = [run for run in arm["runs"] if run["accuracy"] is not None]
    where = "" if study["evaluated_on"] == "test" else f", {study['evaluated_on']}"
    ours = f"{_mean(arm)} ({len(runs)}{where})"
    paper = "" if arm["paper"] is None else _mean(arm["paper"])
    return f"| {arm['label']} | {ours} | {paper} | `{arm['command']}` |"


def _mean(values: dict[str, Any]) -> str:
    spread = "" if values["std"] is None else f" ± {values['std']:.2f}"
    return f"{values['mean']:.2f}{spread}"


def inference_table(path: Path = HERE / "inference" / "avx512.json") -> str:
    """One image, one thread."""
    found = json.loads(path.read_text())
    rows = [r for r in found["rows"] if (r["batch"], r["threads"]) == (1, 1) and not r["problem"]]
    cpu = f"{found['machine']['cpu']}, one image, one thread"
    lines = [
        f"| {cpu} | ours, 1 bit | ONNX Runtime float | best int8 engine | Larq Compute Engine | file against float |",
        "|---|---|---|---|---|---|",
    ]
    for network, label in (
        ("resnet18", "ResNet-18, 224 × 224"),
        ("resnet20", "ResNet-20, 32 × 32"),
    ):
        of = [r for r in rows if r["network"] == network]
        cells = [
            _fastest(of, "unflip"),
            _fastest(of, "ort"),
            _fastest(of, "ort-int8", "openvino-int8"),
            _fastest(of, "lce"),
        ]
        smaller = f"{found['compression'][network]:.1f} times smaller"
        lines.append(f"| {label} | {' | '.join(cells)} | {smaller} |")
    return "\n".join(lines)


def _fastest(rows: Sequence[dict[str, Any]], *peers: str) -> str:
    times = [r["median_ms"] for r in rows if r["peer"] in peers]
    if not times:
        return ""
    return f"{min(times):.2f} ms" if min(times) < 1 else f"{min(times):.1f} ms"


TABLES = {"accuracy": accuracy_table, "inference": inference_table}


def with_tables(text: str) -> str:
    """The README with each table between its marks as it should be."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: results/headline.py -->\n", f"\n<!-- {name} ends -->"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            sys.exit(f"README.md lacks the marks of the table {name!r}: {begin.strip()}")
        text = f"{before}{begin}{make()}{end}{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into README.md")
    if parser.parse_args().write:
        README.write_text(with_tables(README.read_text()))
    else:
        print("\n\n".join(make() for make in TABLES.values()))


if __name__ == "__main__":
    main()
