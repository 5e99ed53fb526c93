"""Memory in bits and FLOPs, counted as the LNS paper and the papers it compares with count them.

Memory  a binary weight is 1 bit (a bit for each of its bases), everything else the model keeps after
        freezing is 32: scales, offsets, float weights, biases, BatchNorm's two parameters, PReLU slopes.
        BatchNorm's running statistics are left out, as in the papers' figures.
FLOPs   multiplications of convolutions and linear layers for one input: a float one counts 1, a 1-bit
        one 1/64 (a 64-bit word of XNOR and POPCOUNT), times the bit planes of the input and the bases
        of the weight. With binary weights and float inputs only additions remain: 1/2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unflip.freeze import FrozenLayer, frozen_layers
from unflip.layers import BinaryLayer, binary_layers, inside_binarizer, warn_idle


@dataclass(frozen=True)
class LayerCost:
    """One convolution or linear layer."""

    name: str
    kind: str
    weight_bits: int  # bits a weight
    input_bits: int
    memory_bits: int  # weights, scales and bias
    macs: int
    flops: float


@dataclass(frozen=True)
class Cost:
    """A whole model; ``memory_bits`` includes what no layer of ``layers`` holds (BatchNorm, PReLU)."""

    memory_bits: int
    flops: float
    layers: tuple[LayerCost, ...]


def cost(model: nn.Module, example_input: Tensor) -> Cost:
    """Count ``model`` on one image of ``example_input``'s shape (its batch size does not matter)."""
    outputs = _output_sizes(model, example_input[:1])
    idle = [name for name, _ in _binary(model) if not outputs[name]]
    warn_idle(idle, "their multiplications are counted as none")
    layers = tuple(
        _layer_cost(name, module, outputs[name])
        for name, module in model.named_modules()
        if name in outputs
    )
    dropped = _dropped_when_frozen(model)
    rest = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter not in dropped and name.rpartition(".")[0] not in outputs
    )
    return Cost(
        memory_bits=32 * rest + sum(layer.memory_bits for layer in layers),
        flops=sum(layer.flops for layer in layers),
        layers=layers,
    )


def _binary(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [*binary_layers(model), *frozen_layers(model)]


def _dropped_when_frozen(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of the method that only training needs."""
    dropped: set[nn.Parameter] = set()
    for _, layer in binary_layers(model):
        dropped |= {*layer.weight_binarizer.parameters(), *layer.input_binarizer.parameters()}
        dropped -= {*layer.input_binarizer.deployed().parameters()}
    return dropped


def _output_sizes(model: nn.Module, x: Tensor) -> dict[str, int]:
    """How many values each convolution and linear layer puts out; 0 for those that do not run."""
    sizes: dict[str, int] = {}
    handles = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            sizes[name] += output.numel()

        return hook

    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)) and not inside_binarizer(name):
            sizes[name] = 0
            handles.append(module.register_forward_hook(watch(name)))
    was_training = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()(x)
    finally:
        for module, training in was_training:
            module.training = training
        for handle in handles:
            handle.remove()
    return sizes


def _layer_cost(name: str, module: nn.Module, outputs: int) -> LayerCost:
    weight = module.weight
    assert isinstance(weight, Tensor)
    macs = outputs * weight[0].numel()
    weight_bits, input_bits, scales = 32, 32, 0
    if isinstance(module, (BinaryLayer, FrozenLayer)):
        code = module.code()
        weight_bits, input_bits = len(code.signs), module.input_binarizer.bits
        scales = code.scales.numel() + (0 if code.offset is None else code.offset.numel())
    bias = module.bias.numel() if isinstance(module.bias, Tensor) else 0
    return LayerCost(
        name=name,
        kind=type(module).__name__,
        weight_bits=weight_bits,
        input_bits=input_bits,
        memory_bits=weight_bits * weight.numel() + 32 * (scales + bias),
        macs=macs,
        flops=macs * _flops_a_mac(weight_bits, input_bits),
    )


def _flops_a_mac(weight_bits: int, input_bits: int) -> float:
    if weight_bits == 32:
        return 1.0
    if input_bits == 32:
        return 0.5 * weight_bits
    return weight_bits * input_bits / 64
