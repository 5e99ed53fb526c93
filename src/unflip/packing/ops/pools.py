"""Pools, means and softmax."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unflip.packing.convert import Converter, Ref
from unflip.packing.ops.registry import dims_of, handles, pair


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
    if pair(dilation) != [1, 1]:
        raise c.refuse(
            f"dilation={dilation} is not supported; only max pools without dilation can be packed"
        )
    kernel = pair(kernel)
    fields = {
        "kernel": kernel,
        "stride": pair(stride) if stride else kernel,
        "padding": pair(padding),
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
        raise c.refuse(
            f"divisor_override={divisor} is not supported; only an average can be packed"
        )
    kernel = pair(kernel)
    fields = {
        "kernel": kernel,
        "stride": pair(stride) if stride else kernel,
        "padding": pair(padding),
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
            f"pooling {tuple(inside)} to {tuple(outside)} pixels needs windows of different sizes; "
            "the input size must be a multiple of the output size"
        )
    return [i // o for i, o in zip(inside, outside, strict=True)]


@handles("mean")
def mean(
    c: Converter, out: Tensor, x: Ref, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> Ref:
    if x.tensor.dim() != 4 or dims_of(x, dims) != [2, 3]:
        raise c.refuse(
            f"mean over dims {dims} is not supported; only a mean over the pixels, dims (2, 3), can be packed"
        )
    return c.emit("mean", [x], out)


@handles("amax")
def amax(c: Converter, out: Tensor, x: Ref, dims: Any = (), keepdim: bool = False) -> Ref:
    if x.tensor.dim() != 4 or dims_of(x, dims) != [2, 3]:
        raise c.refuse(
            f"amax over dims {dims} is not supported; only a maximum over the pixels, dims (2, 3), can be packed"
        )
    return max_pool2d(c, out, x, list(x.tensor.shape[2:]))


@handles("softmax", "_softmax")
def softmax(c: Converter, out: Tensor, x: Ref, dim: int, *rest: Any) -> Ref:
    if dims_of(x, [dim]) != [1]:
        raise c.refuse(
            f"dim={dim} is not supported; only a softmax over the channels, dim 1, can be packed"
        )
    return c.emit("softmax", [x], out)


@handles("log_softmax", "_log_softmax")
def log_softmax(c: Converter, out: Tensor, x: Ref, dim: int, *rest: Any) -> Ref:
    if dims_of(x, [dim]) != [1]:
        raise c.refuse(
            f"dim={dim} is not supported; only a softmax over the channels, dim 1, can be packed"
        )
    return c.emit("log_softmax", [x], out)
