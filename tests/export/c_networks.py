"""Small networks for the tests of plain C: together they have every op that C code can compute."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx_net import Net
from torch import nn

from unflip import models
from unflip.ends import quantize_ends
from unflip.packing import Packed, make_packed
from unflip.packing.describe import value_shapes

ROOT = Path(__file__).parents[2]


def affine(net: Net, channels: int) -> dict[str, Any]:
    return {"step": "affine", "scale": net.tensor(channels), "shift": net.tensor(channels)}


LEVELS = {"steps": 3, "coding": "levels", "scales": [1 / 3, 2 / 3], "offset": -0.5}
CODES: dict[str, Any] = {
    "signs": {"channels": 9},
    "strict": {"strict": [True], "scales": [1.0], "offset": 0.0},
    "unitless": {"scales": [0.7], "offset": -0.3},
    "ternary": {
        "steps": 2, "coding": "levels", "scales": [1.0, 2.0], "offset": -1.0, "strict": [False, True],
    },
    "levels": {"steps": 3, "coding": "levels", "scales": [0.3, 0.6], "offset": 0.1, "channels": 9},
    "planes": {"steps": 3, "scales": [0.31, 0.17, 1.9], "offset": 0.23},
    "many": {
        "steps": 200, "coding": "levels", "scales": [2.0**p for p in range(8)], "offset": -3.0,
    },
}  # fmt: skip
WINDOWS: dict[str, Any] = {
    "same": {"shape": [5, 9, 3, 3], "padding": [1, 1, 1, 1]},
    "strided": {"shape": [5, 9, 3, 3], "padding": [1, 1, 1, 1], "stride": [2, 2]},
    "dilated": {
        "shape": [4, 9, 3, 2],
        "padding": [2, 0, 1, 3],
        "stride": [3, 2],
        "dilation": [2, 3],
    },
    "groups": {"shape": [6, 3, 3, 3], "padding": [0, 1, 1, 0], "groups": 3},
    "depthwise": {"shape": [9, 1, 5, 3], "padding": [2, 1, 2, 1], "groups": 9},
    "wide": {"shape": [3, 9, 1, 13], "padding": [0, 12, 0, 9]},
    "offset": {"shape": [4, 9, 2, 2], "padding": [1, 1, 1, 1], "bases": 2, "offset": True},
}


def binary(code: Any, window: Any, size: tuple[int, int], seed: int) -> Packed:
    """A binary convolution of bits of the input, then a second one on the bits of its value."""
    net = Net((9, *size), seed, exact=seed % 2 == 0)
    fields = dict(window)
    filters = fields["shape"][0]
    if fields.pop("offset", False):
        fields["offset"] = net.tensor(filters)
    first = net.conv(net.quantize(0, **code), **fields, steps=[affine(net, filters)])
    net.conv(net.quantize(first, **LEVELS), [3, filters, 1, 1], steps=[affine(net, 3)])
    return net.packed()


def pruned() -> Packed:
    """A factor of 0 behind an offset: then no factor is folded into the scales, which changes roundings."""
    net = Net((9, 8, 9), 4, exact=False)
    scale = net.keep(np.array([0, 0.3, 0.7, 1.1], np.float32))
    fields = {"padding": [1, 1, 1, 1], "offset": net.tensor(4)}
    net.conv(net.quantize(0), [4, 9, 3, 3], **fields, steps=[{"step": "affine", "scale": scale}])
    return net.packed()


def long_kernels() -> Packed:
    """Kernels of more than 255 taps, and more than 256 different sets of taps inside the image."""
    net = Net((1, 1, 320), 9, exact=False)
    wide = net.conv(net.quantize(0), [3, 1, 1, 299], padding=[0, 149, 0, 149])
    net.conv(net.quantize(wide, scales=[0.7], offset=0.1), [2, 3, 1, 256], padding=[0, 9, 0, 0])
    return net.packed()


def infinities() -> Packed:
    """Sums beyond the largest float: -infinity is not NaN, and no number is the result of a mean that is NaN."""
    net = Net((4, 3, 5), 10, exact=False)
    steps = [{"step": "clamp", "low": -2.0, "high": None}]
    x = net.conv(0, [9, 4, 1, 1], floats=True, steps=steps)
    name = net.ops[-1]["weight"]
    net.tensors[name] = np.float32(3e38) * np.sign(net.tensors[name])
    huge = [{"step": "affine", "scale": net.keep(np.float32([3e38]))}]
    y = net.op("map", 0, steps=[*huge, {"step": "clamp", "low": None, "high": 1.0}])
    codes = [net.quantize(v) for v in (x, net.op("normalize", y, groups=2, epsilon=1e-5))]
    for code in codes:
        net.tensors[net.ops[code - 1]["thresholds"]][:] = -3
    parts = [net.conv(code, [2, c, 1, 1]) for code, c in zip(codes, (9, 4), strict=True)]
    net.op("concat", *parts)
    return net.packed()


def vectors() -> Packed:
    """Linear layers: bits of channels are packed; integer thresholds in between."""
    net = Net((70, 1, 1), 3, exact=False)
    x = net.conv(net.quantize(0), [300, 70, 1, 1], steps=[affine(net, 300)])
    x = net.conv(net.quantize(x, channels=300), [41, 300, 3, 3], padding=[1, 1, 1, 1], bases=2)
    return net.packed()


def integers() -> Packed:
    """Only bits leave the first convolution: they follow from whole numbers, with rising and falling factors."""
    net = Net((8, 16, 16), 5, exact=False)
    slope = net.keep(np.linspace(0, 1.5, 12, dtype=np.float32))
    steps: list[Any] = [affine(net, 12), {"step": "prelu", "slope": slope}]
    steps.append({"step": "clamp", "low": -1.5, "high": None})
    x = net.conv(net.quantize(0), [12, 8, 3, 3], padding=[1, 1, 1, 1], steps=steps)
    net.conv(net.quantize(x, channels=12), [4, 12, 16, 16])
    net.preprocess = {"mean": [0.4] * 8, "std": [0.3] * 8}
    return net.packed()


def floats() -> Packed:
    """Stems of both kinds, a max pool behind falling steps, every simple op, and values that are read late."""
    net = Net((3, 41, 29), 6, exact=False)
    x = net.conv(
        0, [16, 3, 7, 7], floats=True, stride=[2, 2], padding=[3, 3, 3, 3], steps=[affine(net, 16)]
    )
    x = net.op("max_pool", x, kernel=[3, 3], stride=[2, 2], padding=[1, 1], ceil=True)
    y = net.conv(x, [10, 8, 3, 3], floats=True, groups=2, padding=[1, 1, 1, 1])
    z = net.conv(y, [10, 10, 1, 1], floats=True, steps=[{"step": "add", "value": y}])
    unit = net.op("mean_abs", z, over="sample")
    code = net.quantize(z, unit, steps=2, scales=[1.0, 0.5], strict=[True, False])
    steps = [{"step": "mul", "value": net.op("mean_abs", y, over="channels", groups=5)}]
    z = net.conv(code, [10, 10, 3, 3], padding=[1, 1, 1, 1], steps=steps)
    z = net.op("normalize", z, groups=2, epsilon=1e-5)
    for function in ("sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "elu", "mish"):
        z = net.op("curve", z, function=function)
        z = net.op("map", z, steps=[affine(net, 10)])
    z = net.op("channel_shuffle", z, groups=5)
    z = net.op("concat", z, y)
    z = net.op("slice", z, start=[1, 0, 1], stop=[19, 11, 8], step=[2, 1, 1])
    z = net.op("pad", z, before=[1, 2, 0], after=[2, 1, 1])
    z = net.op("upsample", z, factor=[2, 1])
    z = net.op("pixel_shuffle", z, factor=[2, 3])
    z = net.op("resize", z, size=[19, 5], align_corners=False)
    z = net.op("resize", z, size=[7, 9], align_corners=True)
    z = net.op(
        "avg_pool", z, kernel=[3, 2], stride=[2, 1], padding=[1, 1], ceil=True, count_padding=True
    )
    z = net.op("flatten", z)
    net.op("mean", net.conv(z, [3, net_size(net, z), 1, 1], floats=True))
    return net.packed()


def net_size(net: Net, value: int) -> int:
    return value_shapes(net.packed().graph)[value][0]


MEAN, STD = np.float32([0.5, 0.4, 0.3]), np.float32([0.2, 0.25, 0.3])


def residual(int8_ends: bool = False) -> Packed:
    """Shortcuts that are added in place, pooled in place and extended in place."""
    net = Net((3, 16, 24), 7, exact=False)
    first: Any = {"shape": [8, 3, 3, 3], "padding": [1, 1, 1, 1], "steps": [affine(net, 8)]}
    if int8_ends:
        x = net.byte_conv(pixels_to_bytes(net), **first)
    else:
        x = net.conv(0, floats=True, **first)
    for _ in range(2):
        steps = [affine(net, 8), {"step": "add", "value": x}]
        x = net.conv(net.quantize(x, channels=8), [8, 8, 3, 3], padding=[1, 1, 1, 1], steps=steps)
    pooled = net.op(
        "avg_pool", x, kernel=[2, 2], stride=[2, 2], padding=[0, 0], ceil=False, count_padding=True
    )
    wide = net.op("pad", pooled, before=[0, 0, 0], after=[8, 0, 0])
    steps = [{"step": "add", "value": wide}]
    net.conv(net.quantize(x), [16, 8, 3, 3], padding=[1, 1, 1, 1], stride=[2, 2], steps=steps)
    net.preprocess = {"mean": MEAN.tolist(), "std": STD.tolist()}
    return net.packed()


def pixels_to_bytes(net: Net) -> int:
    """The whole number of a normalized pixel is the pixel."""
    net.preprocess = {"mean": MEAN.tolist(), "std": STD.tolist()}
    return net.to_bytes(0, 255 * STD, 255 * MEAN, np.round(255 * MEAN))


def byte_layers() -> Packed:
    """8-bit weights in all kinds of windows, on pixels and on floats, at the ends of all ranges."""
    net = Net((3, 11, 9), 8, exact=False)
    x = net.byte_conv(
        pixels_to_bytes(net), [10, 3, 3, 2], stride=[2, 1], dilation=[1, 2], padding=[1, 2, 1, 1],
        steps=[affine(net, 10), {"step": "clamp", "low": -1.0, "high": None}],
    )  # fmt: skip
    x = net.op("max_pool", x, kernel=[2, 2], stride=[1, 1], padding=[0, 0], ceil=False)
    zeros = net.to_bytes(x, net.numbers(10) * 50, net.numbers(10) * 50 + 99, np.arange(10) * 28)
    y = net.byte_conv(zeros, [6, 5, 3, 3], groups=2, padding=[2, 1, 1, 0])
    z = net.byte_conv(zeros, [10, 1, 1, 3], groups=10, padding=[0, 2, 0, 1])
    slope = net.keep(np.linspace(0, 1.5, 6, dtype=np.float32))
    y = net.op("map", y, steps=[affine(net, 6), {"step": "prelu", "slope": slope}])
    y = net.conv(net.quantize(y, channels=6, **LEVELS), [4, 6, 3, 3])
    features = net.op("concat", net.op("mean", y), net.op("mean", z))
    full = net.to_bytes(features, 1e30, 0.0, 255)  # only 0 and 255
    logits = net.byte_conv(full, [7, 14, 1, 1], scales=np.full((1, 1), 1e-4, np.float32))
    net.op("concat", net.op("softmax", logits), net.op("log_softmax", logits))
    return net.packed()


def trained(name: str, method: str, size: int, int8_ends: bool = False, **options: Any) -> Packed:
    preprocess = {"mean": MEAN.tolist(), "std": STD.tolist()} if int8_ends else None
    model = models.create(name, method, **options)
    if int8_ends:
        quantize_ends(model, preprocess)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    images = torch.randn(4, options.get("in_channels", 3), size, size)
    with torch.no_grad():
        model.train()(images)
    return make_packed(model.eval(), images[:1], preprocess=preprocess)


def networks() -> dict[str, Packed]:
    torch.manual_seed(0)
    seeds = runpy.run_path(str(ROOT / "native" / "fuzz" / "seeds.py"))["seeds"]()
    found = {f"seed_{name}": packed for name, packed in seeds.items()}
    sizes = [(6, 7), (8, 32), (9, 33), (4, 8), (5, 16), (16, 16), (3, 40)]
    for i, (code, size) in enumerate(zip(CODES, sizes, strict=True)):
        window = list(WINDOWS)[i]
        found[f"binary_{code}_{window}"] = binary(CODES[code], WINDOWS[window], size, i)
        other = list(WINDOWS)[(i + 3) % len(WINDOWS)]
        found[f"binary_{code}_{other}"] = binary(CODES[code], WINDOWS[other], sizes[-i], i + 10)
    found |= {
        "pruned": pruned(),
        "long_kernels": long_kernels(),
        "infinities": infinities(),
        "vectors": vectors(),
        "integers": integers(),
        "floats": floats(),
        "residual": residual(),
        "byte_layers": byte_layers(),
    }
    found["resnet20"] = trained("resnet20", "reactnet", 8, width=4)
    found["vgg"] = trained("vgg_small", "dorefa", 8, int8_ends=True, width=4, image_size=8)
    return found
