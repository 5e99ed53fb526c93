"""What a network must know about its inputs: their shape, classes and normalization."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from unflip.data.errors import DataError


@dataclass(frozen=True)
class InputSpec:
    """Shape (channels, height, width), class names, and each channel's mean and standard deviation on the scale 0..1.

    Building a network, packing it and preparing its inputs need no more than this. The class of label i is
    ``classes[i]``, and a network's input is ``(pixel / 255 - mean) / std``.
    """

    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_shape(self.shape)
        _check_classes(self.classes)
        for name, values in (("mean", self.mean), ("std", self.std)):
            _check_numbers(name, values, channels=self.shape[0])
        if not all(value > 0 for value in self.std):
            raise DataError(
                f"std={self.std} must be positive. A channel with the same value in every pixel cannot be "
                "normalized: leave it out."
            )

    def plain(self) -> dict[str, Any]:
        """As JSON values, the inverse of :meth:`from_plain`."""
        return {field.name: list(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> InputSpec:
        """From JSON values; a field that is missing, unknown or wrong is named."""
        if not isinstance(values, Mapping):
            raise DataError(f"an input spec must be a mapping of fields, not {values!r}.")
        names = [field.name for field in fields(cls)]
        for name in [*names, *values]:
            if name not in values or name not in names:
                problem = "missing from" if name in names else "not a field of"
                raise DataError(
                    f"{name!r} is {problem} the input spec; its fields are {', '.join(names)}."
                )
            if not _is_list(values[name]):
                raise DataError(f"{name}={values[name]!r} must be a list.")
        return cls(**{name: tuple(values[name]) for name in names})


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_shape(shape: tuple[object, ...]) -> None:
    if len(shape) != 3 or not all(type(extent) is int and extent > 0 for extent in shape):
        raise DataError(
            f"shape={shape} must be three whole numbers of at least 1: channels, height and width."
        )


def _check_classes(classes: tuple[object, ...]) -> None:
    if not classes or not all(isinstance(name, str) for name in classes):
        raise DataError(f"classes={classes} must be one name per class, and at least one.")


def _check_numbers(name: str, values: tuple[Any, ...], channels: int) -> None:
    if len(values) != channels:
        raise DataError(f"{name}={values} must have one value for each of the {channels} channels.")
    if not all(type(value) in (int, float) and abs(value) < math.inf for value in values):
        raise DataError(f"{name}={values} must be finite numbers.")
