"""Which signs a run changed since its baseline: from checkpoints (``signs.py``, needs torch) or from a kept file."""

from __future__ import annotations

from typing import Any

from unflip.report import signs_file
from unflip.report.curves import rounded
from unflip.report.signs_file import NoWeights
from unflip.runs import provenance
from unflip.runs.run import Run

Pair = tuple[int, Run, Run | None]  # seed, run, and its baseline's run of that seed


class SignChanges:
    """Compares runs with their baselines; a baseline that several arms share is read once.

    ``keep``: write the signs of each finished run beside it, for a report without its checkpoints.
    """

    def __init__(self, filters: int, keep: bool = False) -> None:
        self.filters = filters
        self.keep = keep
        self.baselines: dict[Run, Any] = {}

    def of_arm(self, pairs: list[Pair], started_there: bool = True) -> dict[str, Any]:
        """The signs that the seeds of one arm changed. ``started_there``: False if a person chose the baseline."""
        seeds: list[dict[str, Any]] = []
        problems: dict[str, list[int]] = {}
        kernels = None
        for seed, run, baseline in pairs:
            try:
                if started_there and baseline is not None:
                    _refuse_another_start(run, baseline)
                counts, layers = self._compared(seed, run, baseline)
            except NoWeights as problem:
                problems.setdefault(str(problem), []).append(seed)
                continue
            seeds.append(counts)
            if kernels is None and self.filters > 0:
                most = max((len(layer["filters"]) for layer in layers), default=0)
                kernels = {"seed": seed, "filters": most, "layers": layers}
        notes = [f"{seed_list(which)}: {problem}." for problem, which in problems.items()]
        return {"seeds": seeds, "kernels": kernels, "notes": notes}

    def _compared(
        self, seed: int, run: Run, baseline: Run | None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The counts of each layer, and its filters weight by weight."""
        if baseline is None:
            raise NoWeights("the baseline has no run of that seed")
        for which, name in ((baseline, _name_of(baseline)), (run, "the run")):
            if which.checkpoints:
                continue
            if (run.folder / signs_file.NAME).exists():
                return self._kept(seed, run, baseline)
            raise NoWeights(f"{name} has no checkpoint: only its metrics were kept")
        from unflip.report import signs  # imports torch: only for runs that have their checkpoints

        if baseline not in self.baselines:
            self.baselines[baseline] = signs.signs_of(baseline, _name_of(baseline))
        flips, epoch, layers = signs.compare(self.baselines[baseline], run, self.filters)
        counts = _counts(seed, epoch, flips)
        if self.keep and run.finished:
            path = signs_file.write(run, baseline, counts, layers)
            print(f"{path}, {path.stat().st_size / 1e3:.0f} kB")
        return counts, layers

    def _kept(
        self, seed: int, run: Run, baseline: Run
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        kept = signs_file.read(run, baseline)
        flips = {layer.name: (layer.changed, layer.weights) for layer in kept.layers}
        layers = [layer.model_dump() for layer in kept.kernels] if self.filters > 0 else []
        for layer in layers:
            layer["filters"] = _most_changed(layer["filters"], self.filters)
        return _counts(seed, kept.epoch, flips), layers


def _name_of(run: Run) -> str:
    """The name of a baseline in a note, without the seed: the note begins with that."""
    return (
        run.folder.absolute().parent.name
        if run.folder.name.startswith("seed-")
        else run.folder.name
    )


def _refuse_another_start(run: Run, baseline: Run) -> None:
    saved = provenance.read(run)
    wrong = provenance.other_weights(saved, "start", baseline.folder, baseline) if saved else None
    if wrong:
        raise NoWeights(f"the baseline is not what the run started from ({wrong})")


def _most_changed(filters: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The same filters that ``signs.py`` chooses."""
    chosen = sorted(filters, key=lambda one: (-one["changed"], one["index"]))[:most]
    return sorted(chosen, key=lambda one: one["index"])


def seed_list(seeds: list[int]) -> str:
    return f"Seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _counts(seed: int, epoch: int, flips: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Changed signs in each layer and in all."""
    layers = [
        {"name": name, **_share(changed, weights)} for name, (changed, weights) in flips.items()
    ]
    total = _share(sum(c for c, _ in flips.values()), sum(w for _, w in flips.values()))
    return {"seed": seed, "epoch": epoch, **total, "layers": layers}


def _share(changed: int, weights: int) -> dict[str, Any]:
    return {"changed": changed, "weights": weights, "percent": rounded(100 * changed / weights)}
