"""Builds an ONNX graph node by node. Names are short, because they would dominate the size of a small network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from unflip.packing.file import Array

OPSET = 18  # the first with BitwiseAnd
IR_VERSION = 8  # the version of opset 18; old readers refuse a newer one


def onnx_package() -> Any:
    """The ``onnx`` package, which only the export needs."""
    try:
        import onnx
    except ImportError as error:
        raise ImportError(
            f"writing ONNX files needs the onnx package ({error}); install it with: pip install 'unflip[onnx]'"
        ) from error
    return onnx


class Builder:
    """Nodes and constants of a graph. Methods return names of values."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        """``taken``: names that inner values of the graph must not have."""
        self._onnx = onnx_package()
        self._nodes: list[Any] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._initializers: list[Any] = []
        self._named = {""}
        self._taken = set(taken)
        self._next = 0

    def node(self, op: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Add a node with one output."""
        return self.nodes(op, *inputs, outputs=1, name=name, **attributes)[0]

    def nodes(
        self, op: str, *inputs: str, outputs: int, name: str = "", **attributes: Any
    ) -> list[str]:
        """Add a node with several outputs."""
        made = [self._new() for _ in range(outputs)]
        node = self._onnx.helper.make_node(op, inputs, made, **attributes)
        if name not in self._named:  # names must be unique; only the first node with a name gets it
            node.name = name
            self._named.add(name)
        self._nodes.append(node)
        return made

    def constant(self, array: Array) -> str:
        """A constant. Equal constants are stored once."""
        array = np.asarray(array, order="C")
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._new()
            tensor = self._onnx.numpy_helper.from_array(array, self._constants[key])
            self._initializers.append(tensor)
        return self._constants[key]

    def number(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))

    def integers(self, *values: int) -> str:
        """A constant of int64, for sizes and axes."""
        return self.constant(np.array(values, np.int64))

    def rename_last(self, name: str) -> None:
        """Rename the last value."""
        self._nodes[-1].output[0] = name

    def remove_identities(self) -> None:
        """Give the name of an Identity's output to its input, if a node makes that."""
        makers = {name: node for node in self._nodes for name in node.output}
        for identity in [node for node in self._nodes if node.op_type == "Identity"]:
            maker = makers.pop(identity.input[0], None)
            if maker is None:  # an input of the graph, or an output that has its name already
                continue
            old, new = identity.input[0], identity.output[0]
            self._nodes.remove(identity)
            for node in self._nodes:
                for names in (node.input, node.output):
                    names[:] = [new if name == old else name for name in names]

    def remove_unused(self, outputs: Iterable[str]) -> None:
        """Remove nodes and constants that none of the outputs needs."""
        needed, kept = set(outputs), []
        for node in reversed(self._nodes):
            if needed.intersection(node.output):
                needed.update(node.input)
                kept.append(node)
        self._nodes = kept[::-1]
        self._initializers = [tensor for tensor in self._initializers if tensor.name in needed]

    def model(
        self,
        input_shape: list[int],
        output_shapes: dict[str, list[int]],
        metadata: dict[str, str],
        batch: int | str = "batch",
        domains: tuple[str, ...] = (),
    ) -> Any:
        """The model, with the float32 input ``input`` and the outputs, for one batch size or any.

        ``domains``: those of operators that are not ONNX's own.
        """
        helper, float32 = self._onnx.helper, self._onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            self._nodes,
            "unflip",
            [helper.make_tensor_value_info("input", float32, [batch, *input_shape])],
            [
                helper.make_tensor_value_info(name, float32, [batch, *shape])
                for name, shape in output_shapes.items()
            ],
            self._initializers,
        )
        opsets = [helper.make_opsetid("", OPSET)]
        opsets += [helper.make_opsetid(domain, 1) for domain in domains]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="unflip")
        model.ir_version = IR_VERSION
        helper.set_model_props(model, metadata)
        return model

    def _new(self) -> str:
        self._next += 1
        while str(self._next) in self._taken:  # the outputs of a tuple are named "0", "1", ...
            self._next += 1
        return str(self._next)
