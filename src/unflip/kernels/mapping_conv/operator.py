"""LNS's mapping networks f(W) of all 3×3 layers at once: eleven kernels per step, for any number of layers.

The filters of a layer are a batch of 3×3 images. A convolution of f is then a matrix product of a few hundred rows,
which is too small for a GPU, and a network has three of them per layer. Here one launch takes the layers of all shapes.
A table says where the numbers of each layer begin, and a program looks up its layer and its block of that layer:

    latent ─conv1─▶ y1 ─norm, ReLU─▶ h1 ─conv2─▶ y2 ─norm, ReLU─▶ h2 ─conv3─▶ q̂          forward: 5 launches
      grad ◀─dgrad1─ ◀──norm'── ◀─dgrad2─ ◀──norm'── ◀─dgrad3─ grad q̂                    backward: 5, and
      one launch for the gradients of all weights and biases, in the memory layout of the (channels_last) weights

Forward products are three TF32 products each, close to float32: the bits of training must be those that are frozen
later. Gradients are plain TF32. The statistics over filters are exact to rounding: mean and sum of squares about it for
every 16 filters, merged by Chan's formula in a fixed order. There are no atomics: for a given choice of blocks, all
results have the same bits every time. Blocks are tuned at the first call for every set of shapes. That call must not be
inside the capture of a CUDA graph. A NaN stays a NaN.

``networks`` is the number of networks that train side by side on the device (``tuning.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unflip.kernels.mapping_conv.plan import Plan, count_activations, make_plan
from unflip.kernels.mapping_conv.triton_kernels import (
    conv_kernel,
    norm_backward_kernel,
    norm_kernel,
    wgrad_kernel,
)
from unflip.kernels.tuning import Tuned, available, make_configs, runs_on
from unflip.methods.mapping_network import MappingNetwork

MOST_CHANNELS = 128  # with more, the products of one layer fill the device


def is_plain(mapping: MappingNetwork, weight: Tensor) -> bool:
    """Whether f has the form that kernels know: of 3×3 filters, with statistics over them, in float32."""
    return (
        tuple(weight.shape[2:]) == (3, 3)
        and mapping.chunks == 1
        and mapping.norm1.measuring
        and "mean" not in mapping.norm1._buffers  # statistics over filters only
        and all(t.dtype == torch.float32 for t in (weight, mapping.conv1.weight))
        and runs_on(weight.device)
    )


def supports(mapping: MappingNetwork, weight: Tensor) -> bool:
    """Whether the kernels cover f of this layer."""
    filters, channels = weight.shape[:2]
    return (
        is_plain(mapping, weight)
        and mapping.conv1.out_channels == 2 * channels
        and channels <= MOST_CHANNELS
        and filters * channels * 9 <= 2**24
    )


def predict_fused(
    mappings: Sequence[MappingNetwork], weights: Sequence[Tensor], *, networks: int
) -> tuple[Tensor, ...]:
    """f(W) of several 3×3 layers of any shapes. :func:`supports` must cover each of them."""
    # The longest sums first, so that the last programs to start are short.
    order = sorted(range(len(weights)), key=lambda i: -weights[i].shape[1])
    nets, latents = [mappings[i] for i in order], [weights[i] for i in order]
    filters, channels = [w.shape[0] for w in latents], [w.shape[1] for w in latents]
    latent = _pack([_flat(w) for w in latents])
    q, _ = _forward(latent, _parameters(nets), filters, channels, networks)
    predictions: list[Tensor] = list(weights)
    for i, part, net in zip(order, q.split([w.numel() for w in latents]), nets, strict=True):
        weight = weights[i]
        o, c = weight.shape[:2]
        predicted = part.view(o, 3, 3, c).permute(0, 3, 1, 2)
        predictions[i] = net.finish(predicted, weight)
    return tuple(predictions)


def _flat(weight: Tensor) -> Tensor:
    """In the order of channels_last; this copies nothing if the weight is channels_last."""
    return weight.permute(0, 2, 3, 1).reshape(-1)


def _parameters(nets: Sequence[MappingNetwork]) -> Tensor:
    """One copy of all parameters. Each gradient is then a part of one tensor and need not be copied."""
    convolutions = [[n.conv1 for n in nets], [n.conv2 for n in nets], [n.conv3 for n in nets]]
    parts = [_flat(conv.weight) for kind in convolutions for conv in kind]
    for kind in ([n.norm1 for n in nets], [n.norm2 for n in nets]):
        parts += [norm.weight for norm in kind]
        parts += [norm.bias for norm in kind]
    return _pack([*parts, *[_bias(n.conv3) for n in nets]])


def _bias(convolution: nn.Conv2d) -> Tensor:
    assert convolution.bias is not None
    return convolution.bias


# ----------------------------------------------------------------------------------------- launchers

CONV_BLOCKS = [
    # BLOCK_F, BLOCK_N, BLOCK_K, num_warps, num_stages
    (64, 32, 32, 4, 3),
    (32, 32, 32, 4, 4),
    (32, 32, 64, 2, 3),
    (64, 64, 32, 4, 3),
    (16, 64, 64, 4, 3),
    (32, 64, 32, 4, 3),
    (32, 64, 64, 8, 3),
]
WGRAD_BLOCKS = [
    # BLOCK_R, BLOCK_O, BLOCK_I, num_warps, num_stages
    (32, 64, 32, 4, 3),
    (32, 32, 32, 2, 4),
    (64, 32, 32, 4, 3),
    (32, 64, 64, 4, 3),
    (64, 32, 32, 4, 1),
    (32, 64, 64, 4, 1),
]
CONV_CONFIGS = make_configs(("BLOCK_F", "BLOCK_N", "BLOCK_K"), CONV_BLOCKS)
WGRAD_CONFIGS = make_configs(("BLOCK_R", "BLOCK_O", "BLOCK_I"), WGRAD_BLOCKS)
NORM_BLOCKS = {"BLOCK_R": 32, "BLOCK_N": 32, "BLOCK_P": 16}
CONV = Tuned(conv_kernel, CONV_CONFIGS, ["layers", "activations", "IN", "OUT", "TRANSPOSED"])
WGRAD = Tuned(wgrad_kernel, WGRAD_CONFIGS, ["layers", "activations"])


def tuned() -> dict[str, dict[tuple[Any, ...], str]]:
    """The blocks that tuning chose: kernel -> (networks, key) -> configuration."""
    return {"convolution": CONV.chosen(), "wgrad": WGRAD.chosen()}


def _check(*tensors: Tensor) -> None:
    device = tensors[0].device
    if not available() or not runs_on(device):
        raise RuntimeError(f"mapping needs Triton and a CUDA device; the weights are on {device}")
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.device != device:
            raise TypeError(
                f"mapping: a tensor is {tensor.dtype} on {tensor.device}; "
                f"it should be torch.float32 on {device}"
            )
        if not tensor.is_contiguous():
            raise ValueError("mapping: a tensor is not contiguous")


def _convolve(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    multiples: tuple[int, int],
    networks: int,
    *,
    transposed: bool = False,
    then: str = "",
    pointers: dict[str, Tensor] | None = None,
) -> None:
    names = ("bias_ptr", "y_ptr", "h_ptr", "mean_ptr", "rstd_ptr", "first_ptr", "second_ptr")
    CONV.beside(networks)[
        lambda meta: (plan.conv_programs(meta["BLOCK_F"], multiples[1], meta["BLOCK_N"]),)
    ](
        x_ptr=x,
        w_ptr=weight,
        out_ptr=out,
        **{name: (pointers or {}).get(name, x) for name in names},
        **plan.shared,
        activations=plan.activations,
        IN=multiples[0],
        OUT=multiples[1],
        TRANSPOSED=transposed,
        THEN=then,
        PRECISION="tf32" if transposed else "tf32x3",
    )


def _normalize(
    plan: Plan,
    y: Tensor,
    h: Tensor,
    scale: Tensor,
    shift: Tensor,
    statistics: Sequence[Tensor],
    partial: Sequence[Tensor],
) -> None:
    norm_kernel[(plan.programs(NORM_BLOCKS["BLOCK_R"], 2, NORM_BLOCKS["BLOCK_N"]),)](
        y_ptr=y,
        h_ptr=h,
        scale_ptr=scale,
        shift_ptr=shift,
        mean_ptr=statistics[0],
        rstd_ptr=statistics[1],
        first_ptr=partial[0],
        second_ptr=partial[1],
        **plan.shared,
        **NORM_BLOCKS,
    )


def _normalize_backward(
    plan: Plan,
    grad: Tensor,
    y: Tensor,
    scale: Tensor,
    grads: Sequence[Tensor],
    statistics: Sequence[Tensor],
    partial: Sequence[Tensor],
) -> None:
    norm_backward_kernel[(plan.programs(NORM_BLOCKS["BLOCK_R"], 2, NORM_BLOCKS["BLOCK_N"]),)](
        grad_ptr=grad,
        y_ptr=y,
        scale_ptr=scale,
        grad_scale_ptr=grads[0],
        grad_shift_ptr=grads[1],
        mean_ptr=statistics[0],
        rstd_ptr=statistics[1],
        first_ptr=partial[0],
        second_ptr=partial[1],
        **plan.shared,
        **NORM_BLOCKS,
    )


# ------------------------------------------------------------------------------------- torch operators


def _empty_outputs(
    latent: Tensor, filters: Sequence[int], channels: Sequence[int]
) -> tuple[Tensor, Tensor]:
    size = 8 * count_activations(filters, channels) + 8 * sum(channels)
    return torch.empty_like(latent), latent.new_empty(size)


@torch.library.custom_op("unflip::pack", mutates_args=())
def _pack(parts: list[Tensor]) -> Tensor:
    """torch.cat as an operator: inductor would make one kernel per eight parts, torch's own takes 128 at once."""
    return torch.cat(parts)


@_pack.register_fake
def _(parts: list[Tensor]) -> Tensor:
    return parts[0].new_empty(sum(part.numel() for part in parts))


def _save_sizes(ctx: Any, inputs: tuple[list[Tensor]], output: Tensor) -> None:
    ctx.sizes = [part.numel() for part in inputs[0]]


def _unpack(ctx: Any, grad: Tensor) -> list[Tensor]:
    return list(grad.split(ctx.sizes))


_pack.register_autograd(_unpack, setup_context=_save_sizes)


@torch.library.custom_op("unflip::mapping", mutates_args=())
def _forward(
    latent: Tensor, parameters: Tensor, filters: list[int], channels: list[int], networks: int
) -> tuple[Tensor, Tensor]:
    """q̂, and the values that the gradient needs. The layouts are those of ``plan.py``."""
    _check(latent, parameters)
    plan = make_plan(tuple(filters), tuple(channels), latent.device)
    q, saved = _empty_outputs(latent, filters, channels)
    w1, w2, w3 = plan.weights(parameters)
    scale1, shift1, scale2, shift2, bias = plan.vectors(parameters)
    y1, h1, y2, h2 = plan.values(saved)
    statistics = plan.statistics(saved)
    partial = latent.new_empty(4 * plan.partials).chunk(2)
    sums = {"first_ptr": partial[0], "second_ptr": partial[1]}
    with torch.cuda.device_of(latent):
        _convolve(plan, latent, w1, y1, (1, 2), networks, then="statistics", pointers=sums)
        _normalize(plan, y1, h1, scale1, shift1, statistics[:2], partial)
        _convolve(plan, h1, w2, y2, (2, 2), networks, then="statistics", pointers=sums)
        _normalize(plan, y2, h2, scale2, shift2, statistics[2:], partial)
        _convolve(plan, h2, w3, q, (2, 1), networks, then="bias", pointers={"bias_ptr": bias})
    return q, saved


@_forward.register_fake
def _(
    latent: Tensor, parameters: Tensor, filters: list[int], channels: list[int], networks: int
) -> tuple[Tensor, Tensor]:
    return _empty_outputs(latent, filters, channels)


def _empty_gradients(latent: Tensor, parameters: Tensor, to_latent: bool) -> tuple[Tensor, Tensor]:
    first = torch.empty_like(latent) if to_latent else latent.new_empty(0)
    return first, torch.empty_like(parameters)


@torch.library.custom_op("unflip::mapping_backward", mutates_args=())
def _gradients(
    grad: Tensor,
    latent: Tensor,
    parameters: Tensor,
    saved: Tensor,
    filters: list[int],
    channels: list[int],
    networks: int,
    to_latent: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of the latent weights and of the parameters. Without ``to_latent`` the first is empty."""
    _check(grad, latent, parameters, saved)
    plan = make_plan(tuple(filters), tuple(channels), latent.device)
    grad_latent, grad_parameters = _empty_gradients(latent, parameters, to_latent)
    w1, w2, w3 = plan.weights(parameters)
    scale1, _, scale2, _, _ = plan.vectors(parameters)
    *norm_grads, grad_bias = plan.vectors(grad_parameters)
    y1, h1, y2, h2 = plan.values(saved)
    statistics = plan.statistics(saved)
    g1, g2 = latent.new_empty(4 * plan.activations).chunk(2)
    partial = latent.new_empty(4 * plan.partials).chunk(2)
    with torch.cuda.device_of(latent):
        for x, weight, out, multiples, y, h, scale, norm in (
            (grad, w3, g2, (1, 2), y2, h2, scale2, 2),
            (g2, w2, g1, (2, 2), y1, h1, scale1, 0),
        ):
            pointers = {
                "y_ptr": y,
                "h_ptr": h,
                "mean_ptr": statistics[norm],
                "rstd_ptr": statistics[norm + 1],
                "first_ptr": partial[0],
                "second_ptr": partial[1],
            }
            more: dict[str, Any] = {"transposed": True, "then": "relu", "pointers": pointers}
            _convolve(plan, x, weight, out, multiples, networks, **more)
            two = slice(norm, norm + 2)
            _normalize_backward(plan, out, y, scale, norm_grads[two], statistics[two], partial)
        if to_latent:
            _convolve(plan, g1, w1, grad_latent, (2, 1), networks, transposed=True)
        out1, out2, out3 = plan.weights(grad_parameters)
        WGRAD.beside(networks)[
            lambda meta: (plan.wgrad_programs(meta["BLOCK_O"], meta["BLOCK_I"]), 3)
        ](
            x1_ptr=latent,
            x2_ptr=h1,
            x3_ptr=h2,
            g1_ptr=g1,
            g2_ptr=g2,
            g3_ptr=grad,
            out1_ptr=out1,
            out2_ptr=out2,
            out3_ptr=out3,
            bias_ptr=grad_bias,
            **plan.shared,
            activations=plan.activations,
        )
    return grad_latent, grad_parameters


@_gradients.register_fake
def _(
    grad: Tensor,
    latent: Tensor,
    parameters: Tensor,
    saved: Tensor,
    filters: list[int],
    channels: list[int],
    networks: int,
    to_latent: bool,
) -> tuple[Tensor, Tensor]:
    return _empty_gradients(latent, parameters, to_latent)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    latent, parameters, *ctx.options = inputs  # filters, channels, networks
    ctx.save_for_backward(latent, parameters, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    to_latent = ctx.needs_input_grad[0]  # not if f reads detached weights
    given = (*ctx.saved_tensors, *ctx.options, to_latent)
    grad_latent, grad_parameters = _gradients(grad.contiguous(), *given)
    return (grad_latent if to_latent else None, grad_parameters, None, None, None)


_forward.register_autograd(_backward, setup_context=_save)
