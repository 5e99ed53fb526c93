"""The fused binary convolution: values, gradients, every block, compile, and what it refuses.

One file of more than 400 lines, because Triton's interpreter runs it again as a whole.

On a CUDA machine the kernels run for real. Elsewhere one test runs this file again in a process of its own, in
Triton's interpreter, which has to be chosen before Triton is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unflip import methods
from unflip.kernels import tuning
from unflip.kernels.sign_conv import cuda_kernels, library, triton_launch
from unflip.kernels.sign_conv import operator as sign_conv
from unflip.kernels.sign_conv.cover import INPUTS, supports
from unflip.kernels.sign_conv.layer import fused_product
from unflip.kernels.sign_conv.operator import sign_conv2d
from unflip.kernels.tuning import available
from unflip.layers import BinaryConv2d

DEVICE = "cpu" if tuning.INTERPRETED else "cuda"
runs = pytest.mark.skipif(not available(), reason="no CUDA device: see test_in_the_interpreter")
# On a CUDA device both kinds of kernels are tried.
CUDA = torch.cuda.is_available() and not tuning.INTERPRETED and cuda_kernels.allowed()
every_kind = pytest.mark.parametrize("inputs", INPUTS)

# images, channels in and out, height, width, kernel, stride, padding
SHAPES = [
    (2, 16, 16, 8, 8, 3, 1, 1),
    (3, 16, 32, 9, 7, 3, 2, 1),
    (1, 32, 16, 5, 5, 3, 1, 1),
    (2, 32, 64, 6, 5, 3, 2, 1),
    (1, 64, 64, 4, 3, 3, 1, 1),
    (1, 48, 48, 4, 4, 3, 1, 1),
    (2, 16, 16, 5, 6, 1, 1, 0),
    (2, 16, 32, 6, 7, 1, 2, 0),
    (1, 16, 16, 7, 9, 5, 3, 2),
    (1, 16, 144, 3, 4, 3, 1, 1),
    (1, 144, 16, 3, 3, 3, 2, 1),
    (1, 16, 16, 6, 6, 3, 1, 0),
    (1, 16, 16, 3, 3, 3, 2, 3),
    (5, 16, 16, 2, 2, 2, 2, 0),
]
FEW_SHAPES = [SHAPES[1], SHAPES[4], SHAPES[5]]


def names(shape: tuple[int, ...]) -> str:
    n, c, o, h, w, k, stride, padding = shape
    return f"{n}x{c}-{o}@{h}x{w},k{k}s{stride}p{padding}"


shapes = pytest.mark.parametrize("shape", SHAPES, ids=names)


def example(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Input with every special value, signs, and a gradient of the output."""
    n, c, o, h, w, k, stride, padding = shape
    torch.manual_seed(seed)
    x = torch.randn(n, c, h, w).to(torch.float16)
    special = [
        0.0,
        -0.0,
        2**-24,
        -(2**-24),
        1.0,
        -1.0,
        1.001,
        -1.001,
        0.5,
        0.5005,
        math.inf,
        -math.inf,
    ]
    x.view(-1)[: len(special)] = torch.tensor(special, dtype=torch.float16)
    x.view(-1)[-len(special) :] = torch.tensor(special, dtype=torch.float16)
    signs = torch.where(torch.randn(o, c, k, k) >= 0, 1.0, -1.0)
    size = [(length + 2 * padding - k) // stride + 1 for length in (h, w)]
    grad = torch.randn(n, o, *size).to(torch.float16)
    last = torch.channels_last
    return (
        x.to(DEVICE, memory_format=last),
        signs.to(DEVICE),
        grad.to(DEVICE, memory_format=last),
    )


def plainly(
    x: Tensor, signs: Tensor, grad: Tensor, stride: int, padding: int, inputs: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of x and of the signs by torch, in float64."""
    x, grad = x.double(), grad.double()
    if inputs == "pm1":
        binary, passes = torch.where(x >= 0, 1.0, -1.0).double(), x.abs() <= 1
    elif inputs == "01":
        binary, passes = (x > 0.5).double(), (x >= 0) & (x <= 1)
    else:
        binary, passes = x, torch.ones_like(x, dtype=torch.bool)
    binary.requires_grad_()
    signs = signs.double().requires_grad_()
    y = F.conv2d(binary, signs, stride=stride, padding=padding)
    grad_binary, grad_signs = torch.autograd.grad(y, (binary, signs), grad)
    return y.detach(), grad_binary * passes, grad_signs


def fused(
    x: Tensor,
    signs: Tensor,
    grad: Tensor,
    stride: int,
    padding: int,
    inputs: Any,
    function: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    x, signs = x.detach().requires_grad_(), signs.detach().requires_grad_()
    y = (function or sign_conv2d)(x, signs, stride, padding, inputs, cuda=CUDA)
    grad_x, grad_signs = torch.autograd.grad(y, (x, signs), grad)
    return y.detach(), grad_x, grad_signs


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-9)).item()


def binarized(x: Tensor, inputs: str) -> Tensor:
    """Values that a method has made −1, 0 and +1 itself."""
    return x.clamp(-1, 1).round() if inputs == "given" else x


def check(shape: tuple[int, ...], inputs: str) -> None:
    stride, padding = shape[-2:]
    x, signs, grad = example(shape)
    x = binarized(x, inputs)
    y, grad_x, grad_signs = fused(x, signs, grad, stride, padding, inputs)
    true_y, true_grad_x, true_grad_signs = plainly(x, signs, grad, stride, padding, inputs)
    assert y.dtype == grad_x.dtype == torch.float16
    assert grad_signs.dtype == torch.float32
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y.double(), true_y)
    assert error(grad_x, true_grad_x) < 2e-3
    assert torch.equal(grad_x == 0, (grad_x == 0) | (true_grad_x == 0))  # the mask is exact
    assert error(grad_signs, true_grad_signs) < 1e-5


@pytest.mark.skipif(available(), reason="the kernels run in this process")
def test_in_the_interpreter(in_the_interpreter: Callable[[str], None]) -> None:
    in_the_interpreter(__file__)


@runs
@every_kind
@shapes
def test_values_are_exact_and_gradients_right(shape: tuple[int, ...], inputs: str) -> None:
    check(shape, inputs)


def only(
    number: int, kernel: tuning.Tuned, configs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave a kernel one of its blocks, by Triton alone."""
    monkeypatch.setattr(kernel, "configs", configs[number : number + 1])
    monkeypatch.setattr(kernel, "tuners", {})
    monkeypatch.setattr(cuda_kernels, "covers", lambda *_: False)


@pytest.mark.at_length
@runs
@pytest.mark.parametrize("shape", FEW_SHAPES, ids=names)
@pytest.mark.parametrize("number", range(len(triton_launch.PIXEL_BLOCKS)))
def test_every_pixel_block(
    shape: tuple[int, ...], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tuning.INTERPRETED and number in (1, 6, 7):
        pytest.skip("to the interpreter, the same as another")
    for kernel in (triton_launch.FPROP, triton_launch.DGRAD):
        only(number, kernel, triton_launch.PIXEL_CONFIGS, monkeypatch)
    check(shape, "pm1")


@pytest.mark.at_length
@runs
@pytest.mark.parametrize("shape", FEW_SHAPES, ids=names)
@pytest.mark.parametrize("number", range(len(triton_launch.CHUNK_BLOCKS)))
def test_every_chunk_block(
    shape: tuple[int, ...], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(number, triton_launch.WGRAD, triton_launch.CHUNK_CONFIGS, monkeypatch)
    check(shape, "pm1")


@pytest.mark.at_length
@runs
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 7, 50])
def test_any_number_of_chunks_covers_every_pixel_once(
    chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "chunks", lambda *_: chunks)
    monkeypatch.setattr(cuda_kernels, "covers", lambda *_: False)
    check((5, 16, 16, 13, 11, 3, 1, 1), "pm1")


def test_chunks_fill_the_device_and_bound_the_partial_sums() -> None:
    for n, size, terms, outputs in [
        (128, (32, 32), 144, 16),
        (128, (8, 8), 576, 64),
        (1, (7, 5), 144, 16),
        (256, (224, 224), 1152, 128),
    ]:
        x = torch.empty(n, terms // 9, *size, device="meta")
        chunks = triton_launch.chunks(x, size, terms, outputs, 1)
        assert 1 <= chunks <= n * -(-size[0] * size[1] // 64)
        assert chunks == 1 or chunks * terms * outputs <= triton_launch.MOST_PARTIAL


def test_networks_side_by_side_share_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(128, 16, 32, 32, device="meta")
    monkeypatch.setattr(tuning, "PROGRAMS_PER_SM", 64)
    alone = triton_launch.chunks(x, (32, 32), 144, 16, 1)
    assert 1 <= triton_launch.chunks(x, (32, 32), 144, 16, 8) <= alone // 4


@pytest.mark.at_length
@runs
@every_kind
def test_compiled_is_the_same(inputs: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(sign_conv2d, backend="aot_eager", fullgraph=True, dynamic=False)
    for shape in FEW_SHAPES:
        x, signs, grad = example(shape)
        x = binarized(x, inputs)
        expected = fused(x, signs, grad, *shape[-2:], inputs)
        found = fused(x, signs, grad, *shape[-2:], inputs, function=compiled)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


@runs
@every_kind
@pytest.mark.parametrize("shape", FEW_SHAPES, ids=names)
def test_a_gradient_from_elsewhere_is_added(shape: tuple[int, ...], inputs: str) -> None:
    x, signs, grad = example(shape)
    halves = sign_conv.halves(signs)
    rest = (*shape[-2:], INPUTS.index(inputs), 1, CUDA)
    alone = sign_conv.input_gradient(grad, x, halves, *rest)
    plus = torch.linspace(-3, 3, x.numel()).to(alone).view(x.permute(0, 2, 3, 1).shape)
    plus = plus.permute(0, 3, 1, 2)
    found = sign_conv.input_gradient(grad, x, halves, *rest, plus)
    assert error(found, alone.double() + plus.double()) < 1e-3


@runs
@pytest.mark.parametrize("shape", FEW_SHAPES, ids=names)
def test_operators_keep_their_promises(shape: tuple[int, ...]) -> None:
    """Schema, fake tensors (shape, strides, dtype), autograd registration, AOT dispatch."""
    stride, padding = shape[-2:]
    x, signs, grad = example(shape)
    halves = signs.to(torch.float16).contiguous(memory_format=torch.channels_last)
    ops, k = torch.ops.unflip, shape[5]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        ops.sign_conv2d.default,
        (x, signs.requires_grad_(), halves, stride, padding, 0, 1, CUDA),
        test_utils=(*tests, "test_autograd_registration"),
    )
    torch.library.opcheck(
        ops.sign_conv2d_dgrad.default,
        (grad, x, halves, stride, padding, 0, 1, CUDA),
        test_utils=tests,
    )
    torch.library.opcheck(
        ops.sign_conv2d_wgrad.default,
        (grad, x, k, k, stride, padding, 0, 1, CUDA),
        test_utils=tests,
    )


@runs
def test_any_memory_format_and_dtype_of_signs() -> None:
    x, signs, grad = example(SHAPES[3])
    expected = fused(x, signs, grad, 2, 1, "pm1")
    for other_x in (x.contiguous(), x[:, :, :, torch.arange(x.shape[3])]):
        for other_signs in (signs.contiguous(memory_format=torch.channels_last), signs.half()):
            found = fused(other_x, other_signs, grad.contiguous(), 2, 1, "pm1")
            assert found[2].dtype == other_signs.dtype
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b.to(a.dtype))


@runs
def test_gradient_of_an_expanded_scalar() -> None:
    """The gradient of sum() has strides of zero."""
    x, signs, _ = example(SHAPES[0])
    x.requires_grad_()
    sign_conv2d(x, signs, 1, 1).sum().backward()
    ones = torch.ones(2, 16, 8, 8, device=x.device)
    assert x.grad is not None
    assert error(x.grad, plainly(x.detach(), signs, ones, 1, 1, "pm1")[1]) < 2e-3


@runs
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_wanted(wanted: tuple[bool, bool]) -> None:
    x, signs, grad = example(SHAPES[0])
    x.requires_grad_(wanted[0])
    signs.requires_grad_(wanted[1])
    y = sign_conv2d(x, signs, 1, 1)
    assert y.requires_grad == any(wanted)
    if y.requires_grad:
        y.backward(grad)
    assert (x.grad is not None, signs.grad is not None) == wanted


@runs
def test_the_largest_sums_are_exact() -> None:
    shape = (1, 224, 16, 3, 3, 3, 1, 1)
    x, signs, _ = example(shape)
    y = sign_conv2d(torch.ones_like(x), torch.ones_like(signs), 1, 1)
    assert y[0, 0, 1, 1].item() == 2016
    check(shape, "pm1")


@runs
def test_a_nan_spoils_nothing_else() -> None:
    x, signs, grad = example(SHAPES[0])
    x[1, 3, 4, 4] = math.nan
    y, grad_x, grad_signs = fused(x, signs, grad, 1, 1, "pm1")
    assert torch.isfinite(y).all()
    assert torch.isfinite(grad_signs).all()
    assert grad_x[1, 3, 4, 4].item() == 0


def test_supports() -> None:
    x, weight = (128, 16, 32, 32), (16, 16, 3, 3)
    assert supports(x, weight, 1, 1)
    assert supports(x, weight, (2, 2), (1, 1), (1, 1), 1)
    assert supports((128, 224, 8, 8), (64, 224, 3, 3), 1, 1)
    assert supports((128, 512, 7, 7), (512, 512, 3, 3), 1, 1)
    assert not supports((1, 2**21, 3, 3), (16, 2**21, 3, 3), 1, 1)  # 2²⁴ · 9 / 8 terms
    assert not supports((128, 3, 32, 32), (16, 3, 3, 3), 1, 1)
    assert not supports(x, (10, 16, 3, 3), 1, 1)
    assert not supports(x, (16, 32, 3, 3), 1, 1)
    assert not supports(x, weight, (1, 2), 1)
    assert not supports(x, weight, 1, (0, 1))
    assert not supports(x, weight, 1, "same")
    assert not supports(x, weight, 1, 1, 2)
    assert not supports(x, (16, 8, 3, 3), 1, 1, 1, 2)
    assert not supports((0, 16, 32, 32), weight, 1, 1)
    assert not supports((1, 16, 2, 2), weight)
    assert not supports((2**20, 16, 32, 32), weight, 1, 1)  # 2³⁴ elements
    assert not supports((16, 32, 32), weight, 1, 1)


def test_refusals_name_the_reason() -> None:
    half = torch.zeros(1, 24, 4, 4, dtype=torch.float16)
    with pytest.raises(ValueError, match="24 and 16 channels are not both multiples of 16"):
        sign_conv2d(half, torch.ones(16, 24, 3, 3), 1, 1)
    with pytest.raises(TypeError, match=r"float32.*should be torch\.float16"):
        sign_conv2d(half[:, :16].float(), torch.ones(16, 16, 3, 3), 1, 1)
    wrong: Any = "02"
    with pytest.raises(ValueError, match="'02' is not one of pm1, 01, given"):
        sign_conv2d(half[:, :16], torch.ones(16, 16, 3, 3), 1, 1, wrong)


@runs
@pytest.mark.parametrize(
    ("channels", "inputs", "expected"),
    [
        (224, "01", torch.float16),
        (240, "pm1", torch.float16),  # 2160 terms: their sums are even
        (240, "01", torch.float32),
        (512, "pm1", torch.float32),
    ],
)
def test_every_sum_of_a_wide_layer_is_exact(
    channels: int, inputs: Any, expected: torch.dtype
) -> None:
    """With all signs alike the sums are the largest; with a few different they take values near it."""
    x = torch.ones(2, channels, 3, 3, dtype=torch.float16, device=DEVICE)
    x[1].view(-1)[:45] = -1.0 if inputs == "pm1" else 0.0
    signs = torch.ones(16, channels, 3, 3, device=DEVICE)
    for filter in range(16):
        signs[filter, :filter, 1, 1] = -1.0
    y, _, _ = fused(x, signs, torch.ones(2, 16, 3, 3, device=DEVICE).to(expected), 1, 1, inputs)
    assert y.dtype == expected
    binary = torch.where(x > 0.5, 1.0, -1.0 if inputs == "pm1" else 0.0).double()
    assert torch.equal(y.double(), F.conv2d(binary, signs.double(), padding=1))


@runs
@every_kind
@pytest.mark.parametrize("shape", FEW_SHAPES, ids=names)
def test_large_layers_by_cudnn_are_the_same(
    shape: tuple[int, ...], inputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, signs, grad = example(shape)
    stride, padding = shape[-2:]
    if inputs == "given":
        x = torch.where(x > 0.5, 1.0, -1.0).to(x)
    ours = fused(x, signs, grad, stride, padding, inputs)
    monkeypatch.setattr(library, "LARGE", 0.0)
    large = fused(x, signs, grad, stride, padding, inputs)
    assert torch.equal(ours[0], large[0])
    expected = plainly(x, signs, grad, stride, padding, inputs)
    for found, value, right in zip(large, ours, expected, strict=True):
        assert found.stride() == value.stride()
        assert found.dtype == value.dtype
        assert error(found, right) < 2e-3
    plus = torch.randn_like(x)
    options = stride, padding, INPUTS.index(inputs), 1, False
    added = sign_conv.input_gradient(grad, x, sign_conv.halves(signs), *options, plus)
    assert error(added, expected[1] + plus.double()) < 2e-3


def test_which_layers_are_large() -> None:
    """All of ResNet-18 at ImageNet's size, none of ResNet-20 at CIFAR-10's."""
    assert library.is_large((256, 64, 56, 56), (64, 64, 3, 3))
    assert library.is_large((256, 512, 7, 7), (512, 256, 3, 3))
    assert not library.is_large((128, 64, 8, 8), (64, 64, 3, 3))
    assert not library.is_large((128, 16, 32, 32), (16, 16, 3, 3))


OPTIONS: dict[str, dict[str, Any]] = {
    "dorefa01": {"name": "dorefa", "inputs": "01"},
    "reactnet-clipped": {"name": "reactnet", "gradient": "clipped"},
}


@runs
@pytest.mark.parametrize("name", [*methods.names(), *OPTIONS])
def test_a_layer_of_every_method_is_the_same_with_and_without_the_kernels(
    name: str,
) -> None:
    torch.manual_seed(0)
    method = OPTIONS.get(name, name)
    layer = BinaryConv2d(16, 16, 3, padding=1, bias=False, method=method).to(DEVICE)
    shifts = [p for n, p in layer.input_binarizer.named_parameters() if n == "shift"]
    for shift in shifts:
        torch.nn.init.normal_(shift)
    x, _, grad = example((2, 16, 16, 6, 5, 3, 1, 1))
    x = x.clamp(-3, 3)

    def run(product: Any) -> list[Tensor]:
        layer.fused_product = product
        leaf = x.clone().requires_grad_()
        with torch.autocast(DEVICE, torch.float16):
            y = layer(leaf)
        return [y, *torch.autograd.grad(y, [leaf, layer.weight, *shifts], grad.to(y.dtype))]

    plain, fused_ = run(None), run(partial(fused_product, networks=1, cuda=CUDA))
    # FDA adds a little noise to its signs while it trains: there sums are rounded, in another order
    same = (
        error(fused_[0], plain[0].double()) < 1e-3
        if name == "fda"
        else torch.equal(fused_[0], plain[0])
    )
    assert same
    for found, expected in zip(fused_[1:], plain[1:], strict=True):
        assert error(found, expected.double()) < 5e-3


@pytest.mark.skipif(tuning.INTERPRETED, reason="the interpreter takes tensors on the CPU")
def test_a_tensor_on_the_cpu_is_refused() -> None:
    x = torch.zeros(1, 16, 4, 4, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="needs Triton and a CUDA device"):
        sign_conv2d(x, torch.ones(16, 16, 3, 3), 1, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_captured_in_a_cuda_graph_and_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    x, signs, grad = example((8, 32, 32, 16, 16, 3, 1, 1))
    expected = fused(x, signs, grad, 1, 1, "pm1")
    compiled = torch.compile(sign_conv2d, fullgraph=True, dynamic=False)
    for function in (sign_conv2d, compiled):
        for _ in range(3):
            fused(x, signs, grad, 1, 1, "pm1", function)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = fused(x, signs, grad, 1, 1, "pm1", function)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found[0], expected[0])
        assert error(found[1], expected[1].double()) < 1e-3
        assert error(found[2], expected[2].double()) < 1e-5
