"""PReLU, BatchNorm and shortcut in one operator: values, gradients, running statistics, compile, and refusals.

One file of more than 400 lines, because Triton's interpreter runs it again as a whole.

On a CUDA machine the kernels run for real. Elsewhere one test runs this file again in a process of its own, in
Triton's interpreter, which has to be chosen before Triton is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip import layers
from unflip.kernels import Trial, check, tuning
from unflip.kernels.check import Mismatch
from unflip.kernels.norm import layer as in_model
from unflip.kernels.norm import operator, triton_kernels
from unflip.kernels.sign_conv.layer import fused_product
from unflip.kernels.tuning import INTERPRETED, available
from unflip.layers import BinaryConv2d, binary_layers
from unflip.methods.reactnet import RPReLU

DEVICE = "cpu" if INTERPRETED else "cuda"
FUSED = partial(in_model.fused_norm, networks=1, cuda=False)
runs = pytest.mark.skipif(not available(), reason="no CUDA device: see test_in_the_interpreter")

# images, channels, height, width
SHAPES = [(2, 16, 8, 8), (3, 48, 5, 7), (9, 32, 16, 16), (1, 144, 3, 3), (2, 16, 1, 3)]
parts = pytest.mark.parametrize(
    ("slopes", "shifted", "scales", "shortcut"),
    [
        ("each", False, "one", True),
        ("one", False, "each", False),
        ("each", True, "each", True),
        ("one", True, "one", False),
        ("none", False, "one", True),
        ("none", False, "each", False),
    ],
)


def channels_last(values: Tensor) -> Tensor:
    return values.to(DEVICE).contiguous(memory_format=torch.channels_last)


def example(
    shape: tuple[int, ...], slopes: str, shifted: bool, scales: str, shortcut: bool
) -> dict[str, Any]:
    torch.manual_seed(0)
    c = shape[1]
    count = {"one": 1, "each": c}
    near = torch.randn(c) / 10
    leaves = {
        "y": channels_last(torch.randint(-40, 41, shape).half()).requires_grad_(),
        "shift": torch.randn(c).to(DEVICE).requires_grad_() if shifted else None,
        "slope": None
        if slopes == "none"
        else (torch.randn(count[slopes]) / 2).to(DEVICE).requires_grad_(),
        "gamma": torch.randn(c).to(DEVICE).requires_grad_(),
        "beta": torch.randn(c).to(DEVICE).requires_grad_(),
        "shortcut": channels_last(torch.randn(shape).half()).requires_grad_() if shortcut else None,
    }
    scale = torch.randn(count[scales], 1, 1, 1)  # a learned scale may be negative
    return {**leaves, "scale": scale.to(DEVICE), "near": near.to(DEVICE), "eps": 1e-5}


def reference(example: dict[str, Any]) -> tuple[list[Tensor], Tensor, Tensor]:
    """By torch in float64: leaves, output, moments."""
    doubles = {
        key: value.detach().double().requires_grad_() if value is not None else None
        for key, value in example.items()
        if key in LEAVES
    }
    y, slope = doubles["y"], doubles["slope"]
    z = y * example["scale"].double().view(1, -1, 1, 1)
    if doubles["shift"] is not None:
        z = z + doubles["shift"].view(1, -1, 1, 1)
    if slope is not None:
        z = F.prelu(z, slope)
    gamma, beta = doubles["gamma"], doubles["beta"]
    out = F.batch_norm(z, None, None, gamma, beta, training=True, eps=example["eps"])
    if doubles["shortcut"] is not None:
        out = out + doubles["shortcut"]
    moments = torch.stack([z.mean((0, 2, 3)), z.var((0, 2, 3), unbiased=False)]).detach()
    return [leaf for leaf in doubles.values() if leaf is not None], out, moments


LEAVES = ("y", "shift", "slope", "gamma", "beta", "shortcut")


def off(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-3)).item()


@pytest.mark.skipif(available(), reason="the kernels run in this process")
def test_in_the_interpreter(in_the_interpreter: Callable[[str], None]) -> None:
    in_the_interpreter(__file__)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("slope", "shift"), operator.SUMS)
@pytest.mark.parametrize("shape", [(128, 16, 32, 32), (128, 64, 8, 8), (2, 144, 8, 8)], ids=str)
def test_kernels_compile_for_a_gpu_that_is_not_there(
    shape: tuple[int, ...], slope: bool, shift: bool, compile_for_sm_90: Callable[..., None]
) -> None:
    plan = operator._Plan(torch.empty(shape, device="meta"), 1)
    blocks = {k: v for k, v in plan.blocks.items() if k != "num_warps"}
    blocks |= {"HAS_SLOPE": slope, "HAS_SHIFT": shift}
    second = {"PROGRAMS": plan.programs, "BLOCK": plan.block, "TILES": 3}
    count = {"COUNT": operator.SUMS[slope, shift]}
    kinds = {"pixels": "i32", "share": "i32", "eps": "fp32", "": "*fp32"}
    kinds |= dict.fromkeys(("y_ptr", "g_ptr", "shortcut_ptr"), "*fp16")
    compile_it = compile_for_sm_90
    compile_it(triton_kernels.moments_kernel, blocks, kinds, num_warps=operator.WARPS)
    smaller = blocks | {"BLOCK_P": plan.smaller["BLOCK_P"]}
    compile_it(
        triton_kernels.sums_kernel, smaller | count, kinds, num_warps=plan.smaller["num_warps"]
    )
    kinds["out_ptr"] = "*fp16"
    output = blocks | second | {"HAS_SHORTCUT": True}
    compile_it(triton_kernels.output_kernel, output, kinds, num_warps=operator.WARPS)
    gradient = blocks | second | count
    compile_it(triton_kernels.input_gradient_kernel, gradient, kinds, num_warps=operator.WARPS)


@runs
@parts
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(
    shape: tuple[int, ...], slopes: str, shifted: bool, scales: str, shortcut: bool
) -> None:
    case = example(shape, slopes, shifted, scales, shortcut)
    out, moments = operator.normalize(**case)
    doubles, expected, expected_moments = reference(case)
    assert out.dtype == torch.float16
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert off(out, expected) < 5e-4
    assert off(moments, expected_moments) < 1e-5
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    leaves = [case[name] for name in LEAVES if case[name] is not None]
    found = torch.autograd.grad(out, leaves, grad)
    exact = torch.autograd.grad(expected, doubles, grad.double())
    for leaf, a, b in zip(leaves, found, exact, strict=True):
        assert a.dtype == leaf.dtype
        assert a.shape == leaf.shape
        assert off(a, b) < (5e-4 if a.dtype == torch.float16 else 1e-4)


@pytest.mark.at_length
@runs
def test_the_same_bits_every_time_and_compiled() -> None:
    compiled = torch.compile(operator.normalize, backend="aot_eager", fullgraph=True, dynamic=False)
    results = []
    for function in (operator.normalize, operator.normalize, compiled):
        case = example(SHAPES[2], "each", True, "one", True)
        out, moments = function(**case)
        leaves = [case[name] for name in LEAVES]
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out) / 8)
        results.append([out, moments, *grads])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@runs
@pytest.mark.parametrize("tiles", [2, 3])
def test_several_tiles_a_program_are_the_same(tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    true = operator._Plan.__init__

    def more(plan: Any, y: Tensor, networks: int) -> None:
        true(plan, y, networks)
        plan.tiles = tiles

    results = []
    for made in (true, more):
        monkeypatch.setattr(operator._Plan, "__init__", made)
        case = example(SHAPES[2], "each", True, "one", True)
        out, moments = operator.normalize(**case)
        grads = torch.autograd.grad(out, [case[name] for name in LEAVES], torch.ones_like(out))
        results.append([out, moments, *grads])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@runs
def test_operators_keep_their_promises() -> None:
    """Schema, fake tensors (shape, strides, dtype), autograd registration."""
    case = example(SHAPES[0], "each", True, "each", True)
    order = ("y", "scale", "shift", "slope", "gamma", "beta", "shortcut", "near")
    args = (*(case[k] for k in order), 1e-5, 1)
    flat = [a.detach().flatten() if k == 1 else a for k, a in enumerate(args)]
    torch.library.opcheck(
        torch.ops.unflip.normalize.default,
        tuple(flat),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(2, 16, 3, 3).double()}, "float64; it should be torch.float16 or torch"),
        ({"shortcut": torch.zeros(2, 16, 3, 3)}, "shortcut is torch.float32; it should be"),
        ({"y": torch.zeros(2, 8, 3, 3).half()}, "8 channels are not a multiple of 16"),
        ({"y": torch.zeros(2, 16).half()}, r"shape \(2, 16\); it should be \(N, C, H, W\)"),
        ({"shortcut": torch.zeros(2, 16, 3, 2).half()}, r"shortcut has shape \(2, 16, 3, 2\)"),
        ({"slope": torch.zeros(3)}, "slope has 3 values for 16 channels"),
        ({"scale": torch.zeros(2)}, "scale has 2 values for 16 channels"),
        ({"shift": torch.zeros(16), "slope": None}, "a shift without slopes"),
    ],
)
def test_what_is_refused(change: dict[str, Tensor], message: str) -> None:
    case: dict[str, Any] = {
        "y": torch.zeros(2, 16, 3, 3).half(),
        "scale": torch.ones(1),
        "shift": None,
        "slope": torch.ones(16),
        "gamma": torch.ones(16),
        "beta": torch.zeros(16),
        "shortcut": None,
        "near": torch.zeros(16),
        "eps": 1e-5,
    }
    with pytest.raises(ValueError, match=message):
        operator.normalize(**case | change)


def test_programs_cover_every_pixel_and_share_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in [(128, 16, 32, 32), (128, 64, 8, 8), (1, 16, 1, 1), (100, 512, 7, 7)]:
        plan = operator._Plan(torch.empty(shape, device="meta"), 1)
        assert plan.share % plan.block_p == 0
        assert (plan.programs - 1) * plan.share < plan.pixels <= plan.programs * plan.share
        assert plan.block >= plan.programs
        assert plan.second_pass[0] * plan.tiles * plan.block_p >= plan.pixels
        assert 1 <= plan.tiles <= operator.MOST_TILES
    y = torch.empty(128, 16, 32, 32, device="meta")
    monkeypatch.setattr(tuning, "_processors", lambda _: 66)
    alone = operator._Plan(y, 1).programs
    assert operator._Plan(y, 4).programs <= alone // 1.9


def modules(
    method: Any = "dorefa", shifted: bool = False
) -> tuple[nn.Module, nn.Module, nn.Module]:
    torch.manual_seed(0)
    conv = BinaryConv2d(16, 16, 3, padding=1, bias=False, method=method)
    bn = nn.BatchNorm2d(16)
    nn.init.normal_(bn.weight)
    activation = RPReLU(nn.PReLU(16)) if shifted else nn.PReLU(16)
    for shift in activation.adapted.parameters() if isinstance(activation, RPReLU) else ():
        nn.init.normal_(shift)
    return tuple(m.to(DEVICE) for m in (conv, activation, bn))  # type: ignore[return-value]


def test_what_is_left_to_torch() -> None:
    conv, prelu, bn = (m.to("cpu") for m in modules_on_cpu())
    x = torch.randn(2, 16, 4, 4)
    assert FUSED(conv, prelu, bn, x, None) is None  # no autocast
    with torch.autocast("cpu", torch.float16):
        assert FUSED(conv, nn.ReLU(), bn, x, None) is None
        assert FUSED(nn.Conv2d(16, 16, 3), prelu, bn, x, None) is None
        assert FUSED(conv, prelu, nn.BatchNorm2d(16, momentum=None), x, None) is None
        assert FUSED(conv, prelu, copy.deepcopy(bn).eval(), x, None) is None
        seen: list[Any] = []
        handle = bn.register_forward_hook(lambda *args: seen.append(args))
        assert FUSED(conv, prelu, bn, x, None) is None  # someone listens
        handle.remove()
        xnor = BinaryConv2d(16, 16, 3, padding=1, bias=False, method="xnor")
        assert FUSED(xnor, prelu, bn, x, None) is None  # its K map comes between


def modules_on_cpu() -> tuple[nn.Module, nn.Module, nn.Module]:
    conv = BinaryConv2d(16, 16, 3, padding=1, bias=False)
    return conv, nn.PReLU(16), nn.BatchNorm2d(16)


@pytest.fixture
def our_product(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = staticmethod(partial(fused_product, networks=1, cuda=False))
    monkeypatch.setattr(BinaryConv2d, "fused_product", kernel)


@runs
@pytest.mark.usefixtures("our_product")
@pytest.mark.parametrize("name", ["prelu", "rprelu", "no prelu"])
@pytest.mark.parametrize("inputs", ["pm1", "01"])
@pytest.mark.parametrize("size", [3, 1])
def test_a_shortcut_that_is_the_input_is_one_operator(
    size: int, inputs: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same values and gradients as of convolution and norm one by one, and one gradient of the input."""
    torch.manual_seed(0)
    method = {"name": "dorefa", "inputs": inputs}
    conv = BinaryConv2d(16, 16, size, padding=size // 2, bias=False, method=method).to(DEVICE)
    _, activation, bn = modules(shifted=name == "rprelu")
    activation = nn.Identity() if name == "no prelu" else activation
    x = channels_last(torch.randn(3, 16, 6, 5).half()).requires_grad_()
    shifts = [p for n, p in activation.named_parameters() if n != "adapted.after"]
    leaves = [x, conv.weight, *shifts, *bn.parameters()]
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    calls = []
    true = operator.both
    monkeypatch.setattr(operator, "both", lambda *args: calls.append(args) or true(*args))
    found = []
    for shortcut in (x, x.clone()):
        with torch.autocast(DEVICE, torch.float16):
            out = FUSED(conv, activation, bn, x, shortcut)
        assert out is not None
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
        bn.reset_running_stats()  # type: ignore[operator]
    assert len(calls) == 1
    for one, both in zip(*found, strict=True):
        assert off(one, both.double()) < 1e-3
    assert torch.equal(found[0][0], found[1][0])


@runs
@pytest.mark.usefixtures("our_product")
def test_one_operator_when_compiled_too() -> None:
    conv, prelu, bn = modules({"name": "dorefa", "inputs": "pm1"})
    x = channels_last(torch.randn(2, 16, 4, 4).half()).requires_grad_()
    operators = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def block(x: Tensor) -> Tensor | None:
        with torch.autocast(DEVICE, torch.float16):
            return FUSED(conv, prelu, bn, nn.Identity()(x), x)

    torch.compiler.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=False)
    found = compiled(x)
    assert any("convolve_and_normalize" in name for name in operators)
    bn.reset_running_stats()  # type: ignore[operator]
    assert torch.equal(found, block(x))


@pytest.mark.parametrize(
    ("change", "has"),
    [
        ({}, True),
        ({"stride": 2}, False),
        ({"padding": 0}, False),
        ({"padding": "same"}, False),
        ({"method": "reactnet"}, False),  # not a sign that the kernel knows
        ({"method": {"name": "reactnet", "gradient": "clipped"}}, False),  # shifted before it
    ],
)
def test_where_convolution_and_norm_are_one(change: dict[str, Any], has: bool) -> None:
    options: dict[str, Any] = {"padding": 1, "bias": False, "method": "binarynet", **change}
    conv = BinaryConv2d(16, 16, 3, **options)
    assert in_model._has_kernels(conv, torch.zeros(2, 16, 6, 6).half()) is has
    assert not in_model._has_kernels(conv, torch.zeros(2, 16, 6, 6))


@runs
@pytest.mark.parametrize("shifted", [False, True])
def test_running_statistics_are_those_of_batchnorm(shifted: bool) -> None:
    x = channels_last(torch.randn(3, 16, 6, 5).half())
    conv, prelu, bn = modules(shifted=shifted)
    others = copy.deepcopy((conv, prelu, bn))
    with torch.autocast(DEVICE, torch.float16):
        for _ in range(3):
            out = FUSED(conv, prelu, bn, x, x)
            expected = layers.normalized(*others, x, x)
    assert out is not None
    assert off(out, expected.double()) < (1e-2 if shifted else 2e-3)  # torch rounds u and z to half
    theirs: Any = others[2]
    assert off(bn.running_mean, theirs.running_mean.double()) < 1e-3  # type: ignore[arg-type]
    assert off(bn.running_var, theirs.running_var.double()) < 1e-3  # type: ignore[arg-type]
    assert bn.num_batches_tracked == theirs.num_batches_tracked == 3


@pytest.mark.at_length
@runs
@pytest.mark.parametrize(
    "options",
    [{"shortcut": "block"}, {"shortcut": "conv"}, {"method": "reactnet"}, {"method": "lns"}],
    ids=str,
)
def test_all_of_a_network_is_checked_before_the_kernels_are_used(
    options: dict[str, Any], make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_trial(device=DEVICE, **options)
    before = trial.snapshot()
    calls = check._calls_of_normalized(trial)
    assert [c[0].path for c in calls] == [name for name, _ in binary_layers(trial.model)]
    check.check_norm(trial, FUSED)
    for name, value in trial.snapshot().items():
        assert torch.equal(value, before[name]), name
    true = operator.normalize
    monkeypatch.setattr(operator, "normalize", lambda *a: (true(*a)[0] * 1.05, true(*a)[1]))
    with pytest.raises(Mismatch, match=r"output of the norm after .*conv1 is off by"):
        check.check_norm(trial, FUSED)
    assert all(layer.fused_norm is None for _, layer in binary_layers(trial.model))
