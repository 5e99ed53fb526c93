"""The real qonnx, in a Python of its own: outputs and costs of files that the tests wrote.

``UNFLIP_QONNX_PYTHON`` names that Python (pip install qonnx hls4ml). Without it, the tests use onnx's own evaluator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

PYTHON = os.environ.get("UNFLIP_QONNX_PYTHON")


def in_qonnx(model: Path, x: Any, *options: str) -> tuple[list[Any], dict[str, Any]]:
    """The outputs of a QONNX file for each sample of ``x``, and its cost report."""
    assert PYTHON
    given, found = model.with_suffix(".in.npy"), model.with_suffix(".npz")
    np.save(given, x)
    command = [PYTHON, __file__, str(model), str(given), str(found), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    arrays = np.load(found)
    return [arrays[name] for name in arrays.files], json.loads(
        model.with_suffix(".json").read_text()
    )


def work(model: Path, given: Path, found: Path, simulate: str = "") -> None:
    from qonnx.core.modelwrapper import ModelWrapper
    from qonnx.core.onnx_exec import execute_onnx
    from qonnx.util.cleanup import cleanup_model
    from qonnx.util.inference_cost import inference_cost

    clean = cleanup_model(ModelWrapper(str(model)))
    x = np.load(given)
    if simulate:
        results = [[simulated(clean, x, model.with_suffix(""))]]
        names = ["output"]
    else:
        names = [output.name for output in clean.graph.output]
        start = clean.graph.input[0].name
        runs = [execute_onnx(clean, {start: x[i : i + 1]}) for i in range(len(x))]
        results = [[run[name] for run in runs] for name in names]
    np.savez(found, **{n: np.concatenate(r) for n, r in zip(names, results, strict=True)})
    cost = inference_cost(clean)["total_cost"]
    model.with_suffix(".json").write_text(json.dumps(cost))


def simulated(clean: Any, x: Any, folder: Path) -> Any:
    """The outputs of the C++ that hls4ml writes, compiled with this machine's compiler."""
    import hls4ml
    from hls4ml.model.flow import update_flow
    from qonnx.transformation.channels_last import ConvertToChannelsLastAndClean
    from qonnx.util.cleanup import cleanup_model

    # This pass of hls4ml 1.3 takes the signs of binary weights twice, after which all of them are +1.
    update_flow("vivado:quantization", remove_optimizers=["vivado:quantize_dense_output"])
    model = cleanup_model(clean.transform(ConvertToChannelsLastAndClean()))
    for node in model.get_nodes_by_op_type("Add") + model.get_nodes_by_op_type("Mul"):
        constant = model.get_initializer(node.input[1])  # hls4ml wants no batch in them
        if constant is not None and constant.ndim == 4:
            model.set_initializer(node.input[1], constant.reshape(-1))
    config = hls4ml.utils.config_from_onnx_model(
        model, granularity="name", backend="Vitis", default_precision="fixed<32,16>"
    )
    network = hls4ml.converters.convert_from_onnx_model(
        model, output_dir=str(folder), io_type="io_parallel", backend="Vitis", hls_config=config
    )
    network.compile()
    if x.ndim == 4:
        x = x.transpose(0, 2, 3, 1)
    return network.predict(np.ascontiguousarray(x, np.float32)).reshape(len(x), -1)


if __name__ == "__main__":
    work(*[Path(text) for text in sys.argv[1:4]], *sys.argv[4:])
