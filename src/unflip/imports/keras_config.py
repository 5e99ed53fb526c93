"""Keras's model configs: JSON of a Sequential or functional model, as a list of calls in order.

Nothing in a config is run: layers are looked up by name in a table, and code in Lambda layers is not read. A model
inside a model is replaced by its layers. Layers may be listed in any order; a cycle is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unflip.imports.errors import CannotImport

MOST_LAYERS = 10_000
MOST_MODELS_DEEP = 8
LARGEST_NUMBER = 1_048_576
LARGEST_FLOAT = 1e30
LONGEST_NAME = 500
# Of registered classes.
PACKAGES = frozenset(["", "Keras", "keras", "Larq", "larq", "larq_zoo", "Builtins", "Custom"])
MODELS = ("Sequential", "Functional", "Model")

# A tensor of the graph: the layer with the models around it, the number of the call, the number of the output.
Tensor = tuple[tuple[str, ...], int, int]


@dataclass(frozen=True)
class Layer:
    """A layer and its settings. The methods read one setting, or name it in an error."""

    kind: str
    path: tuple[str, ...]
    config: Mapping[str, Any]

    @property
    def title(self) -> str:
        return f"{self.kind} {'/'.join(self.path)!r:.200}"

    def wrong(self, key: str, right: str) -> CannotImport:
        return CannotImport(f"{self.title}: {key}={self.config.get(key)!r:.80} should be {right}")

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.config.get(key, default)
        if type(value) is not int or not least <= value <= LARGEST_NUMBER:
            raise self.wrong(key, f"a whole number from {least} to {LARGEST_NUMBER:,}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if isinstance(value, list) and len(value) == 1:  # how Keras writes a numpy scalar
            value = value[0]
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if not right or not -LARGEST_FLOAT <= value <= LARGEST_FLOAT:  # also false for NaN
            raise self.wrong(key, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def pair(self, key: str, default: Any = None) -> tuple[int, int]:
        value = self.config.get(key)
        value = default if value is None else value
        values = [value, value] if type(value) is int else value
        right = isinstance(values, list | tuple) and len(values) == 2
        if not right or any(type(v) is not int or not 1 <= v <= LARGEST_NUMBER for v in values):
            raise self.wrong(key, f"two whole numbers from 1 to {LARGEST_NUMBER:,}")
        return values[0], values[1]

    def choice(self, key: str, default: Any, *right: Any) -> Any:
        value = self.config.get(key, default)
        if value not in right:
            raise self.wrong(key, " or ".join(map(repr, right)))
        return value

    def function(self, key: str) -> tuple[str | None, Layer]:
        """A function or object, such as a quantizer, by name, and its settings. Keras writes it in three ways."""
        value = self.config.get(key)
        settings: Any = {}
        if isinstance(value, dict):
            settings = value.get("config", {})
            value = value.get("class_name", "")
            if value == "function":
                value, settings = settings, {}
        if not isinstance(value, str | None) or value == "" or not isinstance(settings, dict):
            raise self.wrong(key, "a name, or an object with class_name and config")
        name = known_name(value, self.title) if value else None
        return name, Layer(f"{self.kind} {self.path[-1]!r:.80} {key}", self.path, settings)


def known_name(registered: str, title: str) -> str:
    """The name of "Package>Name". A class of another package may share the name and compute something else."""
    package, _, name = registered.rpartition(">")
    if package not in PACKAGES:
        raise CannotImport(
            f"{title}: {registered!r:.80} is of the package {package!r:.40}; only classes of Keras and Larq are known"
        )
    return name


@dataclass(frozen=True)
class Call:
    """A layer applied to tensors. ``keywords`` are numbers and texts that it is called with."""

    layer: Layer
    number: int
    inputs: tuple[Tensor, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """The calls of a model in order, its input and its output."""

    name: str
    shape: tuple[int, ...]  # of the input, without the batch
    calls: list[Call]
    input: Tensor
    output: Tensor


def parse_config(text: bytes, where: str) -> Config:
    """The config of a model: ``model.to_json()``, or ``model_config`` of an .h5 file."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CannotImport(f"{where}: bad JSON: {error!s:.200}") from None
    try:
        return _Parser().config(found)
    except CannotImport as error:
        raise CannotImport(f"{where}: {error}") from None


class _Parser:
    def __init__(self) -> None:
        self.layers = 0
        self.calls: list[Call] = []
        self.aliases: dict[Tensor, Tensor] = {}  # inputs and outputs of models inside models
        self.inputs: list[Layer] = []

    def config(self, found: Any) -> Config:
        model = self._layer(found, ())
        if model.kind not in MODELS:
            raise CannotImport(
                f"a model should be a Sequential or functional one, not {model.kind!r:.80}; subclasses of Model have "
                "no config that could be read"
            )
        outputs = self._model(model, None)
        if len(outputs) != 1 or len(self.inputs) != 1:
            raise CannotImport(
                f"the model has {len(self.inputs)} inputs and {len(outputs)} outputs; one of each is supported"
            )
        [given] = self.inputs
        return Config(
            model.path[-1],
            _input_shape(given),
            self._ordered(),
            (given.path, 0, 0),
            self._real(outputs[0]),
        )

    def _layer(self, entry: Any, inside: tuple[str, ...]) -> Layer:
        self.layers += 1
        if self.layers > MOST_LAYERS:
            raise CannotImport(f"it has more than {MOST_LAYERS:,} layers")
        config = entry.get("config") if isinstance(entry, dict) else None
        if isinstance(config, list):  # Sequential before Keras 2.2.3
            config = {"name": "sequential", "layers": config}
        kind = entry.get("class_name") if isinstance(entry, dict) else None
        name = config.get("name") if isinstance(config, dict) else None
        if not all(
            isinstance(text, str) and 1 <= len(text) <= LONGEST_NAME for text in (kind, name)
        ):
            raise CannotImport(
                "every layer should be an object with class_name and config, and its config a name"
            )
        assert isinstance(config, dict)
        assert isinstance(kind, str)
        assert isinstance(name, str)
        # a subclass of Model that was built as a functional one, such as larq-zoo's BinaryDenseNet
        functional = isinstance(config.get("layers"), list) and "output_layers" in config
        kind = "Functional" if functional else known_name(kind, f"layer {name!r:.80}")
        return Layer(kind, (*inside, name), config)

    def _model(self, model: Layer, given: Tensor | None) -> list[Tensor]:
        """Add the calls of a model to a tensor (the outermost one has none), and return its outputs."""
        if len(model.path) > MOST_MODELS_DEEP:
            raise CannotImport(f"models are nested more than {MOST_MODELS_DEEP} levels deep")
        entries = model.config.get("layers")
        if not isinstance(entries, list) or not entries:
            raise CannotImport(f"{model.title} has no list of layers")
        inside = model.path if given is not None else ()
        if model.kind == "Sequential":
            return self._sequential(entries, inside, given)
        return self._functional(model, entries, inside, given)

    def _sequential(
        self, entries: list[Any], inside: tuple[str, ...], at: Tensor | None
    ) -> list[Tensor]:
        for number, entry in enumerate(entries):
            layer = self._layer(entry, inside)
            if layer.kind == "InputLayer":
                if number:
                    raise CannotImport(f"{layer.title} should be the first layer")
                at = self._input(layer, at)
                continue
            if at is None:  # the first layer may state the shape itself
                at = self._input(
                    Layer("InputLayer", (*inside, "input"), _first_config(layer)), None
                )
            at = self._call(layer, 0, (at,), {})[0]
        if at is None:
            raise CannotImport("a Sequential model without layers cannot be imported")
        return [at]

    def _functional(
        self, model: Layer, entries: list[Any], inside: tuple[str, ...], given: Tensor | None
    ) -> list[Tensor]:
        names: set[str] = set()
        for entry in entries:
            layer = self._layer(entry, inside)
            if layer.path[-1] in names:
                raise CannotImport(
                    f"two layers have the name {layer.path[-1]!r:.80}; names must differ"
                )
            names.add(layer.path[-1])
            if layer.kind == "InputLayer":
                self._input(layer, given)
                continue
            nodes = entry.get("inbound_nodes")
            if not isinstance(nodes, list) or not nodes:
                raise CannotImport(f"{layer.title} has no inbound_nodes")
            for number, node in enumerate(nodes):
                inputs, keywords = _node(layer, node, inside)
                self._call(layer, number, inputs, keywords)
        outputs = model.config.get("output_layers")
        if isinstance(outputs, list) and outputs and isinstance(outputs[0], str):
            outputs = [outputs]  # one output may be written without a list around it
        if not isinstance(outputs, list) or not all(_is_reference(part) for part in outputs):
            raise CannotImport(
                f"{model.title}: output_layers should be a list of [layer, node, tensor]"
            )
        return [_reference(part, inside) for part in outputs]

    def _input(self, layer: Layer, given: Tensor | None) -> Tensor:
        if given is None:
            self.inputs.append(layer)
            return layer.path, 0, 0
        if (layer.path, 0, 0) in self.aliases:
            raise CannotImport(
                f"{layer.title}: a model inside a model has one input, and is used once"
            )
        self.aliases[layer.path, 0, 0] = given
        return given

    def _call(
        self, layer: Layer, number: int, inputs: tuple[Tensor, ...], keywords: Mapping[str, Any]
    ) -> list[Tensor]:
        if layer.kind not in MODELS:
            self.calls.append(Call(layer, number, inputs, keywords))
            if len(self.calls) > MOST_LAYERS:
                raise CannotImport(f"it has more than {MOST_LAYERS:,} calls of layers")
            return [(layer.path, number, 0)]
        if len(inputs) != 1 or number:
            raise CannotImport(
                f"{layer.title}: a model inside a model has one input, and is used once"
            )
        outputs = self._model(layer, inputs[0])
        # A functional model inside a functional one is called at node 1 if it was built alone before.
        for node in (0, 1):
            self.aliases |= {(layer.path, node, i): output for i, output in enumerate(outputs)}
        return outputs

    def _real(self, tensor: Tensor) -> Tensor:
        for _ in range(2 * MOST_MODELS_DEEP + 2):
            if tensor not in self.aliases:
                return tensor
            tensor = self.aliases[tensor]
        raise CannotImport("the graph has a cycle")

    def _ordered(self) -> list[Call]:
        """Inputs first. What cannot be ordered has a cycle, or a tensor that nothing makes."""
        calls = {(c.layer.path, c.number): c for c in self.calls}
        known = {(layer.path, 0) for layer in self.inputs}
        inputs = {key: tuple(map(self._real, c.inputs)) for key, c in calls.items()}
        waiting = {key: {t[:2] for t in tensors} - known for key, tensors in inputs.items()}
        users: dict[Any, list[Any]] = {}
        for key, needed in waiting.items():
            for source in needed:
                if source not in calls:
                    name, layer = "/".join(source[0]), calls[key].layer
                    raise CannotImport(
                        f"{layer.title} takes the result of {name!r:.200}, which is not there"
                    )
                users.setdefault(source, []).append(key)
        order = [key for key, needed in waiting.items() if not needed]
        for key in order:  # grows
            for user in users.get(key, []):
                waiting[user].discard(key)
                if not waiting[user]:
                    order.append(user)
        if len(order) != len(calls):
            stuck = next(calls[key].layer for key in calls if waiting[key])
            raise CannotImport(f"{stuck.title}: the graph has a cycle")
        return [Call(calls[k].layer, k[1], inputs[k], calls[k].keywords) for k in order]


def _node(
    layer: Layer, node: Any, inside: tuple[str, ...]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """One call in ``inbound_nodes``: [[layer, node, tensor, keywords], ...], or one of these without a list."""
    parts = [node] if _is_reference(node) else node
    if not isinstance(parts, list) or not parts or not all(_is_reference(part) for part in parts):
        raise CannotImport(
            f"{layer.title}: inbound_nodes should be lists of [layer, node, tensor, keywords]"
        )
    inputs = [_reference(part, inside) for part in parts]
    keywords = dict(parts[0][3]) if len(parts[0]) > 3 else {}
    for key in [key for key, value in keywords.items() if _is_reference(value)]:
        inputs.append(_reference(keywords.pop(key), inside))
    return tuple(inputs), keywords


def _is_reference(part: Any) -> bool:
    return (
        isinstance(part, list)
        and len(part) in (3, 4)
        and isinstance(part[0], str)
        and all(type(n) is int and n >= 0 for n in part[1:3])
        and (len(part) == 3 or isinstance(part[3], dict))
    )


def _reference(part: list[Any], inside: tuple[str, ...]) -> Tensor:
    return (*inside, part[0]), part[1], part[2]


def _first_config(layer: Layer) -> Mapping[str, Any]:
    """The settings of a layer, or those of the first layer of a model."""
    config = layer.config
    while isinstance(config.get("layers"), list) and config["layers"]:
        first = config["layers"][0]
        inner = first.get("config") if isinstance(first, dict) else None
        config = inner if isinstance(inner, dict) else {}
    return config


def _input_shape(layer: Layer) -> tuple[int, ...]:
    shape = layer.config.get("batch_input_shape", layer.config.get("batch_shape"))
    if not isinstance(shape, list) or len(shape) not in (2, 4):
        raise layer.wrong(
            "batch_input_shape", "[null, height, width, channels] or [null, features]"
        )
    return tuple(0 if size is None else size for size in shape[1:])
