"""BMXNet's networks: MXNet files whose binary convolutions store 64 signs per float64.

Yang et al., "BMXNet: An Open-Source Binary Neural Network Implementation Based on MXNet", 2017, arXiv:1705.09864.

A binary convolution, QConvolution, has three peculiarities:

weights   float64 arrays of 64 bits each: lowest bit first, in the order (out, in, kh, kw), 1 is +1 and 0 is −1
padding   zeros are padded before the sign, and sign(0) = +1, so the padding is +1
output    the number of equal signs, (K + Σ x·w) / 2, where K is the number of weights of a filter

Here it is a padding by zeros, a binary convolution without padding, a scale of 1/2 and a shift of K/2. QActivation only
has a gradient (``backward_only``); the sign belongs to the convolution after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unflip.binarize import binarize
from unflip.imports.errors import CannotImport, listed
from unflip.imports.mxnet_params import Array, read_params
from unflip.imports.mxnet_symbol import Node, read_symbol
from unflip.imports.symbol_network import CountingConv, GlobalMean, Part, Sum, SymbolNetwork

BITS_PER_WORD = 64
DEFAULT_EPSILON = 1e-3  # MXNet's, of BatchNorm

# Attributes that do not change the result in evaluation mode.
NEUTRAL = {
    "workspace",
    "momentum",
    "cudnn_off",
    "cudnn_tune",
    "use_global_stats",
    "output_mean_var",
    "__init__",
    "layout",
    "grad_scale",
    "normalization",
    "use_ignore",
    "multi_output",
    "__shape__",
    "__dtype__",
}


class Imported(NamedTuple):
    """The network, and the numbers of its layers for the report."""

    model: nn.Module
    binary: int
    fixed: int  # BatchNorms whose gamma is 1 whatever the file says
    classes: int
    stem: int  # kernel size of the first convolution


def load(params: Path, symbol: Path) -> Imported:
    """Build the network of a symbol file with the arrays of a ``.params`` file."""
    return build(read_symbol(symbol), read_params(params), f"{params} with {symbol.name}")


def build(nodes: list[Node], arrays: Mapping[str, Array], where: str) -> Imported:
    builder = _Builder(nodes, arrays)
    try:
        return builder.network()
    except CannotImport as error:
        raise CannotImport(f"{where}: {error}") from None


class _Builder:
    def __init__(self, nodes: list[Node], arrays: Mapping[str, Array]) -> None:
        self.nodes = nodes
        self.arrays = dict(arrays)
        self.used: set[str] = set()
        self.channels: dict[int, int] = {}
        self.fixed = 0
        self.stem = 0
        self.classes = 0

    def network(self) -> Imported:
        needed = self._needed()
        [data, *others] = [i for i in needed if self._is_data(i)] or [-1]
        if data < 0 or others:
            raise CannotImport("the graph should have one input that is not an array, 'data'")
        self.channels[data] = 3
        self._refuse_names(needed, data)
        output = self._output()
        parts = [
            (Part(self.nodes[i].name, i, self._sources(i)), self._module(i))
            for i in needed
            if self.nodes[i].op != "null" and i <= output
        ]
        if self.arrays.keys() - self.used:
            odd = sorted(self.arrays.keys() - self.used)
            raise CannotImport(f"nothing in the graph uses {listed(odd)}")
        model = SymbolNetwork(parts, data, output).eval()
        binary = [p.name for p, m in parts if isinstance(m, CountingConv)]
        if not binary:
            raise CannotImport("the graph has no QConvolution, so there is nothing binary in it")
        if not self.classes:
            raise CannotImport("the graph has no FullyConnected layer that gives the logits")
        skip = [p.name for p, m in parts if isinstance(m, nn.Conv2d | nn.Linear)]
        binarize(model, "binarynet", skip, keep_first_and_last=False, quiet=True)
        return Imported(model, len(binary), self.fixed, self.classes, self.stem)

    # --- the graph

    def _needed(self) -> list[int]:
        """The nodes that the last one depends on, in order."""
        found = {len(self.nodes) - 1}
        for number in range(len(self.nodes) - 1, -1, -1):  # inputs are always earlier nodes
            if number in found:
                node = self.nodes[number]
                loss = node.op in ("SoftmaxOutput", "Softmax")
                found.update(node.inputs[:1] if loss else node.inputs)  # the second is the label
        return sorted(found)

    def _output(self) -> int:
        """The node of the logits: a softmax at the end is left out."""
        last = len(self.nodes) - 1
        while self.nodes[last].op in ("SoftmaxOutput", "Softmax", "softmax"):
            if not self.nodes[last].inputs:
                raise CannotImport(f"{self.nodes[last].title} has no input")
            last = self.nodes[last].inputs[0]
        return last

    def _is_data(self, number: int) -> bool:
        node = self.nodes[number]
        return node.op == "null" and self._key(node.name) is None and node.name == "data"

    def _key(self, name: str) -> str | None:
        return next((p + name for p in ("arg:", "aux:") if p + name in self.arrays), None)

    def _refuse_names(self, needed: list[int], data: int) -> None:
        names = [self.nodes[i].name for i in needed if self.nodes[i].op == "null" and i != data]
        missing = [name for name in names if self._key(name) is None]
        if missing:
            raise CannotImport(f"the graph needs arrays that are not there: {listed(missing)}")

    def _sources(self, number: int) -> tuple[int, ...]:
        """The inputs that are values, not arrays."""
        node = self.nodes[number]
        return tuple(i for i in node.inputs if self.nodes[i].op != "null" or i in self.channels)

    def _module(self, number: int) -> nn.Module:
        node = self.nodes[number]
        if node.op not in OPS:
            raise CannotImport(
                f"{node.title}: this operation is not supported; supported are {', '.join(sorted(OPS))}"
            )
        known, values, make = OPS[node.op]
        if node.attributes.get("layout", "None") not in ("NCHW", "None"):
            raise CannotImport(
                f"{node.title} has layout={node.attributes['layout']!r:.20}; only NCHW is supported"
            )
        odd = sorted(node.attributes.keys() - known - NEUTRAL)
        if odd:
            raise CannotImport(f"{node.title} has unknown attributes: {listed(odd)}")
        sources = self._sources(number)
        if len(sources) != values or node.inputs[:values] != sources:
            raise CannotImport(
                f"{node.title} should take {values} value{'s' if values > 1 else ''} and then arrays"
            )
        module, channels = make(self, node, [self.channels[i] for i in sources])
        self.channels[number] = channels
        return module

    def array(self, node: Node, place: int, what: str, shape: tuple[int, ...] | None) -> Array:
        """Input ``place`` of a node: an array of this shape, with finite numbers."""
        if place >= len(node.inputs):
            raise CannotImport(f"{node.title} has no {what}")
        name = self.nodes[node.inputs[place]].name
        key = self._key(name)
        if key is None:
            raise CannotImport(f"{node.title}: its {what} should be an array, not {name!r}")
        self.used.add(key)
        found = self.arrays[key]
        if shape is not None and (found.shape != shape or found.dtype != np.float32):
            raise CannotImport(
                f"{key} has shape {found.shape} of {found.dtype}; {node.title} needs {shape} of float32"
            )
        if shape is not None and not np.isfinite(found).all():
            raise CannotImport(f"{key} contains NaN or infinity")
        return found

    def tensor(self, node: Node, place: int, what: str, shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(self.array(node, place, what, shape).astype(np.float32))


# --- operations: each makes a module, and states the channels of its result

Made = tuple[nn.Module, int]
CONV = {"kernel", "stride", "pad", "dilate", "num_filter", "num_group", "no_bias"}


def _conv_shape(node: Node, channels: list[int]) -> tuple[tuple[int, ...], dict[str, Any]]:
    kernel = node.pair("kernel")
    if node.pair("dilate", (1, 1)) != (1, 1) or node.whole("num_group", 1) != 1:
        raise CannotImport(f"{node.title}: only dilate=(1, 1) and num_group=1 are supported")
    stride, padding = node.pair("stride", (1, 1)), node.pair("pad", (0, 0))
    _refuse_sizes(node, kernel, stride, padding)
    shape = node.whole("num_filter"), channels[0], *kernel
    return shape, {"stride": stride, "padding": padding}


def _refuse_sizes(
    node: Node, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    for k, s, p in zip(kernel, stride, padding, strict=True):
        if k < 1 or s < 1 or 2 * p > k:
            raise CannotImport(
                f"{node.title}: kernel {kernel}, stride {stride}, pad {padding}: kernel and stride start at 1, and pad "
                "is at most half of the kernel"
            )


def _conv_of(weight: Tensor, **options: Any) -> nn.Conv2d:
    conv = nn.Conv2d(1, 1, 1, bias=False, **options)  # its own weight is replaced
    conv.out_channels, conv.in_channels = weight.shape[:2]
    conv.kernel_size = (weight.shape[2], weight.shape[3])
    conv.weight = nn.Parameter(weight)
    return conv


def _convolution(b: _Builder, node: Node, channels: list[int]) -> Made:
    shape, options = _conv_shape(node, channels)
    conv = _conv_of(b.tensor(node, 1, "weight", shape), **options)
    if not node.flag("no_bias", False):
        conv.bias = nn.Parameter(b.tensor(node, 2, "bias", shape[:1]))
    b.stem = b.stem or shape[2]
    return conv, shape[0]


def _binary_convolution(b: _Builder, node: Node, channels: list[int]) -> Made:
    shape, options = _conv_shape(node, channels)
    if node.whole("act_bit", 1) != 1 or node.whole("weight_bit", 1) != 1:
        raise CannotImport(f"{node.title}: only 1 bit for weights and inputs is supported")
    if not node.flag("no_bias", False):
        raise CannotImport(f"{node.title} has a bias, which is not supported")
    if not node.flag("binarized_weights_only", False):
        raise CannotImport(
            f"{node.title}: its weights are not stored as bits; convert the files with BMXNet's model converter first"
        )
    signs = _signs(node, b.array(node, 1, "weight", None), shape)
    padding = options.pop("padding")
    return CountingConv(_conv_of(signs, **options), padding), shape[0]


def _signs(node: Node, words: Array, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    if words.dtype != np.float64 or words.size * BITS_PER_WORD != count:
        raise CannotImport(
            f"{node.title}: its weights {shape} are {count:,} bits, in an array of {words.size:,} {words.dtype}; "
            f"it should be {count / BITS_PER_WORD:,.6g} float64"
        )
    bits = np.unpackbits(np.frombuffer(words.tobytes(), np.uint8), bitorder="little")
    return torch.from_numpy(bits.astype(np.float32) * 2 - 1).view(shape)


def _batch_norm(b: _Builder, node: Node, channels: list[int]) -> Made:
    names = ("gamma", "beta", "moving mean", "moving variance")
    weight, bias, mean, variance = (
        b.tensor(node, place, what, (channels[0],)) for place, what in enumerate(names, 1)
    )
    if (variance < 0).any():
        raise CannotImport(f"{node.title}: its variance has negative numbers")
    fixed = node.flag("fix_gamma", True)
    b.fixed += fixed
    norm = nn.BatchNorm2d(channels[0], eps=node.number("eps", DEFAULT_EPSILON))
    norm.load_state_dict(
        {
            "weight": torch.ones_like(weight) if fixed else weight,
            "bias": bias,
            "running_mean": mean,
            "running_var": variance,
            "num_batches_tracked": torch.tensor(0),
        }
    )
    return norm, channels[0]


def _activation(b: _Builder, node: Node, channels: list[int]) -> Made:
    if node.attributes.get("act_type") != "relu":
        raise node.wrong("act_type", "relu, the only one that is supported")
    return nn.ReLU(), channels[0]


def _quantized_activation(b: _Builder, node: Node, channels: list[int]) -> Made:
    if node.whole("act_bit", 1) != 1 or not node.flag("backward_only", False):
        raise CannotImport(f"{node.title}: only act_bit=1 with backward_only=True is supported")
    return nn.Identity(), channels[0]


def _pooling(b: _Builder, node: Node, channels: list[int]) -> Made:
    kind = node.attributes.get("pool_type", "max")
    if node.flag("global_pool", False):
        if kind != "avg":
            raise node.wrong("pool_type", "avg for a global pool")
        return GlobalMean(), channels[0]
    if kind != "max" or node.attributes.get("pooling_convention", "valid") != "valid":
        raise CannotImport(
            f"{node.title}: pool_type={kind!r:.30}; only max pools (pooling_convention=valid) and global avg pools are "
            "supported"
        )
    sizes = node.pair("kernel"), node.pair("stride", (1, 1)), node.pair("pad", (0, 0))
    _refuse_sizes(node, *sizes)
    return nn.MaxPool2d(*sizes), channels[0]


def _fully_connected(b: _Builder, node: Node, channels: list[int]) -> Made:
    outputs = node.whole("num_hidden")
    weight = b.tensor(node, 1, "weight", (outputs, channels[0]))
    layer = nn.Linear(1, 1, bias=False)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight)
    if not node.flag("no_bias", False):
        layer.bias = nn.Parameter(b.tensor(node, 2, "bias", (outputs,)))
    b.classes = outputs
    return layer, outputs


def _sum(b: _Builder, node: Node, channels: list[int]) -> Made:
    if channels[0] != channels[1]:
        raise CannotImport(f"{node.title} adds {channels[0]} and {channels[1]} channels")
    return Sum(), channels[0]


def _same(module: type[nn.Module]) -> Callable[[_Builder, Node, list[int]], Made]:
    return lambda b, node, channels: (module(), channels[0])


# op -> its attributes, how many values it takes, how its module is made
OPS: dict[str, tuple[set[str], int, Callable[[_Builder, Node, list[int]], Made]]] = {
    "Activation": ({"act_type"}, 1, _activation),
    "BatchNorm": ({"eps", "fix_gamma"}, 1, _batch_norm),
    "Convolution": (CONV, 1, _convolution),
    "Flatten": (set(), 1, _same(nn.Flatten)),
    "FullyConnected": ({"num_hidden", "no_bias"}, 1, _fully_connected),
    "Pooling": (
        {"kernel", "stride", "pad", "pool_type", "global_pool", "pooling_convention"},
        1,
        _pooling,
    ),
    "QActivation": ({"act_bit", "backward_only"}, 1, _quantized_activation),
    "QConvolution": (
        CONV | {"act_bit", "weight_bit", "binarized_weights_only"},
        1,
        _binary_convolution,
    ),
    "elemwise_add": (set(), 2, _sum),
}
