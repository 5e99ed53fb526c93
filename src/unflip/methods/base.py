"""What a binarization method is, and the registry of them.

A method is a typed, frozen config (a dataclass) that builds two small modules for each layer:

- a :class:`WeightBinarizer`: latent weights -> binary weights. It states the *discrete form*
  (``code``: scales and signs) and a differentiable ``surrogate`` whose gradient stands in for it.
  Training, freezing, packing and cost all read ``code``, so they cannot disagree.
- an :class:`InputBinarizer`: the layer's input -> binary input.

A new method is one file in this folder: see ``docs/new-method.md``.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unflip.hints import known
from unflip.ste import straight_through
from unflip.uses import same_definition


class BinaryWeight(NamedTuple):
    """Discrete weights: weight = Σ_i scales[i] · signs[i] (+ offset)."""

    signs: Tensor  # (bases, *weight.shape), every element +1 or -1
    scales: Tensor  # (bases, out or 1, 1, ...): broadcasts over the weight
    offset: Tensor | None = None  # (out or 1, 1, ...): a number for a whole filter, no bit a weight

    def dense(self) -> Tensor:
        """The weight as one float tensor: what a convolution is given."""
        total = self.scales[0] * self.signs[0]
        for scale, signs in zip(self.scales[1:], self.signs[1:], strict=True):
            total = total + scale * signs
        return total if self.offset is None else total + self.offset


class InputCode(NamedTuple):
    """Discrete inputs: value = offset + Σ_p scales[p] · plane[p], planes 0 or 1 (docs/format.md, ``quantize``)."""

    thresholds: Tensor  # (steps, channels or 1), float32
    scales: tuple[float, ...]  # one a plane
    offset: float
    strict: tuple[bool, ...] = (False,)  # whether step s is reached at x > t, or at x >= t
    coding: Literal["planes", "levels"] = (
        "planes"  # plane p is step p; or digit p of the steps reached
    )
    relative: bool = False  # thresholds are shares of the sample's mean |x|
    k_map: bool = False  # ``output_scale`` is the mean |x| under the layer's kernel (XNOR-Net's K)


def sign_code(thresholds: Tensor | None = None) -> InputCode:
    """sign(x − threshold): +1 from the threshold on, −1 below; the threshold is 0 if none is given."""
    return InputCode(torch.zeros(1, 1) if thresholds is None else thresholds, (2.0,), -1.0)


@torch.no_grad()
def one_step_code(binarizer: Callable[[Tensor], Tensor]) -> InputCode:
    """The code of a function with one step, up or down, that is the same for all channels."""
    largest = torch.finfo(torch.float32).max
    low, high = (float(binarizer(torch.tensor([[x]]))) for x in (-largest, largest))
    if low == high:
        return InputCode(torch.zeros(1, 1), (0.0,), low)
    step = least_float(lambda x: binarizer(x) == high, torch.zeros(1, 1))
    return InputCode(step, (high - low,), low)


@torch.no_grad()
def least_float(reached: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The least float32 at which ``reached``, False below and True above, is True; for each element of ``like``.

    By bisection over all float32 numbers: where an expression such as β·x − b rounds, its step is not quite at b / β.
    """
    largest = int(torch.tensor(torch.finfo(torch.float32).max).view(torch.int32))
    low = torch.full(like.shape, -largest, dtype=torch.int64)
    high = torch.full(like.shape, largest, dtype=torch.int64)
    for _ in range(33):
        middle = torch.div(low + high, 2, rounding_mode="floor")
        there = reached(_float_of_rank(middle))
        low, high = torch.where(there, low, middle + 1), torch.where(there, middle, high)
        low = torch.minimum(low, high)
    return _float_of_rank(high)


def _float_of_rank(rank: Tensor) -> Tensor:
    """Numbers the float32 in their order, from 0 for 0."""
    size = rank.abs().to(torch.int32).view(torch.float32)
    return torch.where(rank < 0, -size, size)


def can_be_read(x: Tensor) -> bool:
    """Whether there are values to look at: not while tracing, compiling or capturing, nor under vmap."""
    if not isinstance(x, Tensor) or torch.compiler.is_compiling():
        return False
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return x.device.type in ("cpu", "cuda") and not torch._C._are_functorch_transforms_active()


class Numbers(nn.Module):
    """A module with numbers of the config and the epoch in buffers, where a captured step reads them.

    They are no state, so no state dict brings them: where ``to_empty`` left memory as it was, loading one would not
    make them right. They are remembered here, and filled in again by every load.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, float] = {}

    def hold(self, name: str, value: float, like: Tensor) -> None:
        """Make the buffer ``name`` with the device and type of ``like``."""
        self.register_buffer(name, like.new_full((), value), persistent=False)
        self.numbers[name] = value

    def set_number(self, name: str, value: float) -> None:
        """Fill it in place."""
        self.numbers[name] = value
        self.get_buffer(name).fill_(value)

    def leave_meta(self, device: torch.device) -> None:
        """Make those buffers on ``device`` that are on the meta device, where they have no values."""
        for name, value in self.numbers.items():
            buffer = self.get_buffer(name)
            if buffer.is_meta:
                self._buffers[name] = torch.full_like(buffer, value, device=device)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        for name, value in self.numbers.items():
            self.get_buffer(name).fill_(value)


class WeightBinarizer(Numbers):
    """Latent weights -> binary weights with the method's gradient."""

    made_by: str = ""  # the method's name; set by the layer, used in messages

    def code(self, weight: Tensor) -> BinaryWeight:
        """The discrete form of ``weight``."""
        raise NotImplementedError

    def surrogate(self, weight: Tensor) -> Tensor:
        """A differentiable function of ``weight``; its gradient is the method's gradient."""
        raise NotImplementedError

    def forward(self, weight: Tensor) -> Tensor:
        code, surrogate = self.code(weight), self.surrogate(weight)
        if not torch.compiler.is_compiling():
            check_shapes(self.title, code, weight, surrogate)
        return straight_through(code.dense(), surrogate)

    @property
    def title(self) -> str:
        """For messages: the class, and the method where a layer has one."""
        name = type(self).__name__
        return f"{name} of method {self.made_by!r}" if self.made_by else name

    def auxiliary_loss(self, weight: Tensor) -> Tensor | None:
        """The method's own loss term for this layer, weighted; None where it has none."""
        return None

    def latent_replaced(self, weight: Tensor) -> None:
        """Called when the latent weights were replaced by those of another network."""

    def start_epoch(self, epoch: int, epochs: int) -> None:
        """Called before epoch 0 .. epochs − 1, for schedules. A scheduled value is a buffer (``hold``) that is
        filled in place (``set_number``; a captured step reads it); it must not change ``code`` unless the buffer is
        persistent."""

    def after_step(self, weight: Tensor) -> None:
        """Change the latent weights in place after an optimizer step (clipping, centring)."""


def check_shapes(
    title: str, code: BinaryWeight, weight: Tensor, surrogate: Tensor | None = None
) -> None:
    """Refuse by name what broadcasting would turn into other weights. Looks at shapes alone, which costs no wait."""
    shape = tuple(weight.shape)
    bases, rows = len(code.signs), {1, len(weight)}
    ones = (1,) * (len(shape) - 1)
    parts = [("code().signs", code.signs, "(bases, *weight.shape)", {(bases, *shape)})]
    number = "(bases, out or 1, 1, ...)"
    parts += [("code().scales", code.scales, number, {(bases, r, *ones) for r in rows})]
    if code.offset is not None:
        parts += [("code().offset", code.offset, "(out or 1, 1, ...)", {(r, *ones) for r in rows})]
    if surrogate is not None:
        parts += [("surrogate()", surrogate, "weight.shape", {shape})]
    for what, tensor, meant, allowed in parts:
        if tuple(tensor.shape) not in allowed:
            raise ValueError(
                f"{title}: {what} has shape {tuple(tensor.shape)} and should have {meant}, which is "
                f"{' or '.join(map(str, sorted(allowed)))} for a weight of shape {shape}"
            )


class InputBinarizer(Numbers):
    """A layer's input -> what the binary layer multiplies with."""

    bits: int = 1  # bit planes of the result; 32 means the input stays float
    unit: bool = True  # every value is -1, 0 or +1, so that sums of products are integers
    fused_as: str | None = None  # "pm1" or "01": what kernels/sign_conv knows this binarizer as

    def deployed(self) -> InputBinarizer:
        """What a frozen layer keeps: the same function, without what only training needs."""
        return self

    def code(self) -> InputCode | None:
        """The discrete form of inputs in evaluation mode, which is what a packed network does. None: not
        stated, or the input stays float (``bits`` is 32). Packing compares it with ``forward``."""
        return None

    def start_epoch(self, epoch: int, epochs: int) -> None:
        """As of :class:`WeightBinarizer`."""

    def shifted(self, x: Tensor) -> Tensor:
        """What a fused kernel takes the sign of (``fused_as``)."""
        return x

    def output_scale(self, x: Tensor, layer: nn.Module) -> Tensor | None:
        """A factor for the layer's output that depends on the float input (XNOR-Net's K)."""
        return None


class FloatInput(InputBinarizer):
    """Weights-only methods leave the input as it is."""

    bits = 32
    unit = False

    def forward(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Method:
    """Base of all method configs. Options whose type is a ``Literal`` or ``float`` are checked here."""

    name: ClassVar[str] = ""

    @property
    def family(self) -> str:
        """What two models must share to exchange state dicts."""
        return str(self)

    @property
    def binary_downsample(self) -> bool:
        """Whether the paper binarizes ResNet's 1×1 down-sampling convolutions too."""
        return False

    @property
    def unfit_for_lns(self) -> str | None:
        """Why LNS cannot wrap this method; None where it can."""
        return None

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if hints[field.name] is float and (
                isinstance(value, bool) or not isinstance(value, Real)
            ):
                raise ValueError(f"{self.name}: {field.name}={value!r} should be a number")
            if typing.get_origin(hints[field.name]) is Literal:
                allowed = typing.get_args(hints[field.name])
                if value not in allowed:
                    raise ValueError(
                        f"{self.name}: {field.name}={value!r} is not one of "
                        + ", ".join(map(repr, allowed))
                    )

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        raise NotImplementedError

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        raise NotImplementedError

    def adapt(self, model: nn.Module) -> None:
        """Change what stands round the binary layers of a model just binarized: activations, shortcuts."""

    def latent_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer | None:
        """The method's own optimizer for the weights of binary layers; None: the recipe's. Its ``lr`` follows the
        recipe's schedule, unless a group has ``peak_lr`` None."""
        return None

    def options(self) -> dict[str, Any]:
        """Name and options as plain values, the inverse of :func:`resolve` (for JSON, YAML)."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = {k: v.options() if isinstance(v, Method) else v for k, v in values.items()}
        return {"name": self.name, **plain}

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


def check_whole(method: str, option: str, value: object, least: int, most: int) -> None:
    """Refuse an option that is no int from ``least`` to ``most``: 2.0 and True pass for one, until something counts."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"{method}: {option}={value!r} should be a whole number, {least} to {most}"
        )


def replace_prelus(model: nn.Module, make: Callable[[nn.PReLU], nn.Module]) -> None:
    """Put ``make(prelu)`` in the place of every nn.PReLU, for ``adapt``; one that has two names stays one module."""
    replaced: dict[nn.Module, nn.Module] = {}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if type(child) is nn.PReLU:
                setattr(module, name, replaced.setdefault(child, make(child)))


M = TypeVar("M", bound=Method)

_REGISTRY: dict[str, type[Method]] = {}


def register(name: str) -> Callable[[type[M]], type[M]]:
    """Class decorator: make a method known by ``name`` to recipes, ``binarize`` and the CLI."""

    def add(cls: type[M]) -> type[M]:
        there = _REGISTRY.get(name)
        if there is not None and not same_definition(there, cls):
            raise ValueError(f"method {name!r} is already registered by {there!r}")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return add


def names() -> list[str]:
    """The registered methods."""
    return sorted(_REGISTRY)


def config_class(name: str) -> type[Method]:
    """The config class registered as ``name``."""
    return _REGISTRY[known(name, _REGISTRY, "method")]


def get(name: str, **options: Any) -> Method:
    """The method ``name`` with ``options``; unknown names and options are refused by name."""
    cls = config_class(name)
    fields = [f.name for f in dataclasses.fields(cls)]
    for option in options:
        known(option, fields, f"option of method {name!r}")
    return cls(**options)


def resolve(method: str | Mapping[str, Any] | Method) -> Method:
    """A method from its name, from a mapping with ``name`` and options, or as it is."""
    if isinstance(method, Method):
        return method
    if isinstance(method, str):
        return get(method)
    if isinstance(method, Mapping) and isinstance(method.get("name"), str):
        return get(**method)
    raise TypeError(
        f"method={method!r} should be a name ({', '.join(names())}), "
        "a mapping with 'name' and options, or a Method"
    )
