"""A network's first convolution in training: real values, from images of few channels, by the kernels of ``sign_conv``.

A convolution library wants channels in multiples of 8. For the 3 channels of an image it first copies the batch and
inserts zeros. It then takes several times as long as reading the images and writing the output would. The kernels of
``sign_conv`` never store their left side and can gather it from images as well: in k = (kh, kw, c) all taps of a row
are adjacent in memory, 9 halves for a 3×3 window of 3 channels. A step of the sum takes 16 or more values of k, of any
taps, and zeros at the end:

                     k = (kh, kw, c)                               O
                    ┌────────┬────────┬────────┬─────┐          ┌─────┐
     x  (NHWC)      │ row 0  │ row 1  │ row 2  │ end │          │     │           O
    ┌─────────┐     ├────────┼────────┼────────┼─────┤          │  w  │        ┌─────┐
    │rgb rgb  │ ──▶ │  9 halves   9        9      0  │ BLOCK_P ×│     │   =    │  y  │
    │rgb[p]   │     │    (0: zero padding)           │ pixels   │     │        └─────┘
    │rgb rgb  │     └────────┴────────┴────────┴─────┘          └─────┘
    └─────────┘

The values are float16, products are accumulated in float32. The weight's gradient is float32: the sum of one partial
sum per chunk of pixels, with the same bits every time. An image needs no gradient, so the input's gradient is not
computed, and a convolution that needs it is refused.

:func:`by_kernel` gives these kernels to the first convolutions (stems) of a model. They are used in training mode only,
so evaluation does not change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from unflip.kernels.attach import attached
from unflip.kernels.sign_conv import cover
from unflip.kernels.sign_conv import operator as sign_conv
from unflip.layers import in_half, inside_binarizer

MOST_CHANNELS = 8  # with 8 or more, a convolution library needs no copy
MOST_TERMS = 512  # 11×11 taps of 3 channels; with longer sums a library is fast as well


def supports(
    x: Tensor,
    weight: Tensor,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> bool:
    """Whether the kernels cover this layer. Arguments as of ``F.conv2d``; the padding is zeros."""
    return _obstacle(x, weight, stride, padding, dilation, groups) is None


def stem_conv2d(
    x: Tensor,
    weight: Tensor,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    *,
    networks: int = 1,
) -> Tensor:
    """``conv2d(x, weight)`` of few channels, in float16, with a gradient of the weight only.

    ``x`` is float16 (N, C, H, W), best in channels_last; ``weight`` is (O, C, kh, kw), best in float32 and
    channels_last, and its gradient has its dtype. The result is channels_last. Gradients of gradients are not defined.
    """
    problem = _obstacle(x, weight, stride, padding)
    if problem is not None:
        raise ValueError(f"stem_conv2d: {problem}")
    if x.dtype != torch.float16:
        raise TypeError(f"stem_conv2d: the input is {x.dtype}; it should be torch.float16")
    return sign_conv.convolve_given(x, weight, stride, padding, networks)


def _obstacle(
    x: Tensor,
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> str | None:
    """Why the kernels do not cover a layer, or None."""
    problem = cover.misfit(x.shape, weight.shape, stride, padding, dilation, groups)
    if problem is not None:
        return problem
    channels, terms = weight.shape[1], math.prod(weight.shape[1:])
    if channels > MOST_CHANNELS:
        return f"{channels} channels are more than {MOST_CHANNELS}"
    if terms > MOST_TERMS:
        return f"{terms} terms per sum are more than {MOST_TERMS}"
    if x.requires_grad:
        return "the input requires a gradient, which these kernels do not compute"
    return None


# ------------------------------------------------------------------------------------------ in a model


def stems(model: nn.Module) -> dict[str, nn.Conv2d]:
    """The float convolutions of few channels, by name, without those that belong to a method."""
    return {
        name: module
        for name, module in model.named_modules()
        if may_be_stem(module) and not inside_binarizer(name)
    }


def may_be_stem(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a module is a plain convolution of few channels. The input is checked when it is called."""
    return (
        type(module) is nn.Conv2d
        and "forward" not in vars(module)  # not changed by someone else
        and module.in_channels <= MOST_CHANNELS
        and max(module.kernel_size) <= 3  # larger windows are right, but have not been timed
        and module.padding_mode == "zeros"
        and module.weight.dtype == torch.float32
    )


@contextmanager
def by_kernel(stems: Iterable[nn.Conv2d], networks: int = 1) -> Iterator[None]:
    """Inside, these convolutions use the kernels when they train under autocast to float16."""
    with ExitStack() as scope:
        for stem in stems:
            # A bound method of a global function: for the compiler, the stems of all seeds are the same.
            forward = MethodType(_forward, stem)
            scope.enter_context(attached([stem], forward=forward, networks=networks))
        yield


def _forward(stem: Any, x: Tensor) -> Tensor:
    fits = stem.training and in_half(x)
    if not fits or not supports(
        x, stem.weight, stem.stride, stem.padding, stem.dilation, stem.groups
    ):
        return nn.Conv2d.forward(stem, x)
    y = stem_conv2d(
        x.to(torch.float16), stem.weight, stem.stride, stem.padding, networks=stem.networks
    )
    return y if stem.bias is None else (y + stem.bias[:, None, None]).to(torch.float16)
