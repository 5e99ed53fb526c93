"""freeze: frozen output equals eval output exactly, for any layer, and nothing else is left."""

import functools
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import unflip
from unflip.freeze import FrozenLayer, frozen_layers, pack_signs, unpack_signs
from unflip.layers import BinaryLayer, binary_layers, inside_binarizer

METHODS: list[dict[str, Any]] = [
    *({"name": name} for name in unflip.methods.names()),
    {"name": "dorefa", "inputs": "pm1"},
    {"name": "dorefa", "input_bits": 2},
    {"name": "xnor", "k_map": False},
    {"name": "abc", "scope": "filter"},
    {"name": "lns", "statistics": "fixed", "labels": "frozen", "base": "xnor"},
    {"name": "lns", "mapping": "residual", "base": "bireal"},
]

properties = settings(
    deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Conv2d, Tensor]:
    """Any convolution, and images that are large enough for it."""
    small = st.integers(1, 3)
    groups = draw(small)
    kernel = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    dilation = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    stride = (draw(small), draw(small))
    padding: str | tuple[int, int] = draw(
        st.one_of(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.just("valid"))
        if stride != (1, 1)
        else st.one_of(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.just("same"))
    )
    layer = nn.Conv2d(
        groups * draw(small),
        groups * draw(small) + groups,  # two filters at least: see lns
        kernel,
        stride,
        padding,
        dilation,
        groups,
        draw(st.booleans()),
        draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"])),
    )
    size = [
        d * (k - 1) + 4 + draw(st.integers(0, 3)) for d, k in zip(dilation, kernel, strict=True)
    ]
    return layer, torch.randn(draw(small), layer.in_channels, *size)


@st.composite
def linears(draw: st.DrawFn) -> tuple[nn.Linear, Tensor]:
    inputs, outputs = draw(st.integers(1, 40)), draw(st.integers(2, 20))
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    return nn.Linear(inputs, outputs, draw(st.booleans())), torch.randn(*shape, inputs)


def check(layer: nn.Module, x: Tensor, method: dict[str, Any]) -> None:
    binary = unflip.binarize(layer, method, keep_first_and_last=False, quiet=True)
    assert isinstance(binary, BinaryLayer)
    before = {k: v.clone() for k, v in binary.state_dict().items()}
    frozen = unflip.freeze(binary)
    assert isinstance(frozen, FrozenLayer)
    assert not frozen.training
    assert all(torch.equal(v, before[k]) for k, v in binary.state_dict().items())

    expected = binary.eval()(x)
    assert torch.equal(frozen(x), expected)
    with torch.no_grad():
        assert torch.equal(frozen(x), expected)

    code = frozen.code()
    bases = len(code.signs)
    assert torch.equal(code.signs, binary.code().signs)
    assert torch.equal(frozen.weight, binary.binary_weight())
    assert set(code.signs.unique().tolist()) <= {-1, 1}
    filters = frozen.weight if code.scales.shape[1] > 1 else frozen.weight[None]
    for weights in filters:  # those that share a scale
        assert len(weights.unique()) <= 2**bases

    state = frozen.state_dict()
    own = {k for k in state if not k.startswith("input_binarizer.")}
    offset = [] if code.offset is None else ["offset"]
    assert own == {"bits", "scales", *offset, *([] if frozen.bias is None else ["bias"])}
    n = code.signs.numel()
    assert state["bits"].dtype == torch.uint8
    assert state["bits"].numel() == -(-n // 8)
    floats = sum(state[k].numel() for k in own - {"bits"})
    assert sum(state[k].nbytes for k in own) == -(-n // 8) + 4 * floats
    assert not any("weight" in name for name, _ in frozen.named_parameters())
    assert [n for n, _ in frozen.named_modules() if "weight_binarizer" in n] == []


@properties
@given(convolutions(), st.sampled_from(METHODS))
def test_any_convolution(case: tuple[nn.Conv2d, Tensor], method: dict[str, Any]) -> None:
    check(*case, method)


@properties
@given(linears(), st.sampled_from(METHODS))
def test_any_linear_layer(case: tuple[nn.Linear, Tensor], method: dict[str, Any]) -> None:
    check(*case, method)


@properties
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 2**31))
def test_bits_round_trip(shape: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, shape, generator=generator) * 2.0 - 1
    packed = pack_signs(signs)
    assert packed.dtype == torch.uint8
    assert packed.shape == (-(-signs.numel() // 8),)
    for dtype in (torch.float32, torch.float16, torch.int8):
        back = unpack_signs(packed, tuple(shape), dtype)
        assert back.dtype == dtype
        assert torch.equal(back, signs.to(dtype))


def test_bit_order() -> None:
    signs = torch.tensor([1, -1, -1, -1, -1, -1, -1, -1, 1, 1, -1], dtype=torch.float32)
    assert pack_signs(signs).tolist() == [1, 3]
    assert pack_signs(torch.ones(8)).tolist() == [255]
    assert pack_signs(torch.tensor([-1.0] * 7 + [1.0])).tolist() == [128]


# --- whole networks -------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.Sequential(nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.PReLU()),
        nn.Flatten(),
        nn.Linear(64, 12),
        nn.Dropout(),
        nn.Linear(12, 4),
    )


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_network_keeps_bits_scales_and_its_float_layers(method: dict[str, Any]) -> None:
    model = unflip.binarize(net(), method, quiet=True)
    model(torch.randn(8, 3, 6, 6))
    frozen = unflip.freeze(model)
    x = torch.randn(8, 3, 6, 6)
    assert torch.equal(frozen(x), model.eval()(x))
    names = [name for name, _ in binary_layers(model)]
    assert [name for name, _ in frozen_layers(frozen)] == names == ["2.0", "4"]
    state, twin = frozen.state_dict(), net().state_dict()
    dropped = {"2.0.weight", "4.weight"}
    own = {k for k in state if not inside_binarizer(k)}
    parts = [k for k in ("bits", "scales", "offset") if f"4.{k}" in state]
    assert parts[:2] == ["bits", "scales"]
    assert own == (twin.keys() - dropped) | {f"{n}.{k}" for n in names for k in parts}
    assert all(torch.equal(state[k], model.state_dict()[k]) for k in twin.keys() - dropped)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_nothing_is_hidden_in_a_frozen_layer(method: dict[str, Any]) -> None:
    """The whole object, hooks, configs and all, weighs what its bits do."""
    layer = unflip.BinaryConv2d(64, 128, 3, method=method)
    buffer = io.BytesIO()
    torch.save(unflip.freeze(layer), buffer)
    bits = 64 * 128 * 9 // 8
    bases = len(layer.code().signs)
    assert buffer.tell() < bases * bits + 10_000 < layer.weight.nbytes / 4


def test_the_frozen_copy_shares_nothing_with_the_model() -> None:
    model = unflip.binarize(net(), "xnor", quiet=True).eval()
    frozen = unflip.freeze(model)
    x = torch.randn(4, 3, 6, 6)
    expected = frozen(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-3)
    assert torch.equal(frozen(x), expected)


def test_frozen_state_dict_loads_into_a_frozen_model() -> None:
    first, second = (unflip.freeze(unflip.binarize(net(), "lns", quiet=True)) for _ in range(2))
    x = torch.randn(4, 3, 6, 6)
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))


def test_a_frozen_model_moves_to_another_precision() -> None:
    model = unflip.binarize(net(), "bwn", quiet=True)
    frozen = unflip.freeze(model).double()
    layer = frozen.get_submodule("4")
    assert isinstance(layer, FrozenLayer)
    assert layer.bits.dtype == torch.uint8
    assert layer.weight.dtype == torch.float64
    assert frozen(torch.randn(2, 3, 6, 6).double()).dtype == torch.float64


def test_frozen_layers_give_gradients_to_their_inputs_only() -> None:
    frozen = unflip.freeze(unflip.BinaryLinear(8, 4, bias=False, method="bireal"))
    x = torch.randn(3, 8, requires_grad=True)
    frozen(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert list(frozen.parameters()) == []


def test_freeze_again() -> None:
    frozen = unflip.freeze(unflip.binarize(net(), "dorefa", quiet=True))
    with pytest.raises(ValueError, match=r"frozen already \(layer '2.0'\); freeze a trainable one"):
        unflip.freeze(frozen)


def test_freeze_a_float_model() -> None:
    with pytest.raises(ValueError, match=r"Sequential has no binary layer.*unflip.binarize first"):
        unflip.freeze(net())


def test_freeze_in_training_mode_gives_the_evaluation_function() -> None:
    model = unflip.binarize(net(), "dorefa", quiet=True)
    assert model.training
    frozen = unflip.freeze(model)
    assert model.training
    assert not any(module.training for module in frozen.modules())


def test_frozen_bits_of_another_method_are_refused() -> None:
    def frozen(method: str) -> nn.Module:
        layer = unflip.binarize(nn.Linear(4, 4), method, keep_first_and_last=False, quiet=True)
        return unflip.freeze(layer)

    with pytest.raises(RuntimeError, match=r"has method bwn, but .* made with method xnor"):
        frozen("bwn").load_state_dict(frozen("xnor").state_dict())
    frozen("bwn").load_state_dict(frozen("bwn").state_dict())


class Small(nn.Module):
    """A network with a place for one more attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)
        self.more: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(self.stem(x)).mean((2, 3)))


def hooked(model: Small) -> None:
    model.conv.register_forward_hook(lambda layer, given, y: setattr(model, "more", y))


USES = {
    "a lambda": lambda model: setattr(model, "more", lambda x: model.conv(x)),
    "a default": lambda model: setattr(model, "more", lambda x, conv=model.conv: conv(x)),
    "a parameter": lambda model: setattr(model, "more", lambda x: x * model.head.weight),
    "in a list": lambda model: setattr(model, "more", [abs, {"run": lambda x: model.stem(x)}]),
    "in a partial": lambda model: setattr(
        model, "more", functools.partial(lambda f, x: f(model.conv(x)), abs)
    ),
    "in a function inside": lambda model: setattr(
        model, "more", (lambda run: lambda x: run(x))(lambda x: model.conv(x))
    ),
    "a forward hook": hooked,
}


@pytest.mark.parametrize("use", USES)
def test_functions_that_keep_a_part_of_the_model_are_refused(use: str) -> None:
    """A copy has the same functions, so a frozen model would follow the training of the original."""
    model = unflip.binarize(Small(), "dorefa", quiet=True)
    USES[use](model)
    with pytest.raises(ValueError, match=r"(more|a forward hook) of .* keeps a part of the model"):
        unflip.freeze(model)


KEPT: dict[str, Callable[[Any], Any]] = {
    "a method": lambda model: model.conv.forward,
    "a partial of a method": lambda model: functools.partial(model.head.forward),
    "a function": lambda model: lambda x: x * 2,
    "a module of another model": lambda model: functools.partial(lambda act, x: act(x), nn.ReLU()),
    "a module": lambda model: [model.conv],
}


@pytest.mark.parametrize("kept", KEPT)
def test_what_a_copy_has_for_itself_may_stay(kept: str) -> None:
    model = unflip.binarize(Small(), "dorefa", quiet=True)
    model.more = KEPT[kept](model)
    model.register_full_backward_hook(lambda module, given, made: print(model.head))
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(unflip.freeze(model)(x), model.eval()(x))


def test_what_cannot_be_copied_is_named() -> None:
    model = unflip.binarize(Small(), "dorefa", quiet=True)
    model.conv.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"lock of 'conv' \(BinaryConv2d\) cannot be copied: "):
        unflip.freeze(model)


def test_a_compiled_model_is_named() -> None:
    model = torch.compile(unflip.binarize(Small(), "dorefa", quiet=True))
    with pytest.raises(ValueError, match=r"torch\.compile; give .* model\._orig_mod"):
        unflip.freeze(model)


@pytest.mark.parametrize("ends", ["float", "int8"])
def test_subclasses_of_layers_are_refused(ends: str) -> None:
    """Their own forward would be lost."""
    images = {"mean": [0.5] * 3, "std": [0.5] * 3} if ends == "int8" else None
    model = unflip.binarize(Small(), "dorefa", quiet=True, ends=ends, preprocess=images)
    model.train()(torch.randn(2, 3, 9, 9))
    layer = model.head if ends == "int8" else model.conv
    layer.__class__ = type("Doubled", (type(layer),), {"forward": lambda self, x: 2 * x})
    with pytest.raises(ValueError, match=r"\(Doubled\) cannot be frozen: only .* subclasses"):
        unflip.freeze(model)
