"""What every registered method has to do; a new method is held to it by being registered.

One file of more than 400 lines, because all tests loop over the same table of methods and layers.
"""

import copy
import dataclasses
import io
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module

import unflip
from unflip import methods
from unflip.layers import BinaryLayer, BinaryLinear, binary_layers
from unflip.methods import Method, register
from unflip.packing import make_packed
from unflip.packing.reference import evaluate

every_method = pytest.mark.parametrize("method", methods.names())


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def float_net() -> nn.Sequential:
    """Float at both ends; between them a 3×3, a grouped strided 1×3 and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 4, (1, 3), stride=2, groups=2, bias=False),
        nn.BatchNorm2d(
            4
        ),  # centred inputs for the next layer: with all on one side it learns nothing
        nn.Flatten(),
        nn.Linear(24, 10),
        nn.BatchNorm1d(10),
        nn.Linear(10, 5),
    )


def binary_net(method: str) -> nn.Module:
    return unflip.binarize(float_net(), method, quiet=True)


def images(n: int = 4) -> Tensor:
    return torch.randn(n, 3, 8, 8)


def gradients(model: nn.Module, x: Tensor, run: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    loss = run(x)
    loss.backward()
    assert x.grad is not None
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {"input": x.grad, **found}


def test_the_first_six_are_there() -> None:
    assert {"dorefa", "binarynet", "bwn", "xnor", "bireal", "lns"} <= set(methods.names())
    assert methods.names() == sorted(methods.names())


@every_method
def test_config(method: str) -> None:
    config = methods.get(method)
    assert isinstance(config, Method)
    assert config.name == method
    assert type(config) is methods.config_class(method)
    assert (type(config).__doc__ or "").strip(), "a method says what it is in one line"
    assert dataclasses.is_dataclass(config)
    assert str(config).startswith(method)
    # by name, by its options as plain JSON, and as it is: the same method
    plain = json.loads(json.dumps(config.options()))
    assert methods.resolve(plain) == methods.resolve(method) == methods.resolve(config) == config
    assert hash(methods.resolve(plain)) == hash(config)


@every_method
def test_unknown_options_are_refused_by_name(method: str) -> None:
    pattern = rf"unknown option of method '{method}' 'blph'.*Known: "
    with pytest.raises(ValueError, match=pattern):
        methods.get(method, blph=1)
    with pytest.raises(ValueError, match=pattern):
        methods.resolve({"name": method, "blph": 1})
    with pytest.raises(ValueError, match=pattern):
        unflip.binarize(float_net(), method, blph=1)


@every_method
def test_zero_goes_with_the_positive(method: str) -> None:
    layer = BinaryLinear(16, 12, method=method)
    weights, inputs = [], []
    for value in (0.0, -0.0, 1e-30):
        weight = layer.weight.detach().clone()
        weight[::3, ::2] = value
        weights.append(layer.weight_binarizer.code(weight).signs)
        x = torch.tensor([[value, 1.0], [-1.0, value]]).repeat(1, 8)
        inputs.append(layer.input_binarizer(x))
    for signs, binary in zip(weights[:2], inputs[:2], strict=True):
        assert torch.equal(signs, weights[2])
        torch.testing.assert_close(binary, inputs[2])
    assert set(weights[0].unique().tolist()) == {-1, 1}


@every_method
def test_nan_is_refused_by_name(method: str) -> None:
    model = binary_net(method)
    x = images()
    x[1, 2, 3, 4] = math.nan
    with pytest.raises(ValueError, match=r"input of layer '2' \(BinaryConv2d\) has NaN.*no sign"):
        model(x)
    layer = model.get_submodule("7")
    assert isinstance(layer, BinaryLinear)
    with torch.no_grad():
        layer.weight[1, 2] = math.nan
    with pytest.raises(ValueError, match=r"weight of layer '7' \(BinaryLinear\) has NaN"):
        model(images())
    with pytest.raises(ValueError, match=r"layer '7' cannot be frozen: it has NaN weights"):
        unflip.freeze(model)
    alone = BinaryLinear(4, 3, method=method)
    with pytest.raises(ValueError, match=r"input of layer BinaryLinear\("):
        alone(torch.full((1, 4), math.nan))


@every_method
@pytest.mark.parametrize("what", ["input", "weight"])
def test_nan_stays_nan_when_compiled(method: str, what: str) -> None:
    layer = BinaryLinear(8, 6, method=method)
    x = torch.randn(3, 8)
    if what == "input":
        x[1, 2] = math.nan
    else:
        with torch.no_grad():
            layer.weight[1, 2] = math.nan
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = compiled(x)
        bits = layer.weight_binarizer.code(layer.weight).signs
    if what == "input":
        assert out[1].isnan().all()
        assert not out[[0, 2]].isnan().any()
    else:
        assert out[:, 1].isnan().all()
        assert bits[:, 1, 2].isnan().all()


@every_method
def test_nan_stays_nan_when_frozen(method: str) -> None:
    frozen = unflip.freeze(BinaryLinear(8, 6, method=method))
    x = torch.randn(3, 8)
    x[1, 2] = math.nan
    assert frozen(x)[1].isnan().all()
    assert not frozen(x)[[0, 2]].isnan().any()


@every_method
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(method: str, dtype: torch.dtype) -> None:
    model = binary_net(method).to(dtype)
    x = (3 * images()).to(dtype).requires_grad_()
    out = model(x)
    assert out.dtype == dtype
    assert out.isfinite().all()
    (out.float().square().mean() + unflip.auxiliary_loss(model).float()).backward()
    for name, tensor in [("input", x), *model.named_parameters()]:
        assert tensor.grad is not None, name
        assert tensor.grad.dtype == dtype
        assert tensor.grad.isfinite().all(), name
    for _, layer in binary_layers(model):
        assert layer.binary_weight().dtype == dtype
        assert layer.weight.grad is not None
        assert layer.weight.grad.abs().sum() > 0
    model.eval()
    assert torch.equal(unflip.freeze(model)(x), model(x))


@every_method
def test_large_inputs_and_weights_stay_finite(method: str) -> None:
    layer = BinaryLinear(8, 6, method=method)
    with torch.no_grad():
        layer.weight.mul_(1e6)
    x = (1e6 * torch.randn(4, 8)).requires_grad_()
    out = layer(x)
    assert out.isfinite().all()
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def check_compiled(model: nn.Module, x: Tensor, backend: str, tolerance: float) -> None:
    """One training step's loss and gradients, eager and compiled."""
    twin = copy.deepcopy(model)

    def eager(x: Tensor) -> Tensor:
        return model(x).square().mean() + unflip.auxiliary_loss(model)

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(x: Tensor) -> Tensor:
        return twin(x).square().mean() + unflip.auxiliary_loss(twin)

    loss, grads = gradients(model, x, eager)
    compiled_loss, compiled_grads = gradients(twin, x, compiled)
    torch.testing.assert_close(compiled_loss, loss, rtol=tolerance, atol=tolerance)
    assert compiled_grads.keys() == grads.keys()
    for name, layer in binary_layers(model):
        prefix = f"{name}." if name else ""
        assert grads[f"{prefix}weight"].abs().sum() > 0, name
        for parameter, _ in layer.weight_binarizer.named_parameters():
            assert f"{prefix}weight_binarizer.{parameter}" in grads
    for name, grad in grads.items():
        torch.testing.assert_close(
            compiled_grads[name], grad, rtol=tolerance, atol=tolerance * float(grad.abs().max())
        )


@every_method
def test_compiled_gradients_equal_eager_ones(method: str) -> None:
    check_compiled(binary_net(method), images(), "aot_eager", tolerance=1e-6)


@pytest.mark.parametrize("method", ["dorefa", "lns"])
def test_compiled_with_inductor(method: str) -> None:
    layer = BinaryLinear(16, 12, method=method)
    check_compiled(layer, torch.randn(8, 16), "inductor", tolerance=1e-4)


@pytest.mark.thinned(4)
@every_method
def test_compiled_evaluation_equals_eager(method: str) -> None:
    model, x = binary_net(method).eval(), images()
    for net in (model, unflip.freeze(model)):
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-6, atol=1e-6)


@pytest.mark.thinned(2)
@every_method
def test_export(method: str) -> None:
    model, x = binary_net(method).eval(), images()
    for net in (model, unflip.freeze(model)):
        batch = torch.export.Dim("batch", min=2, max=64)
        exported = torch.export.export(net, (x,), dynamic_shapes=({0: batch},))
        assert torch.equal(exported.module()(x), net(x))
        other = images(7)
        torch.testing.assert_close(exported.module()(other), net(other))


@every_method
def test_freeze_is_exact(method: str) -> None:
    model = binary_net(method)
    model(images(16))  # BatchNorm statistics that are not their initial values
    state = {k: v.clone() for k, v in model.state_dict().items()}
    frozen = unflip.freeze(model)
    assert model.training, "the model is left as it is"
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    x = images(32)
    assert torch.equal(frozen(x), model.eval()(x))
    with torch.no_grad():
        assert torch.equal(frozen(x), model(x))
    assert unflip.flip_rate(model, frozen) == 0


@every_method
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(method: str, dtype: torch.dtype) -> None:
    """Close to full precision, the same signs, and still exact when frozen."""
    model, x = binary_net(method).eval(), images()
    layer = model.get_submodule("2")
    assert isinstance(layer, BinaryLayer)
    signs, frozen = unflip.signs(model), unflip.freeze(model)
    hidden = torch.randn(4, 8, 6, 6)
    expected = layer(hidden)
    with torch.autocast("cpu", dtype=dtype):
        assert unflip.flip_rate(signs, model) == 0
        out = layer(hidden)
        assert torch.equal(model(x), frozen(x))
        loss = model.train()(x).float().square().mean()
    # Inputs that stay float are rounded one by one: 72 terms of about 1, with an error of 2⁻¹² each.
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=8e-3)
    assert out.dtype in (dtype, torch.float32), "never a half the user did not ask for"
    loss.backward()
    for name, binary in binary_layers(model):
        assert binary.weight.grad is not None
        assert binary.weight.grad.isfinite().all(), name
        assert binary.weight.grad.abs().sum() > 0, name


@every_method
def test_a_filter_of_zeros(method: str) -> None:
    layer = BinaryLinear(8, 6, method=method)
    with torch.no_grad():
        layer.weight[2] = 0
    x = torch.randn(4, 8)
    assert layer(x).isfinite().all()
    with torch.autocast("cpu", dtype=torch.float16):
        assert layer(x).isfinite().all()


@every_method
def test_training_moves_the_weights_and_freezes_exactly(method: str) -> None:
    model = binary_net(method)
    before = {n: layer.weight.detach().clone() for n, layer in binary_layers(model)}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x, target = images(32), torch.randint(5, (32,))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target) + unflip.auxiliary_loss(model)
        loss.backward()
        unflip.before_step(model)
        optimizer.step()
        unflip.after_step(model)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, layer in binary_layers(model):
        assert not torch.equal(layer.weight, before[name])
    assert torch.equal(unflip.freeze(model)(x), model.eval()(x))


@every_method
def test_state_dict_has_the_keys_of_the_float_twin(method: str) -> None:
    state, float_state = binary_net(method).state_dict(), float_net().state_dict()
    assert "2.weight" in state
    own = {k for k in state if "weight_binarizer" not in k and "input_binarizer" not in k}
    assert own == set(float_state)
    assert all(state[k].shape == v.shape for k, v in float_state.items())


@every_method
def test_weights_of_the_float_twin_and_back(method: str) -> None:
    source, model, back = float_net(), binary_net(method), float_net()
    source(images(16))
    expected = source.state_dict()
    # these start from the new weights: test_rebnn.py, test_surge.py
    derived = {"rebnn": "_binarizer.alpha", "surge": "_binarizer.branch"}.get(method, "none")
    binarizers = {
        k: v.clone()
        for k, v in model.state_dict().items()
        if "_binarizer." in k and derived not in k
    }
    unflip.load_twin(model, expected)
    state = model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in expected.items())
    assert all(torch.equal(state[k], v) for k, v in binarizers.items())
    unflip.load_twin(back, state)
    assert all(torch.equal(v, expected[k]) for k, v in back.state_dict().items())
    x = images()
    assert torch.equal(back.eval()(x), source.eval()(x))


@every_method
def test_its_own_state_dict_loads(method: str) -> None:
    model, other = binary_net(method), binary_net(method)
    model(images(16))
    other.load_state_dict(model.state_dict())
    x = images()
    assert torch.equal(other.eval()(x), model.eval()(x))


@every_method
def test_what_is_no_state_is_right_after_the_meta_device(method: str) -> None:
    """``to_empty`` leaves any number in a buffer, and a state dict brings the persistent ones alone."""
    source = binary_net(method)
    with torch.device("meta"):
        model = float_net()
    unflip.binarize(model, method, quiet=True).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7.25 if tensor.is_floating_point() else 7)
    model.load_state_dict(source.state_dict())
    expected = dict(source.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


@every_method
def test_a_model_of_the_meta_device_takes_over_a_state_dict(method: str) -> None:
    """``assign=True`` puts the state dict's own tensors in; what is no state has to follow them."""
    source = binary_net(method).eval()
    with torch.device("meta"):
        model = float_net()
    unflip.binarize(model, method, quiet=True).eval()
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    model.load_state_dict(state, assign=True)
    expected = dict(source.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    x = images()
    assert torch.equal(model(x), source(x))
    unflip.start_epoch(model, 1, 2)


def test_loading_a_state_dict_keeps_the_epochs_numbers() -> None:
    model = binary_net("irnet")
    unflip.start_epoch(model, 3, 4)
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.load_state_dict(model.state_dict())
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())


@every_method
def test_cost(method: str) -> None:
    model, x = binary_net(method), images(1)
    spent = unflip.cost(model, x)
    assert spent == unflip.cost(model, images(5)), "the batch size does not matter"
    kinds = {"BinaryConv2d": "FrozenConv2d", "BinaryLinear": "FrozenLinear"}
    layers = [dataclasses.replace(c, kind=kinds.get(c.kind, c.kind)) for c in spent.layers]
    assert unflip.cost(unflip.freeze(model), x) == dataclasses.replace(spent, layers=tuple(layers))
    full = unflip.cost(float_net(), x)
    assert spent.memory_bits < full.memory_bits
    assert spent.flops < full.flops
    for layer, twin in zip(spent.layers, full.layers, strict=True):
        assert layer.name == twin.name
        assert layer.macs == twin.macs


@every_method
@pytest.mark.filterwarnings("ignore:lns")
def test_a_step_with_tensors_without_values(method: str) -> None:
    """torch's tools that estimate the memory of a training step use FakeTensorMode."""
    model = binary_net(method).train()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state = [*model.named_parameters(), *model.named_buffers()]
        with _reparametrize_module(model, {name: mode.from_tensor(t) for name, t in state}):
            loss = model(mode.from_tensor(images())).sum() + unflip.auxiliary_loss(model)
            loss.backward()


@every_method
def test_copies(method: str) -> None:
    model = binary_net(method).eval()
    x = images()
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    for twin in twins:
        assert torch.equal(twin(x), expected)
        assert all(layer.method == methods.get(method) for _, layer in binary_layers(twin))
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1)
        assert torch.equal(model(x), expected), "a copy shares nothing"
    frozen = unflip.freeze(model)
    for twin in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert torch.equal(twin(x), expected)


@every_method
def test_the_discrete_form_is_the_weight(method: str) -> None:
    for _, layer in binary_layers(binary_net(method).eval()):  # training may use another value
        code = layer.code()
        assert code.signs.shape[1:] == layer.weight.shape
        assert (code.signs.abs() == 1).all()
        assert code.scales.dim() == layer.weight.dim() + 1
        assert len(code.scales) == len(code.signs)
        assert code.scales.expand(code.signs.shape).shape == code.signs.shape
        assert not code.signs.requires_grad
        assert not code.scales.requires_grad
        dense = sum(scale * signs for scale, signs in zip(code.scales, code.signs, strict=True))
        if code.offset is not None:
            assert code.offset.expand(layer.weight.shape).shape == layer.weight.shape
            assert not code.offset.requires_grad
            dense = dense + code.offset
        assert torch.equal(layer.binary_weight(), dense)


@every_method
def test_repr_says_the_method(method: str) -> None:
    model = binary_net(method)
    assert f"method={methods.get(method)}" in repr(model)
    assert "frozen, method=" in repr(unflip.freeze(model))


@every_method
def test_layers_without_binarize(method: str) -> None:
    layer = unflip.BinaryConv2d(4, 6, 3, padding=1, method=method)
    assert isinstance(layer, nn.Conv2d)
    assert isinstance(layer, BinaryLayer)
    assert layer(torch.randn(2, 4, 5, 5)).shape == (2, 6, 5, 5)


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'dorefaa'. Did you mean 'dorefa'\?.*lns"):
        methods.get("dorefaa")
    with pytest.raises(ValueError, match=r"unknown method 'qqq'. Known: .*dorefa.*xnor"):
        unflip.binarize(float_net(), "qqq")
    with pytest.raises(TypeError, match=r"method=3 should be a name .*dorefa.*'name'"):
        methods.resolve(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="should be a name"):
        methods.resolve({"inputs": "01"})


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match=r"method 'dorefa' is already registered by .*DoReFa"):
        register("dorefa")(methods.config_class("xnor"))
    assert methods.config_class("xnor").name == "xnor"


@every_method
def test_what_is_packed_is_the_network(method: str) -> None:
    """The discrete form of inputs is stated, and is what the forward pass does."""
    model = binary_net(method).eval()
    for norm in (model.get_submodule(name) for name in "1358"):
        assert isinstance(norm.running_mean, Tensor)
        norm.running_mean.normal_()  # no sums of ±α that are 0 but for rounding, whose sign is anyone's
    for _, layer in binary_layers(model):
        code = layer.input_binarizer.code()
        bits = layer.input_binarizer.bits
        assert (32 if code is None else len(code.scales)) == bits
    x = images()
    packed = make_packed(model, x)  # compares both forms, and the network op by op
    torch.testing.assert_close(evaluate(packed, x).flatten(1), model(x), rtol=1e-4, atol=1e-4)


def loaded_after(*lines: str) -> set[str]:
    """The modules of unflip that a new process has loaded after these lines."""
    program = "\n".join(
        [*lines, "import sys; print(*(m for m in sys.modules if m.startswith('unflip')))"]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_layers_import_the_contracts_only() -> None:
    """A method may import layers, so layers must not import methods: that would be a cycle."""
    shared = {"unflip.methods", *(f"unflip.methods.{m}" for m in ("base", "pieces", "registry"))}
    contracts = loaded_after("import unflip.methods.base")
    assert "unflip.layers" not in contracts
    for loaded in (contracts, loaded_after("import unflip.layers")):
        assert {name for name in loaded if name.startswith("unflip.methods")} == shared


def test_methods_are_loaded_when_they_are_looked_up() -> None:
    assert "unflip.methods.lns" in loaded_after("import unflip; unflip.methods.names()")
    assert "unflip.methods.xnor" in loaded_after("import unflip; unflip.methods.get('dorefa')")
    one = loaded_after("import unflip; unflip.methods.bop.Bop")
    assert "unflip.methods.bop" in one
    assert "unflip.methods.lns" not in one
    with pytest.raises(AttributeError, match=r"'unflip\.methods' has no attribute 'dorefaa'"):
        methods.dorefaa  # noqa: B018


def test_the_name_of_a_shipped_method_is_taken_from_the_start() -> None:
    """Also before any method was looked up."""
    program = """
from unflip.methods import Method, register
try:
    @register("bop")
    class Mine(Method): pass
except ValueError as error:
    assert "method 'bop' is already registered by" in str(error), error
    assert "register Mine under another name" in str(error), error
else:
    raise AssertionError("not refused")
"""
    loaded_after(program)
