"""Changed signs from checkpoints: per layer, and weight by weight for a few filters. The images are not needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unflip.binarize import flips_by_layer
from unflip.binarize import signs as model_signs
from unflip.layers import BinaryLayer, binary_layers
from unflip.report.curves import rounded
from unflip.report.signs_file import CHANNELS, NoWeights
from unflip.runs.load import model_of
from unflip.runs.run import Run
from unflip.ste import sign

WEIGHT_DIGITS = 3  # significant digits of W and f(W)
Signs = dict[str, Tensor]


def signs_of(run: Run, name: str) -> Signs:
    """The signs of a run's network, per layer; ``name`` is its name in a note."""
    return model_signs(_network(run, name)[0])


def compare(
    before: Signs, run: Run, filters: int
) -> tuple[dict[str, tuple[int, int]], int, list[dict[str, Any]]]:
    """(changed, all) signs per layer, the epoch of the run's checkpoint, and ``filters`` of each layer."""
    model, epoch = _network(run, "the run")  # without a name, so that several runs share one note
    try:
        flips = flips_by_layer(before, model_signs(model))
    except ValueError as error:
        raise NoWeights(f"the baseline is another network: {error}") from error
    return flips, epoch, _kernels(before, model, filters)


def _network(run: Run, name: str) -> tuple[nn.Module, int]:
    """A run's network, and the epoch of its checkpoint."""
    try:
        saved = run.load_checkpoint()
        return model_of(run, saved), saved.epoch
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise NoWeights(f"the checkpoint of {name} cannot be used: {first}") from error


@torch.no_grad()
def _kernels(before: Signs, model: nn.Module, filters: int) -> list[dict[str, Any]]:
    found = []
    for name, layer in binary_layers(model) if filters > 0 else ():
        if len(before[name]) == 1:  # a weight of several signs has no picture
            found.append(_layer_kernels(name, layer, before[name][0], filters))
    return found


def _layer_kernels(name: str, layer: BinaryLayer, before: Tensor, most: int) -> dict[str, Any]:
    """The filters with most changes: latent weights, the prediction if a network predicts the bits, and the bits.

    sign(W) is not stored: it follows from W.
    """
    weight, after = layer.weight.detach(), layer.code().signs[0]
    binarizer = layer.weight_binarizer
    predicted = binarizer.predict(weight)
    changed = (after != before).flatten(1).sum(1)
    order = torch.sort(changed, descending=True, stable=True).indices[:most].tolist()
    filters = []
    for index in sorted(order):
        differs = after[index] != before[index]  # a row of a linear layer has no kernels
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
    """All channels, or those with most changes."""
    order = torch.sort(changed, descending=True, stable=True).indices[:CHANNELS].tolist()
    return sorted(order)


def _numbers(values: Tensor) -> list[float]:
    return [rounded(v, WEIGHT_DIGITS) for v in values.flatten().double().tolist()]


def _bits(values: Tensor) -> str:
    return "".join("+" if v > 0 else "-" for v in values.flatten().tolist())
