"""The network while it is built from Keras's layers: its parts, and what is known about each value."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unflip.imports.errors import CannotImport
from unflip.imports.keras_config import Layer
from unflip.imports.keras_h5 import KerasFile
from unflip.imports.larq_quantizers import Quantizer
from unflip.imports.mxnet_params import Array
from unflip.imports.symbol_network import Part

LARGEST_VALUE, MOST_VALUES = 2**26, 2**28  # elements per image: of one value, and of all together
MOST_WORK = 2**38  # products per image
MOST_PARTS = 20_000

Shape = tuple[int, int, int]


class Value(NamedTuple):
    """A tensor of the network: its number, (channels, height, width), and whether it is a vector (height = width = 1).

    order       where feature k of Keras is here; None: at k
    quantized   the value before a quantizer that made this one, and that quantizer
    """

    number: int
    shape: Shape
    vector: bool
    order: Array | None = None
    quantized: tuple[Any, Quantizer] | None = None


class Builder:
    """The parts so far. Part i makes value i + 1; value 0 is the input."""

    def __init__(self, file: KerasFile) -> None:
        self.file = file
        self.parts: list[tuple[Part, nn.Module]] = []
        self.notes: Counter[tuple[str, str]] = Counter()  # what was changed, and to what
        self.elements = self.products = 0

    def add(
        self,
        layer: Layer,
        module: nn.Module,
        inputs: list[Value],
        shape: Shape,
        like: Value | None = None,
    ) -> Value:
        """Add a module. Its value is a vector, and has an order, as ``like`` (the first input) has."""
        self.check_size(shape, layer.title)
        if len(self.parts) >= MOST_PARTS:
            raise CannotImport(f"{layer.title}: more than {MOST_PARTS:,} modules are not supported")
        like = like or inputs[0]
        number = len(self.parts) + 1
        self.parts.append(
            (Part("_".join(layer.path), number, tuple(v.number for v in inputs)), module)
        )
        return Value(number, shape, like.vector, like.order)

    def check_size(self, shape: Shape, title: str) -> None:
        if min(shape) < 1 or math.prod(shape) > LARGEST_VALUE:
            raise CannotImport(
                f"{title} gives {shape} values (channels, height, width); sizes start at 1, and at most "
                f"{LARGEST_VALUE:,} values are supported"
            )
        self.elements += math.prod(shape)
        if self.elements > MOST_VALUES:
            raise CannotImport(
                f"{title}: all layers up to it give more than {MOST_VALUES:,} values"
            )

    def count(self, layer: Layer, products: int) -> None:
        """Refuse a network that would take too long."""
        self.products += products
        if self.products > MOST_WORK:
            raise CannotImport(
                f"{layer.title}: all layers up to it need more than {MOST_WORK:,} products per image"
            )

    def note(self, what: str, effect: str) -> None:
        self.notes[what, effect] += 1

    def weight(self, layer: Layer, name: str, shape: tuple[int, ...]) -> Array:
        return self.file.find(layer.path, name, shape)

    def vector(self, layer: Layer, name: str, x: Value) -> Tensor:
        """One number per channel of x, in our order."""
        return along(x, self.weight(layer, name, (x.shape[0],)))


def along(x: Value, vector: Array) -> Tensor:
    if x.order is not None:
        found = np.empty_like(vector)
        found[x.order] = vector
        vector = found
    return torch.tensor(vector, dtype=torch.float32)


def same_kind(layer: Layer, values: list[Value], what: str) -> None:
    """Refuse values that are not of one kind: vectors, or images, in one order."""
    first = values[0]
    for value in values[1:]:
        if value.vector != first.vector:
            raise CannotImport(f"{layer.title} {what} a vector and an image")
        same = value.order is first.order or (
            value.order is not None
            and first.order is not None
            and np.array_equal(value.order, first.order)
        )
        if not same:
            raise CannotImport(
                f"{layer.title} {what} a flattened image and another vector; this is not supported"
            )


def image(layer: Layer, x: Value) -> Value:
    if x.vector:
        raise CannotImport(
            f"{layer.title} needs an image, and its input is a vector of {x.shape[0]} features"
        )
    return x
