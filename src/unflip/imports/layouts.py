"""Key maps of released PyTorch checkpoints: one table per layout, names only.

A row maps a name in the file to a name in our network. Placeholders stand for every stage, block and convolution:

    {stage}  1, 2, ...          {block}  0, 1, ...        {n}  1 or 2, the convolution in its block
    {single} 2 · block + n − 1, for networks whose blocks have a single convolution

``*`` at the end of both names stands for the five tensors of a BatchNorm.
The names and forward passes were read in the public repositories that ``page`` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Rows = Mapping[str, str]

UNKNOWN_LICENSE = "not stated in the checkpoint; ask the authors"

STEM: Rows = {"conv1.weight": "conv1.weight", "bn1.*": "bn1.*"}


@dataclass(frozen=True)
class Layout:
    """How a released checkpoint fits one of our networks."""

    page: str  # where code and checkpoint were published
    license: str
    network: str
    options: Mapping[str, Any]
    method: Mapping[str, Any]
    images: Literal["cifar10", "imagenet"]
    blocks: tuple[int, ...]  # per stage
    rows: Rows
    first_blocks: Rows = field(
        default_factory=dict
    )  # only in the first block of stages after the first
    unused: tuple[str, ...] = ()  # patterns of names that the authors' forward pass does not use
    endings: Rows = field(
        default_factory=dict
    )  # endings that other versions of their code give to names


CIFAR_RESNET20: Rows = {
    **STEM,
    "layer{stage}.{block}.conv{n}.weight": "layer{stage}.{block}.conv{n}.weight",
    "layer{stage}.{block}.bn{n}.*": "layer{stage}.{block}.bn{n}.*",
    "bn2.*": "head_norm.*",
    "linear.weight": "fc.weight",
    "linear.bias": "fc.bias",
}

ADABIN: Rows = {
    "nonlinear1.neg_scale": "stem_activation.weight",
    "nonlinear1.pos_scale": "stem_activation.adapted.positive",
    "layer{stage}.{block}.conv{n}.binary_a.alpha_a": "layer{stage}.{block}.conv{n}.input_binarizer.distance",
    "layer{stage}.{block}.conv{n}.binary_a.beta_a": "layer{stage}.{block}.conv{n}.input_binarizer.centre",
    "layer{stage}.{block}.nonlinear{n}.neg_scale": "layer{stage}.{block}.after{n}.weight",
    "layer{stage}.{block}.nonlinear{n}.pos_scale": "layer{stage}.{block}.after{n}.adapted.positive",
}

POOLED_SHORTCUTS: Rows = {
    "layer{stage}.0.downsample.1.weight": "layer{stage}.0.downsample.0.weight",
    "layer{stage}.0.downsample.2.*": "layer{stage}.0.downsample.1.*",
}

# Versions of the code store binary weights in their shape as "weight", or as one column as "weights".
WEIGHTS: Rows = {".binary_conv.weights": ".binary_conv.weight"}

# Bi-Real Net's blocks have one convolution each: two of them are one block here.
BIREAL: Rows = {
    **STEM,
    "layer{stage}.{single}.binary_conv.weight": "layer{stage}.{block}.conv{n}.weight",
    "layer{stage}.{single}.bn1.*": "layer{stage}.{block}.bn{n}.*",
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
}

REACTNET: Rows = {
    **BIREAL,
    "layer{stage}.{single}.move0.bias": "layer{stage}.{block}.conv{n}.input_binarizer.shift",
    "layer{stage}.{single}.move1.bias": "layer{stage}.{block}.after{n}.adapted.before",
    "layer{stage}.{single}.prelu.weight": "layer{stage}.{block}.after{n}.weight",
    "layer{stage}.{single}.move2.bias": "layer{stage}.{block}.after{n}.adapted.after",
}

RESNET18, RESNET34 = (2, 2, 2, 2), (3, 4, 6, 3)

ADABIN_PAGE = "https://github.com/huawei-noah/Efficient-Computing/tree/master/BinaryNetworks/AdaBin"
BIREAL_PAGE = "https://github.com/liuzechun/Bi-Real-net"
REACTNET_PAGE = "https://github.com/liuzechun/ReActNet"

LAYOUTS: dict[str, Layout] = {
    "adabin-resnet20": Layout(
        ADABIN_PAGE,
        "MIT",
        "resnet20",
        {"order": "adabin", "shortcut": "conv"},
        {"name": "adabin", "center": "scaled"},
        "cifar10",
        (3, 3, 3),
        {**CIFAR_RESNET20, **ADABIN},
    ),
    "adabin-resnet18": Layout(
        ADABIN_PAGE,
        "MIT",
        "resnet18",
        {"variant": "adabin"},
        {"name": "adabin", "center": "scaled"},
        "imagenet",
        RESNET18,
        {
            **{k: v for k, v in CIFAR_RESNET20.items() if not k.startswith("linear")},
            **ADABIN,
            "fc.weight": "fc.weight",
            "fc.bias": "fc.bias",
        },
        POOLED_SHORTCUTS,
        ("nonlinear2.*", "bn3.*"),
    ),
    "irnet-resnet20": Layout(
        "https://github.com/htqin/IR-Net",
        UNKNOWN_LICENSE,
        "resnet20",
        {"order": "conv-bn-hardtanh", "shortcut": "conv"},
        {"name": "irnet"},
        "cifar10",
        (3, 3, 3),
        CIFAR_RESNET20,
    ),
    "recu-resnet20": Layout(
        "https://github.com/z-hXu/ReCU",
        UNKNOWN_LICENSE,
        "resnet20",
        {"order": "conv-bn-hardtanh", "shortcut": "conv", "pixels": "mean"},
        {"name": "recu"},
        "cifar10",
        (3, 3, 3),
        {
            **CIFAR_RESNET20,
            "layer{stage}.{block}.conv{n}.alpha": "layer{stage}.{block}.conv{n}.weight_binarizer.alpha",
        },
        {},
        ("layer*.tau",),
    ),
    "bireal-resnet18": Layout(
        BIREAL_PAGE,
        UNKNOWN_LICENSE,
        "resnet18",
        {"variant": "bireal"},
        {"name": "bireal"},
        "imagenet",
        RESNET18,
        BIREAL,
        POOLED_SHORTCUTS,
        endings=WEIGHTS,
    ),
    "bireal-resnet34": Layout(
        BIREAL_PAGE,
        UNKNOWN_LICENSE,
        "resnet34",
        {"variant": "bireal"},
        {"name": "bireal"},
        "imagenet",
        RESNET34,
        BIREAL,
        POOLED_SHORTCUTS,
        endings=WEIGHTS,
    ),
    "reactnet-resnet18": Layout(
        REACTNET_PAGE,
        UNKNOWN_LICENSE,
        "resnet18",
        {"variant": "reactnet"},
        {"name": "reactnet"},
        "imagenet",
        RESNET18,
        REACTNET,
        POOLED_SHORTCUTS,
        endings=WEIGHTS,
    ),
}
