"""The float twin in OpenVINO: float32, and int8 by NNCF."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any

from peers.base import Array, Engine, Network

CALIBRATION = 16  # images


def floats(network: Network, kind: str, batch: int, threads: int) -> Engine:
    return compiled_engine(
        "OpenVINO float", _read(network, kind, batch), network, kind, batch, threads
    )


def int8(network: Network, kind: str, batch: int, threads: int) -> Engine:
    model = network.once(
        f"{kind}-{batch}-int8", lambda _: _quantized(_read(network, kind, batch), network, batch)
    )
    return compiled_engine("OpenVINO int8", model, network, kind, batch, threads)


def _read(network: Network, kind: str, batch: int) -> Any:
    import openvino

    model = openvino.Core().read_model(network.twin_onnx(kind))
    model.reshape([batch, *network.images.shape[1:]])
    return model


def _quantized(model: Any, network: Network, batch: int) -> Any:
    logging.getLogger("nncf").setLevel(logging.ERROR)
    import nncf

    count = max(1, CALIBRATION // batch)
    images = [network.input(batch)] if count == 1 else list(network.input(count * batch)[:, None])
    with contextlib.redirect_stdout(io.StringIO()):  # its progress bars
        return nncf.quantize(model, nncf.Dataset(images), subset_size=count)


def compiled_engine(
    name: str, model: Any, network: Network, kind: str, batch: int, threads: int
) -> Engine:
    """Float stays float32 also on a CPU that has bfloat16."""
    import openvino

    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": False,
    }
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()

    def run(x: Array) -> Array:
        return request.infer({0: x}, share_inputs=True, share_outputs=True)[0]

    return Engine(name, kind, threads, batch, run, network.input(batch))
