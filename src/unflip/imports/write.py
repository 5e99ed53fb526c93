"""Writing an imported network: preprocessing, class names and origin go into the packed file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from unflip.data import class_names
from unflip.data.cifar import CLASSES as CIFAR10
from unflip.imports.errors import CannotImport
from unflip.packing import Packed, make_packed

MOST_SOURCE = 4096  # bytes of one text, as the runtime reads it


@dataclass(frozen=True)
class Images:
    """The input of a network: its shape, (pixel / 255 − mean) / std if it is known, and its classes."""

    shape: tuple[int, ...]  # (channels, height, width), or (features,)
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    labels: tuple[str, ...] | None
    classes: str  # what the classes are, and their order
    preparation: str  # what happens before the normalization


IMAGENET_ORDER = "1,000 ImageNet classes in the order of sorted WNIDs"
IMAGENET_CROP = "RGB, short side 256, center crop 224"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def imagenet(
    mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD
) -> Images:
    return Images((3, 224, 224), mean, std, None, IMAGENET_ORDER, IMAGENET_CROP)


def cifar10(
    mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD
) -> Images:
    return Images(
        (3, 32, 32), mean, std, CIFAR10, "CIFAR-10's ten classes in its order", "RGB, 32 × 32"
    )


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def read_labels(path: Path, count: int) -> tuple[str, ...]:
    """Class names from a file with one class per line, in the order of the outputs: a key, white space, its names."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotImport(f"{path} cannot be read as UTF-8 text: {error}") from None
    found = [line.split(maxsplit=1) for line in lines if line.strip()]
    if len(found) != count:
        raise CannotImport(
            f"{path} has {len(found):,} classes, but the network has {count:,} outputs; write one line per class"
        )
    keys = [words[0] for words in found]
    wnids = [key for key in keys if class_names.wnid(key)]
    if len(wnids) == count and keys != sorted(keys):
        raise CannotImport(
            f"{path}: the network's classes are in the order of sorted WNIDs; sort it"
        )
    return class_names.short_names(keys, [words[-1] for words in found])


def packed(
    model: nn.Module, images: Images, origin: dict[str, str], labels: Sequence[str] | None = None
) -> Packed:
    """Pack the model. Its file also has ``origin`` and what is known about the images, as ``source``."""
    found = make_packed(
        model, _example(images), labels=labels or images.labels, preprocess=_preprocess(images)
    )
    return with_source(found, images, origin)


def with_source(found: Packed, images: Images, origin: dict[str, str]) -> Packed:
    """The packed network with its origin and what is known about the images, as ``source``."""
    source = origin | {"classes": images.classes, "images": images.preparation}
    for key, text in source.items():
        if len(text.encode()) > MOST_SOURCE:
            raise CannotImport(f"the source's {key} is longer than {MOST_SOURCE:,} bytes")
    return found._replace(graph=found.graph | {"source": source})


def named(
    found: Packed, images: Images, origin: dict[str, str], labels: Sequence[str] | None
) -> Packed:
    """A network that was packed without torch, with preprocessing, class names and origin."""
    given = found.graph["input"] | {"preprocess": _preprocess(images)}
    graph = found.graph | {"input": given, "labels": None if labels is None else list(labels)}
    return with_source(found._replace(graph=graph), images, origin)


def _preprocess(images: Images) -> dict[str, Sequence[float]] | None:
    if images.mean is None or images.std is None:
        return None
    return {"mean": images.mean, "std": images.std}


def _example(images: Images) -> Tensor:
    """Two inputs of noise."""
    generator = torch.Generator().manual_seed(0)
    if images.mean is None or images.std is None:
        return torch.randn(2, *images.shape, generator=generator)
    noise = torch.randint(256, (2, *images.shape), generator=generator)
    ones = [1] * (len(images.shape) - 1)
    mean, std = (torch.tensor(v).view(-1, *ones) for v in (images.mean, images.std))
    return (noise / 255 - mean) / std
