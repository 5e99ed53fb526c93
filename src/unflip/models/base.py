"""The registry of networks, and functions that their builders share.

A builder is a plain function ``name(method="float", *, num_classes=..., ...)``. It builds the float
network; ``method="float"`` returns that, any other method returns it binarized. So a binary network and
its float twin have the same parameters under the same names.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn

from unflip.binarize import binarize
from unflip.hints import known
from unflip.methods import Method, resolve
from unflip.methods import names as method_names
from unflip.uses import same_definition

MethodLike = str | Mapping[str, Any] | Method
Activation = Literal["relu", "hardtanh", "identity"]

WIDTH_MULTIPLE = 8  # channels of a network with chosen widths


@dataclass(frozen=True)
class _Entry:
    build: Callable[..., nn.Module]
    input_shape: tuple[int, int, int]
    parts: int


Builder = TypeVar("Builder", bound=Callable[..., nn.Module])

_REGISTRY: dict[str, _Entry] = {}


def register_model(
    name: str, *, input_shape: tuple[int, int, int], parts: int = 0
) -> Callable[[Builder], Builder]:
    """Decorator: register a builder as ``name`` for recipes, :func:`create` and the command line.

    ``parts`` is how many numbers its option ``widths`` takes; 0 if it has no such option.
    """

    def add(build: Builder) -> Builder:
        there = _REGISTRY.get(name)
        if there is not None and not same_definition(there.build, build):
            raise ValueError(f"model {name!r} is already registered by {there.build!r}")
        _REGISTRY[name] = _Entry(build, input_shape, parts)
        return build

    return add


def _entry(name: str) -> _Entry:
    return _REGISTRY[known(name, _REGISTRY, "model")]


def names() -> list[str]:
    """The registered networks."""
    return sorted(_REGISTRY)


def create(name: str, method: MethodLike = "float", **options: Any) -> nn.Module:
    """Build the network ``name``. An unknown name or option raises an error that lists the known ones."""
    check_names(name, options)
    return builder(name)(method, **options)


def check_names(name: str, options: Iterable[str]) -> None:
    """Refuse options that the network ``name`` does not have."""
    accepted = [p for p in inspect.signature(builder(name)).parameters if p != "method"]
    for option in options:
        known(option, accepted, f"option of model {name!r}")


def all_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` of the network ``name``, and its defaults for the others."""
    parameters = inspect.signature(builder(name)).parameters.items()
    return {**{n: p.default for n, p in parameters if n != "method"}, **options}


def builder(name: str) -> Callable[..., nn.Module]:
    """The function that builds the network ``name``."""
    return _entry(name).build


def input_shape(name: str) -> tuple[int, int, int]:
    """(channels, height, width) of the images the network ``name`` was published for."""
    return _entry(name).input_shape


def width_parts(name: str) -> int:
    """How many numbers the option ``widths`` of the network ``name`` takes; 0 if it has no such option."""
    return _entry(name).parts


def resolve_method(method: MethodLike) -> Method | None:
    """The method, or None for "float" (or, from a recipe, ``{"name": "float"}``)."""
    if method in ("float", {"name": "float"}):
        return None
    if isinstance(method, str):
        known(method, ["float", *method_names()], "method")
    return resolve(method)


def binary_twin(model: nn.Module, method: MethodLike | None, skip: Iterable[str] = ()) -> nn.Module:
    """``model`` binarized by the method; unchanged for the float twin."""
    chosen = None if method is None else resolve_method(method)
    return model if chosen is None else binarize(model, chosen, skip, quiet=True)


def check_options(model: str, **options: tuple[object, Any]) -> None:
    """Each option is (value, its ``Literal`` type)."""
    for name, (value, literal) in options.items():
        allowed = get_args(literal)
        if value not in allowed:
            raise ValueError(
                f"{model}: {name}={value!r} is not one of " + ", ".join(map(repr, allowed))
            )


def check_sizes(model: str, **sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{model}: {name}={value!r} should be a whole number >= 1")


def scaled_channels(
    model: str, channels: Sequence[int], widths: Sequence[float] | None, part: str
) -> list[int]:
    """``channels`` times ``widths``, rounded to multiples of 8, at least 8; unchanged if ``widths`` is None."""
    if widths is None:
        return list(channels)
    right = isinstance(widths, list | tuple) and len(widths) == len(channels)
    if not right or not all(_is_factor(w) for w in widths):
        raise ValueError(
            f"{model}: widths={widths!r} should be {len(channels)} numbers > 0, one per {part}"
        )
    eighths = [
        math.floor(c * w / WIDTH_MULTIPLE + 0.5) for c, w in zip(channels, widths, strict=True)
    ]
    return [WIDTH_MULTIPLE * max(1, n) for n in eighths]


def _is_factor(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf  # type: ignore[operator]


def activation_module(activation: Activation) -> nn.Module:
    modules = {"relu": nn.ReLU, "hardtanh": nn.Hardtanh, "identity": nn.Identity}
    return modules[activation]()


def float_inputs(method: Method | None) -> bool:
    """Whether convolutions see float inputs: the float twin and weights-only methods."""
    return method is None or _input_traits(method)[0] == 32


def takes_signs(method: Method | None) -> bool:
    """Whether the method's inputs depend on values below zero, so that they carry nothing after a ReLU."""
    return method is not None and not _relu_is_safe(method)


def choose_activation(
    model: str, method: Method | None, chosen: Activation | None, default: Activation | None = None
) -> Activation:
    """The activation between BatchNorm and the next layer: ``chosen`` by the user, or the network's ``default``.

    Without either it is ReLU, or hardtanh for methods that take the sign of their input: sign(ReLU(x)) is +1
    everywhere, so such a network would learn nothing. To choose ReLU there is an error.
    """
    if chosen is not None:
        check_options(model, activation=(chosen, Activation))
    signs = takes_signs(method)
    if chosen == "relu" and signs:
        raise ValueError(
            f"{model}: activation='relu' gives inputs >= 0, whose sign is always +1 for method {method}; "
            "use 'hardtanh' or 'identity'"
        )
    return chosen or default or ("hardtanh" if signs else "relu")


def _relu_is_safe(method: Method) -> bool:
    bits, reads_negatives = _input_traits(method)
    return bits == 32 or not reads_negatives


def _input_traits(method: Method) -> tuple[int, bool]:
    """(bits of the method's inputs, whether they depend on values below zero), found by trying.

    It runs on the CPU even if the model is built on the meta device. It does not advance the random numbers:
    with one seed all methods of a network start from the same weights.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        binarizer = method.input_binarizer(nn.Conv2d(1, 1, 1)).eval()
        x = torch.linspace(-2, 2, 33).view(1, 1, 1, -1)
        reads_negatives = not torch.equal(binarizer(x), binarizer(x.clamp(min=0)))
    return binarizer.bits, reads_negatives
