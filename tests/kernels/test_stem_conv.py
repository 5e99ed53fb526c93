"""The first convolution of a network by our kernels: values, gradients, every block, what it refuses, and its place.

On a CUDA machine the kernels run for real. Elsewhere one test runs this file again in a process of its own, in
Triton's interpreter, which has to be chosen before Triton is imported; another compiles them for a GPU that is not
there.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip.data import ImageSet
from unflip.kernels import stem_conv
from unflip.kernels.sign_conv import operator as sign_conv
from unflip.kernels.sign_conv import triton_kernels as sign_conv_triton
from unflip.kernels.stem_conv import by_kernel, may_be_stem, stem_conv2d, supports
from unflip.kernels.tuning import INTERPRETED, available, power
from unflip.train import engine, load_recipe
from unflip.train.engine import Engine, check_stems
from unflip.train.learner import Learner, build_model

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
        **sign_conv_triton._geometry(x, (o, c, k, k), stride, padding, 2),
        "PART": sign_conv_triton._part(c),
        "BLOCK_O": power(o, 128),
    }
    for kernel, configs in (
        (sign_conv_triton._fprop_kernel.fn, sign_conv_triton._pixel_configs()),
        (sign_conv_triton._wgrad_kernel.fn, sign_conv_triton._chunk_configs()),
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


@runs
@pytest.mark.parametrize("number", range(len(sign_conv_triton.PIXEL_BLOCKS)))
def test_every_pixel_block(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = sign_conv_triton._pixel_configs()[number : number + 1]
    monkeypatch.setattr(sign_conv_triton._fprop_kernel, "configs", configs)
    for shape in FEW_SHAPES:
        check(shape)


@runs
@pytest.mark.parametrize("number", range(len(sign_conv_triton.CHUNK_BLOCKS)))
def test_every_chunk_block(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = sign_conv_triton._chunk_configs()[number : number + 1]
    monkeypatch.setattr(sign_conv_triton._wgrad_kernel, "configs", configs)
    for shape in FEW_SHAPES:
        check(shape)


@runs
@pytest.mark.parametrize("chunks", [1, 3, 4, 50])
def test_any_number_of_chunks_covers_every_pixel_once(
    chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_conv_triton, "chunks", lambda *_: chunks)
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
    with pytest.raises(ValueError, match="588 terms a sum are more than 512"):
        stem_conv2d(half, torch.zeros(16, 3, 14, 14), 1, 7)
    with pytest.raises(ValueError, match="the input requires a gradient"):
        stem_conv2d(half.requires_grad_(), weight, 1, 1)


# ------------------------------------------------------------------------------------------ in a model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the inputs that were given to stem_conv2d, in whose place a plain convolution stands."""
    seen: list[tuple[int, ...]] = []

    def plain(x: Tensor, weight: Tensor, stride: Any, padding: Any) -> Tensor:
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


def learner(data: ImageSet, seed: int, device: str = DEVICE) -> Learner:
    recipe = load_recipe("digits-dorefa", ["model.width=8", "batch_size=4"])
    where = torch.device(device)
    made = Learner(recipe, build_model(recipe, data, seed), data.source(where), where)
    made.half = True
    made.start_epoch(seed, 0, 1.0)
    return made


def test_a_step_takes_the_kernels_and_evaluation_does_not(
    digits: ImageSet, calls: list[tuple[int, ...]]
) -> None:
    made = learner(digits, 0, "cpu")
    state, accuracy = made.snapshot(), [made.evaluate(exact=exact) for exact in (True, False)]
    names = set(vars(made.model.conv1))
    made.stems = list(engine._stems(made).values())
    assert made.stems == [made.model.conv1]
    made.backward()
    assert calls == [(4, 1, 8, 8)]
    assert made.state().keys() == state.keys()
    made.restore(state)
    assert [made.evaluate(exact=exact) for exact in (True, False)] == accuracy
    assert len(calls) == 1
    assert set(vars(made.model.conv1)) == names
    twin = pickle.loads(pickle.dumps(copy.deepcopy(made.model.conv1)))
    assert set(vars(twin)) == names


@runs
def test_seeds_share_one_compiled_step_and_have_their_own_gradients(digits: ImageSet) -> None:
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    seeds = [learner(digits, seed) for seed in range(3)]
    for made in seeds:
        made.stems = list(engine._stems(made).values())
        made.backward()
        expected = made.model.conv1.weight.grad
        made.losses = torch.compile(made.planned_losses, dynamic=False, backend=backend)
        made.backward()
        assert error(made.model.conv1.weight.grad, expected.double()) < 0.01
    seeds[0].backward()
    assert len(graphs) == 1
    assert graphs[0].count("unflip.sign_conv2d") == 1
    seeds[0].stems = []  # what has been compiled with the kernels is not used without
    seeds[0].backward()
    assert len(graphs) == 2
    assert "unflip.sign_conv2d" not in graphs[1]


@runs
def test_the_engine_compares_and_then_uses_the_kernels(digits: ImageSet) -> None:
    made = learner(digits, 0)
    before = made.snapshot()
    check_stems(made)
    assert all(torch.equal(v, before[k]) for k, v in made.state().items())
    made.backward()
    plain = made.model.conv1.weight.grad
    running = Engine([made], compiled=False, captured=False)
    running._take_stems()
    assert made.stems == [made.model.conv1]
    made.backward()
    found = made.model.conv1.weight.grad
    # A rounding changes a sign here and there, and with it what comes back
    assert torch.nn.functional.cosine_similarity(found.flatten(), plain.flatten(), dim=0) > 0.9


@pytest.mark.parametrize("wrong", ["output", "weight's gradient"])
def test_kernels_that_are_wrong_are_not_used(
    wrong: str, digits: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bent(x: Tensor, weight: Tensor, stride: Any, padding: Any) -> Tensor:
        y = F.conv2d(x, weight.half(), stride=stride, padding=padding)
        return y * 1.1 if wrong == "output" else y.detach() + (y - y.detach()) * 1.1

    monkeypatch.setattr(stem_conv, "stem_conv2d", bent)
    monkeypatch.setattr(sign_conv, "available", lambda: True)
    made = learner(digits, 0, "cpu")
    running = Engine([made], compiled=False, captured=False)
    with pytest.warns(UserWarning, match=f"first convolution, because ours failed: {wrong} of con"):
        running._take_stems()
    assert made.stems == []
    running.step()


def test_training_in_full_precision_has_no_stems(digits: ImageSet) -> None:
    made = learner(digits, 0, "cpu")
    made.half = False
    assert engine._stems(made) == {}
