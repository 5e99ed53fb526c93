"""The handwritten digits that ship with scikit-learn: a real task without a download.

1,797 images of 8×8 pixels: the test part of the UCI set "Optical Recognition of Handwritten Digits"
(Alpaydin and Kaynak, 1998). Training takes seconds, so the tests and the first example use them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unflip.data.image_set import ImageSet, channel_statistics, stratified_order
from unflip.hints import NotInstalled

TEST_IMAGES = 450
SEED = 0


def load_digits(folder: Path | None = None) -> ImageSet:
    """1,347 training and 450 test images of 1×8×8, always the same ones; `folder` is not used.

    scikit-learn orders the images by writer; the seeded shuffle puts all writers into both parts.
    `RandomState` is used because numpy promises never to change its stream. A mirrored digit is not
    a digit, so there is no flip.
    """
    try:
        from sklearn.datasets import load_digits as read_digits
    except ImportError as error:
        raise NotInstalled("the data set 'digits'", "sklearn") from error

    raw = read_digits()
    shuffled = np.random.RandomState(SEED).permutation(len(raw.target))
    order = shuffled[stratified_order(raw.target[shuffled])]
    # The pixels are whole numbers 0..16.
    pixels = np.rint(raw.images[order] * (255 / 16)).astype(np.uint8)
    images = pixels.reshape(-1, 1, 8, 8)
    labels = raw.target[order].astype(np.int64)
    mean, std = channel_statistics(images[:-TEST_IMAGES])
    return ImageSet(
        train_images=images[:-TEST_IMAGES],
        train_labels=labels[:-TEST_IMAGES],
        test_images=images[-TEST_IMAGES:],
        test_labels=labels[-TEST_IMAGES:],
        classes=tuple(str(digit) for digit in range(10)),
        mean=mean,
        std=std,
        crop_padding=1,
        flip=False,
    )
