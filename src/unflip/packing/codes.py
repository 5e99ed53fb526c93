"""The discrete form of a layer's inputs, as stated by the method and verified against its forward pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from unflip.freeze import FrozenLayer
from unflip.methods.base import InputBinarizer, InputCode
from unflip.packing.ir import CannotPack

MOST_PLANES, MOST_STEPS = 8, 255


@torch.no_grad()
def input_code(layer: FrozenLayer, name: str) -> InputCode | None:
    """The layer's verified input code, or None if its input stays float."""
    binarizer = layer.input_binarizer
    probes = _probes(layer, torch.zeros(0, 1))
    if binarizer.bits == 32:
        if not torch.equal(binarizer(probes), probes) or _scale(layer, probes) is not None:
            raise _refusal(layer, name, "has bits = 32, but changes its input")
        return None
    code = binarizer.code()
    if code is None:
        raise _refusal(layer, name, "does not state its discrete form")
    code = code._replace(thresholds=code.thresholds.detach().to(torch.float32) + 0.0)  # no −0
    problem = (
        _malformed(code, _channels(layer))
        or _differs(code, binarizer, layer)
        or _other_scale(code, layer)
    )
    if problem:
        raise _refusal(layer, name, problem)
    return code


def _refusal(layer: FrozenLayer, name: str, problem: str) -> CannotPack:
    kind = type(layer.input_binarizer).__name__
    return CannotPack(
        f"layer {name!r}: {kind} of method {layer.method} {problem}. InputBinarizer.code() must return an InputCode "
        "(sign_code() for sign(x)) that matches forward in evaluation mode: see docs/new-method.md"
    )


def _channels(layer: FrozenLayer) -> int:
    """Of the layer's input. The weight decides: its attributes may be those of a wider layer that was pruned."""
    return int(layer.weight.shape[1]) * getattr(layer, "groups", 1)


def _malformed(code: InputCode, channels: int) -> str | None:
    """The problem with the code itself, if any."""
    thresholds, planes = code.thresholds, len(code.scales)
    numbers = [*thresholds.flatten().tolist(), *code.scales, code.offset]
    if not all(math.isfinite(number) for number in numbers):
        return "states a code with NaN or infinity (has a parameter become 0 or NaN?)"
    if thresholds.dim() != 2 or thresholds.shape[1] not in (1, channels):
        return f"states thresholds of shape {tuple(thresholds.shape)}, not (steps, {channels} or 1)"
    steps = len(thresholds)
    if not (1 <= steps <= MOST_STEPS and 1 <= planes <= MOST_PLANES and len(code.strict) == steps):
        return f"states {steps} steps, {len(code.strict)} strict flags and {planes} planes"
    if code.coding == "planes":
        return None if planes == steps else f"states {steps} steps for {planes} planes"
    doubling = all(code.scales[p] == code.scales[0] * 2**p for p in range(planes))
    if steps >= 2**planes or not doubling:
        return f"states {steps} levels in planes of scales {code.scales}"
    return None


def code_values(code: InputCode, x: Tensor) -> Tensor:
    """The values of the code for inputs N × C × ..., in float64."""
    thresholds = code.thresholds.view(len(code.thresholds), 1, -1, *[1] * (x.dim() - 2))
    if code.relative:
        thresholds = thresholds * x.abs().mean(tuple(range(1, x.dim())), keepdim=True)
    reached = [
        x > t if strict else x >= t for t, strict in zip(thresholds, code.strict, strict=True)
    ]
    if code.coding == "levels":
        level = torch.zeros(x.shape, dtype=torch.int16)
        for step in reached:
            level += step
        return code.offset + code.scales[0] * level.double()
    total = torch.full(x.shape, code.offset, dtype=torch.float64)
    for scale, step in zip(code.scales, reached, strict=True):
        total += scale * step.double()
    return total


def _differs(code: InputCode, binarizer: InputBinarizer, layer: FrozenLayer) -> str | None:
    """The first difference between the module's forward pass and the code, if any."""
    x = _probes(layer, code.thresholds)
    if code.relative:
        x = _settled(x, code)
    there, here = binarizer(x).double(), code_values(code, x)
    size = max(1e-30, abs(code.offset), *map(abs, code.scales))
    wrong = ~((there - here).abs() <= 1e-6 * size * len(code.scales))
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    return (
        f"states a discrete form that differs from its forward pass: at x = {x[at].item()!r} of channel {at[1]} the "
        f"code gives {here[at].item():g}, forward {there[at].item():g}"
    )


def _settled(x: Tensor, code: InputCode) -> Tensor:
    """Moves elements onto the thresholds, as close as possible: the thresholds depend on all elements."""
    x = x.clamp(-4, 4).clone()
    features = x.flatten(1)
    for _ in range(30):
        unit = features.abs().mean(1)
        for number, threshold in enumerate(code.thresholds[: features.shape[1] - 1]):
            features[:, number] = threshold[number % len(threshold)] * unit
    return x


def _probes(layer: FrozenLayer, thresholds: Tensor) -> Tensor:
    """Inputs that reveal a code that is nearly right: at and next to thresholds, very small and very large."""
    channels = _channels(layer)
    at = thresholds.expand(-1, channels)
    up, down = torch.full_like(at, math.inf), torch.full_like(at, -math.inf)
    near = [at, at.nextafter(up), at.nextafter(down)]
    tiny, large = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max / 4
    sizes = torch.tensor([0.0, 1e-45, tiny, 1e-6, 0.1, 0.5, 1.0, 1.5, 100.0, 1e10, large])
    fixed = torch.cat([sizes, -sizes])[:, None].expand(-1, channels)
    random = torch.randn(64, channels, generator=torch.Generator().manual_seed(0))
    x = torch.cat([random, random * 0.1, random * 10, fixed, *near])
    return x[:, :, None, None] if isinstance(layer, nn.Conv2d) else x


def _scale(layer: FrozenLayer, x: Tensor) -> Tensor | None:
    return layer.input_binarizer.output_scale(x, layer)


def _other_scale(code: InputCode, layer: FrozenLayer) -> str | None:
    """The problem with ``output_scale``, if any: it must be the K map if the code states one, else None."""
    generator = torch.Generator().manual_seed(0)
    shape: tuple[int, ...] = (2, _channels(layer))
    if isinstance(layer, nn.Conv2d):
        sizes = zip(layer.kernel_size, layer.dilation, layer.stride, strict=True)
        shape += tuple((k - 1) * d + 1 + 2 * s for k, d, s in sizes)
    x = torch.randn(shape, generator=generator)
    found = _scale(layer, x)
    if found is None:
        return "states a K map, but output_scale is None" if code.k_map else None
    if not code.k_map:
        return "has an output_scale, which its code does not state (k_map)"
    expected = _k_map(layer, x)
    try:
        same = found.expand_as(expected)
    except RuntimeError:
        return f"states a K map, but its output_scale has shape {tuple(found.shape)}"
    if (same - expected).abs().max() > 1e-5 * expected.abs().max():
        return "states a K map, but its output_scale has different values"
    return None


def _k_map(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        return x.abs().mean(1, keepdim=True).expand(-1, layer.out_features)
    assert isinstance(layer, nn.Conv2d)
    weight = torch.full(
        (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size),
        layer.groups / (layer.in_channels * math.prod(layer.kernel_size)),
    )
    return nn.functional.conv2d(
        x.abs(), weight, None, layer.stride, layer.padding, layer.dilation, layer.groups
    )
