"""The pack of images that a study is about, and the hours that its recipes take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Pack:
    """A study's images, and the speed of training on them.

    file, folder       the pack and the folder that it is made from, as messages call them
    classes            of the images: published figures are not shown beside results on others
    images_per_second  of a training step of the studies' networks on one GPU
    slower             methods with a longer step, and how many times longer it is
    """

    name: str
    file: str
    folder: str
    training_images: int
    classes: int
    images_per_second: int
    slower: Mapping[str, float] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command that makes it."""
        return f"unflip data pack {self.folder} {self.file}"

    def hours(self, recipe: Mapping[str, Any]) -> float:
        """Hours of training steps of one run. ``recipe`` has the values of a recipe file."""
        method = recipe.get("method", "float")
        name = method["name"] if isinstance(method, Mapping) else method
        steps = recipe["epochs"] * self.training_images / self.images_per_second
        return float(self.slower.get(name, 1.0) * steps / SECONDS_PER_HOUR)
