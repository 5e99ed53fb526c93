"""Bop2ndOrder: steps by hand, weights of ±1, its state in checkpoints."""

import math
import warnings

import pytest
import torch
from torch import nn

import unflip
from unflip import methods
from unflip.data import ImageSet
from unflip.layers import BinaryLinear, binary_layers
from unflip.methods.bop2 import Bop2
from unflip.recipes import load_recipe
from unflip.recipes.build import build_model
from unflip.train.learner import Learner

CPU = torch.device("cpu")


def test_steps_by_hand() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(40, dtype=torch.float64))
    bits = [1.0 if w >= 0 else -1.0 for w in weight.tolist()]
    optimizer = Bop2([weight], lr=0.2, threshold=0.3, sigma=0.4)
    assert weight.tolist() == bits
    m, v = [0.0] * 40, [0.0] * 40
    flips = 0
    for _ in range(6):
        grad = torch.randn(40, dtype=torch.float64)
        weight.grad = grad
        optimizer.step()
        for i, g in enumerate(grad.tolist()):
            m[i] = (1 - 0.2) * m[i] + 0.2 * g
            v[i] = (1 - 0.4) * v[i] + 0.4 * g * g
            if bits[i] * m[i] / (math.sqrt(v[i]) + 1e-10) > 0.3:
                bits[i] = -bits[i]
                flips += 1
        assert weight.tolist() == bits
    assert 10 < flips < 200
    state = optimizer.state[weight]
    torch.testing.assert_close(state["average"], torch.tensor(m, dtype=torch.float64))
    torch.testing.assert_close(state["square"], torch.tensor(v, dtype=torch.float64))


def test_the_size_of_gradients_does_not_matter() -> None:
    """Bop would need another threshold for each layer."""
    first = torch.sign(torch.randn(50, dtype=torch.float64))
    weights = [nn.Parameter(first.clone()) for _ in range(2)]
    optimizer = Bop2(weights, lr=0.1, threshold=0.2, sigma=0.1)
    for _ in range(5):
        grad = torch.randn(50, dtype=torch.float64)
        weights[0].grad, weights[1].grad = grad, 1e-4 * grad
        optimizer.step()
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], first)


@pytest.mark.parametrize(("threshold", "after"), [(1e-6, -1), (1e-5, 1)])
def test_the_first_step(threshold: float, after: float) -> None:
    """m / √v = γ / √σ, however large the gradient is."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([1e-3, 1.0, 50.0])
    Bop2([weight], threshold=threshold).step()
    assert weight.tolist() == [after] * 3


def test_weights_without_a_gradient_stay() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Bop2([weight])
    optimizer.step()
    assert weight.tolist() == [1, 1, 1]
    weight.grad = torch.zeros(3)  # 0 / (√0 + ε) is 0, not NaN
    optimizer.step()
    assert weight.tolist() == [1, 1, 1]


def test_defaults_and_options() -> None:
    optimizer = methods.get("bop2").latent_optimizer([nn.Parameter(torch.ones(1))])
    assert optimizer is not None
    [group] = optimizer.param_groups
    found = group["lr"], group["peak_lr"], group["sigma"], group["threshold"]
    assert found == (1e-7, 1e-7, 1e-3, 1e-6)
    for options, words in (
        ({"gamma": 0.0}, "bop2: gamma=0.0 should be a rate"),
        ({"sigma": 1.5}, "bop2: sigma=1.5 should be a rate"),
        ({"threshold": -1.0}, "bop2: threshold=-1.0 should be >= 0"),
    ):
        with pytest.raises(ValueError, match=words):
            methods.get("bop2", **options)


def test_an_ordinary_optimizer_for_its_weights_is_noticed() -> None:
    layer = BinaryLinear(6, 4, method="bop2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unflip.after_step(layer)
    [warned] = caught
    assert str(warned.message).startswith("bop2: ")
    assert "unflip.methods.get('bop2').latent_optimizer" in str(warned.message)
    assert warned.filename == __file__


def test_training_flips_signs_and_resumes(digits: ImageSet) -> None:
    recipe = load_recipe("digits-dorefa", ["method=bop2", "model.width=4", "optimizer.lr=0.01"])

    def learner() -> Learner:
        made = Learner(recipe, build_model(recipe, digits.spec, 0), digits.source(CPU), CPU)
        made.start_epoch(seed=0, epoch=0, factor=1.0)
        return made

    one, other = learner(), learner()
    before = unflip.signs(one.model)
    for _ in range(12):
        one.step()
    assert 0 < unflip.flip_rate(before, one.model) < 0.6
    assert all((layer.weight.abs() == 1).all() for _, layer in binary_layers(one.model))
    other.restore(one.snapshot())
    other.position.copy_(one.position)
    for run in (one, other):
        run.step()
    state = other.state()
    assert any(name.endswith(".square") for name in state)
    assert all(torch.equal(state[name], value) for name, value in one.state().items())


def test_lns_cannot_wrap_it() -> None:
    with pytest.raises(ValueError, match="lns: base='bop2' does not work: it has no latent"):
        methods.get("lns", base="bop2")
