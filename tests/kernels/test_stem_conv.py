"""The first convolution of a network by our kernels: values, gradients, every block, what it refuses, and its place.

On a CUDA machine the kernels run for real. Elsewhere one test runs this file again in a process of its own, in
Triton's interpreter, which has to be chosen before Triton is imported; another compiles them for a GPU that is not
there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip.kernels import Trial, stem_conv
from unflip.kernels.check import Mismatch, check_stems
from unflip.kernels.sign_conv import triton_launch
from unflip.kernels.stem_conv import by_kernel, may_be_stem, stem_conv2d, supports
from unflip.kernels.tuning import INTERPRETED, Tuned, available, power

DEVICE = "cpu" if INTERPRETED else "cuda"
runs = pytest.mark.skipif(not available(), reason="no CUDA device: see test_in_the_interpreter")

# images, channels in and out, height, width, kernel, stride, padding
SHAPES = [
    (2, 3, 16, 8, 8, 3, 1, 1),
    (3, 3, 16, 9, 7, 3, 2, 1),
    (1, 1, 8, 5, 4, 3, 1, 0),
    (3, 1, 16, 7, 7, 5, 1, 2),
    (2, 2, 24, 5, 6, 3, 1, 2),
    (1, 4, 16, 6, 5, 3, 2, 0),
    (1, 3, 64, 13, 11, 7, 2, 3),
    (3, 3, 64, 5, 5, 5, 2, 1),
    (1, 8, 24, 4, 5, 3, 1, 1),
    (1, 3, 144, 4, 3, 3, 1, 3),
    (5, 3, 8, 2, 2, 2, 2, 0),
    (2, 7, 5, 4, 4, 1, 1, 0),
    (1, 3, 16, 12, 13, 11, 4, 2),
]
FEW_SHAPES = [SHAPES[1], SHAPES[4], SHAPES[6]]


def names(shape: tuple[int, ...]) -> str:
    n, c, o, h, w, k, stride, padding = shape
    return f"{n}x{c}-{o}@{h}x{w},k{k}s{stride}p{padding}"


def example(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight, and a gradient of the output."""
    n, c, o, h, w, k, stride, padding = shape
    torch.manual_seed(0)
    size = [(length + 2 * padding - k) // stride + 1 for length in (h, w)]
    last = torch.channels_last
    return (
        torch.randn(n, c, h, w).half().to(DEVICE, memory_format=last),
        torch.randn(o, c, k, k).to(DEVICE, memory_format=last),
        torch.randn(n, o, *size).half().to(DEVICE, memory_format=last),
    )


def results(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, grad: Tensor, *rest: int
) -> tuple[Tensor, Tensor]:
    """The output and the weight's gradient."""
    weight = weight.detach().requires_grad_()
    y = function(x, weight, *rest)
    return y.detach(), torch.autograd.grad(y, weight, grad)[0]


def exactly(
    x: Tensor, weight: Tensor, grad: Tensor, stride: int, padding: int
) -> tuple[Tensor, Tensor]:
    """By torch in float64, with the weight that the kernels multiply with."""

    def convolution(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, stride=stride, padding=padding)

    return results(convolution, x.double(), weight.half().double(), grad.double())


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-9)).item()


def check(shape: tuple[int, ...]) -> None:
    x, weight, grad = example(shape)
    y, grad_weight = results(stem_conv2d, x, weight, grad, *shape[-2:])
    true_y, true_grad_weight = exactly(x, weight, grad, *shape[-2:])
    assert y.dtype == torch.float16
    assert y.is_contiguous(memory_format=torch.channels_last)
    # Rounded once: half a unit in the last place, and what float32 sums are off by.
    assert ((y.double() - true_y).abs() <= 2**-11 * true_y.abs() + 1e-5).all()
    assert grad_weight.dtype == torch.float32
    assert grad_weight.stride() == weight.stride(), "it would be copied"
    assert error(grad_weight, true_grad_weight) < 1e-5


@pytest.mark.skipif(available(), reason="the kernels run in this process")
def test_in_the_interpreter(in_the_interpreter: Callable[[str], None]) -> None:
    in_the_interpreter(__file__)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("shape", [(32, 3, 16, 3, 1, 1), (224, 3, 64, 7, 2, 3)], ids=str)
def test_kernels_compile_for_a_gpu_that_is_not_there(
    shape: tuple[int, ...], compile_for_sm_90: Callable[..., None]
) -> None:
    size, c, o, k, stride, padding = shape
    x = torch.empty(1, c, size, size)
    layer = {
        **triton_launch._geometry(x, (o, c, k, k), stride, padding, 2),
        "PART": triton_launch._part(c),
        "BLOCK_O": power(o, 128),
    }
    for kernel, configs in (
        (triton_launch.FPROP.kernel, triton_launch.PIXEL_CONFIGS),
        (triton_launch.WGRAD.kernel, triton_launch.CHUNK_CONFIGS),
    ):
        config = configs[1]
        constants = {**layer, **config.kwargs}
        kinds = {"pixels": "i32", "images": "i32", "out_ptr": "*fp32", "": "*fp16"}
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        compile_for_sm_90(kernel, constants, kinds, **options)


@runs
@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_values_and_gradients(shape: tuple[int, ...]) -> None:
    check(shape)


def only(number: int, kernel: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a kernel one of its blocks."""
    monkeypatch.setattr(kernel, "configs", kernel.configs[number : number + 1])
    monkeypatch.setattr(kernel, "tuners", {})


@runs
@pytest.mark.parametrize("number", range(len(triton_launch.PIXEL_BLOCKS)))
def test_every_pixel_block(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    only(number, triton_launch.FPROP, monkeypatch)
    for shape in FEW_SHAPES:
        check(shape)


@runs
@pytest.mark.parametrize("number", range(len(triton_launch.CHUNK_BLOCKS)))
def test_every_chunk_block(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    only(number, triton_launch.WGRAD, monkeypatch)
    for shape in FEW_SHAPES:
        check(shape)


@runs
@pytest.mark.parametrize("chunks", [1, 3, 4, 50])
def test_any_number_of_chunks_covers_every_pixel_once(
    chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "chunks", lambda *_: chunks)
    check((5, 3, 16, 13, 11, 3, 1, 1))


@runs
def test_compiled_is_the_same() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(stem_conv2d, backend="aot_eager", fullgraph=True, dynamic=False)
    for shape in FEW_SHAPES:
        tensors, rest = example(shape), shape[-2:]
        expected = results(stem_conv2d, *tensors, *rest)
        for a, b in zip(results(compiled, *tensors, *rest), expected, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


@runs
def test_any_memory_format_and_dtype_of_the_weight() -> None:
    x, weight, grad = example(SHAPES[1])
    weight = weight.half().float()
    expected = results(stem_conv2d, x, weight, grad, 2, 1)
    for other_x in (x.contiguous(), x[:, :, :, torch.arange(x.shape[3])]):
        for other in (weight.contiguous(), weight.half()):
            found = results(stem_conv2d, other_x, other, grad.contiguous(), 2, 1)
            assert found[1].dtype == other.dtype
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b.to(a.dtype))


def test_supports() -> None:
    x, weight = torch.zeros(2, 3, 32, 32), torch.zeros(16, 3, 3, 3)
    assert supports(x, weight, 1, 1)
    assert supports(x, weight, (2, 2), (1, 1), (1, 1), 1)
    assert supports(torch.zeros(2, 8, 9, 9), torch.zeros(5, 8, 8, 8))
    assert not supports(torch.zeros(2, 9, 32, 32), torch.zeros(16, 9, 3, 3), 1, 1)
    assert not supports(x, torch.zeros(16, 3, 14, 14))  # 588 terms
    assert not supports(x, torch.zeros(16, 1, 3, 3), 1, 1, 1, 3)
    assert not supports(x, weight, 1, 1, 2)
    assert not supports(x, weight, (1, 2), 1)
    assert not supports(x, weight, 1, "same")
    assert not supports(x[0], weight, 1, 1)
    assert not supports(x[:0], weight, 1, 1)
    assert not supports(torch.zeros(2, 3, 2, 2), weight)
    assert not supports(x.requires_grad_(), weight, 1, 1)


def test_refusals_name_the_reason() -> None:
    half, weight = torch.zeros(1, 3, 4, 4, dtype=torch.float16), torch.zeros(16, 3, 3, 3)
    with pytest.raises(TypeError, match=r"float32.*should be torch\.float16"):
        stem_conv2d(half.float(), weight, 1, 1)
    with pytest.raises(ValueError, match="9 channels are more than 8"):
        stem_conv2d(half.expand(3, 3, 4, 4).reshape(1, 9, 4, 4), torch.zeros(16, 9, 3, 3), 1, 1)
    with pytest.raises(ValueError, match="588 terms per sum are more than 512"):
        stem_conv2d(half, torch.zeros(16, 3, 14, 14), 1, 7)
    with pytest.raises(ValueError, match="the input requires a gradient"):
        stem_conv2d(half.requires_grad_(), weight, 1, 1)


# ------------------------------------------------------------------------------------------ in a model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the inputs that were given to stem_conv2d, in whose place a plain convolution stands."""
    seen: list[tuple[int, ...]] = []

    def plain(x: Tensor, weight: Tensor, stride: Any, padding: Any, *, networks: int) -> Tensor:
        seen.append(tuple(x.shape))
        return F.conv2d(x, weight.half(), stride=stride, padding=padding)

    monkeypatch.setattr(stem_conv, "stem_conv2d", plain)
    return seen


def in_half(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.float16):
        return module(x)


def test_stems_are_plain_convolutions_of_few_channels() -> None:
    class Another(nn.Conv2d):
        pass

    assert may_be_stem(nn.Conv2d(3, 4, 3))
    assert not may_be_stem(nn.Conv2d(9, 4, 3))
    assert not may_be_stem(Another(3, 4, 3))
    assert not may_be_stem(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"))
    assert not may_be_stem(nn.Conv2d(3, 4, 3).double())
    assert not may_be_stem(nn.Conv1d(3, 4, 3))
    with by_kernel([changed := nn.Conv2d(3, 4, 3)]):
        assert not may_be_stem(changed)


@pytest.mark.parametrize("bias", [False, True])
def test_inside_a_stem_takes_the_kernels_and_outside_it_does_not(
    bias: bool, calls: list[tuple[int, ...]]
) -> None:
    stem = nn.Conv2d(3, 4, 3, padding=1, bias=bias)
    x, before = torch.randn(2, 3, 5, 5), set(vars(stem))
    expected = in_half(stem, x)
    assert not calls
    with by_kernel([stem]):
        found = in_half(stem, x)
        assert calls == [(2, 3, 5, 5)]
        keys = list(stem.state_dict())
    assert found.dtype == expected.dtype == torch.float16
    torch.testing.assert_close(found, expected, rtol=2**-10, atol=1e-3)
    assert keys == list(stem.state_dict()) == (["weight", "bias"] if bias else ["weight"])
    assert set(vars(stem)) == before
    in_half(stem, x)
    assert len(calls) == 1


def test_a_stem_is_put_back_after_an_error() -> None:
    stem = nn.Conv2d(3, 4, 3)
    with pytest.raises(RuntimeError, match="channels"), by_kernel([stem]):
        stem(torch.zeros(1, 2, 5, 5))
    assert "forward" not in vars(stem)


def test_what_the_kernels_do_not_cover_stays_plain(calls: list[tuple[int, ...]]) -> None:
    stem, dilated = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3, dilation=2)
    x = torch.randn(2, 3, 5, 5)
    with by_kernel([stem, dilated]):
        assert torch.equal(stem(x), F.conv2d(x, stem.weight, stem.bias))  # exact
        with torch.autocast("cpu", torch.bfloat16):
            assert stem(x).dtype == torch.bfloat16
        in_half(dilated, x)
        y = in_half(stem, x.requires_grad_())
    assert not calls
    y.sum().backward()
    assert x.grad is not None


def test_in_evaluation_a_stem_is_plain(calls: list[tuple[int, ...]]) -> None:
    stem, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 5, 5)
    expected = in_half(stem, x)
    with by_kernel([stem]):
        stem.eval()
        assert torch.equal(in_half(stem, x), expected)
        assert not calls
        stem.train()
        in_half(stem, x)
    assert len(calls) == 1


def test_a_step_uses_the_kernels_and_a_state_dict_does_not_change(
    make_trial: Callable[..., Trial], calls: list[tuple[int, ...]]
) -> None:
    trial = make_trial()
    stems = stem_conv.stems(trial.model)
    assert list(stems) == ["conv1"]
    state = trial.snapshot()
    with by_kernel(stems.values()):
        trial.run()
        assert calls == [(2, 1, 8, 8)]
        assert trial.snapshot().keys() == state.keys()
    trial.run()
    assert len(calls) == 1


@runs
def test_seeds_share_one_compiled_step_and_have_their_own_gradients(
    make_trial: Callable[..., Trial],
) -> None:
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return in_half(model, x).float().square().mean()

    def gradient(model: Any, function: Callable[..., Tensor]) -> Tensor:
        return torch.autograd.grad(function(model, x), model.conv1.weight)[0]

    x = torch.randn(2, 1, 8, 8, device=DEVICE)
    compiled = torch.compile(loss, dynamic=False, backend=backend)
    models = [make_trial(seed=seed, device=DEVICE).model for seed in range(3)]
    with by_kernel(stem for model in models for stem in stem_conv.stems(model).values()):
        for model in models:
            expected = gradient(model, loss)
            assert error(gradient(model, compiled), expected.double()) < 0.01
        gradient(models[0], compiled)
        assert len(graphs) == 1
        assert graphs[0].count("unflip.sign_conv2d") == 1
    gradient(
        models[0], compiled
    )  # code that was compiled with the kernels is not used without them
    assert len(graphs) == 2
    assert "unflip.sign_conv2d" not in graphs[1]


@runs
def test_the_kernels_agree_with_torch_on_a_network(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial(device=DEVICE)
    before = trial.snapshot()
    check_stems(trial, networks=1)
    assert all(torch.equal(v, before[k]) for k, v in trial.snapshot().items())


@pytest.mark.parametrize("wrong", ["output", "weight's gradient"])
def test_kernels_that_are_wrong_are_found(
    wrong: str, make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bent(x: Tensor, weight: Tensor, stride: Any, padding: Any, *, networks: int) -> Tensor:
        y = F.conv2d(x, weight.half(), stride=stride, padding=padding)
        return y * 1.1 if wrong == "output" else y.detach() + (y - y.detach()) * 1.1

    monkeypatch.setattr(stem_conv, "stem_conv2d", bent)
    trial = make_trial()
    with pytest.raises(Mismatch, match=f"{wrong} of conv1 is off by"):
        check_stems(trial, networks=1)
    assert "forward" not in vars(trial.model.conv1)
