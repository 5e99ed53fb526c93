"""Which signs a run changed since its baseline: layer by layer, and weight by weight for a few filters.

Both networks are built from their checkpoints alone; the images they were trained on are not needed. Where a
checkpoint is gone, what was kept of the comparison is shown (``kept.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unflip import models
from unflip.binarize import flips_by_layer, signs
from unflip.data import ImageSet
from unflip.layers import BinaryLayer, binary_layers, inside_binarizer
from unflip.report import kept as kept_signs
from unflip.report.curves import rounded
from unflip.report.read import SEED_FOLDER
from unflip.runs import checkpoint as checkpoints
from unflip.runs import provenance
from unflip.ste import sign
from unflip.train.learner import build_model, model_state
from unflip.train.recipe import Recipe

CHANNELS = 64  # of a filter are shown at most: more than an eye compares, and most of the file
WEIGHT_DIGITS = 3  # significant digits of W and f(W)


class NoWeights(ValueError):
    """Signs that cannot be compared; the message is shown on the page in their place."""


@dataclass(frozen=True)
class Network:
    """A run's network at its newest whole checkpoint."""

    model: nn.Module
    epoch: int


def load_network(folder: Path, name: str) -> Network:
    """Build a run's network from its checkpoint; ``name`` is what a note calls it."""
    if not checkpoints.available(folder):
        raise NoWeights(f"{name} has no checkpoint there, only its metrics were kept")
    try:
        saved = checkpoints.load_usable(folder)
    except ValueError as error:
        raise NoWeights(str(error)) from error
    state = model_state(saved.tensors)
    try:
        recipe = Recipe.model_validate(saved.info["recipe"])
        model = build_model(recipe, _images_like(recipe, state), seed=0)
        model.load_state_dict(state)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise NoWeights(f"the checkpoint of {name} cannot be used: {first}") from error
    return Network(model.eval(), saved.epoch)


def _arm_of(folder: Path) -> str:
    """What a note calls a baseline: it names the seed itself."""
    return folder.absolute().parent.name if SEED_FOLDER.fullmatch(folder.name) else folder.name


def _images_like(recipe: Recipe, state: dict[str, Tensor]) -> ImageSet:
    """Data of the right number of channels and classes, which is all that building a network asks of it.

    The float first convolution and last linear layer tell, in any network.
    """
    with torch.device("meta"):
        probe = models.create(recipe.model.name, recipe.method, **recipe.model.options)
    own = {n: m for n, m in probe.named_modules() if not inside_binarizer(n)}
    first = next(n for n, m in own.items() if isinstance(m, nn.Conv2d))
    last = [n for n, m in own.items() if isinstance(m, nn.Linear)][-1]
    channels, classes = state[f"{first}.weight"].shape[1], state[f"{last}.weight"].shape[0]
    image = torch.zeros(1, channels, 1, 1, dtype=torch.uint8)
    label = torch.zeros(1, dtype=torch.int64)
    names = tuple(str(i) for i in range(classes))
    ones = (1.0,) * channels
    return ImageSet(image, label, image, label, names, ones, ones, crop_padding=0, flip=False)


class Comparison:
    """Runs against their baselines; a baseline that several arms share is read once.

    ``keep``: what is found of a finished run is written beside it, for a report without its checkpoints.
    """

    def __init__(self, filters: int, keep: bool = False) -> None:
        self.filters = filters
        self.keep = keep
        self.baselines: dict[Path, dict[str, Tensor]] = {}

    def arm(
        self, pairs: list[tuple[int, Path, Path | None]], started_there: bool = True
    ) -> dict[str, Any]:
        """What the seeds of one arm changed: (seed, its folder, its baseline's folder) for each. ``started_there``: the
        baseline is what they started from, not one that someone chose."""
        seeds: list[dict[str, Any]] = []
        problems: dict[str, list[int]] = {}
        kernels = None
        for seed, folder, baseline in pairs:
            try:
                if started_there and baseline is not None:
                    _refuse_another_start(folder, baseline)
                counts, layers = self._compared(seed, folder, baseline)
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
        self, seed: int, folder: Path, baseline: Path | None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What changed in each layer, and its filters weight by weight."""
        if baseline is None:
            raise NoWeights("its baseline has no run of that seed")
        checkpointed = all(checkpoints.available(where) for where in (folder, baseline))
        if not checkpointed and (folder / kept_signs.NAME).exists():
            return self._kept(seed, folder, baseline)
        before = self._before(baseline)
        network = load_network(folder, "the run")  # not by name: arms that lack theirs share a note
        counts, layers = _seed(seed, before, network), self._kernels(before, network.model)
        if self.keep and (folder / "result.json").exists():
            path = kept_signs.keep(folder, baseline, counts, layers)
            print(f"{path}, {path.stat().st_size / 1e3:.0f} kB")
        return counts, layers

    def _kept(
        self, seed: int, folder: Path, baseline: Path
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        kept = kept_signs.read_kept(folder, baseline)
        flips = {layer.name: (layer.changed, layer.weights) for layer in kept.layers}
        layers = [layer.model_dump() for layer in kept.kernels] if self.filters > 0 else []
        for layer in layers:
            layer["filters"] = _most_changed(layer["filters"], self.filters)
        return _counts(seed, kept.epoch, flips), layers

    def _before(self, folder: Path) -> dict[str, Tensor]:
        if folder not in self.baselines:
            self.baselines[folder] = signs(load_network(folder, _arm_of(folder)).model)
        return self.baselines[folder]

    @torch.no_grad()
    def _kernels(self, before: dict[str, Tensor], model: nn.Module) -> list[dict[str, Any]]:
        found = []
        for name, layer in binary_layers(model) if self.filters > 0 else ():
            if len(before[name]) == 1:  # a weight of several signs has no picture
                found.append(_layer_kernels(name, layer, before[name][0], self.filters))
        return found


def _refuse_another_start(folder: Path, baseline: Path) -> None:
    given = provenance.read(folder)
    wrong = provenance.other_weights(given, "start", baseline, baseline) if given else None
    if wrong:
        raise NoWeights(f"the baseline is not what the run started from ({wrong})")


def _most_changed(filters: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """As :func:`_layer_kernels` chooses them; no more were kept than it was asked for then."""
    chosen = sorted(filters, key=lambda one: (-one["changed"], one["index"]))[:most]
    return sorted(chosen, key=lambda one: one["index"])


def seed_list(seeds: list[int]) -> str:
    return f"Seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _seed(seed: int, before: dict[str, Tensor], network: Network) -> dict[str, Any]:
    """Signs changed in each layer and in all."""
    after = signs(network.model)
    try:
        flips = flips_by_layer(before, after)
    except ValueError as error:
        raise NoWeights(f"the baseline is another network: {error}") from error
    return _counts(seed, network.epoch, flips)


def _counts(seed: int, epoch: int, flips: dict[str, tuple[int, int]]) -> dict[str, Any]:
    layers = [
        {"name": name, **_share(changed, weights)} for name, (changed, weights) in flips.items()
    ]
    total = _share(sum(c for c, _ in flips.values()), sum(w for _, w in flips.values()))
    return {"seed": seed, "epoch": epoch, **total, "layers": layers}


def _share(changed: int, weights: int) -> dict[str, Any]:
    return {"changed": changed, "weights": weights, "percent": rounded(100 * changed / weights)}


def _layer_kernels(name: str, layer: BinaryLayer, before: Tensor, most: int) -> dict[str, Any]:
    """The filters with most changes: latent weights, f's prediction where there is one, and the bits.

    sign(W) is not stored: it is the sign of what is.
    """
    weight, after = layer.weight.detach(), layer.code().signs[0]
    predicted = layer.weight_binarizer.predict(weight)
    changed = (after != before).flatten(1).sum(1)
    order = torch.sort(changed, descending=True, stable=True).indices[:most].tolist()
    filters = []
    for index in sorted(order):
        differs = after[index] != before[index]  # a linear layer's row has no kernels
        channels = _channels(differs.reshape(weight.shape[1], -1).sum(1))
        filters.append(
            {
                "index": index,
                "changed": int(changed[index]),
                "off_sign": int((after[index] != sign(weight[index])).sum()),
                "channels": channels,
                "w": _numbers(weight[index, channels]),
                "f": None if predicted is None else _numbers(predicted[index, channels]),
                "before": _bits(before[index, channels]),
                "after": _bits(after[index, channels]),
            }
        )
    kernel = list(weight.shape[2:]) or [1, 1]
    return {
        "name": name,
        "filters_in_layer": weight.shape[0],
        "channels_in_filter": weight.shape[1],
        "kernel": kernel,
        "filters": filters,
    }


def _channels(changed: Tensor) -> list[int]:
    """All of them, or the ones with most changes."""
    order = torch.sort(changed, descending=True, stable=True).indices[:CHANNELS].tolist()
    return sorted(order)


def _numbers(values: Tensor) -> list[float]:
    return [rounded(v, WEIGHT_DIGITS) for v in values.flatten().double().tolist()]


def _bits(values: Tensor) -> str:
    return "".join("+" if v > 0 else "-" for v in values.flatten().tolist())
