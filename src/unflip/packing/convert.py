"""Converts the traced nodes to ops of the file, and runs the model on the example at the same time.

The handlers of operations are in ``ops`` and ``binary``. An operation without a handler is refused with its name and
place. Operations on parameters only are computed immediately.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from unflip.packing.file import Array
from unflip.packing.ir import CannotPack, Fields, Graph, Op, Shape, finite
from unflip.packing.outputs import Structure, structure_of
from unflip.packing.trace import BINARY_LAYER, Traced, module_path, place

Handler = Callable[..., Any]  # (converter, result in torch, *the operation's arguments) -> Ref


@dataclass(frozen=True)
class Ref:
    """A value of the graph, and torch's tensor for it on the example."""

    value: int
    tensor: Tensor


class Converter:
    """The graph so far, and the result of each node: a Ref, a list of Refs, or a constant."""

    def __init__(self, traced: Traced, example: Tensor, handlers: dict[str, Handler]) -> None:
        self.traced = traced
        self.handlers = handlers
        self.ops: list[Op] = []
        self.env: dict[fx.Node, Any] = {}
        self.batch = len(example)
        self.example = example
        self.order = {node: number for number, node in enumerate(traced.nodes)}
        self.node = traced.nodes[0]

    def convert(self) -> tuple[Graph, Structure, list[Tensor]]:
        """The graph, the structure of its outputs, and the outputs on the example."""
        for node in self.traced.nodes:
            self.node = node
            if node.op == "output":
                return self._outputs(self.traced.returned)
            self.env[node] = self._value(node)
        raise AssertionError("a traced graph ends with its output")

    def _outputs(self, returned: Any) -> tuple[Graph, Structure, list[Tensor]]:
        structure = structure_of(returned, lambda part: isinstance(part, fx.Node))
        found = [self.env[node] for node in structure.parts(returned)]
        for place_, ref in zip(structure.places, found, strict=True):
            if not isinstance(ref, Ref):
                raise CannotPack(
                    f"the model's {place_} does not depend on its input; remove it from the outputs"
                )
            if ref.tensor.dim() not in (2, 4):
                raise CannotPack(
                    f"the model's {place_} has shape {tuple(ref.tensor.shape)}; outputs must have 2 or 4 dims, so "
                    "flatten it: x.flatten(1)"
                )
        return Graph(self.ops, [ref.value for ref in found]), structure, [r.tensor for r in found]

    def _value(self, node: fx.Node) -> Any:
        if node is self.traced.input:
            return Ref(0, self.example.clone())  # it may be changed in place
        if node.op == "placeholder":
            return self.traced.constants.get(node.name)
        if node.op == "get_attr":
            raise self.refusal(
                "a part of the forward pass",
                "it is in a context such as torch.autocast or torch.enable_grad, which cannot be packed; leave the "
                "context out of the forward pass",
            )
        if node.op != "call_function":
            raise self.refusal(f"{node.op} {node.target}", "only function calls can be packed")
        args: Any = fx.node.map_arg(node.args, self.env.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, self.env.__getitem__)
        if node.target is operator.getitem:
            return args[0][args[1]]
        return self._call(node.target, list(args), dict(kwargs))

    def _call(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        name = _name(target)
        if name in _IGNORED:
            return None
        in_place = name.endswith("_") and not name.endswith("__")
        try:
            computed = self._compute(target, args, kwargs, in_place)
            result = self._result(target, name, in_place, computed, args, kwargs)
        except CannotPack:
            raise
        except Exception as error:  # arguments that neither torch's rules nor the handler foresee
            raise self.refuse(
                f"it cannot be packed with these arguments ({type(error).__name__}: {error})"
            ) from error
        if in_place:
            self._rebind(args[0], result)
        return result

    def _result(
        self,
        target: Any,
        name: str,
        in_place: bool,
        computed: Any,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        if not _refs([args, kwargs]):
            if torch.Tag.nondeterministic_seeded in target.tags:
                raise self.refuse(
                    "its result is random; only deterministic operations can be packed"
                )
            return computed
        handler = self.handlers.get(name[:-1] if in_place else name)
        if handler is None:
            raise self.refuse(
                "this operation is not supported; docs/deploy.md lists those that are"
            )
        return self.stamped(handler(self, computed, *args, **kwargs), computed)

    def _compute(self, target: Any, args: list[Any], kwargs: dict[str, Any], in_place: bool) -> Any:
        plain = torch.utils._pytree.tree_map(
            lambda a: a.tensor if isinstance(a, Ref) else a, (args, kwargs)
        )
        if in_place and isinstance(args[0], Ref):
            self._keep_values(plain[0][0])
        elif in_place:
            plain[0][0] = plain[0][0].clone()
        if target is BINARY_LAYER:
            target = self._run_layer
        with torch.no_grad():
            return target(*plain[0], **plain[1])

    def _run_layer(self, x: Tensor, number: int, *geometry: Any) -> Tensor:
        return self.traced.layers[number](x)

    def stamped(self, result: Any, computed: Any) -> Any:
        """Record torch's result as the value of the whole node."""
        if not isinstance(result, Ref) or not isinstance(computed, Tensor):
            return result
        if computed.dtype != torch.float32:
            raise self.refusal(
                self._target(), f"its result is {computed.dtype}; values must be float32"
            )
        if result.value and self.ops[result.value - 1].value is None:
            self.ops[result.value - 1].value = computed
        return Ref(result.value, computed)

    def _rebind(self, old: Any, new: Any) -> None:
        """After ``x.relu_()``, every name of x refers to the new value.

        Which names share memory depends on strides (``contiguous`` copies or not), so torch's tensors decide.
        """
        for node, value in self.env.items():
            if value is old:
                self.env[node] = new
            elif isinstance(value, Ref) and isinstance(old, Ref):
                shared = _shared_memory(value.tensor, old.tensor)
                if shared == "all" and value.value == old.value:
                    self.env[node] = Ref(new.value, value.tensor)
                elif shared != "none" and self._read_later(node):
                    raise self.refuse(
                        "it changes a tensor in place while another view of it is still in use; use the operation that "
                        "returns a new tensor"
                    )

    def _read_later(self, node: fx.Node) -> bool:
        return any(self.order[user] > self.order[self.node] for user in node.users)

    def _keep_values(self, changing: Tensor) -> None:
        """An operation is about to change a tensor in place: the ops so far keep the values that they have given."""
        for op in self.ops:
            if op.value is not None and _storage(op.value) == _storage(changing):
                op.value = op.value.clone()

    # Used by the handlers

    def refusal(self, what: str, why: str) -> CannotPack:
        return CannotPack(f"{what} at {place(self.node)}: {why}")

    def _target(self) -> str:
        name = _name(self.node.target)
        return name if "::" in name else f"aten.{name}"

    def refuse(self, why: str) -> CannotPack:
        """An error about the current node."""
        return self.refusal(self._target(), why)

    def name(self) -> str:
        return module_path(self.node) or self.node.name

    def shape(self, tensor: Tensor) -> Shape:
        """C × H × W of a batch of images or vectors."""
        sizes = list(tensor.shape)
        if len(sizes) < 2 or len(sizes) > 4 or sizes[0] != self.batch:
            raise self.refuse(
                f"its result has shape {tuple(sizes)} for a batch of {self.batch}; values must be images "
                "(N, C, H, W) or vectors (N, F)"
            )
        if len(sizes) == 3 and sizes[2] != 1:
            raise self.refuse(f"its result has shape {tuple(sizes)}; values must have 2 or 4 dims")
        c, h, w = (*sizes[1:], 1, 1)[:3]
        return c, h, w

    def emit(
        self,
        kind: str,
        inputs: list[Ref],
        out: Tensor | Shape,
        value: Tensor | None = None,
        **fields: Any,
    ) -> Ref:
        """Add an op; ``out`` is its result in torch, or the shape of the result."""
        shape = self.shape(out) if isinstance(out, Tensor) else out
        steps = fields.pop("steps", [])
        read = [ref.value for ref in inputs]
        self.ops.append(Op(kind, self.name(), read, fields, steps, shape, value))
        return Ref(len(self.ops), out if isinstance(out, Tensor) else torch.empty(0))

    def map(self, x: Ref, out: Tensor, *steps: Fields) -> Ref:
        if x.tensor.shape != out.shape and x.tensor.numel():
            raise self.refuse(
                f"it broadcasts {tuple(x.tensor.shape)} to {tuple(out.shape)}; only constants can be broadcast"
            )
        return self.emit("map", [x], out, steps=list(steps))

    def alias(self, x: Ref, out: Tensor) -> Ref:
        return Ref(x.value, out)

    def vector(self, constant: Any, x: Ref) -> Array:
        """A constant operand as one number per channel (or one for all), in float64."""
        tensor = torch.as_tensor(constant).detach().to(torch.float64)
        channels, dims = x.tensor.shape[1], x.tensor.dim()
        if tensor.dim() > dims:
            raise self.refuse(
                f"its constant has shape {tuple(tensor.shape)}, with more dims than the other operand"
            )
        full = tensor.view(*[1] * (dims - tensor.dim()), *tensor.shape)
        rows = full.movedim(1, 0).flatten(1)
        if rows.numel() == 0 or not torch.equal(rows, rows[:, :1].expand_as(rows)):
            raise self.refuse(
                f"its constant of shape {tuple(tensor.shape)} differs from pixel to pixel; "
                "it must have one number per channel"
            )
        values = rows[:, 0].numpy()
        if len(values) not in (1, channels):
            raise self.refuse(
                f"its constant of shape {tuple(tensor.shape)} broadcasts the input; it must have 1 or {channels} "
                "channels"
            )
        if not finite(values):
            raise self.refuse("its constant contains NaN or infinity; it must be finite in float32")
        return values

    def constant(self, value: Any, what: str) -> Any:
        if isinstance(value, Ref):
            raise self.refuse(
                f"its {what} depends on the input; it must be a parameter or a constant"
            )
        return value


def numbers(tensor: Tensor) -> Array:
    return tensor.detach().to(torch.float64).numpy()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _shared_memory(a: Tensor, b: Tensor) -> Literal["all", "some", "none"]:
    """How much of their memory two tensors share."""
    if _storage(a) != _storage(b):
        return "none"
    one, other = _memory(a), _memory(b)
    if torch.equal(one, other):
        return "all"
    return "some" if (one & other).any() else "none"


def _memory(tensor: Tensor) -> Tensor:
    """Which elements of its storage a tensor has."""
    mask = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=torch.bool)
    mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return mask


def _refs(values: Any) -> list[Ref]:
    return [v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, Ref)]


def _name(target: Any) -> str:
    """ "conv2d" for aten.conv2d.default, and "library::conv2d" for the operation of another library."""
    schema = getattr(target, "_schema", None)
    return schema.name.removeprefix("aten::") if schema is not None else str(target)


_IGNORED = {
    "_assert_tensor_metadata",
    "_assert_async",
    "_assert_scalar",
    "sym_constrain_range_for_size",
}
