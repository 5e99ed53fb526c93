"""What the benchmark needs of an engine, and what an engine gets of a network."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Network:
    """One network in the forms the engines want: packed, in torch by kind, and its images.

    Kinds are "binary", "8-bit ends" and "8-bit ends and shortcuts" (binary too; see ``unflip.ends``), and the names of
    the float twins.
    """

    name: str
    packed: dict[str, Path]  # of the binary kinds
    models: dict[str, nn.Module]
    pixels: Tensor  # uint8
    images: Tensor  # the same, normalized
    folder: Path  # for files the engines make on the way
    files: dict[str, Any] = field(default_factory=dict)

    def input(self, batch: int) -> Array:
        return np.ascontiguousarray(self.images[:batch].numpy())

    def once(self, key: str, make: Callable[[Path], Any]) -> Any:
        """A file or model that engines of several batch sizes and thread counts share."""
        if key not in self.files:
            self.files[key] = make(self.folder / key)
        return self.files[key]

    def twin_onnx(self, twin: str) -> Path:
        """The float twin as ONNX, as torch writes it."""
        return self.once(f"{twin}.onnx", lambda path: _export(self.models[twin], self.images, path))

    @torch.inference_mode()
    def expected(self, kind: str) -> Array:
        """What torch says."""
        model = self.models[kind]
        return self.once(
            f"expected {kind}",
            lambda _: torch.cat([model(part) for part in self.images.split(16)]).numpy(),
        )


class Agreement(NamedTuple):
    """An image's difference is its largest one over its largest output.

    In a network with random weights, one sign that falls the other way because a float layer before it
    rounds otherwise grows into a visible difference of that image; so the median says whether two engines
    compute the same, and the share of equal images how often that happened.
    """

    median: float
    equal: float  # share of images with a difference below 1e-4
    same_class: float


@dataclass
class Engine:
    """Something that runs one batch. ``kind`` is the network it runs."""

    name: str
    kind: str
    threads: int
    batch: int
    run: Callable[[Array], Array]
    input: Array
    before: Callable[[], None] = lambda: None  # puts a setting of the whole process in place

    def burst(self, seconds: float) -> list[float]:
        """Seconds of single runs, for about so long. The first run is not timed if it is cheap to repeat."""
        self.before()
        time.sleep(0.02)  # threads of the engine before this one stop spinning
        began = time.perf_counter()
        self.run(self.input)
        first = time.perf_counter() - began
        times = [first] if first > seconds / 2 else []
        while not times or time.perf_counter() - began < seconds:
            start = time.perf_counter()
            self.run(self.input)
            times.append(time.perf_counter() - start)
        return times

    def agreement(self, network: Network) -> Agreement:
        """With torch on the same network."""
        self.before()
        expected = network.expected(self.kind)
        images = network.pixels if self.input.dtype == np.uint8 else network.images
        parts = np.split(images.numpy(), len(expected) // self.batch)
        found = np.concatenate([self.run(np.ascontiguousarray(part)).copy() for part in parts])
        return agreement(found.reshape(expected.shape), expected)

    def close(self) -> None:
        """Nothing to do for engines in this process."""


def agreement(found: Array, expected: Array) -> Agreement:
    each = np.abs(found - expected).max(1) / np.abs(expected).max(1)
    same = (found.argmax(1) == expected.argmax(1)).mean()
    return Agreement(float(np.median(each)), float((each < 1e-4).mean()), float(same))


def _export(model: nn.Module, images: Tensor, path: Path) -> Path:
    """With the exporter that needs no onnxscript."""
    axes = {"input": {0: "batch"}, "output": {0: "batch"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its age, and of what it does not fold
        torch.onnx.export(
            model,
            (images[:1],),
            path,
            dynamo=False,
            input_names=["input"],
            output_names=["output"],
            dynamic_axes=axes,
            opset_version=17,
        )
    return path
