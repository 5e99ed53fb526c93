"""The mapping networks of wide layers as products of halves: as precise as float32, with the gradients of float64.

On a CUDA machine the kernel runs for real. Elsewhere one test runs this file again in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from unflip.kernels import tuning
from unflip.kernels.mapping_products import operator as mapping_products
from unflip.kernels.mapping_products import triton_kernels
from unflip.kernels.mapping_products.operator import predict_by_products, supports
from unflip.kernels.tuning import available
from unflip.methods.mapping_network import MappingNetwork

DEVICE = "cpu" if tuning.INTERPRETED else "cuda"
runs = pytest.mark.skipif(not available(), reason="no CUDA device: see test_in_the_interpreter")


@pytest.mark.skipif(available(), reason="the kernels run in this process")
def test_in_the_interpreter(in_the_interpreter: Callable[[str], None]) -> None:
    in_the_interpreter(__file__)


def example(
    filters: int, channels: int, residual: bool = False, size: float = 0.03
) -> tuple[MappingNetwork, Tensor]:
    torch.manual_seed(0)
    weight = size * torch.randn(filters, channels, 3, 3, device=DEVICE)
    mapping = MappingNetwork(weight, residual, "filters").to(DEVICE)
    with torch.no_grad():
        for parameter in mapping.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    return mapping, weight.requires_grad_()


def values_and_gradients(
    mapping: MappingNetwork, weight: Tensor, predict: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    predicted = predict(weight)
    probe = torch.linspace(-1, 1, predicted.numel(), device=DEVICE).view_as(predicted)
    grads = torch.autograd.grad((predicted * probe).sum(), [weight, *mapping.parameters()])
    return [predicted.detach(), *grads]


def errors(mapping: MappingNetwork, weight: Tensor) -> list[float]:
    """Relative, of the prediction and of every gradient, against float64."""
    found = values_and_gradients(mapping, weight, lambda w: predict_by_products([mapping], [w])[0])
    exact = MappingNetwork(weight, mapping.residual, "filters").to(DEVICE).double()
    exact.load_state_dict({name: value.double() for name, value in mapping.state_dict().items()})
    wide = weight.detach().double().requires_grad_()
    expected = values_and_gradients(exact, wide, exact)
    return [
        ((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)
    ]


@runs
@pytest.mark.parametrize(
    ("filters", "channels", "residual", "size"),
    [(5, 16, False, 0.03), (12, 32, True, 0.03), (3, 32, False, 1e-7), (4, 16, False, 1e5)],
)
def test_predictions_are_as_precise_as_float32(
    filters: int, channels: int, residual: bool, size: float
) -> None:
    """TF32 would be off by 1e-4. Neither tiny nor huge latent weights leave the range of float16."""
    prediction, *gradients = errors(*example(filters, channels, residual, size))
    assert prediction < 2e-6
    # The gradient of the latent weights of 1e-7 is as large as they are small; all are those of one product of halves.
    assert max(gradients) < 3e-3


@runs
def test_the_operators_keep_the_promises_that_a_compiler_relies_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shapes without values, schema, and gradients in a compiled graph."""
    calls: list[tuple[Any, ...]] = []
    forward = mapping_products._forward
    monkeypatch.setattr(
        mapping_products, "_forward", lambda *args: (calls.append(args), forward(*args))[1]
    )
    (first, weight1), (second, weight2) = example(3, 16), example(3, 16, size=0.1)
    predict_by_products([first, second], [weight1, weight2])
    [arguments] = calls
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    leaves = torch.utils._pytree.tree_map(lambda t: t.detach().requires_grad_(), arguments[:3])
    torch.library.opcheck(forward, (*leaves, *arguments[3:]), test_utils=checks)
    sums, *saved = forward(*arguments)
    grad, scale = torch.randn_like(sums), torch.full((2,), 64.0, device=DEVICE)
    for needs_x in (False, True):
        more = (grad, scale, *arguments, *saved, needs_x)
        plain = torch.utils._pytree.tree_map(lambda t: t.detach(), more[:-1])
        torch.library.opcheck(
            mapping_products._gradients, (*plain, needs_x), test_utils=("test_schema", checks[2])
        )


@runs
def test_a_gradient_that_nobody_needs_is_not_computed() -> None:
    mapping, weight = example(4, 16)
    [predicted] = predict_by_products([mapping], [weight.detach()])
    grads = torch.autograd.grad(predicted.sum(), list(mapping.parameters()))
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.at_length
@runs
def test_layers_of_several_shapes() -> None:
    """Layers of one shape go through their products together: each must give what it gives alone."""
    examples = [example(4, 16), example(3, 32, True), example(4, 16, True, 40.0), example(4, 16)]
    mappings, weights = zip(*examples, strict=True)
    with torch.no_grad():
        for i, mapping in enumerate(mappings):
            mapping.conv2.weight *= 10.0**i  # each layer has its own scale
    together = predict_by_products(mappings, weights)
    alone = [predict_by_products([m], [w])[0] for m, w in examples]
    for a, b, mapping, weight in zip(together, alone, mappings, weights, strict=True):
        torch.testing.assert_close(a, b)
        of = [weight, *mapping.parameters()]
        for x, y in zip(
            torch.autograd.grad((a**3).sum(), of, retain_graph=True),
            torch.autograd.grad((b**3).sum(), of),
            strict=True,
        ):
            assert (x - y).norm() <= 1e-3 * y.norm()


@runs
def test_halves_of_rows_in_another_order() -> None:
    """Integers below 2048 are halves, so hi is exact and lo is zero; a 2048th more is lo."""
    same, beside, flipped = (
        mapping_products.SAME,
        mapping_products.BESIDE,
        mapping_products.FLIPPED,
    )
    hi = mapping_products.HI
    x = torch.arange(3 * 2 * 5 * 16, device=DEVICE).float().view(3, 2, 5, 16)
    scales = torch.tensor([1.0, 0.5], device=DEVICE)
    found = mapping_products._halves(x, scales, beside, hi)
    expected = x.permute(1, 2, 0, 3) * scales[:, None, None, None]
    assert torch.equal(found.float().view(expected.shape), expected)
    fine = 1 + 2.0**-13 + torch.zeros(2, 5, 16, device=DEVICE)
    for parts, of_lo in ((mapping_products.LEFT, 1), (mapping_products.RIGHT, 2)):
        found = mapping_products._halves(fine, torch.ones_like(scales), same, parts)
        found = found.view(2, 5, 3, 16)
        assert (found[:, :, of_lo] == 2.0**-13).all()
        assert (found[:, :, [part for part in range(3) if part != of_lo]] == 1).all()
    taps = torch.arange(2 * 9 * 16, device=DEVICE).float().view(2, 3, 3, 16)
    found = mapping_products._of_taps([taps, 2 * taps], torch.ones_like(scales), flipped, hi)
    expected = taps.flip(1, 2).permute(1, 2, 0, 3).reshape(18, 16)
    assert torch.equal(found.float(), torch.stack([expected, 2 * expected]))


@runs
def test_what_is_supported() -> None:
    def covers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> bool:
        weight = torch.zeros(shape, dtype=dtype, device=DEVICE)
        return supports(MappingNetwork(weight, False, "filters").to(weight), weight)

    assert covers((8, 48, 3, 3))
    assert covers((8, 16, 3, 3))
    assert not covers((8, 24, 3, 3))
    assert not covers((8, 16, 1, 1))
    assert not covers((8, 16, 5, 5))
    assert not covers((8, 16, 3, 3), torch.float64)
    weight = torch.zeros(8, 16, 3, 3, device=DEVICE)
    assert not supports(MappingNetwork(weight, False, "fixed").to(weight), weight)


def test_the_kernels_compile_for_a_gpu(compile_for_sm_90: Callable[..., None]) -> None:
    if tuning.INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    kinds = {"": "*fp32", "pixels": "i32", "layers": "i32"}
    halves = {"out_ptr": "*fp16", "beside_ptr": "*fp16", "same_ptr": "*fp16", "hidden_ptr": "*fp16"}
    block, sums = {"C": 512, "ROWS": 8, "BLOCK": 512}, {"C": 512, "SPLITS": 16, "BLOCK": 64}
    for order in (mapping_products.SAME, mapping_products.BESIDE, mapping_products.FLIPPED):
        constants = {**block, "ORDER": order, "PARTS": order, "HIDDEN": order == 1}
        compile_for_sm_90(triton_kernels.halves_kernel, constants, kinds | halves)
    compile_for_sm_90(triton_kernels.hidden_backward_kernel, {**block, "ALL": 512}, kinds | halves)
    for kernel in (triton_kernels.moments_kernel, triton_kernels.sums_kernel):
        for alone in ({}, {"layers": 1}):  # Triton makes a constant of a 1
            compile_for_sm_90(kernel, {**sums, **alone, "ROWS": 32}, kinds)
    for kernel in (triton_kernels.finish_moments_kernel, triton_kernels.finish_sums_kernel):
        for alone in ({}, {"layers": 1}):
            compile_for_sm_90(kernel, {**sums, **alone}, kinds)
