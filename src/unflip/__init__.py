"""unflip: train, correct and deploy 1-bit neural networks in PyTorch."""

from unflip import methods
from unflip.binarize import (
    binarize,
    flip_rate,
    flips_by_layer,
    load_twin,
    signs,
    summary,
)
from unflip.cost import cost
from unflip.freeze import freeze
from unflip.layers import (
    BinaryConv2d,
    BinaryLinear,
    after_step,
    auxiliary_loss,
    auxiliary_losses,
    start_epoch,
)

__version__ = "0.1.0"

__all__ = [
    "BinaryConv2d",
    "BinaryLinear",
    "after_step",
    "auxiliary_loss",
    "auxiliary_losses",
    "binarize",
    "cost",
    "flip_rate",
    "flips_by_layer",
    "freeze",
    "load_twin",
    "methods",
    "signs",
    "start_epoch",
    "summary",
]
