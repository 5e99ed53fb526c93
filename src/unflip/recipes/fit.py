"""The recipe ``images``, fitted to a folder of images: network, image size, batch, rates and epochs.

Small images get the ResNet-20 that is strongest on CIFAR-10. Photos get the ResNet-18 that is strongest on Imagenette
among those of one stage without a teacher. Its first layers halve the image twice, so it is several times faster than
a ResNet-20 of that size. The other rules were chosen, not measured: small images keep their size, and large ones
become 64 or 128 pixels. Rates fall with the batch. A small set sees more epochs, so that signs have enough steps to
settle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unflip.data.listing import SUFFIXES
from unflip.data.survey import Survey, survey
from unflip.printable import printable

NAME = "images"
TEACHER = "images-teacher"
# Of each class, from so many images on, if there are no test images. A tenth of a few images says little.
TEST_SHARES = ((1000, 0.1), (0, 0.2))

# Up to this shorter side, in pixels: the size for training.
SIZES = ((40, 32), (100, 64), (math.inf, 128))
PHOTO = 100  # from more pixels on: ResNet-18
BATCHES = ((5000, 128), (1000, 64), (200, 32), (0, 16))  # from so many images on
SEEN = 6_000_000  # images that training sees, as far as the number of epochs allows
SEEN_PHOTOS = 800_000  # Imagenette needs 40 epochs for 83 %, CIFAR-10 200 for 88 %
FEWEST_EPOCHS, USUAL_EPOCHS, MOST_EPOCHS = 60, 200, 1000
FEWEST_STEPS = 2000
TEACHER_SHARE = 4  # the teacher trains for a quarter of the epochs


@dataclass(frozen=True)
class Fit:
    """Overrides of the recipe ``images``, and the same in words."""

    overrides: list[str]
    words: str


def fit_images(folder: Path, teacher: Path | None = None, epochs: int | None = None) -> Fit:
    """``teacher``: where to write the recipe of a float network to learn from. ``epochs``: the user's own choice."""
    found = survey(folder)
    values = fitted(found)
    values["epochs"] = epochs or values["epochs"]
    overrides = [f"{field}={json.dumps(value)}" for field, value in values.items()]
    if teacher is not None:
        _write_teacher(teacher, values)
        overrides.append(f"distill={json.dumps({'teacher': str(teacher)})}")
    return Fit(overrides, _words(found, values))


def fitted(found: Survey) -> dict[str, Any]:
    """The fields of the recipe that depend on the images."""
    size = next(size for side, size in SIZES if found.side <= side)
    if found.side < size:  # smaller images keep their size; three stages halve it twice
        size = max(8, found.side // 4 * 4)
    trained = found.images - (0 if found.has_test else held_out(found))
    batch = min(next(batch for count, batch in BATCHES if found.images >= count), trained)
    photos = found.side > PHOTO
    epochs = round((SEEN_PHOTOS if photos else SEEN) / trained)
    epochs = min(USUAL_EPOCHS, max(FEWEST_EPOCHS, epochs))
    epochs = min(MOST_EPOCHS, max(epochs, math.ceil(FEWEST_STEPS / (trained // batch))))
    data = {"name": "folder", "size": size}
    return {
        "data": data if found.has_test else {**data, "test_share": test_share(found)},
        "batch_size": batch,
        "epochs": epochs,
        **(_photo_network(batch) if photos else _small_network(batch)),
    }


def _small_network(batch: int) -> dict[str, Any]:
    """The network is that of images.yaml."""
    return {
        "optimizer.lr": round(0.1 * batch / 128, 6),
        "optimizer.latent_lr": round(batch / 128, 6),
    }


def _photo_network(batch: int) -> dict[str, Any]:
    """As imagenette-resnet18-adabin, which has batches of 64."""
    return {
        "model": {"name": "resnet18", "variant": "adabin"},
        "method": "adabin",
        "optimizer": {"name": "adam", "lr": round(0.002 * math.sqrt(batch / 64), 6)},
    }


def test_share(found: Survey) -> float:
    return next(share for count, share in TEST_SHARES if found.images >= count)


def held_out(found: Survey) -> int:
    """About so many; at least one of each class with two or more images."""
    return max(found.classes if found.fewest > 1 else 1, round(test_share(found) * found.images))


def _write_teacher(path: Path, values: dict[str, Any]) -> None:
    """A float ResNet-20 of twice the width, as cifar10-resnet20-teacher; for photos a ResNet-18, as
    imagenette-resnet18-float. JSON is YAML too."""
    photos = "model" in values
    batch = values["batch_size"]
    small = {"name": "resnet20", "width": 32, "shortcut": "block", "order": "conv-prelu-bn"}
    rate = 0.1 * batch / (64 if photos else 128)
    recipe = {
        "about": "A float network for the recipe images to learn from.",
        "data": values["data"],
        "model": {"name": "resnet18"} if photos else small,
        "method": "float",
        "epochs": max(1, values["epochs"] // TEACHER_SHARE),
        "batch_size": batch,
        "optimizer": {"lr": round(rate, 6), "momentum": 0.9, "weight_decay": 0.0005},
        "schedule": {"name": "cosine"},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")


def _words(found: Survey, values: dict[str, Any]) -> str:
    size = values["data"]["size"]
    network = "ResNet-18" if "model" in values else "ResNet-20"
    tested = "your test images" if found.has_test else _held_out_words(found)
    text = (
        f"{found.images:,} images of {found.classes:,} classes, about {found.side} pixels on the shorter side. "
        f"Chosen: {network} at {size} × {size} pixels, epochs={values['epochs']}, "
        f"batch_size={values['batch_size']}, tested on {tested}."
    )
    if found.ignored:
        count = len(found.ignored)
        others = (
            "1 other file or folder is" if count == 1 else f"{count:,} other files or folders are"
        )
        text += (
            f"\n{others} ignored, such as {printable(found.ignored[0])}. Images are in class folders, and end in "
            f"{', '.join(SUFFIXES)}."
        )
    return text


def _held_out_words(found: Survey) -> str:
    share = "a tenth" if test_share(found) == 0.1 else "a fifth"
    return f"{share} of each class, about {held_out(found):,} images, which are not trained on"


def is_fitted(recipe: str, overrides: Sequence[str] | None) -> bool:
    """Whether ``recipe`` is fitted to the images. With another data set, its values are used as they are."""
    return recipe == NAME and not any(
        o.startswith(("data=", "data.name=")) for o in overrides or ()
    )
