"""Layers with 8-bit weights and inputs: the ends of a network (its first convolution and last linear layer), and its
shortcuts (all other convolutions that are not binary, such as the 1 × 1 convolutions in the shortcuts of a ResNet).

Inputs   n = round(clamp(x · scale + shift, 0, 255)) stands for the value (n − zero) / scale. zero is the n of x = 0,
         so the padding is exact. ∂L/∂x = ∂L/∂value · 1[0 ≤ x · scale + shift ≤ 255]
Weights  V = W / scale, s = max |V| / 127 for each filter, Q = round(V / s): whole numbers −127 .. 127.
         ∂L/∂W = ∂L/∂(s · Q · scale)
Product  y = float32(Σ (n − zero) · Q) · s + bias: an exact sum of whole numbers, then three roundings to float32.

A layer in evaluation mode, a frozen layer and a packed one all compute the last line, so they agree to the last bit.
While a layer trains, or under autocast, it multiplies the values themselves, with straight-through gradients.
Rounding is to even.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from unflip.layers import (
    BinaryLayer,
    ConvProduct,
    LinearProduct,
    become,
    inside_binarizer,
    twin_of,
)
from unflip.ste import straight_through

Kept = Literal["float", "int8"]  # of a layer that does not become binary
Twins = list[tuple[nn.Module, nn.Module]]  # layers, and what they become

MOST_LEVEL, MOST_WEIGHT = 255, 127
MOST_WEIGHTS = 65_536  # of a filter: then a sum of products fits 32 bits
MOMENTUM = 0.1  # of the running range, as in BatchNorm
LEAST_WIDTH = 1e-12  # of a range, so that its scale is finite


class ByteInput(nn.Module):
    """Floats as whole numbers 0 .. 255. The three buffers have one element, or one per channel."""

    scale: Tensor
    shift: Tensor
    zero: Tensor

    def __init__(self, scale: Tensor, shift: Tensor, zero: Tensor) -> None:
        super().__init__()
        for name, values in (("scale", scale), ("shift", shift), ("zero", zero)):
            self.register_buffer(name, values.detach().to(torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """The values that the numbers stand for; differentiable."""
        return self.numbers(x) / _channels(self.scale, x)

    def numbers(self, x: Tensor) -> Tensor:
        """n − zero, in float32; differentiable."""
        place = x.float() * _channels(self.scale, x) + _channels(self.shift, x)
        inside = place.clamp(0, MOST_LEVEL)
        return straight_through(torch.round(inside), inside) - _channels(self.zero, x)

    def deployed(self) -> ByteInput:
        """What a frozen layer keeps."""
        return self


class ImageInput(ByteInput):
    """Normalized images: n is the pixel as it is in the file, 0 .. 255."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        scale, shift = ([MOST_LEVEL * value for value in values] for values in (std, mean))
        zero = [float(round(min(max(value, 0), MOST_LEVEL))) for value in shift]
        super().__init__(*map(torch.tensor, (scale, shift, zero)))


class FeatureInput(ByteInput):
    """Features: n spans the running range of the inputs seen in training mode, which always includes 0."""

    range: Tensor  # the least and the largest value
    batches: Tensor

    def __init__(self) -> None:
        super().__init__(torch.ones(1), torch.zeros(1), torch.zeros(1))
        self.register_buffer("range", torch.tensor([-1.0, 1.0]))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self._follow_range()

    def numbers(self, x: Tensor) -> Tensor:
        if self.training:
            self._watch(x.detach().float())
        return super().numbers(x)

    @torch.no_grad()
    def _watch(self, x: Tensor) -> None:
        """Move the range towards that of a batch. No value is read on the host, so a GPU does not wait."""
        seen = torch.stack([x.amin().clamp(max=0), x.amax().clamp(min=0)])
        rate = torch.where(self.batches == 0, 1.0, MOMENTUM)
        self.range.copy_(torch.lerp(self.range, seen, rate))
        self.batches.add_(1)
        self._follow_range()

    @torch.no_grad()
    def _follow_range(self) -> None:
        low, high = self.range[:1], self.range[1:]
        self.scale.copy_(MOST_LEVEL / (high - low).clamp(min=LEAST_WIDTH))
        self.zero.copy_(torch.round(-low * self.scale).clamp(0, MOST_LEVEL))
        self.shift.copy_(self.zero)

    def deployed(self) -> ByteInput:
        if not self.batches:
            raise ValueError(
                "it has seen no batch in training mode, so the range of its inputs is unknown; run the model on one "
                "batch in training mode"
            )
        return ByteInput(self.scale, self.shift, self.zero)


def _channels(values: Tensor, x: Tensor) -> Tensor:
    """In a shape that broadcasts over N × C × ..."""
    return values.view(-1, *[1] * (x.dim() - 2)) if x.dim() > 2 else values


class Int8Layer(nn.Module):
    """Base of Int8Conv2d and Int8Linear. ``weight`` holds float weights, which training changes."""

    weight: Tensor
    bias: Tensor | None
    byte_input: ByteInput

    def code(self) -> tuple[Tensor, Tensor]:
        """Q as float32, and s: one per filter."""
        weight = self.weight.detach().float()
        folded = weight / _input_channels(self, weight)
        largest = folded.flatten(1).abs().amax(1)
        scales = largest / MOST_WEIGHT
        units = torch.where(scales > 0, scales, torch.ones_like(scales))
        rounded = torch.round(folded / _rows(units, weight))
        return rounded.clamp(-MOST_WEIGHT, MOST_WEIGHT), scales

    def quantized_weight(self) -> Tensor:
        """The weight the layer multiplies with in training; differentiable."""
        whole, scales = self.code()
        hard = whole * _rows(scales, whole) * _input_channels(self, whole)
        return straight_through(hard, self.weight)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and (x.is_meta or not torch.is_autocast_enabled(x.device.type)):
            return exact_product(self, x, *self.code())
        inputs = self.byte_input(x)  # first: it may change the scale of the inputs
        return self._multiply(inputs, self.quantized_weight(), self.bias)


class FrozenInt8Layer(nn.Module):
    """An 8-bit layer as it is shipped."""

    bytes: Tensor  # Q as int8
    scales: Tensor
    bias: Tensor | None
    byte_input: ByteInput

    def code(self) -> tuple[Tensor, Tensor]:
        return self.bytes.float(), self.scales

    @property
    def weight(self) -> Tensor:
        """The float weights that the whole numbers stand for."""
        whole, scales = self.code()
        return whole * _rows(scales, whole) * _input_channels(self, whole)

    def forward(self, x: Tensor) -> Tensor:
        return exact_product(self, x, *self.code())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, frozen, 8 bits"


def exact_product(layer: Any, x: Tensor, whole: Tensor, scales: Tensor) -> Tensor:
    """Sums of fewer than 2^53 products of whole numbers are exact in float64, in any order."""
    numbers = layer.byte_input.numbers(x).double()  # autocast does not change products of float64
    total = layer._multiply(numbers, whole.double(), None).float()
    y = total * layer._output_view(scales)
    return y if layer.bias is None else y + layer._output_view(layer.bias)


def _rows(values: Tensor, weight: Tensor) -> Tensor:
    return values.view(-1, *[1] * (weight.dim() - 1))


def _input_channels(layer: Any, weight: Tensor) -> Tensor:
    """The scale of the input channel of each weight, in a shape that broadcasts over the weight."""
    scale: Tensor = layer.byte_input.scale
    groups = getattr(layer, "groups", 1)
    if groups > 1 and len(scale) > 1:
        scale = scale.view(groups, -1).repeat_interleave(len(weight) // groups, 0)
        return scale.view(*scale.shape, *[1] * (weight.dim() - 2))
    return scale.view(1, -1, *[1] * (weight.dim() - 2))


class Int8Conv2d(ConvProduct, Int8Layer, nn.Conv2d):
    """``nn.Conv2d`` with 8-bit weights and inputs. Zero padding stays zero."""


class Int8Linear(LinearProduct, Int8Layer, nn.Linear):  # type: ignore[misc]
    """``nn.Linear`` with 8-bit weights and inputs."""


class FrozenInt8Conv2d(ConvProduct, FrozenInt8Layer, nn.Conv2d):  # type: ignore[override]
    pass


class FrozenInt8Linear(LinearProduct, FrozenInt8Layer, nn.Linear):  # type: ignore[misc, override]
    pass


def int8_layers(model: nn.Module) -> Iterator[tuple[str, Int8Layer]]:
    """(name, layer) of every trainable 8-bit layer."""
    for name, module in model.named_modules():
        if isinstance(module, Int8Layer):
            yield name, module


def first_and_last(model: nn.Module) -> list[nn.Module]:
    """The first convolution and the last linear layer, in the order they are registered, if there are any.

    With duplicates: a layer that is used twice may be both in the middle and last.
    """
    modules = [m for _, m in model.named_modules(remove_duplicate=False)]
    convs = [m for m in modules if isinstance(m, nn.Conv2d)]
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    return [*convs[:1], *linears[-1:]]


def check_kept(ends: str, shortcuts: str, kept: bool, preprocess: object) -> None:
    """Refuse options of ``binarize`` that contradict each other; ``kept`` is its keep_first_and_last."""
    for option, value in (("ends", ends), ("shortcuts", shortcuts)):
        if value not in ("float", "int8"):
            raise ValueError(f"{option}={value!r} is not one of 'float', 'int8'")
    if ends == "int8" and not kept:
        raise ValueError(
            "ends='int8' needs keep_first_and_last=True: otherwise the first and last layer are binary"
        )
    if ends == "float" and preprocess is not None:
        raise ValueError(
            "preprocess has no effect with ends='float'; remove it, or give ends='int8'"
        )


def quantize_ends(model: nn.Module, preprocess: Mapping[str, Sequence[float]] | None) -> nn.Module:
    """Give the ends of ``model`` 8-bit weights and inputs, in place. Returns the model.

    preprocess  ``{"mean": ..., "std": ...}`` of the images, whose pixels become ``(pixel / 255 − mean) / std``
    """
    for layer, twin in end_twins(model, preprocess):
        become(layer, twin)
    return model


def quantize_shortcuts(model: nn.Module) -> nn.Module:
    """Give the shortcuts of ``model`` 8-bit weights and inputs, in place. Returns the model."""
    for layer, twin in shortcut_twins(model):
        become(layer, twin)
    return model


def end_twins(model: nn.Module, preprocess: Mapping[str, Sequence[float]] | None) -> Twins:
    """8-bit twins of the ends."""
    ends = first_and_last(model)
    if not ends:
        raise ValueError(f"ends='int8': {type(model).__name__} has no convolution or linear layer")
    names = {module: name for name, module in model.named_modules()}
    return [(end, _end_twin(names[end], end, preprocess)) for end in ends]


def shortcut_twins(model: nn.Module, binary: Collection[nn.Module] = ()) -> Twins:
    """8-bit twins of the shortcuts. The layers in ``binary`` are about to become binary."""
    found = {name: layer for name, layer in shortcuts(model).items() if layer not in binary}
    if not found:
        raise ValueError(
            f"shortcuts='int8': {type(model).__name__} has no float convolution besides its first one; remove "
            "shortcuts, or keep convolutions float (skip of binarize, downsample='float' of a ResNet-18)"
        )
    return [
        (layer, _twin("shortcuts", name, layer, FeatureInput())) for name, layer in found.items()
    ]


def shortcuts(model: nn.Module) -> dict[str, nn.Module]:
    """name -> layer, for the float convolutions besides the first convolution of the model."""
    ends = first_and_last(model)
    changed = (BinaryLayer, Int8Layer)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
        and not isinstance(module, changed)
        and module not in ends
        and not inside_binarizer(name)
    }


def _end_twin(
    name: str, layer: nn.Module, preprocess: Mapping[str, Sequence[float]] | None
) -> Int8Layer:
    if isinstance(layer, nn.Conv2d):
        return _twin("ends", name, layer, _image_input(name, layer, preprocess))
    return _twin("ends", name, layer, FeatureInput())


def _twin(option: str, name: str, layer: nn.Module, quantizer: ByteInput) -> Int8Layer:
    """``option`` is the one that asks for 8 bits."""
    problem = _unsupported(layer)
    if problem:
        raise ValueError(
            f"{option}='int8': layer {name!r} ({type(layer).__name__}) cannot have 8 bits: {problem}; "
            f"{option}='float' keeps it float"
        )
    kind = Int8Conv2d if isinstance(layer, nn.Conv2d) else Int8Linear
    twin: Int8Layer = twin_of(layer, kind)
    twin._modules = dict(layer._modules)
    twin.byte_input = quantizer.to(twin.weight.device).train(layer.training)
    return twin


def _unsupported(layer: nn.Module) -> str | None:
    if type(layer) not in (nn.Conv2d, nn.Linear):
        return "only plain nn.Conv2d and nn.Linear can"
    if is_parametrized(layer) or "weight" not in layer._parameters or "forward" in vars(layer):
        return "its weight is not a plain parameter, or its forward was replaced; undo that first"
    weight = layer.weight
    if not isinstance(weight, nn.Parameter) or weight.dtype != torch.float32:
        return "its weight is not float32; call .float() on the model first"
    if weight[0].numel() > MOST_WEIGHTS:
        return f"its filters have {weight[0].numel():,} weights, and at most {MOST_WEIGHTS:,} are allowed"
    return None


def _image_input(
    name: str, layer: nn.Conv2d, preprocess: Mapping[str, Sequence[float]] | None
) -> ImageInput:
    right = f"{{'mean': ..., 'std': ...}} with {layer.in_channels} numbers each, one per channel of {name!r}"
    if preprocess is None:
        raise ValueError(f"ends='int8' needs preprocess, the normalization of the images: {right}")
    if not isinstance(preprocess, Mapping) or set(preprocess) != {"mean", "std"}:
        raise ValueError(f"preprocess={preprocess!r} should be {right}")
    mean, std = (list(map(float, preprocess[key])) for key in ("mean", "std"))
    fits = len(mean) == len(std) == layer.in_channels and min(std) > 0
    if not fits or not all(map(math.isfinite, mean + std)):
        raise ValueError(f"preprocess={preprocess!r} should be {right}; finite, and std above 0")
    return ImageInput(mean, std)


def freeze_int8(name: str, layer: Int8Layer) -> FrozenInt8Layer:
    """The frozen form of a layer."""
    if not torch.isfinite(layer.weight).all():
        raise ValueError(
            f"layer {name!r} cannot be frozen: it has NaN or infinite weights. Load an earlier checkpoint"
        )
    if "forward" in vars(layer):
        raise ValueError(
            f"the forward of layer {name!r} was replaced (by a wrapper?): undo that before freezing"
        )
    try:
        quantizer = layer.byte_input.deployed()
    except ValueError as error:
        raise ValueError(f"layer {name!r} cannot be frozen: {error}") from error
    kinds: dict[type[Int8Layer], type[FrozenInt8Layer]] = {
        Int8Conv2d: FrozenInt8Conv2d,
        Int8Linear: FrozenInt8Linear,
    }
    if type(layer) not in kinds:
        raise ValueError(
            f"layer {name!r} ({type(layer).__name__}) cannot be frozen: only Int8Conv2d and Int8Linear can, not their "
            "subclasses or layers with a parametrization"
        )
    kind = kinds[type(layer)]
    whole, scales = layer.code()
    twin = twin_of(layer, kind)
    twin._parameters = {k: v for k, v in layer._parameters.items() if k != "weight"}
    twin._modules = {"byte_input": quantizer.eval()}
    twin._buffers = dict(layer._buffers)
    twin.register_buffer("bytes", whole.to(torch.int8))
    twin.register_buffer("scales", scales)
    return twin
