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

from unflip.study.paper import reference_of

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
# Study -> the arms shown of it, in this order; None: all of them. A study whose folder is not there yet is left out.
HEADLINE: dict[str, tuple[str, ...] | None] = {
    "readings": ("baseline", "conv", "conv-wide"),
    "ablation": (
        "finetune-0.01",
        "finetune-0.001",
        "finetune-still",
        "mapping",
        "lns",
        "lns-frozen",
        "one-mean",
    ),
    "sota": ("xnor", "tbn", "dsq"),  # the others are above
    "final": None,
}
LABELS = {"readings": "baseline, {}"}  # whose arms' labels say only how they differ


def accuracy_table(folder: Path = HERE / "cifar10") -> str:
    """The headline arms on CIFAR-10 that have a finished run; runs that two studies share are shown once."""
    heads = ("CIFAR-10, ResNet-20", "n", "mean ± std, %", "paper, %", "difference (Welch's p)")
    lines = [_line(*heads, "command"), "|---" * 6 + "|"]
    seen: set[Path] = set()
    for name, wanted in HEADLINE.items():
        path = folder / name / "study.json"
        if not path.exists():
            continue
        study = json.loads(path.read_text())
        for arm in _arms(study, wanted):
            runs = (path.parent / arm["folder"]).resolve()
            if arm["mean"] is not None and runs not in seen:
                lines.append(_row(study, arm))
            seen.add(runs)
    return "\n".join(lines)


def _arms(study: dict[str, Any], wanted: Sequence[str] | None) -> list[dict[str, Any]]:
    by_name = {arm["name"]: arm for arm in study["arms"]}
    return [by_name[name] for name in (by_name if wanted is None else wanted) if name in by_name]


def _row(study: dict[str, Any], arm: dict[str, Any]) -> str:
    n = sum(run["accuracy"] is not None for run in arm["runs"])
    where = "" if study["evaluated_on"] == "test" else f" ({study['evaluated_on']} images)"
    paper = "" if arm["paper"] is None else _mean(arm["paper"])
    label = LABELS.get(study["study"], "{}").format(_whole_label(study, arm))
    return _line(label + where, n, _mean(arm), paper, _against(study, arm), f"`{arm['command']}`")


def _whole_label(study: dict[str, Any], arm: dict[str, Any]) -> str:
    """A label that goes on from one above it ("… decay by steps"), with that one, which may not be shown here."""
    if study["study"] not in LABELS or not arm["label"].startswith("… "):
        return str(arm["label"])
    above = study["arms"][: study["arms"].index(arm)]
    begun = next(other["label"] for other in reversed(above) if not other["label"].startswith("…"))
    return f"{begun}, {arm['label'].removeprefix('… ')}"


def _against(study: dict[str, Any], arm: dict[str, Any]) -> str:
    """How much more an arm has than the one its study compares with, and Welch's p where there are seeds enough."""
    name = reference_of(study["study"], study.get("reference"))
    [reference] = [other for other in study["arms"] if other["name"] == name] or [None]
    if reference is None or reference is arm or reference["mean"] is None:
        return ""
    pair = {arm["name"], name}
    [p] = [test["p"] for test in study["tests"] if {test["a"], test["b"]} == pair] or [None]
    shown = "" if p is None else f" ({p:.2g})"
    difference = f"{arm['mean'] - reference['mean']:+.2f}".replace("-", "−")
    return f"{difference}{shown} against {reference['label']}"


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


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
