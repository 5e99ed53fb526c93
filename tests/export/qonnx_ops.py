"""QONNX's operators in numpy, from its documentation: files run in onnx's own evaluator, without the qonnx package."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

DOMAIN = "qonnx.custom_op.general"


class BipolarQuant(OpRun):
    op_domain = DOMAIN

    def _run(self, x: Any, scale: Any) -> Any:
        return (np.where(x >= 0, np.float32(1), np.float32(-1)) * scale,)


class Quant(OpRun):
    op_domain = DOMAIN

    def _run(
        self, x: Any, scale: Any, zero: Any, bits: Any, signed: Any, narrow: Any, rounding_mode: Any
    ) -> Any:
        assert rounding_mode == "ROUND"
        most = 2 ** (bits - 1) - 1 if signed else 2**bits - 1 - narrow
        least = -(2 ** (bits - 1)) + narrow if signed else 0 * bits
        whole = np.round(np.clip(x / scale + zero, least, most))
        return (((whole - zero) * scale).astype(np.float32),)


class MultiThreshold(OpRun):
    op_domain = DOMAIN

    def _run(self, x: Any, thresholds: Any, out_dtype: Any) -> Any:
        limits = thresholds.T.reshape(len(thresholds.T), 1, -1, *[1] * (x.ndim - 2))
        return ((x >= limits).sum(0).astype(np.float32),)


def run_qonnx(model: Any, x: Any) -> list[Any]:
    """The outputs for a batch of any size: the file has a batch of 1."""
    evaluator = ReferenceEvaluator(model, new_ops=[BipolarQuant, Quant, MultiThreshold])
    runs = [evaluator.run(None, {"input": x[i : i + 1]}) for i in range(len(x))]
    return [np.concatenate(parts) for parts in zip(*runs, strict=True)]
