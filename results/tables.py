"""The tables of docs/accuracy.md, docs/methods.md, docs/community.md and results/README.md, made from the files beside
this script; and the recipes of docs/imagenet.md.

python results/tables.py            # shows them
python results/tables.py --write    # writes them between the marks of these pages; a test checks that they are current

More than 400 lines, because all tables share their parts.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats  # type: ignore[import-untyped]

from unflip.networks import entries
from unflip.recipes.load import read_values, recipe_names
from unflip.study.imagenet import EXPERIMENTS, IMAGENET

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# Study -> the arm that its table compares the others with.
REFERENCES = {
    "first-lns": "finetune",
    "first-controls": "lns",
    "readings": "baseline",
    "ablation": "finetune-0.01",
    "theta-rate": "finetune",
    "replication-from-one": "finetune",
    "sota": "baseline",
    "controls": "finetune",
    "corrections": "finetune",
    "alpha": "alpha-0",
    "rho": "rho-0",
    "beyond": "conv",
    "final": "baseline",
    "ends": "baseline",
    "imagenette-resnet18": "baseline",
    "imagenette-alexnet": "baseline",
    "imagenette-ablation": "finetune",
}
FIRST_GRIDS = {"alpha": "first-alpha", "rho": "first-rho"}
# Study -> the arms of it in docs/accuracy.md, in this order.
HEADLINE = {
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
    "sota": ("xnor", "tbn", "dsq"),  # its other arms are rows above
    "final": ("strongest", "alone"),
}
# Study, or arm of it -> the row of that page it is compared with, if not the study's reference: the row with the same
# shortcuts, and with all of its seeds.
HEADLINE_BASES = {
    "sota": ("readings", "conv"),
    "sota/tbn": ("readings", "baseline"),
    "final": ("readings", "conv"),
}
MIN_RUNS_FOR_P = 3  # with two runs, the spread is known too badly for a test


@dataclass(frozen=True)
class Figures:
    """Accuracy over the seeds of an arm; ``std`` is None for one seed."""

    best: float | None
    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Figures:
        several = len(values) > 1
        std = statistics.stdev(values) if several else None
        return cls(max(values) if several else None, statistics.fmean(values), std)

    def mean_std(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")

    def whole(self) -> str:
        """``86.35 (85.60 ± 0.38)``: best (mean ± std), as the LNS paper writes it."""
        return self.mean_std() if self.best is None else f"{self.best:.2f} ({self.mean_std()})"


@dataclass(frozen=True)
class Arm:
    """One row of a study's table: a recipe and its runs."""

    name: str
    label: str
    start: str | None  # the arm whose runs it started from
    command: str
    paper: Figures | None
    accuracies: Mapping[int, float]  # seed -> accuracy of the last epoch
    stopped: Mapping[int, str]  # seed -> why the run stopped
    rows: Sequence[Mapping[str, str]]

    @property
    def figures(self) -> Figures | None:
        return Figures.of(list(self.accuracies.values())) if self.accuracies else None

    @property
    def top5(self) -> Figures | None:
        """None for images with few classes."""
        values = [float(row["top5"]) for row in self.rows if row.get("top5")]
        return Figures.of(values) if values else None

    def count(self, column: str) -> float | None:
        """The memory or the FLOPs of its network, where the study counts them."""
        return _number(self.rows[0].get(column) or "")


def read_studies(folder: Path = HERE) -> dict[str, dict[str, Arm]]:
    """Every study in the ``runs.csv`` files below a folder: study -> arm's name -> arm."""
    rows: dict[str, dict[str, list[dict[str, str]]]] = {}
    for path in sorted(folder.glob("*/runs.csv")):
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                rows.setdefault(row["study"], {}).setdefault(row["arm"], []).append(row)
    return {
        study: {name: _arm(name, runs) for name, runs in arms.items()}
        for study, arms in rows.items()
    }


def _arm(name: str, rows: Sequence[Mapping[str, str]]) -> Arm:
    first = rows[0]
    best, mean, std = (_number(first[f"paper_{part}"]) for part in ("best", "mean", "std"))
    return Arm(
        name,
        first["label"],
        first["start"] or None,
        first["command"],
        None if mean is None else Figures(best, mean, std),
        {int(row["seed"]): float(row["accuracy"]) for row in rows if row["accuracy"]},
        {int(row["seed"]): row["stopped"] for row in rows if row["stopped"]},
        rows,
    )


def _number(text: str) -> float | None:
    return float(text) if text else None


def welch_p(a: Arm, b: Arm) -> float | None:
    """Welch's t-test, two-sided; None with fewer than two seeds, or without any spread."""
    values = [list(arm.accuracies.values()) for arm in (a, b)]
    if min(map(len, values)) < 2 or all(len(set(v)) == 1 for v in values):
        return None
    return float(stats.ttest_ind(*values, equal_var=False).pvalue)


def shown_p(a: Arm, b: Arm) -> float | None:
    """Welch's p if both arms have enough runs for a table to show it."""
    enough = min(len(a.accuracies), len(b.accuracies)) >= MIN_RUNS_FOR_P
    return welch_p(a, b) if enough else None


def paired(a: Arm, b: Arm) -> tuple[float, float | None] | None:
    """Mean difference a − b over the seeds that both have, and the p of the paired t-test.

    None where the arms are not pairs: neither started from the same runs, nor one from the other.
    """
    related = a.start == b.start if a.start and b.start else b.name == a.start or a.name == b.start
    differences = [a.accuracies[s] - b.accuracies[s] for s in a.accuracies if s in b.accuracies]
    if not related or len(differences) < 2:
        return None
    mean = statistics.fmean(differences)
    if len({round(d, 9) for d in differences}) == 1:
        return mean, None
    return mean, float(stats.ttest_1samp(differences, 0).pvalue)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction of a family of p-values."""
    found: dict[str, float] = {}
    least = 0.0
    for rank, name in enumerate(sorted(p, key=lambda name: p[name])):
        least = found[name] = max(least, min(1.0, (len(p) - rank) * p[name]))
    return found


def study_table(arms: Mapping[str, Arm], reference: str, first: Mapping[str, Arm]) -> str:
    """A row per arm. ``first`` are the arms of an earlier grid, if any, in a column of their own."""
    shown = {**first, **arms}
    shown.pop("teacher", None)  # a float network: no row to compare
    with_paper = any(arm.paper for arm in shown.values())
    base = arms[reference]
    tested = any(shown_p(arm, base) is not None for arm in arms.values() if arm is not base)
    with_top5 = any(arm.top5 for arm in shown.values())
    counted = any(arm.count("flops") for arm in shown.values())
    heads = ["", f"{'top-1, ' if with_top5 else ''}best (mean ± std), %"]
    heads += ["top-5, %"] if with_top5 else []
    heads += ["runs"]
    heads += ["paper, %"] if with_paper else []
    heads += ["memory, Mbit", "FLOPs, M"] if counted else []
    heads += [f"against {base.label}{' (p)' if tested else ''}"]
    heads += ["first look, one run"] if first else []
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for name, found in shown.items():
        arm = arms.get(name)
        accuracy, runs = _figures(arm) if arm else ("", "")
        cells = [found.label, accuracy]
        cells += [found.top5.mean_std() if found.top5 else ""] if with_top5 else []
        cells += [runs]
        cells += [found.paper.whole() if found.paper else ""] if with_paper else []
        cells += _counts(found) if counted else []
        cells += [_against(arm, base) if arm else ""]
        cells += [_mean_std(first.get(name))] if first else []
        lines.append(_line(cells))
    return "\n".join([*lines, *_holm_line(arms, base)])


def _counts(arm: Arm) -> list[str]:
    bits, flops = arm.count("memory_bits"), arm.count("flops")
    return [
        "" if bits is None else f"{bits / 1e6:,.1f}",
        "" if flops is None else f"{flops / 1e6:,.0f}",
    ]


def _figures(arm: Arm) -> tuple[str, str]:
    parts = [arm.figures.whole()] if arm.figures else []
    parts += [f"seed {seed} stopped: {reason}" for seed, reason in arm.stopped.items()]
    return "; ".join(parts), str(len(arm.accuracies))


def _mean_std(arm: Arm | None) -> str:
    return arm.figures.mean_std() if arm and arm.figures else ""


def _against(arm: Arm, base: Arm) -> str:
    """``-0.63 (0.0045; paired 0.0021)``, as far as there are tests; a paired difference where it is another one."""
    if arm is base or arm.figures is None or base.figures is None:
        return ""
    p, pairs, tests = shown_p(arm, base), paired(arm, base), []
    if p is not None:
        tests.append(f"{p:.2g}")
    enough = len(arm.accuracies.keys() & base.accuracies.keys()) >= MIN_RUNS_FOR_P
    if pairs is not None and pairs[1] is not None and enough:
        same = arm.accuracies.keys() == base.accuracies.keys()
        tests.append(f"paired {'' if same else f'{_signed(pairs[0])}, '}{pairs[1]:.2g}")
    difference = _signed(arm.figures.mean - base.figures.mean)
    return f"{difference} ({'; '.join(tests)})" if tests else difference


def _holm_line(arms: Mapping[str, Arm], base: Arm) -> list[str]:
    """Arms with too few runs count as comparisons, but are not named."""
    p = {}
    for arm in arms.values():
        pairs = paired(arm, base)
        one = pairs[1] if pairs and pairs[1] is not None else welch_p(arm, base)
        if arm is not base and one is not None:
            p[arm.label] = one
    if len(p) < 2:  # one comparison needs no correction
        return []
    few = {arm.label for arm in arms.values() if len(arm.accuracies) < MIN_RUNS_FOR_P}
    kept = {name: value for name, value in holm(p).items() if value < 0.05 and name not in few}
    left = [f"{name} ({value:.2g})" for name, value in kept.items()]
    how = ", paired where possible" if any(paired(arm, base) for arm in arms.values()) else ""
    text = f"With Holm's correction for {len(p)} comparisons{how}, p < 0.05 remains for"
    if len(left) > 3:
        return ["", f"{text}:", "", *(f"- {one}" for one in left)]
    return ["", f"{text} {', '.join(left) or 'none'}."]


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def methods_table(arms: Mapping[str, Arm]) -> str:
    """The methods side by side, best first."""
    lines = [
        "| method | accuracy, % | memory, Kbit | FLOPs, M | s per epoch and seed |",
        "|---|---|---|---|---|",
    ]
    for arm in sorted(arms.values(), key=lambda a: -(a.figures.mean if a.figures else 0)):
        fields = ("memory_bits", "flops", "seconds_per_epoch")
        bits, flops, seconds = (float(arm.rows[0][field]) for field in fields)
        cells = [f"`{arm.name}`", _mean_std(arm)]
        lines.append(_line([*cells, f"{bits / 1e3:,.0f}", f"{flops / 1e6:,.2f}", f"{seconds:.2f}"]))
    return "\n".join(lines)


def measured_methods(arms: Mapping[str, Arm]) -> str:
    """Accuracy, cost, and the time and size of a packed ResNet-20, by method, best first."""
    packed = {
        row["method"]: row
        for row in json.loads((HERE / "inference" / "methods.json").read_text())["rows"]
    }
    heads = ["method", "accuracy, %", "memory, Kbit", "FLOPs, M", "ms per image", "file, KB"]
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for arm in sorted(arms.values(), key=lambda a: -(a.figures.mean if a.figures else 0)):
        bits, flops = (float(arm.rows[0][field]) for field in ("memory_bits", "flops"))
        row = packed.get(arm.name)
        run = [f"{row['ms']:.3f}", f"{row['bytes'] / 1e3:.0f}"] if row else ["", ""]
        cost = [f"{bits / 1e3:,.0f}", f"{flops / 1e6:,.2f}"]
        lines.append(_line([f"`{arm.name}`", _mean_std(arm), *cost, *run]))
    return "\n".join(lines)


def accuracy_table(studies: Mapping[str, Mapping[str, Arm]]) -> str:
    """The headline arms on CIFAR-10."""
    heads = ["CIFAR-10, ResNet-20", "n", "mean ± std, %", "paper, %", "difference (Welch's p)"]
    lines = [_line([*heads, "command"]), "|---" * 6 + "|"]
    for study, names in HEADLINE.items():
        for name in names:
            arm, usual = studies[study][name], (study, REFERENCES[study])
            of = HEADLINE_BASES.get(f"{study}/{name}") or HEADLINE_BASES.get(study, usual)
            difference = _headline(arm, studies[of[0]][of[1]], _row_label(studies, *of))
            paper = arm.paper.mean_std() if arm.paper else ""
            cells = [_row_label(studies, study, name), str(len(arm.accuracies)), _mean_std(arm)]
            lines.append(_line([*cells, paper, difference, f"`{arm.command}`"]))
    return "\n".join(lines)


def _row_label(studies: Mapping[str, Mapping[str, Arm]], study: str, name: str) -> str:
    arms = studies[study]
    label = _whole_label(arms, arms[name])
    return f"baseline, {label}" if study == "readings" else label


def _headline(arm: Arm, base: Arm, label: str) -> str:
    """Difference from another row, with Welch's p where there are seeds enough."""
    if arm is base or arm.figures is None or base.figures is None:
        return ""
    p = shown_p(arm, base)
    shown = "" if p is None else f" ({p:.2g})"
    return f"{_signed(arm.figures.mean - base.figures.mean)}{shown} against {label}"


def _whole_label(arms: Mapping[str, Arm], arm: Arm) -> str:
    """A label that continues one above it ("… decay by steps"), together with that one."""
    if not arm.label.startswith("… "):
        return arm.label
    labels = [other.label for other in arms.values()]
    above = labels[: labels.index(arm.label)]
    begun = next(label for label in reversed(above) if not label.startswith("…"))
    return f"{begun}, {arm.label.removeprefix('… ')}"


# Columns of the inference table, and the peers of which the fastest counts. Older results have no 8-bit shortcuts.
SHORTCUTS = "ours, 8-bit ends and shortcuts"
ENGINES = {
    "ours, float ends": ("unflip",),
    "ours, 8-bit ends": ("unflip-int8",),
    SHORTCUTS: ("unflip-int8-shortcuts",),
    "ONNX Runtime float": ("ort",),
    "best int8 engine": ("ort-int8", "openvino-int8"),
    "OpenVINO, binary": ("openvino-binary",),
    "Larq Compute Engine": ("lce",),
}


def inference_table(path: Path = HERE / "inference" / "avx512.json") -> str:
    """One image, one thread."""
    found = json.loads(path.read_text())
    rows = [r for r in found["rows"] if (r["batch"], r["threads"]) == (1, 1) and not r["problem"]]
    cpu = f"{found['machine']['cpu']}, one image, one thread"
    measured = {row["peer"] for row in rows}
    engines = {k: v for k, v in ENGINES.items() if k != SHORTCUTS or not measured.isdisjoint(v)}
    heads = [cpu, *engines, "file against float"]
    lines = [_line(heads), "|---" * len(heads) + "|"]
    labels = {"resnet18": "ResNet-18, 224 × 224", "resnet20": "ResNet-20, 32 × 32"}
    for network, label in labels.items():
        of = [r for r in rows if r["network"] == network]
        times = [_fastest(of, peers) for peers in engines.values()]
        lines.append(_line([label, *times, _smaller(found["compression"], network)]))
    return "\n".join(lines)


def _smaller(compression: Mapping[str, float], network: str) -> str:
    """How much smaller its files are than its float weights, for those kinds that were packed."""
    text = f"{compression[network]:.1f} times smaller"
    for kind in ("8-bit ends", "8-bit ends and shortcuts"):
        if f"{network}, {kind}" in compression:
            text += f", {compression[f'{network}, {kind}']:.1f} with {kind}"
    return text


def speed_table(path: Path = HERE / "training-speed" / "speed.json") -> str:
    """Seconds per epoch of training."""
    found = json.loads(path.read_text())
    rows = {
        "plain eager PyTorch loop, one seed": ("plain eager loop", ""),
        "ours, one seed": (
            "baseline, 1 seed",
            f" ({found['plain / ours, 1 seed']:.1f} times faster)",
        ),
        "ours, 5 seeds in one process, each": ("baseline, 5 seeds, each", ""),
        "fine-tuning, one seed": ("fine-tuning, 1 seed", ""),
        "LNS, one seed": (
            "LNS, 1 seed",
            f" ({found['LNS / fine-tuning, 1 seed']:.2f} × fine-tuning)",
        ),
        "LNS, 5 seeds in one process, each": ("LNS, 5 seeds, each", ""),
    }
    lines = [_line([label, f"{found[key]:.3f}{note}"]) for label, (key, note) in rows.items()]
    return "\n".join(["|  | s per epoch |", "|---|---|", *lines])


def imagenet_speed_table(path: Path = HERE / "training-speed" / "imagenet.json") -> str:
    """Speed, memory and start-up of ResNet-18 at ImageNet's size."""
    labels = {
        "float": "torchvision's float ResNet-18, compiled",
        "plain": "our 1-bit ResNet-18 (Bi-Real + PReLU) in a plain loop, compiled",
        "captured": "the same by `unflip train --no-compile`",
        "engine": "the same by `unflip train`",
        "again": "the same, started again",
        "lns": "the same with LNS",
        "pack": "without LNS, images from a pack",
    }
    head = ["", "images/s", "ms per step", "GiB", "s from the command to the first step"]
    parts = json.loads(path.read_text())["parts"]
    lines = [_line(head), "|---|---|---|---|---|"]
    for part, label in labels.items():
        found = parts[part]
        first = f"{found['first_step_s']:.1f}" if "first_step_s" in found else ""
        figures = f"{found['images_per_s']:,.0f}", f"{found['ms']:.2f}", f"{found['gib']:.1f}"
        lines.append(_line([label, *figures, first]))
    return "\n".join(lines)


def _fastest(rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> str:
    times = [r["median_ms"] for r in rows if r["peer"] in peers]
    if not times:
        return ""
    return f"{min(times):.2f} ms" if min(times) < 1 else f"{min(times):.1f} ms"


def recipes_table() -> str:
    """The recipes for ImageNet, with the hours that they take."""
    drafts = {d.source: d for e in EXPERIMENTS.values() for d in e.drafts if not d.changes}
    speed = f"{IMAGENET.images_per_second:,} images/s"
    heads = ["recipe", "published, %", "epochs", f"hours at {speed}", "in all", "starts from"]
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for name in (name for name in recipe_names() if name.startswith("imagenet-")):
        recipe, paper = read_values(name), drafts[name].paper
        figures = (paper.mean, paper.top5) if paper else ()
        own, needed = IMAGENET.hours(recipe), _needed_recipes(name)
        together = own + sum(IMAGENET.hours(read_values(other)) for other in needed)
        start = recipe.get("start")
        cells = [f"`{name}`", " / ".join(f"{figure:.1f}" for figure in figures if figure)]
        cells += [str(recipe["epochs"]), f"{own:.1f}", f"{together:.1f}"]
        lines.append(_line([*cells, f"`{start}`" if start else ""]))
    return "\n".join(lines)


def _needed_recipes(name: str) -> set[str]:
    """The recipes that one starts from or learns from, and theirs."""
    recipe = read_values(name)
    named = {recipe.get("start"), (recipe.get("distill") or {}).get("teacher")} - {None}
    return named.union(*(_needed_recipes(other) for other in named))


def community_table(folder: Path = HERE / "community") -> str:
    """One row per block of ``unflip bench --report``, fastest first."""
    blocks = [read_block(path) for path in sorted(folder.glob("*.txt"))]
    rows = sorted((float(found["least"].split()[0]), found) for found in blocks)
    lines = [
        _line(
            [
                found["cpu"],
                found["instruction set"],
                found["system"].partition(",")[0],
                found["unflip"],
                f"{least:.3f}",
                found["median"].split()[0],
            ]
        )
        for least, found in rows
    ]
    head = ["CPU", "instruction set", "system", "unflip", "least, ms", "median, ms"]
    return "\n".join([_line(head), _line(["---"] * len(head)), *lines])


def read_block(path: Path) -> dict[str, str]:
    """A block that somebody pasted. Times of another network, or of several threads, cannot be compared."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "  " in line]
    found = {name.strip(): value.strip() for name, _, value in (li.partition("  ") for li in lines)}
    expected = {"sha256": entries()["resnet20-cifar10"].sha256, "threads, batch": "1, 1"}
    for name, value in expected.items():
        if found.get(name) != value:
            sys.exit(f"{path.name}: {name} is {found.get(name)!r}, but the table is for {value!r}")
    return found


def pages() -> dict[Path, dict[str, str]]:
    """Page -> name of each table on it -> the table."""
    studies = read_studies()
    of_results = {
        study: study_table(studies[study], name, studies.get(FIRST_GRIDS.get(study, ""), {}))
        for study, name in REFERENCES.items()
        if study in studies
    }
    of_results["methods"] = methods_table(studies["methods"])
    of_results["training-speed"] = speed_table()
    of_results["imagenet-speed"] = imagenet_speed_table()
    return {
        ROOT / "docs" / "accuracy.md": {
            "inference": inference_table(),
            "accuracy": accuracy_table(studies),
        },
        ROOT / "docs" / "community.md": {"community": community_table()},
        ROOT / "docs" / "methods.md": {"methods-measured": measured_methods(studies["methods"])},
        HERE / "README.md": of_results,
        ROOT / "docs" / "imagenet.md": {"imagenet-recipes": recipes_table()},
    }


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """A page with each table between its marks replaced."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: results/tables.py -->\n", f"<!-- {name} ends -->"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            sys.exit(f"a page lacks the marks of the table {name!r}: {begin.strip()} and {end}")
        text = f"{before}{begin}{table}\n{end}{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into the pages")
    write = parser.parse_args().write
    for page, tables in pages().items():
        if write:
            page.write_text(with_tables(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
        else:
            print("\n\n".join(f"{name}\n\n{table}" for name, table in tables.items()), end="\n\n")


if __name__ == "__main__":
    main()
