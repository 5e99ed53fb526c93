"""The accuracy of trained networks whose two float layers are rounded to 8 bits, without training them again.

    python benchmarks/int8_ends.py MODEL.unflip --data DIR

The images are those of CIFAR-10. The range of the last layer's inputs is that of the first 1,000 training images.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unflip
from unflip.data.cifar import load_cifar10
from unflip.packing.file import Packed, read, write
from unflip.packing.reference import evaluate_all
from unflip.runtime.images import normalized

TRAINING_IMAGES = 1000


def floats(pixels: Any, model: Any) -> Any:
    """Pixels, N × C × H × W, as the network takes them."""
    return np.stack([normalized(one.astype(np.float32), model) for one in pixels])


def with_int8_ends(path: Path, pixels: Any, folder: Path) -> Path:
    """A copy of a packed network whose two float layers have 8-bit weights and inputs (docs/format.md).

    ``pixels``: images that give the range of the last layer's inputs.
    """
    packed, model = read(path), unflip.load(path)
    ops, statistics = packed.graph["ops"], packed.graph["input"]["preprocess"]
    first, last = (i for i, op in enumerate(ops) if op["op"] == "conv" and "weight" in op)
    x = torch.from_numpy(floats(pixels, model))
    features = evaluate_all(packed, x)[ops[last]["inputs"][0]].numpy()
    low, high = min(features.min(), 0), max(features.max(), 0)
    mean, std = (255 * np.array(statistics[key], np.float32) for key in ("mean", "std"))
    scale = np.array([255 / (high - low)], np.float32)
    _make_int8(packed, last, scale, np.rint(-low * scale))
    _make_int8(packed, first, std, mean)  # after the last layer, because it changes later numbers
    target = folder / f"{path.stem}-int8.unflip"
    write(target, packed)
    return target


def _make_int8(packed: Packed, i: int, scale: Any, shift: Any) -> None:
    """Insert a to_bytes before op i, and round its weights."""
    op = packed.graph["ops"][i]
    weight = packed.tensors.pop(op.pop("weight")) / scale.reshape(1, -1, 1, 1)
    sizes = np.abs(weight).max((1, 2, 3)) / 127
    whole = np.rint(weight / sizes[:, None, None, None]).astype(np.int8)
    weights = {"bytes": whole.view(np.uint8), "scales": sizes[None]}
    numbers = {"scale": scale, "shift": shift, "zero": np.rint(shift).astype(np.uint8)}
    names = {key: f"int8.{i}.{key}" for key in (*weights, *numbers)}
    packed.tensors.update({names[key]: array for key, array in (weights | numbers).items()})
    made = {"op": "to_bytes", "name": names["bytes"], "inputs": op["inputs"]}
    packed.graph["ops"].insert(i, made | {key: names[key] for key in numbers})
    for other in packed.graph["ops"][i + 1 :]:
        other["inputs"] = [v + (v > i) for v in other["inputs"]]
        for step in other.get("steps", []):
            if "value" in step:
                step["value"] += step["value"] > i
    op |= {"inputs": [i + 1]} | {key: names[key] for key in weights}
    packed.graph["output"] += 1


def classes(path: Path, pixels: Any) -> Any:
    model = unflip.load(path, threads=2)
    return model(floats(pixels, model)).reshape(len(pixels), -1).argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", type=Path, nargs="+", metavar="MODEL.unflip")
    parser.add_argument("--data", type=Path, required=True, help="the folder of CIFAR-10")
    given = parser.parse_args()
    images = load_cifar10(given.data)
    for path in given.networks:
        with tempfile.TemporaryDirectory() as folder:
            rounded = with_int8_ends(path, images.train_images[:TRAINING_IMAGES], Path(folder))
            before, after = (classes(p, images.test_images) for p in (path, rounded))
        labels = images.test_labels
        accuracies = ", ".join(
            f"{name} {100 * np.mean(found == labels):.2f} %"
            for name, found in (("float ends", before), ("8-bit ends", after))
        )
        print(f"{path.name}: {accuracies}; same class: {100 * np.mean(before == after):.1f} %")


if __name__ == "__main__":
    main()
