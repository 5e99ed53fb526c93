"""Arithmetic and activations, element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from unflip.packing.convert import Converter, Handler, Ref, numbers
from unflip.packing.file import Array
from unflip.packing.ir import Fields, affine, clamp, finite, prelu
from unflip.packing.ops.registry import HANDLERS, handles


@handles("relu")
def relu(c: Converter, out: Tensor, x: Ref) -> Ref:
    return c.map(x, out, clamp(0.0, None))


@handles("relu6")
def relu6(c: Converter, out: Tensor, x: Ref) -> Ref:
    return c.map(x, out, clamp(0.0, 6.0))


@handles("hardtanh")
def hardtanh(c: Converter, out: Tensor, x: Ref, low: float = -1.0, high: float = 1.0) -> Ref:
    return clamp_(c, out, x, low, high)


@handles("clamp", "clip")
def clamp_(c: Converter, out: Tensor, x: Ref, min: Any = None, max: Any = None) -> Ref:
    low, high = _bound(c, min, -np.inf), _bound(c, max, np.inf)
    if low is not None and high is not None and low > high:  # torch: everything is the upper bound
        low = high
    return c.map(x, out, clamp(low, high))


@handles("clamp_min")
def clamp_min(c: Converter, out: Tensor, x: Ref, min: Any) -> Ref:
    return c.map(x, out, clamp(_bound(c, min, -np.inf), None))


@handles("clamp_max")
def clamp_max(c: Converter, out: Tensor, x: Ref, max: Any) -> Ref:
    return c.map(x, out, clamp(None, _bound(c, max, np.inf)))


def _bound(c: Converter, bound: Any, none: float) -> float | None:
    """A bound of ``none``, the infinity that bounds nothing, is omitted: the file cannot store infinities."""
    bound = c.constant(bound, "bound")
    if isinstance(bound, Tensor) and bound.numel() != 1:
        raise c.refuse("its bound is a tensor; only a single number can be packed")
    if bound is None:
        return None
    value = float(bound)
    if finite(np.array(value)):
        return value
    if value * none > 0:
        return None
    raise c.refuse(f"its bound is {value}; it must be a finite number")


@handles("prelu")
def prelu_(c: Converter, out: Tensor, x: Ref, weight: Any) -> Ref:
    return c.map(x, out, prelu(numbers(c.constant(weight, "slope").flatten())))


@handles("leaky_relu")
def leaky_relu(c: Converter, out: Tensor, x: Ref, slope: float = 0.01) -> Ref:
    return c.map(x, out, prelu(np.array([float(slope)])))


@handles("abs")
def abs_(c: Converter, out: Tensor, x: Ref) -> Ref:
    return c.map(x, out, prelu(np.array([-1.0])))


@handles("neg")
def neg(c: Converter, out: Tensor, x: Ref) -> Ref:
    return c.map(x, out, affine(np.array([-1.0]), None))


@handles("hardsigmoid")
def hardsigmoid(c: Converter, out: Tensor, x: Ref) -> Ref:
    return c.map(x, out, affine(np.array([1 / 6]), np.array([0.5])), clamp(0.0, 1.0))


@handles("hardswish")
def hardswish(c: Converter, out: Tensor, x: Ref) -> Ref:
    return c.map(x, out, {"step": "mul", "value": hardsigmoid(c, out, x).value})


@handles("square")
def square(c: Converter, out: Tensor, x: Ref) -> Ref:
    return c.map(x, out, {"step": "mul", "value": x.value})


@handles("pow")
def pow_(c: Converter, out: Tensor, x: Any, exponent: Any) -> Ref:
    if not isinstance(x, Ref) or exponent != 2:
        raise c.refuse("only x ** 2 can be packed")
    return square(c, out, x)


@handles("add")
def add(c: Converter, out: Tensor, a: Any, b: Any, alpha: float = 1) -> Ref:
    if alpha != 1:
        b = (
            c.map(b, b.tensor, affine(np.array([float(alpha)]), None))
            if isinstance(b, Ref)
            else b * alpha
        )
    if isinstance(a, Ref) and isinstance(b, Ref):
        return _two_slopes(c, out, a, b, 1.0) or _sum(c, out, a, b)
    x, constant = (a, b) if isinstance(a, Ref) else (b, a)
    return c.map(x, out, affine(None, c.vector(constant, x)))


@handles("sub")
def sub(c: Converter, out: Tensor, a: Any, b: Any, alpha: float = 1) -> Ref:
    if isinstance(a, Ref) and isinstance(b, Ref) and alpha == 1:
        slopes = _two_slopes(c, out, a, b, -1.0)
        if slopes is not None:
            return slopes
    return add(c, out, a, b, alpha=-alpha)


@handles("rsub")
def rsub(c: Converter, out: Tensor, a: Any, b: Any, alpha: float = 1) -> Ref:
    return add(c, out, b, a, alpha=-alpha)


def _sum(c: Converter, out: Tensor, a: Ref, b: Ref) -> Ref:
    if a.tensor.shape != b.tensor.shape:
        raise c.refuse(
            f"it adds {tuple(a.tensor.shape)} and {tuple(b.tensor.shape)}; both must have the same shape"
        )
    return c.map(a, out, {"step": "add", "value": b.value})


@handles("mul")
def mul(c: Converter, out: Tensor, a: Any, b: Any) -> Ref:
    if isinstance(a, Ref) and isinstance(b, Ref):
        return _product(c, out, a, b)
    x, constant = (a, b) if isinstance(a, Ref) else (b, a)
    return c.map(x, out, affine(c.vector(constant, x), None))


def _product(c: Converter, out: Tensor, a: Ref, b: Ref) -> Ref:
    x, factor = (a, b) if a.tensor.shape == out.shape else (b, a)
    (channels, height, width), (g, h, w) = c.shape(x.tensor), c.shape(factor.tensor)
    fits = (h, w) == (height, width) or (g, h, w) == (channels, 1, 1)
    if x.tensor.dim() != factor.tensor.dim() or x.tensor.shape != out.shape or not fits:
        raise c.refuse(
            f"it multiplies {tuple(a.tensor.shape)} by {tuple(b.tensor.shape)}; for x of (N, C, H, W) a factor must "
            "be (N, g, H, W) with g that divides C, or (N, C, 1, 1)"
        )
    return c.map(x, out, {"step": "mul", "value": factor.value})


@handles("div")
def div(c: Converter, out: Tensor, a: Any, b: Any, rounding_mode: str | None = None) -> Ref:
    if not isinstance(a, Ref) or isinstance(b, Ref) or rounding_mode is not None:
        raise c.refuse("only division by a constant can be packed")
    with np.errstate(divide="ignore"):
        scale = 1 / c.vector(b, a)
    if not finite(scale):
        raise c.refuse("it divides by zero; the divisor must not be 0")
    return c.map(a, out, affine(scale, None))


def _two_slopes(c: Converter, out: Tensor, a: Ref, b: Ref, side: float) -> Ref | None:
    """p · relu(x) ± n · relu(−x), as in AdaBin's Maxout, is p times a PReLU with slope ∓n / p."""
    up, down = _ramp(c, a.value, negated=False), _ramp(c, b.value, negated=True)
    if up is None or down is None or up[0] != down[0]:
        return None
    positive, negative = up[1], -side * down[1]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        slope = negative / positive
    if not finite(slope):
        return None
    base = Ref(up[0], out)
    return c.map(base, out, prelu(slope), affine(positive * np.ones_like(slope), None))


def _ramp(c: Converter, value: int, negated: bool) -> tuple[int, Array] | None:
    """(x, s) if the value is s · relu(x), or s · relu(−x)."""

    def step_of(kind: str) -> Fields | None:
        op = c.ops[value - 1] if value else None
        found = (
            op.kind == "map" and len(op.steps) == 1 and op.steps[0]["step"] == kind if op else False
        )
        return op.steps[0] if op and found else None

    scale = np.ones(1)
    last = step_of("affine")
    if last is not None and "shift" not in last:
        scale, value = last["scale"], c.ops[value - 1].inputs[0]
    if step_of("clamp") != clamp(0.0, None):
        return None
    value = c.ops[value - 1].inputs[0]
    if negated:
        first = step_of("affine")
        if first is None or "shift" in first or not (first["scale"] == -1).all():
            return None
        value = c.ops[value - 1].inputs[0]
    return value, scale


def _activation(function: str) -> Handler:
    def handler(c: Converter, out: Tensor, x: Ref) -> Ref:
        return c.emit("curve", [x], out, function=function)

    return handler


HANDLERS.update({name: _activation(name) for name in ("sigmoid", "tanh", "silu", "mish")})


@handles("gelu")
def gelu(c: Converter, out: Tensor, x: Ref, approximate: str = "none") -> Ref:
    return c.emit("curve", [x], out, function="gelu_tanh" if approximate == "tanh" else "gelu")


@handles("elu")
def elu(
    c: Converter, out: Tensor, x: Ref, alpha: float = 1, scale: float = 1, inner: float = 1
) -> Ref:
    """scale · x above 0, scale · alpha · (e^(inner · x) − 1) below: an elu with alpha = 1, then a PReLU."""
    if inner != 1:
        raise c.refuse(f"input_scale={inner} is not supported; only 1 can be packed")
    plain = c.emit("curve", [x], out, function="elu")
    steps = [prelu(np.array([float(alpha)]))] if alpha != 1 else []
    steps += [affine(np.array([float(scale)]), None)] if scale != 1 else []
    return c.map(plain, out, *steps) if steps else plain


@handles("celu")
def celu(c: Converter, out: Tensor, x: Ref, alpha: float = 1) -> Ref:
    scaled = c.map(x, out, affine(np.array([1 / alpha]), None))
    return c.map(elu(c, out, scaled), out, affine(np.array([float(alpha)]), None))


@handles("selu")
def selu(c: Converter, out: Tensor, x: Ref) -> Ref:
    return elu(c, out, x, 1.6732632423543772, 1.0507009873554805)


@handles("clone", "lift_fresh_copy")
def copied(c: Converter, out: Tensor, x: Ref, *rest: Any, **named: Any) -> Ref:
    """A separate value, so that an operation in place does not change x."""
    return c.map(x, out)


@handles("detach", "alias", "contiguous")
def same(c: Converter, out: Tensor, x: Ref, *rest: Any, **named: Any) -> Ref:
    return c.alias(x, out)


@handles("to", "_to_copy", "type_as")
def to(c: Converter, out: Tensor, x: Ref, *rest: Any, **named: Any) -> Ref:
    return c.alias(x, out)


@handles("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def dropout(c: Converter, out: Tensor, x: Ref, p: float, train: bool) -> Ref:
    if train and p > 0:
        raise c.refuse(
            "it drops values at random even in evaluation mode; pass training=self.training"
        )
    return c.alias(x, out)
