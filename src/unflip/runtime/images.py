"""Converts an image file to a network's input, and its output to probabilities."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from unflip.pictures import read_picture
from unflip.runtime.model import Model

if TYPE_CHECKING:
    from PIL.Image import Image

Array = np.ndarray[Any, np.dtype[np.float32]]

MOST_PIXELS = 2**26  # of an image that is resized as a whole, before it is cropped


def read_image(path: str | os.PathLike[str], model: Model) -> Array:
    """An image file as ``model``'s input, one sample (C, H, W).

    The image is resized (bilinear) so that it covers the model's height and width, then its center is cropped. Models
    of one channel get a gray image. Then the file's preprocessing is applied: ``(pixel / 255 - mean) / std``,
    or pixel / 255 if the file has none.
    """
    pixels = read_pixels(path, model).astype(np.float32)
    return normalized(pixels.transpose(2, 0, 1), model)


def read_pixels(path: str | os.PathLike[str], model: Model) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The pixels of :func:`read_image`, (H, W, C), before the file's preprocessing."""
    channels, height, width = model.input_shape
    if channels not in (1, 3):
        raise ValueError(
            f"this model needs {channels} channels, but an image file has 1 or 3; call the model with an array instead"
        )
    image = read_picture(path, "L" if channels == 1 else "RGB")
    pixels = np.asarray(_covering(image, height, width), dtype=np.uint8)
    return pixels.reshape(height, width, channels)


def _covering(image: Image, height: int, width: int) -> Image:
    from PIL import Image as images

    scale = max(height / image.height, width / image.width)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    kept = left, top, left + width, top + height
    if size[0] * size[1] <= MOST_PIXELS:
        return image.resize(size, images.Resampling.BILINEAR).crop(kept)
    # An input of 1 x 65,536 would make a square of it, 17 GB. Pixels may differ by 1, since the box is in float32.
    across, down = image.width / size[0], image.height / size[1]
    right, bottom = min(kept[2] * across, image.width), min(kept[3] * down, image.height)
    box = left * across, top * down, right, bottom
    return image.resize((width, height), images.Resampling.BILINEAR, box=box)


def normalized(pixels: Array, model: Model) -> Array:
    """Pixels 0 .. 255, (C, H, W), with the file's preprocessing applied."""
    values = pixels / np.float32(255)
    if model.preprocess is not None:
        mean, std = (
            np.array(model.preprocess[k], np.float32)[:, None, None] for k in ("mean", "std")
        )
        values = (values - mean) / std
    return np.ascontiguousarray(values, dtype=np.float32)


def probabilities(outputs: Array, model: Model) -> Array:
    """Softmax over the classes, unless the network's last op is already a softmax or sigmoid.

    Outputs below 0 or above 1 are not: then the output is that of another op, and the last one has no use.
    """
    last = model.ops[-1] if model.ops else ""
    if last.startswith(("softmax ", "sigmoid ")) and outputs.min() >= 0 and outputs.max() <= 1:
        return outputs
    shifted = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)
