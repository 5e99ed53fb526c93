"""The real brevitas, in a Python of its own: exports small binary networks, with inputs and outputs.

``UNFLIP_BREVITAS_PYTHON`` names that Python (pip install brevitas onnx onnxscript onnxoptimizer).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

PYTHON = os.environ.get("UNFLIP_BREVITAS_PYTHON")
NETWORKS = ("perceptron", "convolutions", "scaled", "eight bits")


def from_brevitas(name: str, folder: Path) -> tuple[Path, Any, Any]:
    """The QONNX file of a network, a batch of inputs, and what brevitas computes."""
    assert PYTHON
    path = folder / "network.onnx"
    done = subprocess.run(
        [PYTHON, __file__, name, str(path)], capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    arrays = np.load(path.with_suffix(".npz"))
    return path, arrays["x"], arrays["y"]


def work(name: str, path: Path) -> None:
    import torch
    from brevitas.export import export_qonnx

    torch.manual_seed(0)
    layers, shape = network(name)
    model = torch.nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, -1.5, 1.5)
            torch.nn.init.normal_(module.bias)
            module.momentum = 1.0
    x = torch.randint(0, 256, (16, *shape)) / 128 - 1
    with torch.no_grad():
        model.train()(x)
        y = model.eval()(x)
    export_qonnx(model, args=x[:1], export_path=str(path))
    np.savez(path.with_suffix(".npz"), x=x.numpy(), y=y.numpy())


def network(name: str) -> tuple[list[Any], tuple[int, ...]]:
    import brevitas.nn as qnn
    from brevitas.quant import Int8ActPerTensorFloat
    from brevitas.quant.binary import (
        SignedBinaryActPerTensorConst,
        SignedBinaryWeightPerTensorConst,
    )
    from torch import nn

    size = 0.375 if name == "scaled" else 1.0

    class Weight(SignedBinaryWeightPerTensorConst):  # type: ignore[misc]
        scaling_const = size

    class Input(SignedBinaryActPerTensorConst):  # type: ignore[misc]
        scaling_const = 2 * size

    def sign() -> Any:
        return qnn.QuantIdentity(act_quant=Input)

    def linear(*sizes: int, bias: bool = False) -> Any:
        return qnn.QuantLinear(*sizes, bias=bias, weight_quant=Weight)

    def conv(*sizes: int, **options: Any) -> Any:
        return qnn.QuantConv2d(*sizes, bias=False, weight_quant=Weight, **options)

    if name in ("perceptron", "scaled"):
        hidden = [nn.Flatten(), sign(), linear(64, 32), nn.BatchNorm1d(32), sign()]
        return [*hidden, linear(32, 10, bias=True), nn.BatchNorm1d(10)], (1, 8, 8)
    first: list[Any] = []
    if name == "eight bits":
        first = [qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat, return_quant_tensor=False)]
    body = [conv(3, 16, 3, padding=1), nn.BatchNorm2d(16), sign(), conv(16, 16, 3)]
    body += [nn.BatchNorm2d(16), sign(), nn.MaxPool2d(2), conv(16, 32, 3), nn.BatchNorm2d(32)]
    head = [nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), sign(), linear(128, 10, bias=True)]
    return [*first, *body, *head], (3, 14, 14)


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]))
