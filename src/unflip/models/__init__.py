"""Networks as the papers publish them. Every module in this folder registers its networks."""

from unflip.models.alexnet import alexnet
from unflip.models.base import (
    all_options,
    binary_twin,
    builder,
    check_names,
    create,
    input_shape,
    names,
    register_model,
    width_parts,
)
from unflip.models.resnet import resnet18, resnet18_cifar, resnet20, resnet34
from unflip.models.vgg import vgg_small

__all__ = [
    "alexnet",
    "all_options",
    "binary_twin",
    "builder",
    "check_names",
    "create",
    "input_shape",
    "names",
    "register_model",
    "resnet18",
    "resnet18_cifar",
    "resnet20",
    "resnet34",
    "vgg_small",
    "width_parts",
]
