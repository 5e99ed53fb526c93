"""The side of ``benchmarks/larq_import.py`` that needs TensorFlow, Larq and larq-zoo: it runs in a Python of its own.

    python benchmarks/peers/larq_keras.py make NAME FOLDER     FOLDER/NAME.h5 and what Keras computes with it, NAME.npz
    python benchmarks/peers/larq_keras.py convert NAME FOLDER  NAME.tflite, for Larq Compute Engine
    python benchmarks/peers/larq_keras.py serve FILE.tflite 1  times Larq Compute Engine, on request

``make`` gives an architecture of larq-zoo random weights. BatchNorm gets random parameters, and the statistics of a
batch of images: those of a network that was never calibrated would make most signs equal.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

IMAGES = 4
NAMES = {
    "literature": (
        *("BinaryAlexNet", "BiRealNet", "BinaryResNetE18", "BinaryDenseNet28", "BinaryDenseNet37"),
        *(
            "BinaryDenseNet37Dilated",
            "BinaryDenseNet45",
            "XNORNet",
            "DoReFaNet",
            "MeliusNet22",
            "RealToBinaryNet",
        ),
    ),
    "sota": ("QuickNetSmall", "QuickNet", "QuickNetLarge"),
}


def images(count: int, seed: int) -> np.ndarray[Any, Any]:
    """Smooth random images with edges and some noise, normalized: float32, (N, 224, 224, 3)."""
    random = np.random.default_rng(seed)
    coarse = random.normal(size=(count, 14, 14, 3))
    smooth = np.kron(coarse, np.ones((1, 16, 16, 1)))
    for axis in (1, 2):
        smooth = sum(np.roll(smooth, shift, axis) for shift in range(-4, 5)) / 9
    return (1.5 * smooth + 0.2 * random.normal(size=smooth.shape)).astype(np.float32)


def network(name: str) -> tuple[Any, Any]:
    import larq_zoo
    import tensorflow as tf

    package = next(package for package, names in NAMES.items() if name in names)
    tf.keras.utils.set_random_seed(0)
    return tf, getattr(getattr(larq_zoo, package), name)(weights=None, input_shape=(224, 224, 3))


def make(name: str, folder: Path) -> None:
    tf, model = network(name)
    _calibrate(model, tf)
    model.save(folder / f"{name}.h5")
    quantizing = [layer for layer in model.layers if getattr(layer, "input_quantizer", None)]
    wanted = {layer.name: _before_flattening(layer, tf) for layer in quantizing}
    wanted["logits"] = model.layers[-1].input
    probe = tf.keras.Model(model.inputs, list(wanted.values()))
    x = images(IMAGES, 1)
    found = [probe(x[i : i + 1], training=False) for i in range(IMAGES)]
    arrays = {
        key: np.concatenate([each[place].numpy() for each in found])
        for place, key in enumerate(wanted)
    }
    np.savez(folder / f"{name}.npz", images=x, **arrays)


def convert(name: str, folder: Path) -> None:
    """Time and size do not depend on the weights."""
    import larq_compute_engine as lce

    (folder / f"{name}.tflite").write_bytes(lce.convert_keras_model(network(name)[1]))


def _before_flattening(layer: Any, tf: Any) -> Any:
    """The layer's input, or the image that it was flattened from."""
    before = layer.input._keras_history.layer
    flat = isinstance(before, tf.keras.layers.Flatten | tf.keras.layers.Reshape)
    return before.input if flat else layer.input


def _calibrate(model: Any, tf: Any) -> None:
    random = np.random.default_rng(2)
    for layer in model.layers:
        for weight in layer.weights:
            kind, shape = weight.name.split("/")[-1], weight.shape
            if kind == "gamma:0":
                weight.assign(random.uniform(0.5, 1.5, shape))
            elif kind in ("beta:0", "bias:0"):
                weight.assign(random.normal(0, 0.3, shape))
            elif kind == "alpha:0":
                weight.assign(random.uniform(0.05, 0.4, shape))
        if isinstance(layer, tf.keras.layers.BatchNormalization):
            layer.momentum = 0.0
    model(images(8, 3), training=True)


def serve(path: Path, threads: int) -> None:
    """Answer each line, a number of seconds, with the times of single runs."""
    from larq_compute_engine.tflite.python.interpreter import Interpreter

    options = {"num_threads": threads, "use_indirect_bgemm": True, "use_xnnpack": True}
    run = Interpreter(path.read_bytes(), **options).predict
    x = images(1, 1)
    run(x)
    for line in sys.stdin:
        end, times = time.perf_counter() + float(line), []
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            run(x)
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    os.environ |= {
        "TF_USE_LEGACY_KERAS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    task, first, second = sys.argv[1:]
    if task == "serve":
        serve(Path(first), int(second))
    else:
        (make if task == "make" else convert)(first, Path(second))
