"""One function for each operation that torch has and the format knows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unflip.packing.binary import binary_layer
from unflip.packing.convert import Converter, Handler, Ref, numbers
from unflip.packing.file import Array
from unflip.packing.ir import Fields, affine, clamp, conv_fields, finite, prelu
from unflip.packing.transposed import Axis, axis, spread

HANDLERS: dict[str, Handler] = {"binary_layer": binary_layer}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Decorator: what is called for the operations of these names."""

    def add(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, function))
        return function

    return add


# Products and norms


@handles("conv2d")
def conv2d(
    c: Converter,
    out: Tensor,
    x: Ref,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Ref:
    weight = c.constant(weight, "weight")
    dilation, kernel = _pair(dilation), weight.shape[2:]
    if isinstance(padding, str):
        total = [
            d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)
        ]
        sides = [total[0] // 2, total[1] // 2, total[0] - total[0] // 2, total[1] - total[1] // 2]
    else:
        sides = _pair(padding) * 2
    fields = conv_fields(weight.shape, _pair(stride), sides, dilation, groups)
    return _with_bias(c, out, [x], fields, weight, bias)


@handles("conv_transpose2d")
def conv_transpose2d(
    c: Converter,
    out: Tensor,
    x: Ref,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Ref:
    weight = c.constant(weight, "weight")
    sizes = zip(
        c.shape(x.tensor)[1:],
        c.shape(out)[1:],  # the padding of the output is in it
        weight.shape[2:],
        _pair(stride),
        _pair(padding),
        _pair(dilation),
        strict=True,
    )
    high, wide = (axis(*along) for along in sizes)
    kernel = spread(weight, groups, high, wide)
    sides = [high.before, wide.before, high.after, wide.after]
    fields = conv_fields(kernel.shape, [1, 1], sides, [high.dilation, wide.dilation], groups)
    phases = c.emit(
        "conv", [x], (len(kernel), high.rows, wide.rows), **fields, weight=_array(kernel)
    )
    return _biased(c, out, _interleaved(c, out, phases, high, wide), bias)


def _interleaved(c: Converter, out: Tensor, x: Ref, high: Axis, wide: Axis) -> Ref:
    """The phases' pixels side by side, and of these the output's."""
    channels, height, width = c.shape(out)
    factor = [high.stride, wide.stride]
    size = high.rows * high.stride, wide.rows * wide.stride
    if factor != [1, 1]:
        x = c.emit("pixel_shuffle", [x], (channels, *size), factor=factor)
    if size != (height, width):
        stop = [channels, high.crop + height, wide.crop + width]
        start = [0, high.crop, wide.crop]
        x = c.emit("slice", [x], (channels, height, width), start=start, stop=stop, step=[1, 1, 1])
    return x


@handles("conv_transpose1d", "conv_transpose3d")
def other_conv_transpose(c: Converter, out: Tensor, x: Ref, *rest: Any, **named: Any) -> Ref:
    raise c.refuse("nn.ConvTranspose2d, of images, is there")


@handles("linear")
def linear(c: Converter, out: Tensor, x: Ref, weight: Any, bias: Any = None) -> Ref:
    weight = c.constant(weight, "weight")
    if x.tensor.dim() != 2:
        raise c.refuse(
            f"its input has shape {tuple(x.tensor.shape)}; linear layers see vectors (N, F)"
        )
    fields = conv_fields([*weight.shape, 1, 1])
    return _with_bias(c, out, [x], fields, weight[:, :, None, None], bias)


@handles("matmul", "mm")
def matmul(c: Converter, out: Tensor, x: Any, weight: Any) -> Ref:
    if not isinstance(x, Ref) or isinstance(weight, Ref) or weight.dim() != 2:
        raise c.refuse("only a vector times a constant matrix is there")
    return linear(c, out, x, weight.T)


def _with_bias(
    c: Converter, out: Tensor, x: list[Ref], fields: Fields, weight: Tensor, bias: Any
) -> Ref:
    return _biased(c, out, c.emit("conv", x, out, **fields, weight=_array(weight)), bias)


def _array(weight: Tensor) -> Array:
    return weight.detach().to(torch.float32).contiguous().numpy()


def _biased(c: Converter, out: Tensor, result: Ref, bias: Any) -> Ref:
    bias = c.constant(bias, "bias")
    return result if bias is None else c.map(result, out, affine(None, numbers(bias)))


@handles("batch_norm")
def batch_norm(
    c: Converter,
    out: Tensor,
    x: Ref,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool = False,
) -> Ref:
    if training or mean is None:
        raise c.refuse(
            "it takes mean and variance of the batch; only running statistics can be packed"
        )
    scale = 1 / np.sqrt(numbers(var) + eps)
    scale = scale if weight is None else scale * numbers(weight)
    shift = -numbers(mean) * scale
    shift = shift if bias is None else shift + numbers(bias)
    if not finite(scale, shift):
        raise c.refuse("its parameters or statistics have NaN or infinity")
    return c.map(x, out, affine(scale, shift))


@handles("group_norm")
def group_norm(
    c: Converter,
    out: Tensor,
    x: Ref,
    groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Ref:
    return _normalized(c, out, x, groups, weight, bias, eps)


@handles("instance_norm")
def instance_norm(
    c: Converter,
    out: Tensor,
    x: Ref,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn: bool = False,
) -> Ref:
    if not use_input_stats:
        return batch_norm(c, out, x, weight, bias, mean, var, False, momentum, eps)
    return _normalized(c, out, x, x.tensor.shape[1], weight, bias, eps)


@handles("layer_norm")
def layer_norm(
    c: Converter,
    out: Tensor,
    x: Ref,
    shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Ref:
    if list(shape) != list(x.tensor.shape[1:]):
        raise c.refuse(
            f"over the last dimensions, {list(shape)}, of {tuple(x.tensor.shape)}; over all but the batch is there"
        )
    return _normalized(c, out, x, 1, weight, bias, eps)


def _normalized(
    c: Converter, out: Tensor, x: Ref, groups: int, weight: Any, bias: Any, eps: float
) -> Ref:
    """By mean and variance of runs of channels; then what was learned, one number a channel."""
    if eps <= 0:
        raise c.refuse(f"eps={eps}; above 0 is there")
    plain = c.emit("normalize", [x], out, groups=int(groups), epsilon=float(eps))
    if weight is None and bias is None:
        return plain
    return c.map(plain, out, affine(_learned(c, x, weight), _learned(c, x, bias)))


def _learned(c: Converter, x: Ref, vector: Any) -> Array | None:
    """(C) goes along the channels; LayerNorm's of a whole sample, (C, H, W), stays as it is."""
    if vector is None:
        return None
    vector = c.constant(vector, "weight or bias")
    along = vector.reshape(-1, *[1] * (x.tensor.dim() - 2)) if vector.dim() == 1 else vector
    return c.vector(along, x)


# Element by element


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
    return c.map(x, out, clamp(_bound(c, min, -np.inf), _bound(c, max, np.inf)))


@handles("clamp_min")
def clamp_min(c: Converter, out: Tensor, x: Ref, min: Any) -> Ref:
    return c.map(x, out, clamp(_bound(c, min, -np.inf), None))


@handles("clamp_max")
def clamp_max(c: Converter, out: Tensor, x: Ref, max: Any) -> Ref:
    return c.map(x, out, clamp(None, _bound(c, max, np.inf)))


def _bound(c: Converter, bound: Any, none: float) -> float | None:
    """``none`` is the infinity that bounds nothing; the file has no infinity, so it is left out."""
    bound = c.constant(bound, "bound")
    if isinstance(bound, Tensor) and bound.numel() != 1:
        raise c.refuse("its bound is a tensor; one number is there")
    if bound is None:
        return None
    value = float(bound)
    if finite(np.array(value)):
        return value
    if value * none > 0:
        return None
    raise c.refuse(f"its bound is {value}; a number is there")


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
        raise c.refuse("only squares are there")
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
            f"it adds {tuple(a.tensor.shape)} and {tuple(b.tensor.shape)}; both should have one shape"
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
        raise c.refuse(f"it multiplies {tuple(a.tensor.shape)} with {tuple(b.tensor.shape)}")
    return c.map(x, out, {"step": "mul", "value": factor.value})


@handles("div")
def div(c: Converter, out: Tensor, a: Any, b: Any, rounding_mode: str | None = None) -> Ref:
    if not isinstance(a, Ref) or isinstance(b, Ref) or rounding_mode is not None:
        raise c.refuse("only division by a constant is there")
    with np.errstate(divide="ignore"):
        scale = 1 / c.vector(b, a)
    if not finite(scale):
        raise c.refuse("it divides by zero")
    return c.map(a, out, affine(scale, None))


def _two_slopes(c: Converter, out: Tensor, a: Ref, b: Ref, side: float) -> Ref | None:
    """p · relu(x) ± n · relu(−x), as AdaBin's Maxout writes it: a PReLU of slope ∓n / p, times p."""
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


def _curve(function: str) -> Handler:
    def handler(c: Converter, out: Tensor, x: Ref) -> Ref:
        return c.emit("curve", [x], out, function=function)

    return handler


HANDLERS.update({name: _curve(name) for name in ("sigmoid", "tanh", "silu", "mish")})


@handles("gelu")
def gelu(c: Converter, out: Tensor, x: Ref, approximate: str = "none") -> Ref:
    return c.emit("curve", [x], out, function="gelu_tanh" if approximate == "tanh" else "gelu")


@handles("elu")
def elu(
    c: Converter, out: Tensor, x: Ref, alpha: float = 1, scale: float = 1, inner: float = 1
) -> Ref:
    """scale · x above 0, and scale · alpha · (e^(inner · x) − 1) below: what is below has a slope of its own."""
    if inner != 1:
        raise c.refuse(f"input_scale={inner}; 1 is there")
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


# Pools


@handles("max_pool2d")
def max_pool2d(
    c: Converter,
    out: Tensor,
    x: Ref,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil: bool = False,
) -> Ref:
    if _pair(dilation) != [1, 1]:
        raise c.refuse(f"dilation={dilation}; the runtime's max pool has none")
    kernel = _pair(kernel)
    fields = {
        "kernel": kernel,
        "stride": _pair(stride) if stride else kernel,
        "padding": _pair(padding),
    }
    return c.emit("max_pool", [x], out, **fields, ceil=bool(ceil))


@handles("avg_pool2d")
def avg_pool2d(
    c: Converter,
    out: Tensor,
    x: Ref,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil: bool = False,
    count_padding: bool = True,
    divisor: int | None = None,
) -> Ref:
    if divisor is not None:
        raise c.refuse(f"divisor_override={divisor} is not there")
    kernel = _pair(kernel)
    fields = {
        "kernel": kernel,
        "stride": _pair(stride) if stride else kernel,
        "padding": _pair(padding),
    }
    return c.emit(
        "avg_pool", [x], out, **fields, ceil=bool(ceil), count_padding=bool(count_padding)
    )


@handles("adaptive_avg_pool2d")
def adaptive_avg_pool2d(c: Converter, out: Tensor, x: Ref, size: Any) -> Ref:
    if tuple(out.shape[2:]) == (1, 1):
        return c.emit("mean", [x], out)
    window = _windows(c, x, out)
    return avg_pool2d(c, out, x, window)


@handles("adaptive_max_pool2d")
def adaptive_max_pool2d(c: Converter, out: tuple[Tensor, Tensor], x: Ref, size: Any) -> list[Any]:
    window = _windows(c, x, out[0])
    return [c.stamped(max_pool2d(c, out[0], x, window), out[0]), None]


def _windows(c: Converter, x: Ref, out: Tensor) -> list[int]:
    inside, outside = x.tensor.shape[2:], out.shape[2:]
    if any(i % o for i, o in zip(inside, outside, strict=True)):
        raise c.refuse(
            f"it makes {tuple(outside)} of {tuple(inside)} pixels with windows of several sizes; "
            "a whole number of pixels each is there"
        )
    return [i // o for i, o in zip(inside, outside, strict=True)]


@handles("mean")
def mean(
    c: Converter, out: Tensor, x: Ref, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> Ref:
    if x.tensor.dim() != 4 or _dims(x, dims) != [2, 3]:
        raise c.refuse(f"a mean over dimensions {dims}; over all pixels, (2, 3), is there")
    return c.emit("mean", [x], out)


@handles("amax")
def amax(c: Converter, out: Tensor, x: Ref, dims: Any = (), keepdim: bool = False) -> Ref:
    if x.tensor.dim() != 4 or _dims(x, dims) != [2, 3]:
        raise c.refuse(f"a maximum over dimensions {dims}; over all pixels, (2, 3), is there")
    return max_pool2d(c, out, x, list(x.tensor.shape[2:]))


@handles("softmax", "_softmax")
def softmax(c: Converter, out: Tensor, x: Ref, dim: int, *rest: Any) -> Ref:
    if _dims(x, [dim]) != [1]:
        raise c.refuse(f"over dimension {dim}; over the channels, 1, is there")
    return c.emit("softmax", [x], out)


@handles("log_softmax", "_log_softmax")
def log_softmax(c: Converter, out: Tensor, x: Ref, dim: int, *rest: Any) -> Ref:
    if _dims(x, [dim]) != [1]:
        raise c.refuse(f"over dimension {dim}; over the channels, 1, is there")
    return c.emit("log_softmax", [x], out)


# Shapes


@handles("upsample_nearest2d", "_upsample_nearest_exact2d")
def upsample(c: Converter, out: Tensor, x: Ref, *rest: Any, **named: Any) -> Ref:
    inside, outside = x.tensor.shape[2:], out.shape[2:]
    if any(o % i for i, o in zip(inside, outside, strict=True)):
        raise c.refuse(
            f"it makes {tuple(outside)} of {tuple(inside)} pixels; a whole number of times as many is there"
        )
    factor = [o // i for i, o in zip(inside, outside, strict=True)]
    return c.emit("upsample", [x], out, factor=factor)


@handles("upsample_bilinear2d")
def resize(
    c: Converter, out: Tensor, x: Ref, size: Any, align_corners: bool, *factors: Any, **named: Any
) -> Ref:
    given = torch.utils._pytree.tree_leaves([factors, named])  # one list, or two numbers
    if not align_corners:
        _check_factors(c, x, out, [factor for factor in given if factor is not None])
    if out.shape == x.tensor.shape:
        return c.map(x, out)
    return c.emit("resize", [x], out, size=list(out.shape[2:]), align_corners=bool(align_corners))


def _check_factors(c: Converter, x: Ref, out: Tensor, factors: list[float]) -> None:
    """Pixels lie ``factor`` apart, and what the size's rounding cuts off is missing at the end; the file has sizes."""
    for factor, i, o in zip(factors, x.tensor.shape[2:], out.shape[2:], strict=False):
        if not math.isclose(i * factor, o, rel_tol=1e-9):
            raise c.refuse(
                f"scale_factor={factor:g} makes {o} of {i} pixels, not {i * factor:g}; a factor that gives a whole "
                "number, size=... or recompute_scale_factor=True is there"
            )


@handles(
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_lanczos2d_aa",
    "upsample_linear1d",
    "upsample_trilinear3d",
    "upsample_nearest1d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact3d",
)
def other_upsample(c: Converter, out: Tensor, x: Ref, *rest: Any, **named: Any) -> Ref:
    raise c.refuse("images are resized with mode='bilinear' or 'nearest', without antialias")


@handles("pixel_shuffle")
def pixel_shuffle(c: Converter, out: Tensor, x: Ref, factor: int) -> Ref:
    c.shape(out)  # five dimensions are refused by their shape
    return c.emit("pixel_shuffle", [x], out, factor=[int(factor)] * 2)


@handles("channel_shuffle")
def channel_shuffle(c: Converter, out: Tensor, x: Ref, groups: int) -> Ref:
    return c.emit("channel_shuffle", [x], out, groups=int(groups))


@handles("view", "reshape", "_unsafe_view", "flatten", "squeeze", "unsqueeze", "unflatten")
def reshape(c: Converter, out: Tensor, x: Ref, *rest: Any, **named: Any) -> Ref:
    if len(out) != c.batch:
        raise c.refuse(
            f"it makes {tuple(out.shape)} of a batch of {c.batch}: images of a batch are mixed"
        )
    before = c.shape(x.tensor)
    after = (*out.shape[1:], 1, 1)
    if before == after[:3] and all(size == 1 for size in after[3:]):
        return c.alias(x, out)
    if after == (before[0] * before[1] * before[2], *[1] * (len(after) - 1)):
        return c.viewed(x, c.emit("flatten", [x], out))
    hint = "; channels are mixed by nn.ChannelShuffle and nn.PixelShuffle" if out.dim() > 4 else ""
    raise c.refuse(
        f"it makes {tuple(out.shape)} of {tuple(x.tensor.shape)}; flattening an image to a vector is there{hint}"
    )


@handles("slice")
def slice_(
    c: Converter,
    out: Tensor,
    x: Ref,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Ref:
    if out.shape == x.tensor.shape:
        return c.alias(x, out)
    [dim] = _dims(x, [dim])
    if dim == 0 or out.numel() == 0:
        raise c.refuse("it takes a part of the batch" if dim == 0 else "it takes nothing")
    first, size = int(start or 0), x.tensor.shape[dim]
    return _sliced(c, x, out, dim, max(0, first + size if first < 0 else first), int(step))


def _sliced(c: Converter, x: Ref, out: Tensor, dim: int, first: int, step: int) -> Ref:
    """A slice of a slice is one slice of what that was of."""
    base, start, steps = x.value, [0, 0, 0], [1, 1, 1]
    if x.value and c.ops[x.value - 1].kind == "slice":
        inner = c.ops[x.value - 1]
        base, start, steps = (
            inner.inputs[0],
            list(inner.fields["start"]),
            list(inner.fields["step"]),
        )
    start[dim - 1] += first * steps[dim - 1]
    steps[dim - 1] *= step
    stop = [s + (n - 1) * k + 1 for s, n, k in zip(start, c.shape(out), steps, strict=True)]
    sliced = c.emit("slice", [Ref(base, out)], out, start=start, stop=stop, step=steps)
    return c.viewed(Ref(base, out), c.viewed(x, sliced))


@handles("narrow")
def narrow(c: Converter, out: Tensor, x: Ref, dim: int, start: int, length: int) -> Ref:
    return slice_(c, out, x, dim, start, start + length)


@handles("chunk", "split", "split_with_sizes")
def split(c: Converter, out: Any, x: Ref, sizes: Any, dim: int = 0) -> list[Ref]:
    parts, at = [], 0
    [dim] = _dims(x, [dim])
    for part in out:
        ref = slice_(c, part, x, dim, at, at + part.shape[dim])
        parts.append(c.stamped(ref, part))
        at += part.shape[dim]
    return parts


@handles("pad", "constant_pad_nd")
def pad(
    c: Converter,
    out: Tensor,
    x: Ref,
    sides: Any,
    mode: Any = "constant",
    value: float | None = None,
) -> Ref:
    if not isinstance(mode, str):
        mode, value = "constant", mode  # constant_pad_nd has the value in this place
    if mode != "constant" or value not in (None, 0):
        what = f"mode={mode!r}" if mode != "constant" else f"value={value}"
        raise c.refuse(f"{what}; the runtime pads with zeros only")
    dims = x.tensor.dim()
    before, after = [0, 0, 0], [0, 0, 0]
    for place_, (low, high) in enumerate(zip(sides[::2], sides[1::2], strict=True)):
        dim = dims - 1 - place_
        if low < 0 or high < 0 or (dim == 0 and (low or high)):
            raise c.refuse(
                f"padding {list(sides)}; the runtime adds zeros to channels, height and width"
            )
        if dim:
            before[dim - 1], after[dim - 1] = int(low), int(high)
    return c.emit("pad", [x], out, before=before, after=after)


@handles("cat", "concat", "concatenate")
def cat(c: Converter, out: Tensor, parts: list[Any], dim: int = 0) -> Ref:
    if dim % out.dim() != 1:
        raise c.refuse(f"along dimension {dim}; along the channels, 1, is there")
    whole = list(parts)
    zeros = [0, 0]
    for side, end in ((0, 0), (1, -1)):
        while whole and isinstance(whole[end], Tensor) and not whole[end].any():
            zeros[side] += whole.pop(end).shape[1]
    if not whole or any(not isinstance(part, Ref) for part in whole):
        raise c.refuse("one of its parts is a constant that is not zero")
    if len(whole) == len(parts):
        return c.emit("concat", whole, out)
    channels, height, width = c.shape(out)
    inner = whole[0]
    if len(whole) > 1:
        inner = c.emit("concat", whole, (channels - sum(zeros), height, width))
    return c.emit("pad", [inner], out, before=[zeros[0], 0, 0], after=[zeros[1], 0, 0])


# Nothing at all


@handles("clone", "lift_fresh_copy")
def copied(c: Converter, out: Tensor, x: Ref, *rest: Any, **named: Any) -> Ref:
    """A value of its own, which an operation in place may change without changing x."""
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
        raise c.refuse("it drops values at random even in evaluation mode (training=True)")
    return c.alias(x, out)


def _pair(value: Any) -> list[int]:
    values = [int(v) for v in value] if isinstance(value, list | tuple) else [int(value)]
    return values if len(values) == 2 else values * 2


def _dims(x: Ref, dims: Any) -> list[int]:
    return sorted(int(d) % x.tensor.dim() for d in dims or ())
