"""The float twin in ONNX Runtime: float32, and int8 (static, QDQ, u8 activations and s8 weights)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.base import Array, Engine, Network

CALIBRATION = 16  # images


def floats(network: Network, kind: str, batch: int, threads: int) -> Engine:
    path = network.twin_onnx(kind)
    return _engine("ONNX Runtime float", path, network, kind, batch, threads)


def int8(network: Network, kind: str, batch: int, threads: int) -> Engine:
    path = network.once(f"{kind}-int8.onnx", lambda path: _quantized(network, kind, path))
    return _engine("ONNX Runtime int8", path, network, kind, batch, threads)


def exported(network: Network, kind: str, batch: int, threads: int) -> Engine:
    """Our own ONNX file: what ``unflip export`` gives, with signs as floats once it is loaded."""
    path = network.once("exported.onnx", lambda path: _exported(network, path))
    return _engine("ONNX Runtime, unflip export", path, network, kind, batch, threads)


def _engine(name: str, path: Path, network: Network, kind: str, batch: int, threads: int) -> Engine:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(x: Array) -> Array:
        return session.run(None, {"input": x})[0]

    return Engine(name, kind, threads, batch, run, network.input(batch))


def _exported(network: Network, path: Path) -> Path:
    from unflip.export.onnx import export

    export(network.packed["binary"], path)
    return path


def _quantized(network: Network, kind: str, path: Path) -> Path:
    """Folded and fused first, as ONNX Runtime's own guide has it. Signed activations would be much slower."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Images(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left: Iterator[Any] = iter(network.input(CALIBRATION))

        def get_next(self) -> dict[str, Array] | None:
            image = next(self.left, None)
            return None if image is None else {"input": image[None]}

    ready = path.with_suffix(".ready.onnx")
    quant_pre_process(str(network.twin_onnx(kind)), str(ready))
    quantize_static(
        str(ready),
        str(path),
        Images(),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
    )
    return path
