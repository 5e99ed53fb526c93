"""How an image becomes an input: random crop, flip and colors for training, one fixed crop for testing.

Everything random follows from a sample's key, a 63-bit hash of (seed, epoch, index). So a sample looks the same
whichever process decodes it, and whenever. Torch is not needed: worker processes import this.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unflip.data.errors import DataError
from unflip.resize import Pixels, resized

Keys = npt.NDArray[np.int64]
Colors = npt.NDArray[np.float32]

# The constants of splitmix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
GAMMA = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = 2**64 - 1
ORDER, KEYS = 1, 2  # two streams of numbers per epoch: its order, and the samples' keys

RATIOS = (3 / 4, 4 / 3)  # width / height of a random crop, as in PyTorch's reference
ATTEMPTS = 10

LUMA = np.array([0.299, 0.587, 0.114], np.float32)
# Principal components of ImageNet's colors on the scale 0..1, for the lighting noise of AlexNet (Krizhevsky,
# Sutskever, Hinton, 2012). The numbers are those of fb.resnet.torch; a column belongs to an eigenvalue.
EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
EIGENVECTORS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
)


def scramble(state: int) -> int:
    """The output function of splitmix64: a bijection of 64-bit numbers."""
    state = ((state ^ (state >> 30)) * FIRST) & MASK
    state = ((state ^ (state >> 27)) * SECOND) & MASK
    return state ^ (state >> 31)


def epoch_order(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    """A permutation of 0 .. count - 1, from the arguments alone on every machine."""
    return np.argsort(_numbers(seed, epoch, ORDER, count), kind="stable")


def epoch_keys(seed: int, epoch: int, count: int) -> Keys:
    """The keys of the samples 0 .. count - 1 in an epoch."""
    return (_numbers(seed, epoch, KEYS, count) >> np.uint64(1)).astype(np.int64)


def _numbers(seed: int, epoch: int, stream: int, count: int) -> npt.NDArray[np.uint64]:
    """splitmix64's first ``count`` numbers, seeded with a hash of (seed, epoch, stream)."""
    start = 0
    for part in (seed, epoch, stream):
        start = scramble((start + GAMMA + part) & MASK)
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA) + np.uint64(start)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(FIRST)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(SECOND)
    return state ^ (state >> np.uint64(31))


class Numbers:
    """The random numbers of one sample: splitmix64, seeded with its key."""

    __slots__ = ("state",)

    def __init__(self, key: int) -> None:
        self.state = key

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """From ``low``, included, to ``high``."""
        self.state = (self.state + GAMMA) & MASK
        return low + (high - low) * ((scramble(self.state) >> 11) * 2.0**-53)

    def below(self, count: int) -> int:
        """A whole number from 0 to count - 1."""
        return int(self.uniform() * count)

    def normal(self) -> float:
        """Mean 0, variance 1 (Box and Muller)."""
        radius = math.sqrt(-2 * math.log(1 - self.uniform()))
        return radius * math.cos(2 * math.pi * self.uniform())


@dataclass(frozen=True)
class Transform:
    """From a decoded image to ``size`` × ``size`` pixels.

    Training: a random part of the image, at least ``scale_min`` of its area, resized; flipped with probability 1/2.
    Testing: the short side resized to ``resize``, then the center. Both are byte for byte what torchvision computes on
    Pillow's images (RandomResizedCrop, RandomHorizontalFlip, Resize, CenterCrop), but for the random numbers.

    ``jitter`` is the strength of random brightness, contrast and saturation in a random order, ``lighting`` the
    standard deviation of AlexNet's noise along the principal components of colors. Both are as in fb.resnet.torch (0.4
    and 0.1 there), but for one rounding to 8 bits after them.
    """

    size: int = 224
    resize: int = 256
    scale_min: float = 0.08
    jitter: float = 0.0
    lighting: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("resize", self.size)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise DataError(
                    f"{name}={value!r} must be a whole number of pixels, at least {least}. Set data.{name}."
                )
        self._check_number("scale_min", 0 < self.scale_min <= 1, "above 0 and at most 1")
        self._check_number("jitter", 0 <= self.jitter <= 1, "from 0 to 1")
        self._check_number("lighting", 0 <= self.lighting <= 1, "from 0 to 1")

    def _check_number(self, name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise DataError(
                f"{name}={getattr(self, name)!r} must be a number {wanted}. Set data.{name}."
            )

    def for_training(self, image: Pixels, key: int, out: Pixels | None = None) -> Pixels:
        """Pixels H,W,3 of the sample with this key, from an image H,W,3; written to ``out`` if that is given."""
        numbers = Numbers(key)
        height, width, _ = image.shape
        box = random_box(width, height, self.scale_min, numbers)
        flip = numbers.uniform() < 0.5
        out = resized(image, box, (self.size, self.size), flip=flip, out=out)
        if self.jitter or self.lighting:
            colors = out.astype(np.float32)
            if self.jitter:
                colors = jittered(colors, self.jitter, numbers)
            if self.lighting:
                colors += lighting(self.lighting, numbers)
            out[...] = np.rint(colors).clip(0, 255)
        return out

    def for_testing(self, image: Pixels, out: Pixels | None = None) -> Pixels:
        """Pixels H,W,3 of the center; written to ``out`` if that is given."""
        height, width, _ = image.shape
        size = resized_to(width, height, self.resize)
        # Python rounds halves to even, and so does torchvision.
        left, top = (round((side - self.size) / 2) for side in size)
        window = (left, top, left + self.size, top + self.size)
        return resized(image, (0, 0, width, height), size, window, out=out)


def random_box(
    width: int, height: int, scale_min: float, numbers: Numbers
) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of a random part with a share of scale_min .. 1 of the area and a ratio in RATIOS.

    If ten attempts do not fit into the image, it is the largest part in the center with a ratio in RATIOS.
    """
    low, high = (math.log(ratio) for ratio in RATIOS)
    for _ in range(ATTEMPTS):
        area = width * height * numbers.uniform(scale_min, 1.0)
        ratio = math.exp(numbers.uniform(low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = numbers.below(height - h + 1), numbers.below(width - w + 1)
            return left, top, left + w, top + h
    w, h = width, height
    if width / height < RATIOS[0]:
        h = round(width / RATIOS[0])
    elif width / height > RATIOS[1]:
        w = round(height * RATIOS[1])
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def resized_to(width: int, height: int, short: int) -> tuple[int, int]:
    """Width and height with the short side ``short``; the long side is rounded down, as in torchvision."""
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


def jittered(colors: Colors, strength: float, numbers: Numbers) -> Colors:
    """Brightness, contrast and saturation in a random order: colors · a + target · (1 − a), a from 1 ± strength.

    The target is black, the mean gray of the image, or the gray of each pixel.
    """
    orders = list(itertools.permutations(("brightness", "contrast", "saturation")))
    for change in orders[numbers.below(len(orders))]:
        a = np.float32(numbers.uniform(1 - strength, 1 + strength))
        if change == "brightness":
            colors = colors * a
            continue
        gray = colors @ LUMA
        target = (
            np.float32(gray.mean(dtype=np.float64)) if change == "contrast" else gray[..., None]
        )
        colors = colors * a + target * (1 - a)
    return colors


def lighting(std: float, numbers: Numbers) -> npt.NDArray[np.float32]:
    """What is added to the three channels of all pixels, on the scale 0..255."""
    alphas = np.array([std * numbers.normal() for _ in range(3)])
    return (255 * EIGENVECTORS @ (alphas * EIGENVALUES)).astype(np.float32)
