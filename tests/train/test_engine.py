"""Compiled gradients are compared with eager ones before they are believed."""

from __future__ import annotations

import copy
import functools
import shutil
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from unflip import auxiliary_loss, binarize, methods
from unflip.data import ImageSet
from unflip.kernels import check, scope, tuning
from unflip.kernels.sign_conv import operator as sign_conv
from unflip.layers import binary_layers
from unflip.methods import ClippedSign, LayerMeanSign
from unflip.recipes.build import build_model
from unflip.train import engine as engines
from unflip.train import load_recipe
from unflip.train.engine import Engine, check_straight_through
from unflip.train.learner import Learner

CPU = torch.device("cpu")


def network(method: Any) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(24, 5), nn.Linear(5, 2)
    )
    return binarize(model, method, quiet=True)


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces and differentiates as torch.compile does, and leaves out the C++ compiler."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("method", methods.names())
def test_every_methods_gradient_survives_tracing(method: str) -> None:
    check_straight_through(network(method))


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("method", [{"name": "dorefa", "inputs": "pm1"}, "lns"], ids=str)
def test_gradients_survive_the_real_compiler(method: Any) -> None:
    torch.compiler.reset()
    check_straight_through(network(method))


def dropped(binarizer: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """A binarizer whose gradient is lost when compiled, as a custom Function's was in torch 2.11."""
    forward = binarizer.forward

    def forward_without_gradient(self: nn.Module, value: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return forward(self, value).detach() + 0 * value
        return forward(self, value)

    monkeypatch.setattr(binarizer, "forward", forward_without_gradient)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(("binarizer", "what"), [(LayerMeanSign, "weight"), (ClippedSign, "input")])
def test_a_gradient_the_compiler_drops_is_found(
    monkeypatch: pytest.MonkeyPatch, binarizer: type[nn.Module], what: str
) -> None:
    dropped(binarizer, monkeypatch)
    with pytest.raises(RuntimeError, match=rf"the {what} binarizer of 1 differs from the eager"):
        check_straight_through(network({"name": "dorefa", "inputs": "pm1"}))


@pytest.mark.usefixtures("quick_compiler")
def test_a_gradient_that_is_slightly_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    surrogate = LayerMeanSign.surrogate

    def bent(self: LayerMeanSign, weight: Tensor) -> Tensor:
        return surrogate(self, weight) * (0.9 if torch.compiler.is_compiling() else 1.0)

    monkeypatch.setattr(LayerMeanSign, "surrogate", bent)
    with pytest.raises(RuntimeError, match="weight binarizer"):
        check_straight_through(network("dorefa"))


@pytest.mark.usefixtures("quick_compiler")
def test_every_kind_of_layer_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the first layer's binarizers, where a model mixes methods."""
    model = network("bireal")
    _, last = list(binary_layers(model))[-1]
    last.set_method({"name": "dorefa", "inputs": "pm1"})
    dropped(LayerMeanSign, monkeypatch)
    with pytest.raises(RuntimeError, match="weight binarizer of 3 "):
        check_straight_through(model)


def learner(digits: ImageSet, name: str = "digits-dorefa") -> Learner:
    recipe = load_recipe(name, ["model={name: vgg_small, width: 4}"])
    made = Learner(recipe, build_model(recipe, digits.spec, 0), digits.source(CPU), CPU)
    made.start_epoch(0, 0, 1.0)
    return made


def test_on_a_cpu_steps_are_eager_and_no_one_is_warned(digits: ImageSet) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Engine([learner(digits)], compiled=True, captured=True) as engine:
            engine.step()
    assert engine.mode == "eager"
    assert engine.graph is None


@pytest.mark.usefixtures("quick_compiler")
def test_when_compiling_fails_training_continues_eagerly_and_warns(
    monkeypatch: pytest.MonkeyPatch, digits: ImageSet
) -> None:
    dropped(LayerMeanSign, monkeypatch)
    with Engine([learner(digits)], compiled=False, captured=False) as engine, ExitStack() as stack:
        with pytest.warns(UserWarning, match=r"torch\.compile, because it failed: .*gradient"):
            engine._compile(stack)
        assert engine.mode == "eager"
        engine.step()
        assert engine.learners[0].position.item() == 1


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are attached and steps compiled as on a GPU; nothing calls the kernels in full precision."""
    monkeypatch.setattr(tuning, "available", lambda: True)
    monkeypatch.setattr(tuning, "runs_on", lambda device: True)
    for name in ("check_product", "check_stems", "check_norm", "check_mapping"):
        monkeypatch.setattr(check, name, lambda *_: None)


def settings() -> tuple[object, ...]:
    cudnn = torch.backends.cudnn
    return cudnn.benchmark, cudnn.allow_tf32, torch._dynamo.config.cache_size_limit


def kernels_of(learner: Learner) -> set[Any]:
    return {layer.fused_product for _, layer in binary_layers(learner.model)}


@pytest.mark.usefixtures("quick_compiler", "as_on_a_gpu")
def test_two_engines_in_one_process_do_not_influence_each_other(digits: ImageSet) -> None:
    before, one, others = settings(), learner(digits), [learner(digits, "digits-lns")] * 2
    with Engine([one], compiled=False, captured=False) as engine, ExitStack() as stack:
        engine._compile(stack)
        (kernel,) = kernels_of(one)
        assert kernel.keywords["networks"] == 1
        assert kernels_of(others[0]) == {None}
        with Engine(others, compiled=False, captured=False) as second:
            (other,) = kernels_of(others[0])
            assert other.keywords["networks"] == 2
            assert second.mode == "eager"
        assert kernels_of(one) == {kernel}
        assert kernels_of(others[0]) == {None}
        assert engine.mode == "compiled"
        engine.step()
    assert kernels_of(one) == {None}
    assert settings() == before


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_engine_restores_everything_after_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, digits: ImageSet
) -> None:
    """In a step, and while it gets ready: Ctrl-C is not caught, as a failing kernel is."""
    before, one = settings(), learner(digits)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(ZeroDivisionError), Engine([one], compiled=False, captured=False):
        raise ZeroDivisionError
    assert kernels_of(one) == {None}
    assert settings() == before
    monkeypatch.setattr(check, "check_norm", interrupted)
    monkeypatch.setenv("UNFLIP_CACHE", str(tmp_path))  # as if the kernels had not passed before
    with pytest.raises(KeyboardInterrupt), Engine([one], compiled=False, captured=False):
        pytest.fail("the engine was entered")
    assert kernels_of(one) == {None}
    assert settings() == before


def test_code_compiled_for_other_kernels_is_not_taken_from_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, digits: ImageSet
) -> None:
    """The gradient of the signs is a sum of partial sums, as many as were fastest: no graph says how many.

    A machine that had compiled for another number trained without the compiler, three times slower.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.empty(8, 16, 16, 16, dtype=torch.half, device="meta")
    kernels = Engine([learner(digits)], compiled=True, captured=False).kernels
    kernels.cuda = True
    hits = []
    for rows in (0, 8, 8):
        monkeypatch.setattr(tuning, "chosen_rows", {sign_conv._key("wgrad", x, 16, 0, 1): rows})
        torch.compiler.reset()
        counters.clear()
        weight = torch.ones(3, requires_grad=True)
        with torch.compiler.config.patch(cache_key_tag=engines.cache_tag(kernels)):
            torch.compile(lambda w: (w * w).sum())(weight).backward()
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 0, 1]


def test_without_a_tag_nothing_is_taken_from_the_disk(
    monkeypatch: pytest.MonkeyPatch, digits: ImageSet
) -> None:
    def no_sources(_: object) -> str:
        raise OSError("could not read the sources")

    monkeypatch.setattr(scope.Kernels, "fingerprint", no_sources)
    kernels = Engine([learner(digits)], compiled=True, captured=False).kernels
    with engines._tagged(kernels):
        assert torch._inductor.config.force_disable_caches


@pytest.mark.parametrize(("name", "steps"), [("digits-dorefa", 3), ("digits-lns", 1)])
def test_a_step_is_momentum_sgd_on_cross_entropy_and_the_auxiliary_loss(
    digits: ImageSet, name: str, steps: int
) -> None:
    """Against a plain loop of torch, with a rate for each group.

    LNS for one step: a rounding soon changes a sign, and from there the two go apart.
    """
    made = learner(digits, name)
    twin = copy.deepcopy(made.model)
    rates = {id(p): g["peak_lr"] for g in made.groups for p in g["params"]}
    groups = [
        {"params": [q], "lr": rates[id(p)]}
        for p, q in zip(made.model.parameters(), twin.parameters(), strict=True)
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    total = 0.0
    for step in range(steps):
        images, labels = made.source.batch(made.plan[step])
        loss = F.cross_entropy(twin(images), labels)
        total += loss.item()
        optimizer.zero_grad()
        (loss + auxiliary_loss(twin)).backward()
        optimizer.step()
        made.step()
    for (key, found), expected in zip(
        made.model.named_parameters(), twin.parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, msg=lambda text, key=key: f"{key}: {text}")
    assert made.loss_sum.item() == pytest.approx(total)


def test_restoring_a_snapshot_undoes_steps(digits: ImageSet) -> None:
    """What capture does around its trial steps, and resuming after them."""
    made = learner(digits)
    made.step()
    before = made.snapshot()
    addresses = {name: tensor.data_ptr() for name, tensor in made.state().items()}
    made.step()
    made.restore(before)
    assert all(torch.equal(v, before[k]) for k, v in made.state().items())
    assert {k: v.data_ptr() for k, v in made.state().items()} == addresses, "a graph reads these"
    with pytest.raises(ValueError, match=r"does not fit the model: .*sums\.loss"):
        made.restore({k: v for k, v in before.items() if k != "sums.loss"})


def test_adam_resumes_too(digits: ImageSet) -> None:
    recipe = load_recipe("digits-dorefa", ["model.width=2", "optimizer.name=adam"])

    def make() -> Learner:
        made = Learner(recipe, build_model(recipe, digits.spec, 0), digits.source(CPU), CPU)
        made.start_epoch(0, 0, 1.0)
        return made

    one, two = make(), make()
    for _ in range(4):
        one.step()
    two.step()
    two.step()
    three = make()
    three.restore(two.snapshot())
    three.position.fill_(2)
    three.step()
    three.step()
    assert all(torch.equal(v, one.state()[k]) for k, v in three.state().items())
    steps = [v.item() for k, v in three.state().items() if k.endswith(".step")]
    assert set(steps) == {4}


class NoRate(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("make", "rate"),
    [
        # As any optimizer of torch's: from the rate it was made with.
        (lambda weights: torch.optim.SGD(weights, lr=0.5), 0.25),
        (lambda weights: torch.optim.SGD([{"params": weights, "peak_lr": 0.8}], lr=0.5), 0.4),
        (lambda weights: torch.optim.SGD([{"params": weights, "peak_lr": None}], lr=0.5), 0.5),
        (lambda weights: NoRate(weights, {}), None),
    ],
    ids=["lr", "peak", "left alone", "no rate"],
)
def test_a_methods_own_optimizer_follows_the_schedule(
    monkeypatch: pytest.MonkeyPatch, digits: ImageSet, make: Any, rate: float | None
) -> None:
    dorefa = methods.config_class("dorefa")
    monkeypatch.setattr(dorefa, "latent_optimizer", lambda self, weights: make(weights))
    made = learner(digits)
    made.start_epoch(0, 1, 0.5)
    usual, own = (optimizer.param_groups[0].get("lr") for optimizer in made.optimizers)
    assert (usual, own) == (0.5 * made.recipe.optimizer.lr, rate)
