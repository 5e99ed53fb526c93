"""The kernels of LNS's mapping networks: values, gradients, every block, compile, and what is left to the plain path.

On a CUDA machine the kernels run for real. Elsewhere one test runs this file again in a process of its own, in
Triton's interpreter, where products are exact to float32; another compiles the kernels for a GPU that is not there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unflip import binarize
from unflip.kernels import mapping
from unflip.kernels.check import Mismatch, check_mapping
from unflip.kernels.mapping_conv import operator as mapping_conv
from unflip.kernels.mapping_conv import triton_kernels
from unflip.kernels.mapping_conv.operator import predict_fused, supports
from unflip.kernels.tuning import INTERPRETED, Tuned, available
from unflip.layers import binary_layers
from unflip.methods.lns import MappedSign

DEVICE = "cpu" if INTERPRETED else "cuda"
runs = pytest.mark.skipif(not available(), reason="no CUDA device: see test_in_the_interpreter")
BACKWARD = 1e-5 if INTERPRETED else 3e-3  # on a GPU, gradients are products of TF32

# (filters, channels) of the layers
SMALL = [(5, 3), (18, 4)]
GROUPS = [SMALL, [(16, 16), (8, 16)], [(20, 7), (3, 19), (1, 1)]]


def network(shapes: list[tuple[int, int]], **options: Any) -> nn.Sequential:
    """Layers whose mappings have nothing at zero or one, which would hide mistakes."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Conv2d(c, o, 3, bias=False) for o, c in shapes])
    binarize(model, "lns", keep_first_and_last=False, quiet=True, **options)
    for f in mappings(model):
        nn.init.normal_(f.conv3.weight, std=0.2)
        for norm in (f.norm1, f.norm2):
            nn.init.normal_(norm.weight, 1, 0.3)
            nn.init.normal_(norm.bias, 0, 0.3)
    return model.to(DEVICE).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def mappings(model: nn.Module) -> list[Any]:
    return [layer.weight_binarizer.mapping for _, layer in binary_layers(model)]


def weights(model: nn.Module) -> list[Tensor]:
    return [layer.weight for _, layer in binary_layers(model)]


def fused(model: nn.Module) -> tuple[Tensor, ...]:
    return predict_fused(mappings(model), weights(model), networks=1)


def gradients(model: nn.Module, predictions: Any) -> list[Tensor]:
    torch.manual_seed(1)
    probes = [torch.randn(p.shape).to(p) for p in predictions]
    total = sum((p * probe).sum() for p, probe in zip(predictions, probes, strict=True))
    return list(torch.autograd.grad(total, list(model.parameters())))


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-9)).item()


def check(model: nn.Module, in_place: bool = True) -> None:
    """Against the mappings themselves, one by one, in float64."""
    exact = copy.deepcopy(model).double()
    expected = [f(w) for f, w in zip(mappings(exact), weights(exact), strict=True)]
    found = fused(model)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert error(a, b) < 1e-5
    for (name, parameter), a, b in zip(
        model.named_parameters(),
        gradients(model, found),
        gradients(exact, expected),
        strict=True,
    ):
        assert error(a, b) < BACKWARD, name
        if in_place:
            assert a.stride() == parameter.stride(), f"{name}: its gradient would be copied"


@pytest.mark.skipif(available(), reason="the kernels run in this process")
def test_in_the_interpreter(in_the_interpreter: Callable[[str], None]) -> None:
    in_the_interpreter(__file__)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("aligned", [True, False])
def test_kernels_compile_for_a_gpu_that_is_not_there(
    aligned: bool, compile_for_sm_90: Callable[..., None]
) -> None:
    every = {"ALIGNED": aligned, "LAYERS": 4}
    conv = {"BLOCK_F": 32, "BLOCK_N": 32, "BLOCK_K": 32, **every}
    back = {**conv, "TRANSPOSED": True, "PRECISION": "tf32"}
    ahead = {**conv, "TRANSPOSED": False, "PRECISION": "tf32x3"}
    norm = {**mapping_conv.NORM_BLOCKS, **every}
    for kernel, constants in (
        (triton_kernels.conv_kernel, {**ahead, "IN": 1, "OUT": 2, "THEN": "statistics"}),
        (triton_kernels.conv_kernel, {**ahead, "IN": 2, "OUT": 1, "THEN": "bias"}),
        (triton_kernels.conv_kernel, {**back, "IN": 2, "OUT": 2, "THEN": "relu"}),
        (triton_kernels.conv_kernel, {**back, "IN": 2, "OUT": 1, "THEN": ""}),
        (triton_kernels.norm_kernel, norm),
        (triton_kernels.norm_backward_kernel, norm),
        (
            triton_kernels.wgrad_kernel,
            {"BLOCK_R": 32, "BLOCK_O": 32, "BLOCK_I": 32, **every},
        ),
    ):
        kinds = {"table_ptr": "*i32", "layers": "i32", "activations": "i32", "": "*fp32"}
        compile_for_sm_90(kernel, constants, kinds)


@runs
@pytest.mark.parametrize("shapes", GROUPS, ids=str)
def test_values_and_gradients(shapes: list[tuple[int, int]]) -> None:
    check(network(shapes))


@runs
@pytest.mark.parametrize("options", [{"mapping": "residual"}, {"output": "tanh"}], ids=str)
def test_residual_and_saturating_mappings(options: dict[str, str]) -> None:
    check(network(SMALL[:1], **options), in_place=False)  # the probe has other strides


@runs
def test_detached_weights_get_no_gradient_and_the_parameters_the_same() -> None:
    model = network(SMALL[:1])
    latents = weights(model)
    parameters = [p for f in mappings(model) for p in f.parameters()]
    found = []
    for detached in (False, True):
        seen = [w.detach() for w in latents] if detached else latents
        predictions = predict_fused(mappings(model), seen, networks=1)
        loss = sum(p.square().sum() for p in predictions)
        found.append(torch.autograd.grad(loss, [*parameters, *latents], allow_unused=True))
    for attached, alone in zip(*(grads[: len(parameters)] for grads in found), strict=True):
        assert torch.equal(attached, alone)
    of_latents = [grads[len(parameters) :] for grads in found]
    assert all(grad is not None for grad in of_latents[0])
    assert all(grad is None for grad in of_latents[1])


def only(number: int, kernel: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a kernel one of its blocks."""
    monkeypatch.setattr(kernel, "configs", kernel.configs[number : number + 1])
    monkeypatch.setattr(kernel, "tuners", {})


@pytest.mark.at_length
@runs
@pytest.mark.parametrize("number", range(1, len(mapping_conv.CONV_BLOCKS)))
def test_every_block_of_a_convolution(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED and number not in (3, 4):
        pytest.skip("to the interpreter, the same as another")
    only(number, mapping_conv.CONV, monkeypatch)
    check(network([(19, 5)] if INTERPRETED else [(64, 64), (19, 5)]))


@pytest.mark.at_length
@runs
@pytest.mark.parametrize("number", range(1, len(mapping_conv.WGRAD_BLOCKS)))
def test_every_block_of_the_weights_gradient(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED and number not in (1, 3):
        pytest.skip("to the interpreter, the same as another")
    only(number, mapping_conv.WGRAD, monkeypatch)
    check(network([(19, 5)] if INTERPRETED else [(64, 64), (19, 5)]))


@runs
def test_statistics_do_not_suffer_from_a_large_mean() -> None:
    """E[y²] − E[y]² would have no digit left."""
    model = network(SMALL)
    with torch.no_grad():
        for weight in weights(model):
            weight.mul_(0.01).add_(3)
    exact = copy.deepcopy(model).double()
    for a, f, w in zip(fused(model), mappings(exact), weights(exact), strict=True):
        assert error(a, f(w)) < 1e-3  # of y, three of seven digits are the mean's


@runs
def test_parameters_that_are_not_channels_last() -> None:
    model = network(SMALL[:1])
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    check(model, in_place=False)


@runs
def test_a_nan_stays_in_its_layer_and_never_becomes_a_bit() -> None:
    model = network(SMALL)
    with torch.no_grad():
        weights(model)[0][0, 0, 0, 0] = math.nan
    first, second = fused(model)
    assert first.isnan().all()
    assert second.isfinite().all()


@runs
def test_the_same_bits_every_time_and_compiled() -> None:
    torch._dynamo.reset()
    model = network(SMALL[:1])
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True, dynamic=False)
    once, again, traced = fused(model), fused(model), compiled(model)
    grads = [gradients(model, predictions) for predictions in (once, again, traced)]
    for a, b, c in zip(once, again, traced, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    for a, b, c in zip(*grads, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert a.stride() == c.stride()


def with_kernels(model: nn.Module) -> list[Any]:
    mapped = [layer for _, layer in binary_layers(model)]
    for layer in mapped:
        if supports(layer.weight_binarizer.mapping, layer.weight):
            layer.fused_predict = partial(predict_fused, networks=1)
    return mapped


@runs
def test_a_traced_step_uses_the_kernels() -> None:
    """In one graph, and the gradients of all mappings are parts of one tensor: nothing is copied."""
    torch._dynamo.reset()
    model = network(SMALL)

    def total(mapped: Any) -> Tensor:
        mapping.fill(mapped)
        pairs = [(layer.weight, layer.weight_binarizer) for layer in mapped]
        values = [b.forward(w).square().sum() + b.auxiliary_loss(w) for w, b in pairs]
        for _, binarizer in pairs:
            binarizer.shared = None
        return sum(values, torch.zeros((), device=DEVICE))

    mapped = with_kernels(model)
    torch.compile(total, backend="aot_eager", fullgraph=True, dynamic=False)(mapped).backward()
    inner = [p for f in mappings(model) for p in f.parameters()]
    assert len({p.grad.untyped_storage().data_ptr() for p in inner if p.grad is not None}) == 1
    assert all(p.grad is not None and p.grad.stride() == p.stride() for p in inner)


@runs
def test_operators_keep_their_promises() -> None:
    """Schema, fake tensors (shape, strides, dtype), autograd registration."""
    model = network([(5, 3)])
    latent = mapping_conv._flat(weights(model)[0]).detach().requires_grad_()
    parameters = mapping_conv._parameters(mappings(model)).detach().requires_grad_()
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.unflip.mapping.default,
        (latent, parameters, [5], [3], 1),
        test_utils=(*tests, "test_autograd_registration"),
    )
    torch.library.opcheck(
        torch.ops.unflip.pack.default,
        ([latent, parameters],),
        test_utils=(*tests, "test_autograd_registration"),
    )
    q, saved = torch.ops.unflip.mapping(latent.detach(), parameters.detach(), [5], [3], 1)
    for to_latent, checks in ((True, tests), (False, ("test_faketensor",))):
        torch.library.opcheck(
            torch.ops.unflip.mapping_backward.default,
            (q, latent.detach(), parameters.detach(), saved, [5], [3], 1, to_latent),
            test_utils=checks,
        )


@runs
def test_layers_that_are_not_covered_take_the_plain_path() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(4, 6, 5), nn.Conv2d(4, 6, 1))
    binarize(model, "lns", keep_first_and_last=False, quiet=True)
    model.to(DEVICE)
    mapped = with_kernels(model)
    covered = [supports(layer.weight_binarizer.mapping, layer.weight) for layer in mapped]
    assert covered == [True, False, False]
    mapping.fill(mapped)
    for weight, binarizer in ((layer.weight, layer.weight_binarizer) for layer in mapped):
        assert isinstance(binarizer, MappedSign)
        assert binarizer.shared is not None
        torch.testing.assert_close(
            binarizer.shared[0], binarizer.mapping(weight), rtol=1e-4, atol=1e-5
        )


@runs
def test_what_is_not_supported() -> None:
    def covers(o: int, c: int, dtype: torch.dtype = torch.float32, **options: Any) -> bool:
        model = network([(o, c)], **options).to(dtype)
        return supports(mappings(model)[0], weights(model)[0])

    assert covers(6, 4)
    assert not covers(6, 4, torch.float64)
    assert not covers(6, 4, statistics="fixed")
    assert not covers(6, mapping_conv.MOST_CHANNELS + 1)


@pytest.mark.at_length
@runs
def test_kernels_that_are_wrong_are_found() -> None:
    model = network(SMALL[:1])
    layers = mapping.mapped_layers(model)
    check_mapping(layers, partial(predict_fused, networks=1))

    def slightly_off(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        return tuple(1.0001 * q for q in predict_fused(*arguments, **options))

    def without_gradient(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        return tuple(q - 0.1 * (q - q.detach()) for q in predict_fused(*arguments, **options))

    for wrong, what in ((slightly_off, "prediction"), (without_gradient, "gradient 1")):
        with pytest.raises(Mismatch, match=rf"{what} of 0 is off by"):
            check_mapping(layers, partial(wrong, networks=1), attempts=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_captured_in_a_cuda_graph_and_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    model = network([(16, 16), (32, 16), (32, 32), (64, 64)])
    check(model)
    expected = fused(model)
    compiled = torch.compile(fused, fullgraph=True, dynamic=False)
    for function in (fused, compiled):
        for _ in range(3):
            gradients(model, function(model))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = function(model)
            torch.autograd.grad(sum(q.square().sum() for q in found), list(model.parameters()))
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
