"""The recipe ``images``, fitted to a folder of images: network, image size, batch, rates and epochs.

The rules were chosen, not measured: small images keep their size, and large ones become 64 or 128 pixels, because the
first layers would otherwise take most of the time. Rates fall with the batch, as for plain SGD. A small set sees more
epochs, so that signs have enough steps to settle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unflip.data.survey import Survey, survey

NAME = "images"
TEACHER = "images-teacher"
TEST_SHARE = 0.1  # of each class, if there are no test images

# Up to this shorter side, in pixels: the size for training, and the width of the ResNet-20 (its first channels).
NETWORKS = ((40, 32, 16), (100, 64, 16), (math.inf, 128, 32))
BATCHES = ((5000, 128), (1000, 64), (200, 32), (0, 16))  # from so many images on
SEEN = 6_000_000  # images that training sees, as far as the number of epochs allows
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
    size, width = next((size, width) for side, size, width in NETWORKS if found.side <= side)
    if found.side < size:  # smaller images keep their size; three stages halve it twice
        size = max(8, found.side // 4 * 4)
    trained = found.images - (0 if found.has_test else held_out(found))
    batch = min(next(batch for count, batch in BATCHES if found.images >= count), trained)
    epochs = min(USUAL_EPOCHS, max(FEWEST_EPOCHS, round(SEEN / trained)))
    epochs = min(MOST_EPOCHS, max(epochs, math.ceil(FEWEST_STEPS / (trained // batch))))
    data = {"name": "folder", "size": size}
    return {
        "data": data if found.has_test else {**data, "test_share": TEST_SHARE},
        "model.width": width,
        "batch_size": batch,
        "epochs": epochs,
        "optimizer.lr": round(0.1 * batch / 128, 6),
        "optimizer.latent_lr": round(batch / 128, 6),
    }


def held_out(found: Survey) -> int:
    """About so many; at least one of each class with two or more images."""
    return max(found.classes if found.fewest > 1 else 1, round(TEST_SHARE * found.images))


def _write_teacher(path: Path, values: dict[str, Any]) -> None:
    """A float ResNet-20 of twice the width, as cifar10-resnet20-teacher. JSON is YAML too."""
    recipe = {
        "about": "A float network of twice the width, for the recipe images to learn from.",
        "data": values["data"],
        "model": {
            "name": "resnet20",
            "width": 2 * values["model.width"],
            "shortcut": "block",
            "order": "conv-prelu-bn",
        },
        "method": "float",
        "epochs": max(1, values["epochs"] // TEACHER_SHARE),
        "batch_size": values["batch_size"],
        "optimizer": {"lr": values["optimizer.lr"], "momentum": 0.9, "weight_decay": 0.0005},
        "schedule": {"name": "cosine"},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")


def _words(found: Survey, values: dict[str, Any]) -> str:
    size = values["data"]["size"]
    tested = (
        "their own test images"
        if found.has_test
        else "a tenth of each class, which is not trained on"
    )
    return (
        f"{found.images:,} images of {found.classes:,} classes, about {found.side} pixels on the shorter side. "
        f"Chosen: ResNet-20 of width {values['model.width']} at {size} × {size} pixels, {values['epochs']} epochs, "
        f"batches of {values['batch_size']}, tested on {tested}."
    )


def is_fitted(recipe: str, overrides: Sequence[str] | None) -> bool:
    """Whether ``recipe`` is fitted to the images. With another data set, its values are used as they are."""
    return recipe == NAME and not any(
        o.startswith(("data=", "data.name=")) for o in overrides or ()
    )
