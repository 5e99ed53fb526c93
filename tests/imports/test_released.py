"""Released files against plain torch. They are not in the repository: two environment variables name their folders.

UNFLIP_OTHERS  the files of BMXNet and AdaBin, under the names they were released with
UNFLIP_DATA    CIFAR-10, as for ``unflip evaluate``
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from plain import AdabinResnet20, Bmxnet
from torch import Tensor

import unflip as package
from unflip.data import load as load_data

FOLDER = os.environ.get("UNFLIP_OTHERS")
IMAGES = os.environ.get("UNFLIP_DATA")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="UNFLIP_OTHERS does not name a folder of released files"
)
needs_images = pytest.mark.skipif(not IMAGES, reason="UNFLIP_DATA does not name CIFAR-10")

CIFAR = "binarized_cifar10-resnet18-64bit-0000.params"
IMAGENET = (
    "binarized_imagenet-resnet18-64bit-0040.params",
    "binarized_imagenet-resnet18-64bit-1st-stage-fullprecision-0038.params",
)
MEAN = torch.tensor([123.68, 116.779, 103.939]).view(1, 3, 1, 1)
AT_ONCE = 100
Reference = Callable[..., Tensor]


def released(name: str) -> Path:
    assert FOLDER
    path = Path(FOLDER) / name
    if not path.is_file():
        pytest.skip(f"{name} is not in UNFLIP_OTHERS")
    return path


def compare(reference: Reference, file: Path, inputs: Tensor) -> tuple[Tensor, Tensor, str]:
    """Logits of the reference and the runtime. Every image whose logits differ must have a tie."""
    network, ties, expected, found = package.load(file), [], [], []
    with torch.no_grad():
        for batch in inputs.split(AT_ONCE):
            near: list[Tensor] = []
            expected.append(reference(batch, near).float())
            ties.append(torch.stack(near).sum(0))
            found.append(torch.as_tensor(np.asarray(network(batch.numpy()))))
    right, got, near_ties = torch.cat(expected), torch.cat(found), torch.cat(ties)
    same = (right - got).abs().amax(1) <= 1e-4 * right.abs().amax(1)
    classes = int((right.argmax(1) == got.argmax(1)).sum())
    text = (
        f"{len(inputs)} images: {int(same.sum())} with equal logits, {classes} with the same class; "
        f"{int((near_ties > 0).sum())} images have ties ({int(near_ties.sum())} in all); images without a tie: "
        f"{int(same[near_ties == 0].sum())} of {int((near_ties == 0).sum())} equal"
    )
    print(text)
    assert bool(same[near_ties == 0].all()), text
    return right, got, text


def cifar_test() -> tuple[Tensor, Tensor]:
    images = load_data("cifar10")
    return torch.from_numpy(images.test_images).float(), torch.from_numpy(
        images.test_labels.astype(np.int64)
    )


def percent(logits: Tensor, labels: Tensor) -> float:
    return round(100 * float((logits.argmax(1) == labels).double().mean()), 2)


@needs_images
def test_adabins_resnet20_equals_plain_torch_on_cifar10(unflip, tmp_path):
    source = released("adabin-resnet20-cifar10.pth")
    out = tmp_path / "adabin.unflip"
    made = unflip("import", "torch", source, "--layout", "adabin-resnet20", "-o", out)
    assert made.code == 0, made.err
    pixels, labels = cifar_test()
    mean, std = (
        torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    right, got, text = compare(AdabinResnet20(source), out, (pixels / 255 - mean) / std)
    print(f"plain {percent(right, labels)} %, runtime {percent(got, labels)} %")
    # Ties decide a few images, and torch's sums depend on the machine.
    assert abs(percent(right, labels) - 87.97) <= 0.03, text
    assert abs(percent(got, labels) - 87.97) <= 0.03, text


@needs_images
def test_bmxnets_cifar10_network_equals_plain_torch(unflip, tmp_path):
    source, out = released(CIFAR), tmp_path / "cifar.unflip"
    made = unflip("import", "bmxnet", source, "-o", out)
    assert made.code == 0, made.err
    pixels, labels = cifar_test()
    right, got, text = compare(Bmxnet(source), out, pixels - MEAN)
    print(f"plain {percent(right, labels)} %, runtime {percent(got, labels)} %")
    assert abs(percent(right, labels) - 85.21) <= 0.03, text
    assert abs(percent(got, labels) - 85.21) <= 0.03, text


def structured(count: int) -> Tensor:
    """Images that are not noise: black, white, ramps, stripes, checkers, discs, and smooth random ones."""
    rows, columns = torch.meshgrid(torch.arange(224.0), torch.arange(224.0), indexing="ij")
    disc = ((rows - 112) ** 2 + (columns - 112) ** 2 < 60**2) * 255.0
    plain = [torch.zeros(224, 224), torch.full((224, 224), 255.0), rows * 255 / 223]
    plain += [
        columns * 255 / 223,
        (columns // 8 % 2) * 255,
        ((rows + columns) // 16 % 2) * 255,
        disc,
    ]
    images = [image.expand(3, 224, 224) for image in plain]
    coarse = torch.rand(count, 3, 7, 7, generator=torch.Generator().manual_seed(1)) * 255
    smooth = torch.nn.functional.interpolate(coarse, (224, 224), mode="bilinear")
    return torch.cat([torch.stack(images), smooth])


@pytest.mark.parametrize("name", IMAGENET)
def test_bmxnets_imagenet_networks_equal_plain_torch(unflip, tmp_path, name):
    source, out = released(name), tmp_path / "imagenet.unflip"
    made = unflip("import", "bmxnet", source, "-o", out)
    assert made.code == 0, made.err
    noise = torch.randint(256, (12, 3, 224, 224), generator=torch.Generator().manual_seed(2))
    inputs = torch.cat([noise.float(), structured(12)]) - MEAN
    _, _, text = compare(Bmxnet(source, torch.float64), out, inputs)
    assert "images" in text
