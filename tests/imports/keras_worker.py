"""Real Keras and Larq, in a Python of their own: lines with an .h5 file, an input and where to write the output.

``UNFLIP_LARQ_PYTHON`` names that Python (benchmarks/larq_import.py shows how to make one). Without it, the tests
compare with numpy only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

PYTHON = os.environ.get("UNFLIP_LARQ_PYTHON")
SETTINGS = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


class Keras:
    """The worker, from the side of the tests."""

    def __init__(self) -> None:
        assert PYTHON
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [PYTHON, __file__], stdin=pipe, stdout=pipe, text=True, env=os.environ | SETTINGS
        )

    def output(self, model: Path, x: Any) -> Any:
        given, found = model.with_suffix(".in.npy"), model.with_suffix(".out.npy")
        np.save(given, x.astype(np.float32))
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{model} {given} {found}\n")
        self.process.stdin.flush()
        answer = next(line for line in self.process.stdout if line.startswith("worker: "))
        assert answer == "worker: done\n", answer
        return np.load(found)

    def close(self) -> None:
        self.process.communicate()


def work() -> None:
    import larq
    import tensorflow as tf

    # larq-zoo's functions, without its dependencies
    def xnor_weight_scale(x: Any) -> Any:
        x = tf.clip_by_value(x, -1, 1)
        return tf.reduce_mean(tf.abs(x), [0, 1, 2], keepdims=True) * larq.math.sign(x)

    def magnitude_aware_sign_unclipped(x: Any) -> Any:
        return tf.reduce_mean(tf.abs(x)) * larq.math.sign(x)

    mine = {f.__name__: f for f in (xnor_weight_scale, magnitude_aware_sign_unclipped)}
    for line in sys.stdin:
        model, given, found = line.split()
        try:
            network = tf.keras.models.load_model(model, mine, compile=False)
            last = network.layers[-1]
            if getattr(last, "activation", None) is tf.keras.activations.softmax:
                last.activation = tf.keras.activations.linear  # the importer leaves it out
            np.save(found, network(np.load(given), training=False).numpy())
            print("worker: done", flush=True)
        except Exception as error:
            print(f"worker: {type(error).__name__}: {error!s:.500}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    work()
