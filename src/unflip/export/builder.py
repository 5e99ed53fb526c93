"""Builds an ONNX graph node by node. Names are short, because they would dominate the size of a small network."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from unflip.packing.file import Array, PackedFileError

MOST_MEMORY = 2**30  # bytes, as in unflip.load
COPIES = 8  # of a constant at most: arrays of doubles, the initializer, and those of the graph, the model and the file
MOST_NODES = 500_000
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

    def __init__(self, taken: Iterable[str] = (), max_memory: int | None = None) -> None:
        """``taken``: names that inner values of the graph must not have. ``max_memory``: the limit in bytes."""
        self._onnx = onnx_package()
        self._nodes: list[Any] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._bytes = 0  # of the constants
        self._max_memory = MOST_MEMORY if max_memory is None else max_memory
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
        if len(self._nodes) >= MOST_NODES:
            raise PackedFileError(
                f"more than {MOST_NODES:,} ONNX nodes: every base of a convolution is multiplied with every plane of "
                "its input; use fewer of them"
            )
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
        key = (array.dtype.str, array.shape, hashlib.sha256(array.data).digest())
        if key not in self._constants:
            self.check_room(array.nbytes)
            self._bytes += array.nbytes
            self._constants[key] = self._new()
            tensor = self._onnx.numpy_helper.from_array(array, self._constants[key])
            self._initializers.append(tensor)
        return self._constants[key]

    def check_room(self, more: int) -> None:
        """Refuse to make constants of ``more`` bytes if the file would then need too much memory."""
        needed = COPIES * (self._bytes + more)
        if needed > self._max_memory:
            raise PackedFileError(
                f"writing the file may need {needed:,} bytes of memory or more; the limit is {self._max_memory:,}. "
                "If you trust the network, raise the limit with max_memory"
            )

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
        made = {name for node in self._nodes for name in node.output}
        new_names: dict[str, str] = {}
        kept = []
        for node in self._nodes:
            old = node.input[0] if node.op_type == "Identity" else ""
            # Other identities are of an input of the graph, or of an output that has its name already.
            if old in made and old not in new_names:
                new_names[old] = node.output[0]
            else:
                kept.append(node)
        for node in kept:
            for names in (node.input, node.output):
                names[:] = [new_names.get(name, name) for name in names]
        self._nodes = kept

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
