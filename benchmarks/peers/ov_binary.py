"""The same binary network in OpenVINO's own 1-bit kernels.

OpenVINO has a ``BinaryConvolution`` that none of its front ends makes any more. The packed graph is rebuilt from its
operators here, so both run the same weights and the outputs can be compared. Only what the benchmark's networks
have is covered; the rest is an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from peers.base import Array, Engine, Network
from peers.ov import compiled_engine

TINY = np.finfo(np.float32).tiny


def engine(network: Network, kind: str, batch: int, threads: int) -> Engine:
    builder = network.once(f"openvino-binary-{batch}", lambda _: Builder(network, batch))
    return compiled_engine("OpenVINO binary", builder.model, network, kind, batch, threads)


class Builder:
    def __init__(self, network: Network, batch: int) -> None:
        import openvino
        from openvino import opset8

        from unflip.packing.file import read

        self.ov, self.ops = openvino, opset8
        self.packed = read(network.packed["binary"])
        shape = [batch, *self.packed.graph["input"]["shape"]]
        entry = opset8.parameter(shape, np.float32, name="input")
        self.values: list[Any] = [entry]
        for op in self.packed.graph["ops"]:
            inputs = [self.values[number] for number in op["inputs"]]
            self.values.append(getattr(self, op["op"])(op, *inputs))
        last = self.values[self.packed.graph["output"]]
        self.model = openvino.Model([last], [entry], "binary")

    def tensor(self, name: str) -> Array:
        return self.packed.tensors[name]

    def channels(self, name: str) -> Array:
        return self.tensor(name).reshape(1, -1, 1, 1)

    def quantize(self, op: dict[str, Any], x: Any) -> Any:
        """x ≥ t as FakeQuantize's x > the float before t; for t = 0 the largest normal one below."""
        if (op["coding"], op["scales"], op["offset"]) != ("planes", [2.0], -1.0):
            raise NotImplementedError("a code other than ±1")
        limit = self.channels(op["thresholds"])
        if not op["strict"][0]:
            before = np.nextafter(limit, np.float32(-np.inf))
            limit = np.where(limit == 0, -TINY, before)
        zero, one = np.zeros((1, 1, 1, 1), np.float32), np.ones((1, 1, 1, 1), np.float32)
        return self.ops.fake_quantize(x, limit, limit, zero, one, levels=2)

    def conv(self, op: dict[str, Any], x: Any) -> Any:
        if op["groups"] != 1 or "offset" in op:
            raise NotImplementedError("groups, or an offset")
        pads = op["padding"]
        place = (op["stride"], pads[:2], pads[2:], op["dilation"])
        if "weight" in op:
            out = self.ops.convolution(x, self.tensor(op["weight"]), *place)
            return self.map(op, out)
        # Its constant refers to the array, which must outlive it: self.packed keeps it.
        bits = self.ov.op.Constant(
            self.ov.Tensor(self.tensor(op["bits"]), self.ov.Shape(op["shape"]), self.ov.Type.u1)
        )
        out = self.ov.opset1.binary_convolution(x, bits, *place, "xnor-popcount", 0.0)
        return self.map(op, self.ops.multiply(out, self.channels(op["scales"])))

    def map(self, op: dict[str, Any], x: Any) -> Any:
        for step in op["steps"]:
            kind = step["step"]
            if kind == "affine":
                if "scale" in step:
                    x = self.ops.multiply(x, self.channels(step["scale"]))
                if "shift" in step:
                    x = self.ops.add(x, self.channels(step["shift"]))
            elif kind == "prelu":
                x = self.ops.prelu(x, self.tensor(step["slope"]))
            elif kind == "clamp":
                low = -np.inf if step["low"] is None else step["low"]
                high = np.inf if step["high"] is None else step["high"]
                x = self.ops.relu(x) if (low, high) == (0, np.inf) else self.ops.clamp(x, low, high)
            elif kind == "add":
                x = self.ops.add(x, self.values[step["value"]])
            else:
                raise NotImplementedError(f"step {kind}")
        return x

    def max_pool(self, op: dict[str, Any], x: Any) -> Any:
        rounding = "ceil" if op["ceil"] else "floor"
        pads = op["padding"]
        return self.ov.opset1.max_pool(x, op["stride"], pads, pads, op["kernel"], rounding)

    def avg_pool(self, op: dict[str, Any], x: Any) -> Any:
        rounding = "ceil" if op["ceil"] else "floor"
        pads, exclude = op["padding"], not op["count_padding"]
        return self.ops.avg_pool(x, op["stride"], pads, pads, op["kernel"], exclude, rounding)

    def mean(self, op: dict[str, Any], x: Any) -> Any:
        return self.ops.reduce_mean(x, np.array([2, 3]), keep_dims=True)

    def slice(self, op: dict[str, Any], x: Any) -> Any:
        parts = [np.array(op[key]) for key in ("start", "stop", "step")]
        return self.ops.slice(x, *parts, np.array([1, 2, 3]))

    def pad(self, op: dict[str, Any], x: Any) -> Any:
        before, after = (np.array([0, *op[key]]) for key in ("before", "after"))
        return self.ops.pad(x, before, after, "constant", np.float32(0))

    def flatten(self, op: dict[str, Any], x: Any) -> Any:
        return self.ops.reshape(x, np.array([0, -1, 1, 1]), special_zero=True)
