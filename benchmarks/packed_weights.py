"""The weights of a packed ResNet-20 (DoReFa, one shortcut per convolution), to train it further.

    python benchmarks/packed_weights.py MODEL.unflip START.safetensors --data DIR

The file has no latent weights: each becomes its sign times the filter's scale. BatchNorm is one factor and one shift
there; its mean and variance are measured on training images of CIFAR-10, and factor and shift are kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from unflip import models
from unflip.data.cifar import load_cifar10
from unflip.freeze import unpack_signs
from unflip.packing.file import Packed, read

TRAINING_IMAGES = 2000
BATCH = 500


def network(packed: Packed) -> nn.Module:
    """The same function as the file's: every BatchNorm has mean 0 and variance 1."""
    method = {"name": "dorefa", "inputs": "pm1"}
    model = models.create("resnet20", method, shortcut="conv", order="conv-prelu-bn").eval()
    for op in packed.graph["ops"]:
        if op["op"] == "conv":
            _load_layer(model, op, packed)
    return model


def _load_layer(model: nn.Module, op: dict[str, Any], packed: Packed) -> None:
    name, steps = op["name"], {step["step"]: step for step in op["steps"]}
    layer: Any = model.get_submodule(name)
    block, number = name[:-1].rpartition("conv")[0], name[-1]

    def tensor(key: str, of: dict[str, Any] = op) -> Tensor:
        return torch.from_numpy(packed.tensors[of[key]].copy())

    if "weight" in op:
        layer.weight.data = tensor("weight").reshape(layer.weight.shape)
    else:
        signs = unpack_signs(tensor("bits"), layer.weight.shape, layer.weight.dtype)
        layer.weight.data = signs * tensor("scales").reshape(-1, 1, 1, 1)
    if "prelu" in steps:
        model.get_submodule(f"{block}prelu{number}").weight.data = tensor("slope", steps["prelu"])
    if "scale" not in steps["affine"]:
        layer.bias.data = tensor("shift", steps["affine"])
        return
    norm: Any = model.get_submodule(f"{block}bn{number}")
    norm.running_mean.zero_()
    norm.running_var.fill_(1 - norm.eps)
    norm.weight.data = tensor("scale", steps["affine"])
    norm.bias.data = tensor("shift", steps["affine"])


@torch.no_grad()
def measure_norms(model: nn.Module, images: Tensor) -> None:
    """Give every BatchNorm the mean and variance of its inputs, and keep what it computes."""
    seen: dict[nn.Module, list[Tensor]] = {}
    norms: list[Any] = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]

    def look(norm: nn.Module, inputs: tuple[Tensor]) -> None:
        seen.setdefault(norm, []).append(inputs[0].transpose(0, 1).flatten(1).double())

    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    for batch in images.split(BATCH):
        model(batch)
    for hook in hooks:
        hook.remove()
    for norm in norms:
        inputs = torch.cat(seen[norm], 1)
        mean, var = inputs.mean(1).float(), inputs.var(1).float()
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(var)
        norm.bias += norm.weight * mean
        norm.weight *= (var + norm.eps).sqrt()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", type=Path, metavar="MODEL.unflip")
    parser.add_argument("out", type=Path, metavar="START.safetensors")
    parser.add_argument("--data", type=Path, required=True, help="the folder of CIFAR-10")
    given = parser.parse_args()
    packed = read(given.network)
    model = network(packed)
    statistics = packed.graph["input"]["preprocess"]
    mean, std = (torch.tensor(statistics[key]).reshape(3, 1, 1) for key in ("mean", "std"))
    pixels = torch.from_numpy(load_cifar10(given.data).train_images[:TRAINING_IMAGES])
    measure_norms(model, (pixels / 255 - mean) / std)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, given.out)


if __name__ == "__main__":
    main()
