"""The accuracy of a network in plain C with shortcuts of 16 bits, next to the exact one, on all test images.

    python benchmarks/int16_shortcuts.py results/cifar10/network/resnet20-strongest.unflip cifar10 --data DIR

The ranges of the shortcuts are measured on the first 100 training images. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import unflip
from unflip.data import ImageSet
from unflip.data import load as load_data
from unflip.export.plain_c.check import Compiled
from unflip.export.plain_c.export import export_c
from unflip.export.plain_c.measure import export_int16

MEASURED = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", type=Path)
    parser.add_argument("dataset")
    parser.add_argument("--data", type=Path)
    given = parser.parse_args()
    images = load_data(given.dataset, given.data)
    assert isinstance(images, ImageSet)
    command = ["git", "rev-parse", "--short", "HEAD"]
    print("commit", subprocess.run(command, capture_output=True, text=True).stdout.strip())
    scores = unflip.load(given.network).output_shape[0]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        measured = folder / "images"
        measured.mkdir()
        for i, pixels in enumerate(images.train_images[:MEASURED]):
            Image.fromarray(pixels.transpose(1, 2, 0)).save(measured / f"{i}.png")
        exact = export_c(given.network, folder, "exact")
        short, error = export_int16(given.network, folder, "int16", measured)
        print(f"{given.network.stem}: {error} (training images)")
        classes = {}
        for files in (exact, short):
            with Compiled(folder / f"{files.name}.c", files.name, files.arena) as compiled:
                found = [
                    int(compiled.run(pixels.transpose(1, 2, 0).copy(), scores).argmax())
                    for pixels in images.test_images
                ]
            classes[files.name] = np.array(found)
            right = int((classes[files.name] == images.test_labels).sum())
            print(
                f"{files.name}: {100 * right / len(found):.2f} % of {len(found):,} test images, "
                f"arena {files.arena:,} bytes"
            )
        other = int((classes["exact"] != classes["int16"]).sum())
        print(f"{other:,} test images get another class")


if __name__ == "__main__":
    main()
