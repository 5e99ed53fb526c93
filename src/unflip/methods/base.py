"""What a binarization method is: the classes every method derives from.

A method is a typed, frozen config (a dataclass) that builds two small modules for each layer:

- a :class:`WeightBinarizer`: latent weights -> binary weights. It states the *discrete form*
  (``code``: scales and signs) and a differentiable ``surrogate`` whose gradient replaces that of ``code``.
  Training, freezing, packing and cost all read ``code``, so they cannot disagree.
- an :class:`InputBinarizer`: the layer's input -> binary input.

``registry.py`` finds methods by name, ``pieces.py`` holds parts that several methods share.
A new method is one file in this folder: see ``docs/new-method.md``.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from unflip.ste import straight_through


class BinaryWeight(NamedTuple):
    """Discrete weights: weight = Σ_i scales[i] · signs[i] (+ offset)."""

    signs: Tensor  # (bases, *weight.shape), every element +1 or -1
    scales: Tensor  # (bases, out or 1, 1, ...): broadcasts over the weight
    offset: Tensor | None = (
        None  # (out or 1, 1, ...): one number per filter or layer, no extra bits
    )

    def dense(self) -> Tensor:
        """The weight as one float tensor, as a convolution takes it."""
        total = self.scales[0] * self.signs[0]
        for scale, signs in zip(self.scales[1:], self.signs[1:], strict=True):
            total = total + scale * signs
        return total if self.offset is None else total + self.offset


class InputCode(NamedTuple):
    """Discrete inputs: value = offset + Σ_p scales[p] · plane[p], planes 0 or 1 (docs/format.md, ``quantize``)."""

    thresholds: Tensor  # (steps, channels or 1), float32
    scales: tuple[float, ...]  # one per plane
    offset: float
    strict: tuple[bool, ...] = (False,)  # per step: reached at x > t (True) or at x >= t (False)
    coding: Literal["planes", "levels"] = (
        "planes"  # plane p is step p; or binary digit p of the number of steps reached
    )
    relative: bool = False  # thresholds are multiples of the sample's mean |x|
    k_map: bool = False  # ``output_scale`` is the mean |x| under the layer's kernel (XNOR-Net's K)


def can_be_read(x: Tensor) -> bool:
    """Whether Python may look at the values of ``x``: not while tracing, compiling or capturing, nor under vmap or
    FakeTensorMode."""
    if not isinstance(x, Tensor) or isinstance(x, FakeTensor) or torch.compiler.is_compiling():
        return False
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return x.device.type in ("cpu", "cuda") and not torch._C._are_functorch_transforms_active()


class Numbers(nn.Module):
    """A module that keeps numbers of the config and the epoch in buffers, where a captured step reads them.

    The buffers are not part of the state dict. Loading a state dict would therefore not repair them after
    ``to_empty``, which leaves memory uninitialized. So the values are also kept in a Python dict, and every load
    fills the buffers from it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, float] = {}

    def hold(self, name: str, value: float, like: Tensor) -> None:
        """Create the buffer ``name`` with the device and dtype of ``like``."""
        self.register_buffer(name, like.new_full((), value), persistent=False)
        self.numbers[name] = value

    def set_number(self, name: str, value: float) -> None:
        """Fill the buffer ``name`` in place."""
        self.numbers[name] = value
        self.get_buffer(name).fill_(value)

    def leave_meta(self, device: torch.device) -> None:
        """Create the buffers that are on the meta device, where they have no values, on ``device``."""
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
    binary: bool = True  # False: the weight stays float and has no code
    carried: tuple[str, ...] = ()  # tensors of its state that ``load_twin`` copies if they fit

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
        """The class, and the method if a layer has set it, for messages."""
        name = type(self).__name__
        return f"{name} of method {self.made_by!r}" if self.made_by else name

    def predict(self, weight: Tensor) -> Tensor | None:
        """The values whose signs the weights are, if a network predicts them (LNS: f(W)); otherwise None."""
        return None

    def auxiliary_loss(self, weight: Tensor) -> Tensor | None:
        """The method's weighted loss term for this layer, or None."""
        return None

    def gradient_branch(self, x: Tensor, layer: Any) -> tuple[Tensor, Tensor] | None:
        """In training: the layer's input again, and a term of its output that is zero and has only a gradient.

        None: there is no such term. SURGE's float branch is one.
        """
        return None

    def latent_replaced(self, weight: Tensor) -> None:
        """Called after the latent weights were replaced by those of another network."""

    def restored(self) -> None:
        """Called after the state was filled in place from a checkpoint, without ``load_state_dict``."""

    def start_epoch(self, epoch: int, epochs: int) -> None:
        """Called before epoch 0 .. epochs − 1, for schedules.

        Keep a scheduled value in a buffer (``hold``) and fill it in place (``set_number``): a captured step reads the
        buffer. ``code`` may depend on it only if the buffer is persistent.
        """

    def before_step(self, weight: Tensor) -> None:
        """Change gradients in place before an optimizer step: ``weight.grad``, and those of own parameters.

        They are the gradients of the whole batch, over all ranks, and any loss scale is divided out.
        """

    def after_step(self, weight: Tensor) -> None:
        """Change the latent weights in place after an optimizer step (clipping, centering)."""


class FloatWeight(WeightBinarizer):
    """The unchanged weight, for networks in which only the inputs are binary."""

    binary = False

    def code(self, weight: Tensor) -> BinaryWeight:
        raise ValueError(f"{self.title}: its weights are float, so they have no signs")

    def forward(self, weight: Tensor) -> Tensor:
        return weight


def check_shapes(
    title: str, code: BinaryWeight, weight: Tensor, surrogate: Tensor | None = None
) -> None:
    """Raise for shapes that broadcasting would silently turn into other weights. Reads shapes only, so a GPU does not
    wait."""
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
    """A layer's input -> the binary values the layer multiplies with."""

    bits: int = 1  # bit planes of the result; 32 means the input stays float
    unit: bool = True  # every value is -1, 0 or +1, so that sums of products are integers
    fused_as: str | None = None  # "pm1" or "01": which sign the fused GPU kernels may apply instead

    def deployed(self) -> InputBinarizer:
        """The binarizer a frozen layer keeps: the same function, without the parts only training needs."""
        return self

    def code(self) -> InputCode | None:
        """The discrete form of inputs in evaluation mode, which a packed network computes.

        None if the method does not state it, or if the input stays float (``bits`` is 32). Packing compares it with
        ``forward``.
        """
        return None

    def start_epoch(self, epoch: int, epochs: int) -> None:
        """As in :class:`WeightBinarizer`."""

    def shifted(self, x: Tensor) -> Tensor:
        """The values a fused kernel takes the sign of (``fused_as``)."""
        return x

    def output_scale(self, x: Tensor, layer: nn.Module) -> Tensor | None:
        """A factor for the layer's output that depends on the float input (XNOR-Net's K)."""
        return None


class FloatInput(InputBinarizer):
    """The unchanged input, for methods that binarize only the weights."""

    bits = 32
    unit = False

    def forward(self, x: Tensor) -> Tensor:
        return x


class ParameterGroup(NamedTuple):
    """Parameters that are trained at their own learning rate."""

    name: str
    parameters: list[nn.Parameter]
    lr: float | None  # None: the recipe's rate


class Preparation(Protocol):
    """What :meth:`Method.prepare` may use of the run that is about to start; implemented by ``unflip.train``."""

    @property
    def memo(self) -> dict[str, Any] | None:
        """Shared by runs that are prepared side by side, for results they have in common; None for a single run."""

    def say(self, text: str) -> None:
        """Show progress to a person; silent if the run is quiet."""

    def branches(self, count: int, epochs: int, rate: float) -> tuple[nn.Module, list[nn.Module]]:
        """The network this run started from, and ``count`` copies of it that were trained further.

        Each copy is trained for ``epochs`` at ``rate`` times the learning rates of the network's own recipe, with
        another order of the data. Raises ValueError if the run did not start from a finished run.
        """


@dataclass(frozen=True)
class Method:
    """Base of all method configs. It checks options whose type is a ``Literal`` or a plain number or bool."""

    name: ClassVar[str] = ""
    from_scratch: ClassVar[bool] = True  # False: it corrects a network that another method trained

    @property
    def family(self) -> str:
        """Two models can exchange state dicts if their methods have the same family."""
        return str(self)

    @property
    def binary_downsample(self) -> bool:
        """Whether the paper binarizes ResNet's 1×1 down-sampling convolutions too."""
        return False

    @property
    def unfit_for_lns(self) -> str | None:
        """Why LNS cannot wrap this method; None if it can."""
        return None

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            problem = _option_problem(value, hints[field.name])
            if problem:
                raise ValueError(f"{self.name}: {field.name}={value!r} {problem}")

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        raise NotImplementedError

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        raise NotImplementedError

    def adapt(self, model: nn.Module) -> None:
        """Change the modules around the binary layers of a model just binarized: activations, shortcuts."""

    def needs_start(self) -> str | None:
        """Why a recipe with these options must name a ``start``; None if it need not."""
        return None

    def prepare(self, model: nn.Module, preparation: Preparation) -> None:
        """Called once per run, after the first weights were loaded and before the first epoch."""

    def parameter_groups(self, model: nn.Module) -> list[ParameterGroup]:
        """Parameters with a learning rate of the method's own. All others are trained as the recipe says."""
        return []

    def latent_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer | None:
        """The method's optimizer for the weights of binary layers; None: the recipe's.

        Its ``lr`` follows the recipe's schedule, unless a group has ``peak_lr`` None.
        """
        return None

    def options(self) -> dict[str, Any]:
        """Name and options as plain values for JSON and YAML; the inverse of :func:`~unflip.methods.resolve`."""
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


def _option_problem(value: object, hint: Any) -> str | None:
    """What is wrong with an option's value; None if it fits ``hint``, or if ``hint`` is another kind of type."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        optional = len(kinds) < len(typing.get_args(hint))
        if len(kinds) > 1 or (optional and value is None):
            return None
        problem = _option_problem(value, kinds[0])
        return f"{problem} or None" if problem else None
    if typing.get_origin(hint) is Literal:
        allowed = typing.get_args(hint)
        return None if value in allowed else f"is not one of {', '.join(map(repr, allowed))}"
    if hint is bool:
        return None if isinstance(value, bool) else "should be true or false"
    if hint is int:  # 2.0 and True would pass as numbers until something counts with them
        return None if type(value) is int else "should be a whole number"
    if hint is float:
        number = isinstance(value, Real) and not isinstance(value, bool)
        return None if number else "should be a number"
    return None
