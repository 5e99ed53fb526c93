"""Parts that several methods are made of: scales, plain binarizers, discrete forms of inputs, changes to a network."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from unflip.methods.base import BinaryWeight, InputBinarizer, InputCode, WeightBinarizer
from unflip.ste import clipped_sign, sign, straight_through
from unflip.vectorized import clip

# why methods that change the gradients of latent weights are unfit for LNS
MAPPING_DECIDES_SIGNS = (
    "it changes the gradients of latent weights whose signs are the binary weights, and in LNS the mapping network "
    "decides the signs"
)

# --- scales and moments of weights ----------------------------------------------------------------------


def layer_mean(weight: Tensor) -> Tensor:
    """mean |w| of the whole layer, shaped as ``BinaryWeight.scales``: (1, 1, 1, ...)."""
    return weight.abs().mean().view(1, *[1] * weight.dim())


def filter_mean(weight: Tensor) -> Tensor:
    """mean |w| of each filter, shaped as ``BinaryWeight.scales``: (1, filters, 1, ...)."""
    return weight.abs().flatten(1).mean(1).view(1, -1, *[1] * (weight.dim() - 1))


def centered(weight: Tensor) -> Tensor:
    """Each filter minus its mean. A filter of one weight is unchanged, because it would become 0."""
    if weight[0].numel() == 1:
        return weight
    return weight - weight.mean(tuple(range(1, weight.dim())), keepdim=True)


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32, or in its own dtype if that is wider: squares and sums overflow in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sample_dims(layer: nn.Module) -> tuple[int, ...]:
    """The dimensions of one sample in the layer's input."""
    return (-3, -2, -1) if isinstance(layer, nn.Conv2d) else (-1,)


# --- binarizers: the gradient is the identity, unless the name says otherwise ---------------------------


class PlainSign(WeightBinarizer):
    """Q = sign(W), ∂L/∂W = ∂L/∂Q; after each step W is clipped to [−1, 1]."""

    def code(self, weight: Tensor) -> BinaryWeight:
        return BinaryWeight(sign(weight)[None], weight.new_ones([1] * (weight.dim() + 1)))

    def surrogate(self, weight: Tensor) -> Tensor:
        return weight

    @torch.no_grad()
    def after_step(self, weight: Tensor) -> None:
        weight.clamp_(-1, 1)


class LayerMeanSign(WeightBinarizer):
    """Q = E · sign(W), E = mean |W| of the layer, not differentiated; ∂L/∂W = ∂L/∂Q."""

    def code(self, weight: Tensor) -> BinaryWeight:
        return BinaryWeight(sign(weight)[None], layer_mean(weight))

    def surrogate(self, weight: Tensor) -> Tensor:
        return weight


class FilterMeanSign(WeightBinarizer):
    """Q = α · sign(W), α = mean |W| of each filter, not differentiated; ∂L/∂W = ∂L/∂Q."""

    def code(self, weight: Tensor) -> BinaryWeight:
        return BinaryWeight(sign(weight)[None], filter_mean(weight))

    def surrogate(self, weight: Tensor) -> Tensor:
        return weight


class ClippedFilterMeanSign(FilterMeanSign):
    """FilterMeanSign with the clipped gradient: ∂L/∂W = ∂L/∂Q · 1[|W| ≤ 1]."""

    def surrogate(self, weight: Tensor) -> Tensor:
        return clip(weight, -1, 1)


class ClippedSign(InputBinarizer):
    """B = sign(x), ∂L/∂x = ∂L/∂B · 1[|x| ≤ 1], the gradient of hard tanh."""

    fused_as = "pm1"

    def forward(self, x: Tensor) -> Tensor:
        return clipped_sign(x)

    def code(self) -> InputCode:
        return sign_code()


class ApproxSign(InputBinarizer):
    """B = sign(x), ∂L/∂x = ∂L/∂B · max(0, 2 − 2|x|), Bi-Real Net's approximation."""

    def forward(self, x: Tensor) -> Tensor:
        return straight_through(sign(x), parabolic_sign(x))

    def code(self) -> InputCode:
        return sign_code()


def parabolic_sign(x: Tensor) -> Tensor:
    """2x − x|x| on [−1, 1] and ±1 outside. Its derivative is max(0, 2 − 2|x|)."""
    c = clip(x, -1, 1)
    return 2 * c - c * c.abs()


# --- discrete forms of inputs ---------------------------------------------------------------------------


def sign_code(thresholds: Tensor | None = None) -> InputCode:
    """sign(x − threshold): +1 from the threshold on, −1 below. The default threshold is 0."""
    return InputCode(torch.zeros(1, 1) if thresholds is None else thresholds, (2.0,), -1.0)


@torch.no_grad()
def one_step_code(binarizer: Callable[[Tensor], Tensor]) -> InputCode:
    """The code of a function with one step, up or down, at the same place for all channels."""
    largest = torch.finfo(torch.float32).max
    low, high = (float(binarizer(torch.tensor([[x]]))) for x in (-largest, largest))
    if low == high:
        return InputCode(torch.zeros(1, 1), (0.0,), low)
    step = least_float(lambda x: binarizer(x) == high, torch.zeros(1, 1))
    return InputCode(step, (high - low,), low)


@torch.no_grad()
def least_float(reached: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The least float32 at which ``reached`` is True, for each element of ``like``.

    ``reached`` must be False below some value and True above it. The search is a bisection over all float32 numbers:
    an expression such as β·x − b rounds, so its step is not exactly at b / β.
    """
    largest = int(torch.tensor(torch.finfo(torch.float32).max).view(torch.int32))
    low = torch.full(like.shape, -largest, dtype=torch.int64)
    high = torch.full(like.shape, largest, dtype=torch.int64)
    for _ in range(33):
        middle = torch.div(low + high, 2, rounding_mode="floor")
        above = reached(_float_of_rank(middle))
        low, high = torch.where(above, low, middle + 1), torch.where(above, middle, high)
        low = torch.minimum(low, high)
    return _float_of_rank(high)


def _float_of_rank(rank: Tensor) -> Tensor:
    """The float32 numbers in their order, counted from 0 for 0."""
    size = rank.abs().to(torch.int32).view(torch.float32)
    return torch.where(rank < 0, -size, size)


# --- options, and changes to a network ------------------------------------------------------------------


def check_whole(method: str, option: str, value: object, least: int, most: int) -> None:
    """Raise for an option that is not an int in ``least`` .. ``most``; call it before ``super().__post_init__()``."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"{method}: {option}={value!r} should be a whole number, {least} to {most}"
        )


def warn_of_missing_hook(binarizer: WeightBinarizer, so: str) -> None:
    """Warn in ``after_step`` of a loop that does not call ``unflip.before_step``; ``so`` is the consequence."""
    warnings.warn(
        f"{binarizer.made_by}: unflip.after_step was called without unflip.before_step, so {so}. Call "
        "unflip.before_step(model) before optimizer.step() (docs/training.md).",
        stacklevel=5,  # the caller of unflip.after_step, beyond torch.no_grad
    )


class Carry(nn.Identity):
    """The point where the shortcut of a residual network joins. It does nothing; a method may replace it by a gate."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels


def replace_prelus(model: nn.Module, make: Callable[[nn.PReLU], nn.Module]) -> None:
    """Replace every nn.PReLU by ``make(prelu)``, for ``Method.adapt``. A module with two names stays one module."""
    replaced: dict[nn.Module, nn.Module] = {}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if type(child) is nn.PReLU:
                setattr(module, name, replaced.setdefault(child, make(child)))
