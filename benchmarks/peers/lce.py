"""Larq Compute Engine: Bi-Real Net-18 of larq-zoo with random weights, the closest it has to our ResNet-18.

It needs TensorFlow, so it runs in a Python of its own, given by --lce or the variable LCE_PYTHON:

    python3.11 -m venv lce
    lce/bin/pip install larq-compute-engine==0.16.0 tensorflow-cpu==2.16.2 tf-keras==2.16.0 larq==0.14.0 larq-zoo==2.4.0
    python benchmarks/inference.py --lce lce/bin/python

This file is both sides: imported, the engine that the benchmark sees; run by the other Python, the worker, which
answers lines of JSON. On x86 its default kernels are several times slower than the indirect ones used here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any


class Worker:
    """What :class:`peers.base.Engine` is for engines in this process."""

    name, kind = "Larq Compute Engine", "binary"

    def __init__(self, python: str, batch: int, threads: int) -> None:
        self.batch, self.threads = batch, threads
        settings = {
            "TF_USE_LEGACY_KERAS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "",
        }
        # A pipe that nobody reads would stop it when full. Open as long as the worker runs.
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), str(batch), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | settings,
        )
        self.compared = self._answer()

    def burst(self, seconds: float) -> list[float]:
        _pipe(self.process.stdin).write(f"{seconds}\n")
        _pipe(self.process.stdin).flush()
        return self._answer()

    def agreement(self, network: Any) -> list[float]:
        """With its own Keras model: its weights are not ours."""
        return self.compared

    def close(self) -> None:
        _pipe(self.process.stdin).close()
        self.process.wait()

    def _answer(self) -> Any:
        for line in _pipe(self.process.stdout):
            if line.startswith("["):
                return json.loads(line)
        self.errors.seek(0)
        raise RuntimeError((self.errors.read().strip() or "the worker ended").splitlines()[-1])


def engine(network: Any, kind: str, batch: int, threads: int) -> Worker:
    python = os.environ.get("LCE_PYTHON")
    if network.name != "resnet18":
        raise RuntimeError("its zoo has no such network")
    if batch != 1:
        raise RuntimeError("run with one image at a time")
    if not python:
        raise RuntimeError("no Python with larq-compute-engine given (--lce)")
    return Worker(python, batch, threads)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def work(batch: int, threads: int) -> None:
    """The worker: says how the converted model compares with Keras, then times bursts it is asked for."""
    import larq_compute_engine as lce
    import larq_zoo
    import numpy as np
    from larq_compute_engine.tflite.python.interpreter import Interpreter

    model = larq_zoo.literature.BiRealNet(weights=None, input_shape=(224, 224, 3))
    images = np.random.default_rng(0).normal(size=(batch, 224, 224, 3)).astype(np.float32)
    converted = lce.convert_keras_model(model)
    run = Interpreter(
        converted, num_threads=threads, use_indirect_bgemm=True, use_xnnpack=True
    ).predict
    expected, found = model.predict(images, verbose=0), run(images)
    each = np.abs(found - expected).max(1) / np.abs(expected).max(1)
    same = (found.argmax(1) == expected.argmax(1)).mean()
    _say([float(np.median(each)), float((each < 1e-4).mean()), float(same)])
    for line in sys.stdin:
        end, times = time.perf_counter() + float(line), []
        run(images)
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            run(images)
            times.append(time.perf_counter() - start)
        _say(times)


def _say(numbers: list[float]) -> None:
    print(json.dumps(numbers), flush=True)


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]))
