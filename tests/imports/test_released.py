"""Released files against plain torch. They are not in the repository: two environment variables name their folders.

UNFLIP_OTHERS  the files of BMXNet and AdaBin, under the names they were released with
UNFLIP_DATA    CIFAR-10, as for ``unflip evaluate``
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain import AdabinResnet20, Bmxnet, Followed
from torch import Tensor

import unflip as package
from unflip.data import load as load_data
from unflip.packing.file import read, write

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
ROUNDING = (
    1e-5  # of a layer's root mean square, or of the largest logit: sums of float32 against float64
)
Reference = Callable[..., Tensor]


def released(name: str) -> Path:
    assert FOLDER
    path = Path(FOLDER) / name
    if not path.is_file():
        pytest.skip(f"{name} is not in UNFLIP_OTHERS")
    return path


def compare(reference: Reference, file: Path, inputs: Tensor) -> Tensor:
    """The runtime's logits, after every sign and every logit of every image was compared with float64.

    The reference follows the signs of the runtime. No image is left out: values before a sign must be equal up to
    rounding, so a sign that differs is as near to its threshold; then the logits must be equal up to rounding.
    """
    network, (probe, thresholds) = package.load(file), with_inputs_of_signs(file)
    found, different, seen, zeros = [], [], 0, 0
    error = nearest = farthest = 0.0
    with torch.no_grad():
        for batch in inputs.split(AT_ONCE):
            logits = torch.from_numpy(network(batch.numpy()))
            inside = {k: torch.from_numpy(v) for k, v in probe(batch.numpy()).items()}
            assert torch.equal(logits, inside.pop("logits")), "the same network with more outputs"
            to = Followed(inside, thresholds)
            right = reference(batch, to)
            assert len(to.different) == len(thresholds), "every binary layer was followed"
            far = (right - logits).abs().amax(1) / right.abs().amax(1)
            farthest = max(farthest, float(far.max()))
            different.append(torch.stack(to.different).sum(0))
            error, nearest = max(error, to.error), max(nearest, to.nearest)
            seen, zeros = seen + to.seen, zeros + to.zeros
            found.append(logits)
    differs = torch.cat(different)
    print(
        f"{len(inputs):,} images, {seen:,} signs: {int(differs.sum()):,} signs in {int((differs > 0).sum()):,} images "
        f"differ from float64, at most {nearest:.1e} of the root mean square from the threshold; {zeros:,} values "
        f"are exactly on it; values before signs differ by at most {error:.1e}, logits by {farthest:.1e}"
    )
    assert error < ROUNDING
    assert nearest < ROUNDING
    assert farthest < ROUNDING
    return torch.cat(found)


def with_inputs_of_signs(file: Path) -> tuple[Any, dict[str, float]]:
    """The network that also returns the values before its signs, by the names of their layers; the thresholds."""
    packed = read(file)
    ops = [op for op in packed.graph["ops"] if op["op"] == "quantize"]
    outputs = [{"name": op["name"], "value": op["inputs"][0]} for op in ops]
    outputs.append({"name": "logits", "value": packed.graph["output"]})
    graph = {k: v for k, v in packed.graph.items() if k != "output"}
    graph |= {"outputs": outputs, "structure": "dict", "labels": None}
    with tempfile.NamedTemporaryFile(suffix=".unflip") as temporary:
        write(Path(temporary.name), packed._replace(graph=graph))
        probe = package.load(temporary.name)
    thresholds = {}
    for op in ops:
        assert op["strict"] == [False]
        [[thresholds[op["name"]]]] = packed.tensors[op["thresholds"]].tolist()
    return probe, thresholds


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
    inputs = (pixels / 255 - mean) / std
    logits = compare(AdabinResnet20(source, torch.float64), out, inputs)
    print(f"{percent(logits, labels)} % of the test images are right")
    assert abs(percent(logits, labels) - 87.97) <= 0.03  # ties decide a few images


@needs_images
def test_bmxnets_cifar10_network_equals_plain_torch(unflip, tmp_path):
    source, out = released(CIFAR), tmp_path / "cifar.unflip"
    made = unflip("import", "bmxnet", source, "-o", out)
    assert made.code == 0, made.err
    pixels, labels = cifar_test()
    logits = compare(Bmxnet(source, torch.float64), out, pixels - MEAN)
    print(f"{percent(logits, labels)} % of the test images are right")
    assert abs(percent(logits, labels) - 85.21) <= 0.03


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
    compare(Bmxnet(source, torch.float64), out, inputs)
