"""Put a finished study into results/: one row per run in the runs.csv of its images, and the raw files in one archive.

    python results/archive.py runs/STUDY results/IMAGES/NAME [ARM]

With ARM, the last checkpoints of that arm's runs are in the archive too: other runs can start from them.

IMAGES is the data set, such as cifar10. NAME is the study's name in tables, so no other data set may have it.
Other checkpoints stay behind. The same study gives the same bytes: the archive has no dates and no owners.
Afterwards add a section to results/README.md, and the study to its data set's list in the Makefile.
"""

from __future__ import annotations

import csv
import io
import lzma
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unflip.runs import Run
from unflip.study.summary import ArmSummary, Summary

OF_RESULT = ("device", "torch", "unflip", "commit", "dirty", "precision", "finished")
COLUMNS = (
    *("study", "arm", "label", "seed", "accuracy", "best_accuracy", "epochs", "seconds", "stopped"),
    *(
        "evaluated_on",
        *OF_RESULT,
        "start",
        "paper_best",
        "paper_mean",
        "paper_std",
        "command",
        "raw",
    ),
    # of studies that count them, and of images with many classes
    *("memory_bits", "flops", "seconds_per_epoch", "top5", "paper_top5"),
)
RAW = (
    "recipe.json",
    "provenance.json",
    "metrics.jsonl",
    "result.json",
    "stopped.json",
    "study.json",
)


def main(source: Path, target: Path, arm_with_weights: str | None = None) -> None:
    summary = Summary.read(source)
    target.mkdir(parents=True, exist_ok=True)
    new = [row for arm in summary.arms for row in rows(source, target.name, summary, arm)]
    replace_rows(target.parent / "runs.csv", target.name, new)
    inside = f"{target.parent.name}/{target.name}"
    files = [path for path in source.rglob("*") if path.name in RAW or path.suffix == ".log"]
    if arm_with_weights is not None:
        files += last_checkpoints(source / arm_with_weights)
    data = archive(source, inside, files)
    (target / "raw.tar.xz").write_bytes(data)
    print(f"{target}: {sum(len(arm.runs) for arm in summary.arms)} runs, {len(data):,} bytes")


def replace_rows(path: Path, study: str, new: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows of a study behind those of the others."""
    others: list[Mapping[str, Any]] = []
    if path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            others = [row for row in csv.DictReader(file) if row["study"] != study]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*others, *new])


def rows(source: Path, name: str, summary: Summary, arm: ArmSummary) -> list[dict[str, Any]]:
    return [
        {key: _text(value) for key, value in row.items()}
        for row in (_row(source, name, summary, arm, i) for i in range(len(arm.runs)))
    ]


def _row(source: Path, name: str, summary: Summary, arm: ArmSummary, i: int) -> dict[str, Any]:
    outcome, paper = arm.runs[i], arm.paper
    result = Run.of_seed(source / arm.folder, outcome.seed).result or {}
    return {
        "study": name,
        "arm": arm.name,
        "label": arm.label,
        "seed": outcome.seed,
        "accuracy": outcome.accuracy,
        "best_accuracy": outcome.best_accuracy,
        "epochs": outcome.epochs,
        "seconds": outcome.seconds,
        "stopped": outcome.stopped,
        "evaluated_on": summary.evaluated_on,
        **{key: result.get(key) for key in OF_RESULT},
        "start": arm.start,
        "paper_best": paper.best if paper else None,
        "paper_mean": paper.mean if paper else None,
        "paper_std": paper.std if paper else None,
        "command": arm.command,
        "raw": f"{name}/{arm.folder}/seed-{outcome.seed}",
        "memory_bits": arm.memory_bits,
        "flops": arm.flops,
        "seconds_per_epoch": arm.seconds_per_epoch,
        "top5": outcome.top5,
        "paper_top5": paper.top5 if paper else None,
    }


def _text(value: Any) -> Any:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else value


def last_checkpoints(arm: Path) -> list[Path]:
    found = [sorted(run.glob("checkpoint-*.safetensors"))[-1] for run in sorted(arm.glob("seed-*"))]
    if not found:
        raise SystemExit(f"{arm} has no finished run with checkpoints")
    return [path for one in found for path in (one, one.with_suffix(".json"))]


def archive(source: Path, name: str, files: Sequence[Path]) -> bytes:
    """Files of the study, sorted by kind, which compresses a fifth better."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(files, key=lambda path: (path.name, str(path))):
            data = path.read_bytes()
            info = tarfile.TarInfo(f"{name}/{path.relative_to(source)}")
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return lzma.compress(plain.getvalue(), preset=9 | lzma.PRESET_EXTREME)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
