"""Writes small QONNX files for the tests of the importer."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from qonnx_ops import DOMAIN


class File:
    """Collects the nodes and constants of a QONNX file. Numbers are small eighths, so that ties happen."""

    def __init__(self, *shape: int) -> None:
        self.random = np.random.default_rng(0)
        self.shape = shape
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.last = "input"

    def numbers(self, *shape: int) -> Any:
        return (self.random.integers(-16, 17, shape) / 8).astype(np.float32)

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op: str, *inputs: Any, **attributes: Any) -> str:
        """A node of constants (arrays) and values (names); without any value, of the last one."""
        parts = list(inputs)
        if op != "Constant" and not any(isinstance(part, str) for part in parts):
            parts.insert(0, self.last)
        names = [part if isinstance(part, str) else self.constant(part) for part in parts]
        self.last = f"v{len(self.nodes)}"
        domain = DOMAIN if op in ("BipolarQuant", "Quant", "MultiThreshold") else ""
        made = helper.make_node(
            op, names, [self.last], name=f"{op}_{len(self.nodes)}", domain=domain, **attributes
        )
        self.nodes.append(made)
        return self.last

    def sign(self, scale: float = 1.0) -> str:
        return self.node("BipolarQuant", np.float32(scale))

    def quant(
        self, *inputs: Any, scale: Any = 0.25, zero: float = 0, bits: int = 4, **more: Any
    ) -> str:
        given = {"signed": 1, "narrow": 0, "rounding_mode": "ROUND"} | more
        parts = (np.float32(scale), np.float32(zero), np.float32(bits))
        return self.node("Quant", *inputs, *parts, **given)

    def binary(self, *shape: int, scale: float = 1.0) -> str:
        x = self.last
        weight = self.node("BipolarQuant", self.constant(self.numbers(*shape)), np.float32(scale))
        self.last = x
        return weight

    def conv(self, *shape: int, scale: float = 1.0, **options: Any) -> str:
        x = self.last
        return self.node("Conv", x, self.binary(*shape, scale=scale), **options)

    def linear(self, inputs: int, outputs: int) -> str:
        x = self.last
        return self.node("MatMul", x, self.binary(inputs, outputs))

    def norm(self, channels: int) -> str:
        mean, bias, scale = (self.numbers(channels) for _ in range(3))
        return self.node("BatchNormalization", scale, bias, mean, np.abs(self.numbers(channels)))

    def model(self) -> Any:
        info = helper.make_tensor_value_info
        graph = helper.make_graph(
            self.nodes,
            "test",
            [info("input", TensorProto.FLOAT, [1, *self.shape])],
            [info(self.last, TensorProto.FLOAT, None)],
            self.constants,
        )
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, producer_name="test")
