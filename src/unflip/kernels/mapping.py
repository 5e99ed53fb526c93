"""LNS's mapping networks in a training step: each f(W) once, and layers of one shape together.

A step needs f(W) twice, for the layer's bits and for the auxiliary loss. And a network has a mapping for
each layer: on a GPU that is hundreds of kernels too small to fill it. Layers whose weights have the same
shape go through their mappings at once, each convolution as one batched matrix product. With :data:`kernels`, which
the engine sets once it has compared the two, 3×3 layers of all shapes go through ``mapping_conv.py`` together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip.kernels import mapping_conv
from unflip.layers import binary_layers
from unflip.methods.lns import MappedSign
from unflip.methods.mapping_network import FilterNorm, MappingNetwork

kernels = False  # whether to use those of mapping_conv


@contextmanager
def shared_predictions(model: nn.Module) -> Iterator[None]:
    """Inside, each f(W) is computed once. The weights must not change; models without LNS are left alone."""
    mapped = [
        (layer.weight, layer.weight_binarizer)
        for _, layer in binary_layers(model)
        if isinstance(layer.weight_binarizer, MappedSign)
    ]
    for _, binarizer in mapped:
        binarizer.shared = []
    try:
        if mapped and mapped[0][0].device.type == "cuda":
            _fill(mapped)
        yield
    finally:
        for _, binarizer in mapped:  # an autograd graph must not outlive its step
            binarizer.shared = None


def _fill(mapped: Sequence[tuple[Tensor, MappedSign]]) -> None:
    with torch.autocast("cuda", enabled=False):  # half precision could change a sign
        for fused, group in _groups(mapped):
            weights, binarizers = zip(*group, strict=True)
            predict = mapping_conv.predict_fused if fused else predict_together
            predictions = predict([b.mapping for b in binarizers], weights)
            for binarizer, predicted in zip(binarizers, predictions, strict=True):
                binarizer.shared = [predicted]


def _groups(
    mapped: Sequence[tuple[Tensor, MappedSign]],
) -> list[tuple[bool, list[tuple[Tensor, MappedSign]]]]:
    """Layers to be taken together, and whether by the kernels; those that are left out go alone."""
    fused: list[tuple[Tensor, MappedSign]] = []
    groups: dict[tuple[int, ...], list[tuple[Tensor, MappedSign]]] = defaultdict(list)
    for weight, binarizer in mapped:
        convolution = binarizer.mapping.chunks == 1 and weight.dim() == 4
        if not convolution or binarizer.config.statistics != "filters":
            continue
        if kernels and mapping_conv.supports(binarizer.mapping, weight):
            fused.append((weight, binarizer))
        else:
            groups[tuple(weight.shape)].append((weight, binarizer))
    together = [(False, group) for group in groups.values()]
    return [(True, fused), *together] if fused else together


def predict_together(
    mappings: Sequence[MappingNetwork], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """f(W) of several layers of one shape: what each mapping gives alone, up to rounding."""
    latent = torch.stack(list(weights))  # layers, filters, channels, height, width
    h = latent.permute(0, 1, 3, 4, 2)
    h = F.relu(_normalize([m.norm1 for m in mappings], _convolve([m.conv1 for m in mappings], h)))
    h = F.relu(_normalize([m.norm2 for m in mappings], _convolve([m.conv2 for m in mappings], h)))
    predicted = _convolve([m.conv3 for m in mappings], h)
    bias = torch.stack([m.conv3.bias for m in mappings if m.conv3.bias is not None])
    predicted = (predicted + bias[:, None, None, None]).permute(0, 1, 4, 2, 3)
    if mappings[0].residual:
        size = latent.detach().abs().mean((1, 2, 3, 4), keepdim=True)
        predicted = predicted + latent / size.clamp_min(torch.finfo(latent.dtype).tiny)
    return predicted.unbind(0)


def _convolve(convolutions: Sequence[nn.Conv2d], x: Tensor) -> Tensor:
    """Each layer's convolution (no bias) on (layers, filters, height, width, channels)."""
    layers, filters, height, width, channels = x.shape
    rows, columns = convolutions[0].kernel_size
    padded = F.pad(x, (0, 0, columns // 2, columns // 2, rows // 2, rows // 2))
    patches = [
        padded[:, :, i : i + height, j : j + width] for i in range(rows) for j in range(columns)
    ]
    pixels = torch.stack(patches, dim=4).reshape(layers, -1, rows * columns * channels)
    weight = torch.stack([c.weight for c in convolutions]).permute(0, 3, 4, 2, 1)
    product = torch.bmm(pixels, weight.reshape(layers, rows * columns * channels, -1))
    return product.view(layers, filters, height, width, -1)


def _normalize(norms: Sequence[FilterNorm], x: Tensor) -> Tensor:
    """Each layer's BatchNorm over its own filters."""
    var, mean = torch.var_mean(x, dim=(1, 2, 3), keepdim=True, correction=0)
    scale = torch.stack([n.weight for n in norms])[:, None, None, None]
    shift = torch.stack([n.bias for n in norms])[:, None, None, None]
    return (x - mean) * torch.rsqrt(var + 1e-5) * scale + shift


def check_kernels(
    model: nn.Module, forward: float = 3e-5, backward: float = 0.01, looks: int = 4
) -> None:
    """Compare the kernels with the plain path, in value and gradient; also tunes them before capture.

    The value has to be that of float32: TF32 would be off by ten times ``forward``. A gradient may be off without a
    wrong kernel: one hidden value within rounding of zero falls on the other side of its ReLU, and a small layer's
    gradients move by 1 to 3 % (those of float32 against float64 too). Another look, at latent weights a little aside,
    tells the two apart: a wrong kernel is wrong there as well.
    """
    mapped = [
        (name, layer.weight, layer.weight_binarizer.mapping)
        for name, layer in binary_layers(model)
        if isinstance(layer.weight_binarizer, MappedSign)
        and mapping_conv.supports(layer.weight_binarizer.mapping, layer.weight)
    ]
    if not mapped:
        return
    names, weights, mappings = zip(*mapped, strict=True)
    wrong: dict[str, str] = {}
    for look in range(looks):
        found = _differences(names, _aside(weights, 0.01 * look), mappings, forward, backward)
        wrong = {name: what for name, what in found.items() if look == 0 or name in wrong}
        if not wrong:
            return
    raise RuntimeError(next(iter(wrong.values())))


def _aside(weights: Sequence[Tensor], share: float) -> list[Tensor]:
    """Leaves near the weights: moved by a share of their spread."""
    moved = []
    for weight, noise in zip(weights, _noise(weights, seed=1), strict=True):
        moved.append((weight.detach() + share * weight.detach().std() * noise).requires_grad_())
    return moved


def _differences(
    names: Sequence[str],
    weights: Sequence[Tensor],
    mappings: Sequence[MappingNetwork],
    forward: float,
    backward: float,
) -> dict[str, str]:
    """The layers where the kernels differ from the plain path, and in what."""
    fused = _values_and_gradients(mapping_conv.predict_fused(mappings, weights), mappings, weights)
    alone = [
        predict_together([mapping], [weight])[0]
        for mapping, weight in zip(mappings, weights, strict=True)
    ]
    plain = _values_and_gradients(alone, mappings, weights)
    different: dict[str, str] = {}
    for name, found, expected in zip(names, fused, plain, strict=True):
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            error, norm = (a - b).norm().item(), b.norm().item()
            if not error <= (backward if number else forward) * norm:
                what = f"gradient {number}" if number else "prediction"
                text = f"{what} of {name} is off by {error:.3g} (norm {norm:.3g})"
                different.setdefault(name, text)
    return different


def _values_and_gradients(
    predictions: Sequence[Tensor], mappings: Sequence[MappingNetwork], weights: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Of each layer: f(W), and the gradients of W and of the mapping's parameters for a fixed probe."""
    leaves = [[w, *m.parameters()] for w, m in zip(weights, mappings, strict=True)]
    probes = _noise(predictions, seed=0)
    total = sum((p * probe).sum() for p, probe in zip(predictions, probes, strict=True))
    assert isinstance(total, Tensor)
    grads = list(torch.autograd.grad(total, [leaf for group in leaves for leaf in group]))
    return [
        [p.detach(), *(grads.pop(0) for _ in group)]
        for p, group in zip(predictions, leaves, strict=True)
    ]


def _noise(like: Sequence[Tensor], seed: int) -> list[Tensor]:
    """The same in each run, and nothing taken from torch's own generator."""
    generator = torch.Generator(like[0].device).manual_seed(seed)
    return [torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=generator) for t in like]
