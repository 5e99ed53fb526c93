"""The handwritten digits that ship with scikit-learn: a real task with nothing to download.

1,797 images of 8×8 pixels (the test part of the UCI set "Optical Recognition of Handwritten
Digits", Alpaydin and Kaynak, 1998): seconds to train on, which makes it the set of the tests and
of the first example.
"""

from __future__ import annotations

import numpy as np
import torch

from unflip.data import ImageSet, channel_statistics, missing_package, stratified_order

TEST_IMAGES = 450
SEED = 0


def load_digits() -> ImageSet:
    """1,347 training and 450 test images of 1×8×8, always the same ones.

    scikit-learn's order follows the writers; the seeded shuffle makes both parts hold all of them.
    `RandomState` is used because numpy promises never to change its stream. A mirrored digit is no
    digit, so there is no flip.
    """
    try:
        from sklearn.datasets import load_digits as read_digits
    except ImportError as error:
        raise missing_package("scikit-learn", "The data set 'digits'") from error

    raw = read_digits()
    shuffled = np.random.RandomState(SEED).permutation(len(raw.target))
    order = shuffled[stratified_order(raw.target[shuffled])]
    # The pixels are whole numbers 0..16.
    pixels = np.rint(raw.images[order] * (255 / 16)).astype(np.uint8)
    images = torch.from_numpy(pixels).unsqueeze(1)
    labels = torch.from_numpy(raw.target[order].astype(np.int64))
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
