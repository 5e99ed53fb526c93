"""Predictions f(W) of LNS in a training step: each is computed once, and layers of one shape are computed together.

A step needs f(W) twice, for the layer's bits and for the auxiliary loss. A network has one mapping per layer: on a GPU
that is hundreds of kernels, each too small to fill it. Layers whose weights have the same shape go through their
mappings at once, each convolution as one batched matrix product. Layers with ``fused_predict`` go through our kernels
instead: narrow 3×3 layers of all shapes together (``mapping_conv``), wide ones of one shape together
(``mapping_products``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip.kernels.mapping_conv import operator as mapping_conv
from unflip.kernels.mapping_products import operator as mapping_products
from unflip.layers import binary_layers
from unflip.methods.lns import MappedSign
from unflip.methods.mapping_network import FilterNorm, MappingNetwork


def mapped_layers(model: nn.Module) -> dict[str, Any]:
    """The binary layers whose weights a network predicts, by name."""
    return {
        name: layer
        for name, layer in binary_layers(model)
        if isinstance(layer.weight_binarizer, MappedSign)
    }


@contextmanager
def shared_predictions(model: nn.Module) -> Iterator[None]:
    """Inside, each f(W) is computed once; the weights must not change. Other models are not affected."""
    mapped = list(mapped_layers(model).values())
    for layer in mapped:
        layer.weight_binarizer.shared = []
    try:
        if mapped and mapped[0].weight.device.type == "cuda":
            fill(mapped)
        yield
    finally:
        for layer in mapped:  # an autograd graph must not outlive its step
            layer.weight_binarizer.shared = None


def fill(mapped: Sequence[Any]) -> None:
    """Compute the predictions of layers that can be computed together. The others are computed when they are needed."""
    with torch.autocast("cuda", enabled=False):  # half precision could change a sign
        for fused, layers in groups(mapped):
            predict = layers[0].fused_predict if fused else predict_together
            mappings = [layer.weight_binarizer.mapping for layer in layers]
            latents = [layer.weight_binarizer.seen(layer.weight) for layer in layers]
            predictions = predict(mappings, latents)
            for layer, predicted in zip(layers, predictions, strict=True):
                layer.weight_binarizer.shared = [predicted]


def groups(mapped: Sequence[Any]) -> list[tuple[bool, list[Any]]]:
    """Layers that are computed together, and whether by the kernels. Layers in no group are computed alone."""
    fused: list[Any] = []
    shapes: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for layer in mapped:
        weight, binarizer = layer.weight, layer.weight_binarizer
        convolution = binarizer.mapping.chunks == 1 and weight.dim() == 4
        if not convolution or binarizer.config.statistics != "filters":
            continue
        if layer.fused_predict is not None:
            fused.append(layer)
        else:
            shapes[tuple(weight.shape)].append(layer)
    together = [(False, layers) for layers in shapes.values()]
    return [(True, fused), *together] if fused else together


def covered(layer: Any) -> bool:
    """Whether our kernels compute the prediction of this layer."""
    mapping = layer.weight_binarizer.mapping
    return any(k.supports(mapping, layer.weight) for k in (mapping_conv, mapping_products))


def predict_fused(
    mappings: Sequence[MappingNetwork], weights: Sequence[Tensor], *, networks: int
) -> tuple[Tensor, ...]:
    """f(W) of several layers, each of them :func:`covered`, by our kernels."""
    pairs = list(zip(mappings, weights, strict=True))
    narrow = [i for i, pair in enumerate(pairs) if mapping_conv.supports(*pair)]
    wide = [i for i in range(len(pairs)) if i not in narrow]
    by_kernel = partial(mapping_conv.predict_fused, networks=networks)
    found: dict[int, Tensor] = {}
    for layers, predict in ((narrow, by_kernel), (wide, mapping_products.predict_by_products)):
        if layers:
            nets, latents = zip(*(pairs[i] for i in layers), strict=True)
            found.update(zip(layers, predict(nets, latents), strict=True))
    return tuple(found[i] for i in range(len(pairs)))


def predict_together(
    mappings: Sequence[MappingNetwork], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """f(W) of several layers of one shape: the prediction of each mapping alone, up to rounding."""
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
    return mappings[0].saturate(predicted).unbind(0)


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
