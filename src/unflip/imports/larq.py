"""Larq's networks: Keras 2 models in HDF5 files, with quantized layers.

Keras stores images as (height, width, channels) and kernels as (height, width, in, out). Here both have channels first.
A vector that was flattened from an image has another order of its features: ``Value.order`` says which, and the layers
after it are reordered instead. The layers are in ``larq_layers.py``, the quantizers in ``larq_quantizers.py``.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from unflip.imports.errors import CannotImport, listed
from unflip.imports.keras_config import Call, Config, Layer, parse_config
from unflip.imports.keras_h5 import KerasFile, read_h5
from unflip.imports.larq_builder import Builder, Value
from unflip.imports.larq_layers import HANDLERS
from unflip.imports.mxnet_params import read_limited
from unflip.imports.symbol_network import SymbolNetwork
from unflip.layers import BinaryLayer

LARGEST_CONFIG = 64_000_000
ZOO = (
    *("binary_alexnet", "birealnet18", "binary_resnet_e_18", "xnornet", "dorefanet", "meliusnet22"),
    *("binary_densenet28", "binary_densenet37", "binary_densenet37_dilated", "binary_densenet45"),
    *("r2b_bnn", "quicknet", "quicknet_small", "quicknet_large"),
)


class Imported(NamedTuple):
    """The network, and what a person should know about it."""

    model: nn.Module
    name: str
    shape: tuple[int, ...]  # of the input: (channels, height, width) or (features,)
    classes: int
    changes: list[str]

    @property
    def from_zoo(self) -> bool:
        """Whether larq-zoo defines a network of this name for ImageNet."""
        return self.name in ZOO and self.classes == 1000


def load(path: Path, config: Path | None = None, size: int | None = None) -> Imported:
    """Build the network of an .h5 file. ``config`` is its JSON, if the file has only weights."""
    file = read_h5(path)
    if config is not None:
        text, where = read_limited(config, LARGEST_CONFIG), str(config)
    elif file.config is not None:
        text, where = file.config, str(path)
    else:
        raise CannotImport(
            f"{path} has weights only; give the model's config (model.to_json()) with --config FILE"
        )
    return build(parse_config(text, where), file, size)


def build(config: Config, file: KerasFile, size: int | None = None) -> Imported:
    builder = Builder(file)
    try:
        return _network(builder, config, size)
    except CannotImport as error:
        raise CannotImport(f"{file.where}: {error}") from None


def _network(b: Builder, config: Config, size: int | None) -> Imported:
    shape = _input_shape(config.shape, size)
    channels, height, width = shape if len(shape) == 3 else (*shape, 1, 1)
    given = Value(0, (channels, height, width), vector=len(shape) == 1)
    values = {config.input: given}
    b.check_size(given.shape, "the input")
    for call in config.calls:
        missing = [name for name in call.inputs if name not in values]
        if missing:
            raise CannotImport(
                f"{call.layer.title} takes output {missing[0][2]} of a layer that has fewer"
            )
        found = _apply(b, call, [values[name] for name in call.inputs])
        results = found if isinstance(found, list) else [found]
        values |= {(call.layer.path, call.number, i): value for i, value in enumerate(results)}
    if config.output not in values:
        raise CannotImport(
            f"its output, {'/'.join(config.output[0])!r:.200}, is not a layer of the graph"
        )
    unused = b.file.unused()
    if unused:
        raise CannotImport(f"no layer uses these weights: {listed(unused)}")
    return _finished(b, config, values[config.output], shape)


def _input_shape(found: tuple[int, ...], size: int | None) -> tuple[int, ...]:
    """Channels first. ``size`` replaces a height and width that the config leaves open."""
    if len(found) == 3:
        if size is None and not (found[0] and found[1]):
            raise CannotImport("the size of its images is open; give it with --size")
        height, width = (have or size for have in found[:2])
        if size is not None and (height, width) != (size, size):
            raise CannotImport(
                f"its images have {height} × {width} pixels; --size {size} does not fit"
            )
        found = (found[2], height or 0, width or 0)
    if not all(type(n) is int and n > 0 for n in found):
        raise CannotImport(f"its input has the shape {found}; sizes start at 1")
    return found


def _apply(b: Builder, call: Call, inputs: list[Value]) -> Value | list[Value]:
    layer = call.layer
    if layer.kind not in HANDLERS:
        raise CannotImport(
            f"{layer.title}: this layer is not supported; supported are {', '.join(sorted(HANDLERS))}"
        )
    neutral = {"training": (None, False), "name": (None,)}
    odd = {k for k, v in call.keywords.items() if v is not None and v not in neutral.get(k, ())}
    if odd:
        raise CannotImport(f"{layer.title} is called with {sorted(odd)}, which is not supported")
    least, most, handler = HANDLERS[layer.kind]
    if not least <= len(inputs) <= most:
        raise CannotImport(f"{layer.title} has {len(inputs)} inputs; it needs {least} or more")
    if layer.config.get("data_format", "channels_last") != "channels_last":
        raise layer.wrong("data_format", "'channels_last'")
    _note_precision(b, layer)
    return handler(b, layer, inputs)


def _note_precision(b: Builder, layer: Layer) -> None:
    policy: Any = layer.config.get("dtype", "float32")
    if isinstance(policy, dict) and isinstance(policy.get("config"), dict):
        policy = policy["config"].get("name")
    if policy not in (None, "float32"):
        b.note(f"layers of dtype {policy!r:.40}", "they compute in float32")


def _finished(b: Builder, config: Config, output: Value, shape: tuple[int, ...]) -> Imported:
    changes = []
    last = b.parts[output.number - 1] if output.number else None
    if last is not None and isinstance(last[1], nn.Softmax):
        output = output._replace(number=last[0].inputs[0])
        changes.append("the softmax at the end is left out: the network returns logits")
    if output.order is not None:
        raise CannotImport(
            "its output is a flattened image; end the network with a dense or convolution layer"
        )
    model = SymbolNetwork(_needed(b, output.number), 0, output.number).eval()
    binary = [m for m in model.modules() if isinstance(m, BinaryLayer)]
    if not binary:
        raise CannotImport("no layer has a quantizer, so there is nothing binary in it")
    changes += [f"{what} ({number}): {effect}" for (what, effect), number in b.notes.items()]
    changes.append(f"{len(binary)} quantized layers: latent weights became signs and scales")
    return Imported(model, config.name, shape, math.prod(output.shape), changes)


def _needed(b: Builder, output: int) -> list[Any]:
    """The parts that the output depends on, with names that torch accepts."""
    needed = {output}
    for part, _ in reversed(b.parts):
        if part.node in needed:
            needed.update(part.inputs)
    found, taken = [], {"parts", "data", "output", *dir(nn.Module())}
    for part, module in b.parts:
        if part.node in needed:
            name = re.sub(r"[^A-Za-z0-9_]", "_", part.name)
            while name in taken:
                name += "_"
            taken.add(name)
            found.append((part._replace(name=name), module))
    return found
