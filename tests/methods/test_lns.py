"""LNS: its options, the layer around another method, and the residual mapping."""

import copy
import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.layers import (
    BinaryConv2d,
    BinaryLayer,
    BinaryLinear,
    binary_layers,
)
from unflip.methods.lns import (
    LNS,
    MappedSign,
    sign_agreement,
    warm_start,
)

Net = Callable[..., nn.Module]

OTHERS = [name for name in methods.names() if name != "lns"]
BASES = [name for name in OTHERS if methods.get(name).unfit_for_lns is None]


def mapped(layer: nn.Module) -> MappedSign:
    assert isinstance(layer, BinaryLayer)
    assert isinstance(layer.weight_binarizer, MappedSign)
    return layer.weight_binarizer


@pytest.mark.parametrize("alpha", [-1, math.nan, math.inf])
def test_alpha_out_of_range(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"lns: alpha={alpha} should be a finite number >= 0"):
        LNS(alpha=alpha)


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        ("loss_on", "before", "'before_sign', 'after_sign'"),
        ("reduction", "max", "'mean', 'sum'"),
        ("labels", "moving", "'following', 'frozen'"),
        ("gradient", "none", "'identity', 'clipped'"),
        ("mapping", "deep", "'plain', 'residual'"),
        ("statistics", "running", "'filters', 'fixed'"),
        ("task_gradient", "f", "'through_f', 'straight_through', 'both'"),
        ("output", "relu", "'linear', 'tanh'"),
    ],
)
def test_unknown_choices_name_the_right_ones(option: str, value: str, known: str) -> None:
    with pytest.raises(ValueError, match=f"lns: {option}='{value}' is not one of {known}"):
        methods.get("lns", **{option: value})


def test_base_is_another_method() -> None:
    with pytest.raises(ValueError, match="lns: base='lns' would map a mapping"):
        LNS(base="lns")
    with pytest.raises(ValueError, match=r"unknown method 'dorfa'. Did you mean 'dorefa'"):
        LNS(base="dorfa")
    with pytest.raises(ValueError, match="unknown option of method 'dorefa' 'input'"):
        LNS(base={"name": "dorefa", "input": "pm1"})


@pytest.mark.parametrize("base", sorted(set(OTHERS) - set(BASES)))
def test_a_method_that_cannot_be_a_base_says_why(base: str) -> None:
    with pytest.raises(ValueError, match=f"lns: base='{base}' does not work: .+"):
        LNS(base=base)


@pytest.mark.parametrize("base", BASES)
def test_weights_are_the_bases_scale_times_sign_of_f(base: str) -> None:
    layer = BinaryConv2d(4, 6, 3, method=LNS(base=base))
    plain = BinaryConv2d(4, 6, 3, method=base)
    plain.weight = layer.weight
    q_hat = mapped(layer).mapping(layer.weight)
    signs = torch.where(q_hat >= 0, 1.0, -1.0)
    assert 0.1 < (signs != plain.code().signs[0]).float().mean() < 0.9, "an untrained f"
    assert torch.equal(layer.code().signs[0], signs)
    assert torch.equal(layer.code().scales, plain.code().scales)
    assert torch.equal(layer.binary_weight(), plain.code()._replace(signs=signs[None]).dense())
    assert torch.equal(mapped(layer).noisy_labels(layer.weight), plain.code().signs[0])


def trained_like(model: nn.Module) -> nn.Module:
    """Filters whose mean is not 0, and learned scales and the like that are not where they started."""
    with torch.no_grad():
        for _, layer in binary_layers(model):
            means = torch.randn(len(layer.weight), *[1] * (layer.weight.dim() - 1))
            layer.weight.add_(0.5 * layer.weight.std() * means)
            for parameter in layer.weight_binarizer.parameters():
                parameter.add_(0.3 * torch.rand_like(parameter))
    return model


@pytest.mark.parametrize("base", BASES)
def test_what_the_base_has_learned_is_taken_over(base: str, float_net: Net, lns_net: Net) -> None:
    plain = trained_like(unflip.binarize(float_net(), base, quiet=True))
    model, again = lns_net(base=base), lns_net(base=base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unflip.load_twin(model, plain.state_dict())
        unflip.load_twin(again, model.state_dict())
    for _, layer in binary_layers(plain):
        for lns in (model, again):
            twin = lns.get_submodule(layer.path)
            assert isinstance(twin, BinaryLayer)
            assert torch.equal(twin.code().scales, layer.code().scales)
            assert torch.equal(mapped(twin).noisy_labels(twin.weight), layer.code().signs[0])


def test_what_the_base_should_have_learned_and_the_twin_lacks_is_named(
    float_net: Net, lns_net: Net
) -> None:
    model, other = lns_net(base="recu"), unflip.binarize(float_net(), "recu", quiet=True)
    with pytest.warns(
        UserWarning, match=r"nothing that fits 2\.weight_binarizer\.base\.alpha, 5\."
    ):
        unflip.load_twin(model, float_net().state_dict())
    state = other.state_dict()
    state["5.weight_binarizer.alpha"] = torch.zeros(3)
    with pytest.warns(UserWarning, match=r"nothing that fits 5\.weight_binarizer\.base\.alpha: "):
        unflip.load_twin(model, state)


@pytest.mark.parametrize("base", BASES)
def test_lns_wraps_every_other_method(base: str, float_net: Net, lns_net: Net) -> None:
    model = lns_net(base=base)
    plain = unflip.binarize(float_net(), base, quiet=True)
    unflip.load_twin(model, plain.state_dict())
    layers = list(zip(binary_layers(model), binary_layers(plain), strict=True))
    for (_, layer), (_, twin) in layers:
        assert type(layer.input_binarizer) is type(twin.input_binarizer)
        assert layer.input_binarizer.bits == twin.input_binarizer.bits
        with torch.no_grad():
            layer.weight.mul_(20)
            twin.weight.mul_(20)
    unflip.after_step(model)
    unflip.after_step(plain)
    for (_, layer), (_, twin) in layers:
        assert torch.equal(layer.weight, twin.weight), "after_step of the base"
        # with f put right, the whole layer is that of the base
        mapped(layer).mapping.forward = mapped(layer).noisy_labels  # type: ignore[method-assign]
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(model.eval()(x), plain.eval()(x))


def test_base_with_options() -> None:
    layer = BinaryLinear(4, 3, method=LNS(base={"name": "dorefa", "inputs": "pm1"}))
    assert layer.input_binarizer(torch.tensor([-0.2, 0.2])).tolist() == [-1, 1]
    assert layer.method == LNS(base=methods.get("dorefa", inputs="pm1"))
    assert "inputs=pm1" in str(layer.method)


def test_sign_of_zero_is_plus_one() -> None:
    layer = BinaryLinear(8, 6, method="lns")
    f = mapped(layer).mapping
    nn.init.zeros_(f.conv3.weight)
    nn.init.zeros_(f.conv3.bias)
    assert (f(layer.weight) == 0).all()
    assert (layer.code().signs == 1).all()
    assert (layer.binary_weight() > 0).all()


@pytest.mark.parametrize("gradient", ["identity", "clipped"])
@pytest.mark.parametrize("base", BASES)
def test_gradient_goes_through_the_sign_to_w_and_theta(base: str, gradient: str) -> None:
    """∂L/∂q̂ = E · ∂L/∂Q, where clipped only for |q̂| ≤ 1; from there f's own Jacobian."""
    layer = BinaryConv2d(4, 10, 3, method=LNS(base=base, gradient=gradient))
    f = mapped(layer).mapping
    with torch.no_grad():
        f.conv3.weight.mul_(3)  # so that some |q̂| > 1
    upstream = torch.randn(layer.weight.shape)
    leaves = [layer.weight, *f.parameters()]
    found = torch.autograd.grad(layer.binary_weight(), leaves, upstream)
    q_hat = f(layer.weight)
    inside = q_hat.abs() <= 1
    assert 0.1 < inside.float().mean() < 0.9
    through = upstream * layer.code().scales[0] * (inside if gradient == "clipped" else 1)
    expected = torch.autograd.grad(q_hat, leaves, through)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("of", ["classification", "auxiliary"])
def test_both_losses_reach_both_w_and_theta(of: str, lns_net: Net) -> None:
    model = lns_net()
    x, target = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
    if of == "classification":
        F.cross_entropy(model(x), target).backward()
    else:
        unflip.auxiliary_loss(model).backward()
    for name, layer in binary_layers(model):
        assert layer.weight.grad is not None
        assert layer.weight.grad.abs().sum() > 0, name
        for key, parameter in mapped(layer).mapping.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.abs().sum() > 0, (name, key)
    outside = [p for n, p in model.named_parameters() if n in ("0.weight", "3.weight", "14.bias")]
    assert len(outside) == 3
    for parameter in outside:
        reached = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert reached == (of == "classification")


# Bases that take signs of something other than W; docs/lns.md names them.
SHIFTED = {"abc", "adabin", "bbg", "bihalf", "dsq", "irnet", "recu"}


@pytest.mark.parametrize("base", [*BASES, "abc"])
def test_residual_starts_with_the_signs_of_a_base_that_takes_those_of_w(
    base: str, float_net: Net, lns_net: Net
) -> None:
    method = methods.get(base, weight_bases=1) if base == "abc" else methods.get(base)
    plain = trained_like(unflip.binarize(float_net(), method, quiet=True))
    model = lns_net(base=method, mapping="residual")
    unflip.load_twin(model, plain.state_dict())
    assert (unflip.flip_rate(plain, model) > 0) == (base in SHIFTED)


@pytest.mark.parametrize("inputs", ["01", "pm1"])
def test_residual_starts_as_the_base_method(inputs: str, float_net: Net, lns_net: Net) -> None:
    base = methods.get("dorefa", inputs=inputs)
    model = lns_net(base=base, mapping="residual")
    plain = unflip.binarize(float_net(), base, quiet=True)
    unflip.load_twin(plain, model.state_dict())
    x = torch.randn(4, 3, 8, 8)
    runs = []
    for net in (model, plain):
        leaf = x.clone().requires_grad_()
        out = net(leaf)
        out.square().mean().backward()
        grads = {n: p.grad for n, p in net.named_parameters() if "binarizer" not in n}
        runs.append((out.detach(), leaf.grad, grads))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    torch.testing.assert_close(runs[0][2], runs[1][2], rtol=1e-5, atol=1e-8)  # one E / E apart
    for _, layer in binary_layers(model):
        f = mapped(layer).mapping
        assert f.conv3.weight.grad is not None
        assert f.conv3.weight.grad.abs().sum() > 0, "g can leave zero"
    assert set(sign_agreement(model).values()) == {1.0}
    assert unflip.flip_rate(model, plain) == 0


def test_residual_of_weights_that_are_all_zero() -> None:
    layer = BinaryLinear(8, 6, method=LNS(mapping="residual"))
    with torch.no_grad():
        layer.weight.zero_()
    assert (layer.code().signs == 1).all()
    assert layer(torch.randn(2, 8)).isfinite().all()


def test_residual_adds_w_over_its_mean_size() -> None:
    layer = BinaryConv2d(4, 6, 3, method=LNS(mapping="residual"))
    f = mapped(layer).mapping
    nn.init.normal_(f.conv3.weight)
    plain = copy.deepcopy(f)
    plain.residual = False
    w = layer.weight
    torch.testing.assert_close(f(w) - plain(w), w / w.abs().mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("statistics", ["filters", "fixed"])
def test_f_is_the_same_in_training_evaluation_and_freezing(
    statistics: str, warm: bool, lns_net: Net
) -> None:
    model = lns_net(statistics=statistics)
    if warm:
        reached = warm_start(model, steps=40, agreement=0.9)
        assert reached == sign_agreement(model)
    x = torch.randn(4, 3, 8, 8)

    def q_hats(training: bool) -> list[Tensor]:
        model.train(training)
        model(x)  # a step that would move running statistics
        return [
            mapped(layer).mapping(layer.weight).detach().clone()
            for _, layer in binary_layers(model)
        ]

    first = q_hats(True)
    state = {k: v.clone() for k, v in model.state_dict().items() if "binarizer" in k}
    for again in (q_hats(True), q_hats(False), q_hats(True)):
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a, b)
    now = model.state_dict()
    assert all(torch.equal(now[k], v) for k, v in state.items())
    frozen = unflip.freeze(model)
    for q_hat, signs in zip(first, unflip.signs(frozen).values(), strict=True):
        assert torch.equal(torch.where(q_hat >= 0, 1, -1).to(torch.int8), signs[0])
    assert torch.equal(frozen(x), model.eval()(x))


def test_fixed_statistics_are_those_of_the_warm_start_for_ever(lns_net: Net) -> None:
    model = lns_net(statistics="fixed")
    binarizers = [mapped(layer) for _, layer in binary_layers(model)]
    assert all((b.mapping.norm1.mean == 0).all() for b in binarizers)
    warm_start(model, steps=10)
    for _, layer in binary_layers(model):
        f = mapped(layer).mapping
        x = f.conv1(f._images(layer.weight)).detach()
        torch.testing.assert_close(f.norm1.mean, x.mean((0, 2, 3)))
        torch.testing.assert_close(f.norm1.var, x.var((0, 2, 3), correction=0))
        h = F.relu(f.norm1(x))
        torch.testing.assert_close(f.norm2.mean, f.conv2(h).detach().mean((0, 2, 3)))
    kept = [(b.mapping.norm1.mean.clone(), b.mapping.norm2.var.clone()) for b in binarizers]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        loss = model(torch.randn(4, 3, 8, 8)).square().mean() + unflip.auxiliary_loss(model)
        loss.backward()
        optimizer.step()
    for b, (mean, var) in zip(binarizers, kept, strict=True):
        assert torch.equal(b.mapping.norm1.mean, mean)
        assert torch.equal(b.mapping.norm2.var, var)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_signs_do_not_depend_on_autocast(dtype: torch.dtype, lns_net: Net) -> None:
    model = lns_net().eval()
    outside = unflip.signs(model)
    x = torch.randn(4, 3, 8, 8)
    with torch.autocast("cpu", dtype=dtype):
        assert unflip.flip_rate(outside, model) == 0
        model.train()
        loss = model(x).float().square().mean() + unflip.auxiliary_loss(model)
    loss.backward()
    for _, layer in binary_layers(model):
        assert layer.weight.grad is not None
        assert layer.weight.grad.abs().sum() > 0
