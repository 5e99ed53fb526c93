"""A network's first convolution in training: real values, from images of few channels, by the kernels of ``sign_conv``.

A convolution library wants channels in multiples of 8. For the 3 of an image it first copies the batch with zeros in
between, and then takes several times as long as reading the images and writing the output would. The kernels of
``sign_conv`` never store their left side, and gather it just as well from images: in k = (kh, kw, c) all taps of a row
are adjacent in memory, 9 halves for a 3×3 window of 3 channels. A step of the sum takes 16 or more values of k, of
whatever taps, and zeros at the end:

                     k = (kh, kw, c)                               O
                    ┌────────┬────────┬────────┬─────┐          ┌─────┐
     x  (NHWC)      │ row 0  │ row 1  │ row 2  │ end │          │     │           O
    ┌─────────┐     ├────────┼────────┼────────┼─────┤          │  w  │        ┌─────┐
    │rgb rgb  │ ──▶ │  9 halves   9        9      0  │ BLOCK_P ×│     │   =    │  y  │
    │rgb[p]   │     │    (0: zero padding)           │ pixels   │     │        └─────┘
    │rgb rgb  │     └────────┴────────┴────────┴─────┘          └─────┘
    └─────────┘

The values are float16, products are accumulated in float32. The weight's gradient is float32: a partial sum for each
chunk of pixels, which are added afterwards, so that it is the same bits every time. An image needs no gradient, so
there is none of the input, and a convolution that needs it is refused.

In training, :func:`by_kernel` gives these kernels to the stems of a model for the time of one step. What the model is
outside, in evaluation, in a copy or in a file, does not change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TypeGuard

import torch
from torch import Tensor, nn

from unflip.kernels.sign_conv import operator as sign_conv
from unflip.layers import in_half

MOST_CHANNELS = 8  # from there on a convolution library needs no copy
MOST_TERMS = 512  # 11×11 taps of 3 channels; longer sums keep a library busy


def supports(
    x: Tensor,
    weight: Tensor,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> bool:
    """Whether the kernels cover this layer. Arguments as of ``F.conv2d``; padding is with zeros."""
    return _obstacle(x, weight, stride, padding, dilation, groups) is None


def stem_conv2d(
    x: Tensor,
    weight: Tensor,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
) -> Tensor:
    """``conv2d(x, weight)`` of few channels, to float16, with a gradient of the weight alone.

    ``x`` is float16 (N, C, H, W), best in channels_last; ``weight`` is (O, C, kh, kw), best in float32 and
    channels_last, and its gradient has its dtype. The result is channels_last. Gradients of gradients are not defined.
    """
    problem = _obstacle(x, weight, stride, padding)
    if problem is not None:
        raise ValueError(f"stem_conv2d: {problem}")
    if x.dtype != torch.float16:
        raise TypeError(f"stem_conv2d: the input is {x.dtype}, which should be torch.float16")
    return sign_conv.convolve_given(x, weight, stride, padding)


def _obstacle(
    x: Tensor,
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> str | None:
    """Why the kernels do not cover a layer, or None."""
    problem = sign_conv.misfit(x.shape, weight.shape, stride, padding, dilation, groups)
    if problem is not None:
        return problem
    channels, terms = weight.shape[1], math.prod(weight.shape[1:])
    if channels > MOST_CHANNELS:
        return f"{channels} channels are more than {MOST_CHANNELS}"
    if terms > MOST_TERMS:
        return f"{terms} terms a sum are more than {MOST_TERMS}"
    if x.requires_grad:
        return "the input requires a gradient, which is not computed here"
    return None


# ------------------------------------------------------------------------------------------ in a model


def may_be_stem(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a module is a plain convolution of few channels. Its input decides, when it comes."""
    return (
        type(module) is nn.Conv2d
        and "forward" not in vars(module)  # someone else has changed it
        and module.in_channels <= MOST_CHANNELS
        and max(module.kernel_size) <= 3  # larger windows are right, but have not been timed
        and module.padding_mode == "zeros"
        and module.weight.dtype == torch.float32
    )


@contextmanager
def by_kernel(stems: Sequence[nn.Conv2d]) -> Iterator[None]:
    """Inside, these convolutions use the kernels under autocast to float16, wherever those cover the input."""
    for stem in stems:
        # A bound method of a global function: to the compiler, another seed's stem is the same.
        stem.forward = MethodType(_forward, stem)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for stem in stems:
            del stem.forward


def _forward(stem: nn.Conv2d, x: Tensor) -> Tensor:
    if not in_half(x) or not supports(
        x, stem.weight, stem.stride, stem.padding, stem.dilation, stem.groups
    ):
        return nn.Conv2d.forward(stem, x)
    assert not isinstance(stem.padding, str)  # not supported
    y = stem_conv2d(x.to(torch.float16), stem.weight, stem.stride, stem.padding)
    return y if stem.bias is None else (y + stem.bias[:, None, None]).to(torch.float16)
