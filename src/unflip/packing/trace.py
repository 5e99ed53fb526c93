"""Traces a frozen model with torch.export. Every binary layer is one node of the graph."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from unflip.ends import FrozenInt8Layer
from unflip.freeze import FrozenLayer
from unflip.layers import become, twin_of
from unflip.packing.ir import CannotPack, sides_of

Layer = FrozenLayer | FrozenInt8Layer

# A binary or 8-bit layer in the traced graph: its number, and the arguments that determine its output's shape.
torch.library.define(
    "unflip::binary_layer",
    "(Tensor x, int layer, int[] weight, SymInt[] stride, SymInt[] padding, SymInt[] dilation, int groups) -> Tensor",
)
BINARY_LAYER = torch.ops.unflip.binary_layer.default


@torch.library.register_fake("unflip::binary_layer")
def _binary_layer_shape(
    x: Tensor,
    layer: int,
    weight: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    if len(weight) == 2:
        return nn.functional.linear(x, x.new_empty(weight))
    top, left, bottom, right = padding
    x = nn.functional.pad(x, (left, right, top, bottom))
    return nn.functional.conv2d(x, x.new_empty(weight), None, stride, 0, dilation, groups)


class Marker(nn.Module):
    """Stands for a frozen layer while the model is traced.

    A forward pass may read attributes of the layer (``self.conv.out_channels``, ``self.fc.weight.dtype``), so these are
    forwarded, and ``isinstance(self.conv, nn.Conv2d)`` holds (``of``). Parameters and buffers are registered here,
    because torch.export requires it for every tensor.
    """

    def __init__(self, number: int, layer: Layer) -> None:
        nn.Module.__init__(self)
        # Not a submodule: the layer's own forward pass is not traced.
        self.__dict__["_layer"] = layer
        self._parameters = dict(layer._parameters)
        self._buffers = {**layer._buffers, "weight": layer.weight}
        self._call = number, list(layer.weight.shape), *_geometry(layer)

    @staticmethod
    def of(number: int, layer: Layer) -> Marker:
        """A marker that is also of the layer's class."""
        return _marker_class(type(layer))(number, layer)  # type: ignore[arg-type]

    @property
    def weight(self) -> Any:
        return self._buffers["weight"]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)

    def forward(self, x: Tensor) -> Tensor:
        return BINARY_LAYER(x, *self._call)


@functools.cache
def _marker_class(kind: type[Layer]) -> type[Marker]:
    return type(f"{kind.__name__}Marker", (Marker, kind), {})


def _geometry(layer: Layer) -> tuple[list[int], list[int], list[int], int]:
    """Stride, padding (top, left, bottom, right), dilation, groups: as the forward pass reads them.

    A layer's attributes may have been changed after it was made. Only padding that is not zeros is kept in advance.
    """
    if not isinstance(layer, nn.Conv2d):
        return [], [], [], 1
    if layer.padding_mode == "zeros":
        sides = sides_of(layer.padding, layer.weight.shape[2:], layer.dilation)
    else:
        left, right, top, bottom = layer._reversed_padding_repeated_twice
        sides = [top, left, bottom, right]
    return list(layer.stride), sides, list(layer.dilation), layer.groups


@dataclass
class Traced:
    """The nodes of the model's forward pass, its constants, and the layers replaced by markers."""

    nodes: list[fx.Node]
    constants: dict[str, Tensor]  # by the name of the placeholder
    input: fx.Node
    returned: Any  # as the model returns it, with nodes for tensors
    layers: list[Layer]
    names: list[str]

    def idle(self) -> list[str]:
        """Binary layers that do not contribute to an output."""
        ran = {node.args[1] for node in self.nodes if node.target is BINARY_LAYER}
        return [name for number, name in enumerate(self.names) if number not in ran]


def trace(model: nn.Module, example: Tensor) -> Traced:
    """Trace ``model``. It is changed: markers replace its binary layers."""
    layers, names = _place_markers(model)
    with _quiet(), torch.no_grad():
        try:
            program = torch.export.export(model, (example,), strict=False)
        except Exception as error:
            raise CannotPack(
                "torch.export cannot trace the model's forward pass, which must not depend on the values of its input. "
                f"Its message: {_first_lines(error)}"
            ) from error
    signature = program.graph_signature
    users = list(signature.user_inputs)
    if len(users) != 1:
        raise CannotPack(f"the model has {len(users)} inputs; a packed network must have one")
    constants: dict[str, Tensor] = {}
    state: dict[str, Any] = {**program.state_dict, **program.constants}
    for found in (
        signature.inputs_to_parameters,
        signature.inputs_to_buffers,
        signature.inputs_to_lifted_tensor_constants,
    ):
        constants |= {name: state[target].detach() for name, target in found.items()}
    nodes = list(program.graph.nodes)
    image = next(n for n in nodes if n.op == "placeholder" and n.name == users[0])
    return Traced(nodes, constants, image, _returned(program), layers, names)


def _returned(program: torch.export.ExportedProgram) -> Any:
    spec = program.call_spec.out_spec
    assert spec is not None  # always set for an exported program
    found: Any = next(n for n in program.graph.nodes if n.op == "output").args[0]
    return torch.utils._pytree.tree_unflatten(found[len(found) - spec.num_leaves :], spec)


def _place_markers(model: nn.Module) -> tuple[list[Layer], list[str]]:
    """Each layer becomes its marker in place, so also where a list or another object refers to it."""
    layers: list[Layer] = []
    names: list[str] = []
    for name, module in list(model.named_modules()):
        if isinstance(module, Layer):
            if module._forward_hooks or module._forward_pre_hooks:
                raise CannotPack(
                    f"layer {name!r} has a forward hook, which a packed network would leave out; remove the hook"
                )
            layer = twin_of(module, type(module))
            become(module, Marker.of(len(layers), layer))
            layers.append(layer)
            names.append(name)
    return layers, names


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__


def module_path(node: fx.Node) -> str:
    """The module that contains the node's operation, such as "layer1.0.prelu1"; "" for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return re.sub(r"@\d+$", "", path)  # torch numbers repeated calls of a module


def place(node: fx.Node) -> str:
    """The place of an operation in the user's model, for messages."""
    kinds = [kind for _, kind in (node.meta.get("nn_module_stack") or {}).values()]
    kind = str(kinds[-1]).rpartition(".")[2] if kinds else "the model"
    where = module_path(node) or kind
    line = _users_line(node.meta.get("stack_trace") or "")
    return f"{where} ({line})" if line else where


def _users_line(trace_: str) -> str:
    """The innermost line of the stack outside torch."""
    torch_folder = os.path.dirname(torch.__file__)
    found = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)', trace_)
    own = [(path, line, text) for path, line, text in found if not path.startswith(torch_folder)]
    if not own:
        return ""
    path, line, text = own[-1]
    return f"{os.path.basename(path)} line {line}: {text.strip()}"
