"""The CUDA C++ kernels of the binary convolution: values, gradients, edges, and the choice between them and Triton.

On a CPU they are run by ``warp_emulator.h``; with a CUDA device, for real as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unflip.kernels import nvrtc, tuning
from unflip.kernels.sign_conv import cuda_kernels
from unflip.kernels.sign_conv.cover import INPUTS

# images, channels in and out, height, width, rows that a warp walks down
SHAPES = [
    (3, 16, 16, 7, 5, 3),
    (2, 16, 16, 4, 33, 4),
    (3, 32, 32, 5, 9, 2),
    (2, 64, 64, 3, 13, 8),
    (1, 16, 64, 2, 3, 1),
    (2, 64, 16, 1, 1, 4),
    (1, 32, 16, 3, 17, 2),
]
VARIANT = """
#define KIND {kind}
#define GRADIENT {gradient}
#define K {k}
#define N {n}
#define convolve convolve_{kind}_{gradient}
namespace variant_{kind}_{gradient} {{
#include "sign_conv.cu"
}}
extern "C" const char* run_{kind}_{gradient}(emulator::Launch& launch) {{
  using namespace variant_{kind}_{gradient};
  return emulator::emulate(convolve, THREADS, launch);
}}
#undef KIND
#undef GRADIENT
#undef K
#undef N
#undef convolve
"""
Compile = Callable[[str], Callable[..., Any]]


def names(shape: tuple[int, ...]) -> str:
    n, c, o, h, w, rows = shape
    return f"{n}x{c}-{o}@{h}x{w},rows{rows}"


def all_nine(shape: tuple[int, ...]) -> str:
    """The kernels for a shape."""
    _, c, o, h, w, _ = shape
    variants = [
        VARIANT.format(kind=kind, gradient=gradient, k=k, n=n)
        for kind in range(3)
        for gradient, k, n in ((0, c, o), (1, o, c), (2, o, c))
    ]
    return f"#define H {h}\n#define W {w}\n" + "".join(variants)


def example(shape: tuple[int, ...], kind: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input with every special value, signs, and a gradient of the output, in channels_last."""
    n, c, o, h, w, _ = shape
    generator = torch.Generator().manual_seed(n + c + o + h + w)
    x = torch.randn(n, c, h, w, generator=generator)
    if kind == 2:
        x = x.clamp(-1, 1).round()
    else:
        special = [0.0, -0.0, 2**-24, -(2**-24), 1.0, -1.0, 1.001, -1.001, 0.5, 0.5005, math.inf]
        x.view(-1)[: len(special)] = torch.tensor(special)
        x.view(-1)[-len(special) :] = -torch.tensor(special)
    signs = torch.where(torch.randn(o, c, 3, 3, generator=generator) >= 0, 1.0, -1.0)
    grad = torch.randn(n, o, h, w, generator=generator)
    x, signs, grad = (
        tensor.half().contiguous(memory_format=torch.channels_last) for tensor in (x, signs, grad)
    )
    return x, signs, grad


def plainly(x: Tensor, signs: Tensor, grad: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Output and gradient of x, in float64."""
    x = x.double()
    if kind == 0:
        binary, passes = torch.where(x >= 0, 1.0, -1.0).double(), x.abs() <= 1
    elif kind == 1:
        binary, passes = (x > 0.5).double(), (x >= 0) & (x <= 1)
    else:
        binary, passes = x, torch.ones_like(x, dtype=torch.bool)
    binary.requires_grad_()
    y = F.conv2d(binary, signs.double(), padding=1)
    (grad_binary,) = torch.autograd.grad(y, binary, grad.double())
    return y.detach(), grad_binary * passes


def emulate(
    kernels: Callable[..., Any],
    shape: tuple[int, ...],
    kind: int,
    gradient: int,
    source: Tensor,
    x: Tensor,
    signs: Tensor,
    plus: Tensor | None = None,
) -> Tensor:
    """The result, which does not depend on the order in which warps run."""
    n, c, o, h, w, rows = shape
    k, results = (o, c) if gradient else (c, o)
    blocks, threads, shared = cuda_kernels.geometry(n, h, w, k, results, rows, gradient)
    outputs = []
    for backwards in (False, True):
        output = torch.full((n, results, h, w), math.nan, dtype=torch.float16)
        output = output.contiguous(memory_format=torch.channels_last)
        arguments = [source, signs, x, x if plus is None else plus, output, n, rows]
        name = f"run_{kind}_{gradient}"
        kernels(name, (blocks, 1, 1), threads, shared, arguments, backwards=backwards)
        outputs.append(output)
    assert torch.equal(*outputs)
    return outputs[0]


@pytest.mark.parametrize("kind", range(3), ids=INPUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_kernels_in_the_emulator(shape: tuple[int, ...], kind: int, emulated: Compile) -> None:
    kernels = emulated(all_nine(shape))
    x, signs, grad = example(shape, kind)
    true_y, true_grad = plainly(x, signs, grad, kind)
    y = emulate(kernels, shape, kind, 0, x, x, signs)
    assert torch.equal(y.double(), true_y)
    found = emulate(kernels, shape, kind, 1, grad, x, signs)
    error = (found.double() - true_grad).abs()
    assert (
        error <= 2**-11 * true_grad.abs() + 2**-13
    ).all()  # float16's rounding, and the sum's in float32
    assert torch.equal(found == 0, (found == 0) | (true_grad == 0))  # the mask is exact
    plus = torch.linspace(-3, 3, x.numel()).half().view(x.permute(0, 2, 3, 1).shape)
    plus = plus.permute(0, 3, 1, 2)
    assert torch.equal(emulate(kernels, shape, kind, 2, grad, x, signs, plus), found + plus)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", range(3), ids=INPUTS)
@pytest.mark.parametrize(
    "shape", [*SHAPES, (9, 16, 16, 32, 32, 8), (5, 64, 64, 8, 8, 8)], ids=names
)
def test_kernels_on_the_device_and_in_a_graph(shape: tuple[int, ...], kind: int) -> None:
    rows = shape[-1]
    x, signs, grad = (tensor.cuda() for tensor in example(shape, kind))
    true_y, true_grad = plainly(x, signs, grad, kind)

    def run() -> tuple[Tensor, Tensor]:
        y, out = torch.empty_like(grad), torch.empty_like(x)
        cuda_kernels.fprop(x, signs, y, kind, rows)
        cuda_kernels.dgrad(grad, x, signs, None, out, kind, rows)
        return y, out

    def check(y: Tensor, found: Tensor) -> None:
        assert torch.equal(y.double(), true_y)
        assert ((found.double() - true_grad).abs() <= 2**-11 * true_grad.abs() + 2**-12).all()

    check(*run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    check(*captured)


def test_a_nan_spoils_nothing_else(emulated: Compile) -> None:
    shape = SHAPES[0]
    kernels = emulated(all_nine(shape))
    x, signs, grad = example(shape, 0)
    x[1, 3, 4, 4] = math.nan
    y = emulate(kernels, shape, 0, 0, x, x, signs)
    assert torch.isfinite(y).all()
    assert emulate(kernels, shape, 0, 1, grad, x, signs)[1, 3, 4, 4].item() == 0


def test_what_is_covered() -> None:
    assert cuda_kernels.covers((16, 16, 3, 3), 1, 1)
    assert cuda_kernels.covers((64, 32, 3, 3), 1, 1)
    assert not cuda_kernels.covers((32, 16, 3, 3), 2, 1)
    assert not cuda_kernels.covers((16, 16, 3, 3), 1, 0)
    assert not cuda_kernels.covers((16, 16, 1, 1), 1, 1)
    assert not cuda_kernels.covers((48, 48, 3, 3), 1, 1)
    assert not cuda_kernels.covers((16, 3, 3, 3), 1, 1)


def test_choices_of_rows() -> None:
    assert cuda_kernels.choices(32) == [4, 8, 16, 32]
    assert cuda_kernels.choices(7) == [4, 7]
    assert cuda_kernels.choices(3) == [3]
    assert cuda_kernels.choices(224) == [4, 8, 16, 32]


class Calls:
    """Counts which kernels compute, and pretends how long that takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[object, float]) -> None:
        self.calls: list[object] = []
        self.networks: list[int] = []

        def pretend(call: Callable[[], object], _: object, networks: int) -> list[float]:
            self.networks.append(networks)
            return [times[call() or self.calls.pop()]]

        monkeypatch.setattr(tuning, "_time", pretend)
        monkeypatch.setattr(tuning, "chosen_rows", {})
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def compute(self, networks: int = 1) -> None:
        key = ("fprop", 16, networks)
        tuning.by_the_faster(key, [4, 8, 16], self.calls.append, self.by_triton)

    def by_triton(self) -> None:
        self.calls.append("Triton")


def test_the_faster_kernel_computes_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Calls(monkeypatch, {4: 3.0, 8: 2.0, 16: 2.5, "Triton": 6.0})
    kernels.compute()
    monkeypatch.delattr(tuning, "_time")
    kernels.compute()
    assert kernels.calls == [8, 8]


def test_noise_does_not_choose_a_kernel_that_compiled_code_depends_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times: dict[object, float] = {4: 3.0, 8: 2.0, 16: 1.95, "Triton": 1.9}
    kernels = Calls(monkeypatch, times)
    kernels.compute()
    assert kernels.calls == ["Triton"]
    kernels.calls.clear()
    key = ("wgrad", 16, 1)
    assert tuning.rows_for(key, [4, 8, 16], kernels.calls.append, kernels.by_triton) == 8


def test_triton_computes_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Calls(monkeypatch, {4: 3.0, 8: 2.0, 16: 2.5, "Triton": 1.0})
    kernels.compute()
    kernels.compute()
    assert kernels.calls == ["Triton", "Triton"]


def test_each_number_of_networks_has_its_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of different sizes in one process do not change each other's choices."""
    times: dict[object, float] = {4: 3.0, 8: 2.0, 16: 2.5, "Triton": 6.0}
    kernels = Calls(monkeypatch, times)
    kernels.compute(networks=1)
    times[16] = 1.0
    kernels.compute(networks=3)
    kernels.compute(networks=1)
    assert kernels.calls == [8, 16, 8]
    assert kernels.networks == [1] * 4 + [3] * 4
    monkeypatch.setattr(tuning, "chosen_rows", {("wgrad", 16, 1): 8, ("wgrad", 16, 3): 4})
    assert tuning.graph_choices(3) == [(("wgrad", 16, 3), 4)]


def test_nothing_is_timed_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Calls(monkeypatch, {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernels.compute()
    assert kernels.calls == ["Triton"]
    assert tuning.chosen_rows == {}


def test_a_kernel_that_fails_raises_and_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scope then tries again without CUDA C++: test_scope.py."""
    kernels = Calls(monkeypatch, {"Triton": 1.0})

    def fails(rows: int) -> None:
        raise RuntimeError("no libnvrtc")

    with pytest.raises(RuntimeError, match="no libnvrtc"):
        tuning.by_the_faster(("dgrad", 16, 1), [16], fails, kernels.by_triton)
    assert tuning.chosen_rows == {}


def test_they_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNFLIP_NVRTC", raising=False)
    assert cuda_kernels.allowed()
    monkeypatch.setenv("UNFLIP_NVRTC", "0")
    assert not cuda_kernels.allowed()


def test_without_nvrtc_the_reason_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    with pytest.raises(RuntimeError, match=r"libnvrtc\.so\.99 is neither in .* nor under"):
        nvrtc._preload_nvrtc()


def test_the_kernels_are_beside_the_module_that_launches_them() -> None:
    for file in ("sign_conv.cu", "sign_conv_wgrad.cu"):
        assert (cuda_kernels.HERE / file).is_file()
