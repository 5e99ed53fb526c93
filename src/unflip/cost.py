"""Memory in bits and FLOPs, counted as papers on 1-bit networks count them (e.g. Han et al., ICML 2020).

Memory  A binary weight is 1 bit per base, a weight of an 8-bit layer 8 bits. Every other number that the model keeps
        after freezing is 32 bits: scales, offsets, float weights, biases, BatchNorm's two parameters, PReLU slopes.
        BatchNorm's running statistics are left out, as in the papers' figures.
FLOPs   Multiplications of convolutions and linear layers for one input. A float one counts 1. A 1-bit one counts
        1/64 (a 64-bit word of XNOR and POPCOUNT) per bit plane of the input and base of the weight. With binary
        weights and float inputs only additions remain: 1/2. Products of 8-bit layers are 8 · 8 planes: 1.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unflip.ends import FrozenInt8Layer, Int8Layer
from unflip.freeze import FrozenLayer, frozen_layers
from unflip.layers import (
    MULTIPLYING,
    BinaryLayer,
    binary_layers,
    inside_binarizer,
    warn_idle,
)
from unflip.tables import Table, Tabular

COUNTED = (nn.modules.conv._ConvNd, nn.Linear)


@dataclass(frozen=True)
class LayerCost:
    """One convolution or linear layer."""

    name: str
    kind: str
    weight_bits: int  # bits per weight
    input_bits: int
    memory_bits: int  # weights, scales and bias; tied weights count for the first layer
    macs: int
    flops: float


@dataclass(frozen=True)
class Cost(Tabular):
    """A whole model. ``memory_bits`` includes parameters outside of ``layers`` (BatchNorm, PReLU).

    ``print`` shows a table, and so do rich and notebooks.
    """

    memory_bits: int
    flops: float
    layers: tuple[LayerCost, ...]

    def table(self, title: str = "") -> Table:
        """One row per layer, and the totals."""
        numbers = ("weight bits", "input bits", "Kbit", "M MACs", "M FLOPs")
        rows = [
            (
                layer.name or "(model)",
                layer.kind,
                str(layer.weight_bits),
                str(layer.input_bits),
                f"{layer.memory_bits / 1e3:,.1f}",
                f"{layer.macs / 1e6:,.2f}",
                f"{layer.flops / 1e6:,.2f}",
            )
            for layer in self.layers
        ]
        total = (
            f"memory {self.memory_bits / 1e6:,.2f} Mbit ({self.memory_bits / 2**20:,.1f} Mibit, "
            f"{self.memory_bits / 8e6:,.2f} MB)   FLOPs {self.flops / 1e6:,.1f} M"
        )
        return Table(("layer", "kind", *numbers), rows, numbers, title, (total,))


def cost(model: nn.Module, example_input: Tensor) -> Cost:
    """Count ``model`` on one image of ``example_input``'s shape (its batch size does not matter).

    Warns, by name, about layers whose multiplications it cannot count, and about binary layers that the forward pass
    does not call.
    """
    _check_batch(example_input)
    macs = _macs(model, example_input[:1])
    idle = [name for name, _ in _binary(model) if not macs[name]]
    warn_idle(idle, "their multiplications are counted as none")
    counted: set[Tensor] = set()
    layers = tuple(
        _layer_cost(name, module, macs[name], counted)
        for name, module in model.named_modules()
        if name in macs
    )
    rest = _parameters_beside(model, set(macs), counted)
    return Cost(
        memory_bits=32 * rest + sum(layer.memory_bits for layer in layers),
        flops=sum(layer.flops for layer in layers),
        layers=layers,
    )


def _check_batch(example_input: Any) -> None:
    if not isinstance(example_input, Tensor):
        raise TypeError(
            f"example_input should be a torch tensor, not {type(example_input).__qualname__}"
        )
    if example_input.dim() == 0 or len(example_input) == 0:
        raise ValueError(
            f"example_input of shape {tuple(example_input.shape)} should be a batch of one image or more"
        )


def _parameters_beside(model: nn.Module, layers: set[str], counted: set[Tensor]) -> int:
    """How many numbers the model keeps outside of counted layers; a parameter with two names counts once."""
    dropped = _dropped_when_frozen(model)
    rest: set[Tensor] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # the parameters of a parametrization exist only until it is removed
        owner, computed, _ = f".{name}".partition(".parametrizations.")
        held = name.rpartition(".")[0] in layers or (computed and owner[1:] in layers)
        if not held and parameter not in dropped:
            rest.add(parameter)
    return sum(parameter.numel() for parameter in rest - counted)


def _binary(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [*binary_layers(model), *frozen_layers(model)]


def _dropped_when_frozen(model: nn.Module) -> set[nn.Parameter]:
    """The method's parameters that only training needs."""
    dropped: set[nn.Parameter] = set()
    for _, layer in binary_layers(model):
        dropped |= {*layer.weight_binarizer.parameters(), *layer.input_binarizer.parameters()}
        dropped -= {*layer.input_binarizer.deployed().parameters()}
    return dropped


def _macs(model: nn.Module, x: Tensor) -> dict[str, int]:
    """Multiplications of each convolution and linear layer; 0 for those that do not run."""
    macs: dict[str, int] = {}
    uncounted: dict[str, str] = {}
    handles = []

    def count(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, named: Any, output: Tensor) -> None:
            # A transposed convolution spreads every input, the others gather every output.
            transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
            places = [*inputs, named.get("input")][0] if transposed else output
            macs[name] += places.numel() * _weight(module)[0].numel()

        return hook

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            uncounted[name] = type(module).__name__

        return hook

    for name, module in model.named_modules():
        if inside_binarizer(name):
            continue
        if isinstance(module, COUNTED):
            macs[name] = 0
            handles.append(module.register_forward_hook(count(name), with_kwargs=True))
        elif isinstance(module, MULTIPLYING):
            handles.append(module.register_forward_hook(note(name)))
    was_training = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()(x)
    finally:
        for module, training in was_training:
            module.training = training
        for handle in handles:
            handle.remove()
    _warn_uncounted(uncounted)
    return macs


def _warn_uncounted(kinds: dict[str, str]) -> None:
    if kinds:
        found = ", ".join(f"{name!r} ({kind})" for name, kind in kinds.items())
        warnings.warn(
            f"cost does not count the multiplications of {found}: FLOPs are without them, memory is with their weights",
            stacklevel=4,
        )


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return module.weight


def _layer_cost(name: str, module: nn.Module, macs: int, counted: set[Tensor]) -> LayerCost:
    """``counted`` are the float parameters of the layers before it, which it may share."""
    weight = _weight(module)
    weight_bits, input_bits, floats = 32, 32, 0
    if isinstance(module, (BinaryLayer, FrozenLayer)):
        input_bits = module.input_binarizer.bits
    if isinstance(module, (BinaryLayer, FrozenLayer)) and module.has_binary_weights:
        code = module.code()
        weight_bits = len(code.signs)
        floats = code.scales.numel() + (0 if code.offset is None else code.offset.numel())
        bits = weight_bits * weight.numel()
    elif isinstance(module, (Int8Layer, FrozenInt8Layer)):
        weight_bits = input_bits = 8
        floats = len(weight)  # scales
        bits = 8 * weight.numel()
    else:
        bits = 32 * _new(weight, counted)
    floats += _new(module.bias, counted) if isinstance(module.bias, Tensor) else 0
    return LayerCost(
        name=name,
        kind=type(module).__name__,
        weight_bits=weight_bits,
        input_bits=input_bits,
        memory_bits=bits + 32 * floats,
        macs=macs,
        flops=macs * _flops_per_mac(weight_bits, input_bits),
    )


def _new(tensor: Tensor, counted: set[Tensor]) -> int:
    """How many numbers it has; 0 if they were counted before."""
    if tensor in counted:
        return 0
    counted.add(tensor)
    return tensor.numel()


def _flops_per_mac(weight_bits: int, input_bits: int) -> float:
    if weight_bits == 32:
        return 1.0
    if input_bits == 32:
        return 0.5 * weight_bits
    return weight_bits * input_bits / 64
