"""The warm start of LNS: what it teaches, what it leaves alone, and what it says."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unflip
from unflip.layers import (
    BinaryLinear,
    binary_layers,
    state_restored,
)
from unflip.methods import warm_start as warm_start_module
from unflip.methods.lns import (
    mapped_layers,
    sign_agreement,
    warm_start,
)

Net = Callable[..., nn.Module]


@pytest.mark.parametrize("options", [{}, {"statistics": "fixed"}, {"labels": "frozen"}], ids=str)
def test_warm_start_teaches_f_the_signs_and_touches_nothing_else(
    options: dict[str, Any], lns_net: Net
) -> None:
    model = lns_net(**options)
    model(torch.randn(16, 3, 8, 8))  # BatchNorm buffers that are not their initial values
    latent = {n: layer.weight for n, layer in binary_layers(model)}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert max(sign_agreement(model).values()) < 0.9
    seen: dict[str, float] = {}
    reached = warm_start(model, progress=lambda name, share, _: seen.update({name: share}))
    assert seen == reached == sign_agreement(model)
    assert set(reached) == {"2", "5", "8", "12"}
    total = sum(w.numel() for w in latent.values())
    assert sum(reached[n] * w.numel() for n, w in latent.items()) / total > 0.999
    assert min(reached.values()) > 0.999, reached

    after = model.state_dict()
    assert after.keys() == before.keys()
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert changed
    assert all(".weight_binarizer.mapping." in k for k in changed), changed
    assert {"1.running_mean", "1.num_batches_tracked", "2.weight"} <= set(before) - changed
    assert all(layer.weight is latent[n] for n, layer in binary_layers(model))
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert model.training
    assert all(m.training for m in model.modules())


@pytest.mark.filterwarnings("ignore:after at most 40 steps")
@pytest.mark.parametrize(
    ("options", "taught"),
    [
        ({"alpha": 0.1}, 0),
        ({"alpha": 0.0, "labels": "frozen", "loss_on": "after_sign"}, 0),
        ({"reduction": "sum", "gradient": "clipped"}, 0),
        ({"lr": 0.5, "warm_steps": 7, "task_gradient": "both"}, 0),
        ({"rho_plus": 0.02}, 4),
        ({"loss": "gce"}, 4),
        ({"output": "tanh"}, 4),
        ({"statistics": "fixed"}, 4),
    ],
    ids=str,
)
def test_a_mapping_that_begins_as_another_is_not_taught_again(
    options: dict[str, Any], taught: int, monkeypatch: pytest.MonkeyPatch, same_net: Net
) -> None:
    """Of a sweep of α one run learns, and the others have what they would have learned, to the bit."""
    memo: dict[str, Any] = {}
    warm_start(same_net(), steps=40, memo=memo)
    alone, beside = same_net(**options), same_net(**options)
    reached = warm_start(alone, steps=40)
    calls, teach = [], warm_start_module._teach

    def counted(*args: Any) -> str:
        calls.append(args)
        return teach(*args)

    monkeypatch.setattr(warm_start_module, "_teach", counted)
    assert warm_start(beside, steps=40, memo=memo) == reached
    assert len(calls) == taught
    states = alone.state_dict(), beside.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
    assert not any(b.untaught for _, _, b in mapped_layers(beside))


@pytest.mark.filterwarnings("ignore:after at most 4. steps")
def test_other_weights_or_steps_are_taught_again(
    monkeypatch: pytest.MonkeyPatch, same_net: Net
) -> None:
    memo: dict[str, Any] = {}
    warm_start(same_net(), steps=40, memo=memo)
    calls: list[Any] = []

    def counted(*args: Any) -> str:
        calls.append(args)
        return "steps"

    monkeypatch.setattr(warm_start_module, "_teach", counted)
    other = same_net()
    with torch.no_grad():
        other.get_parameter("5.weight")[0, 0, 0, 0] += 0.01
    warm_start(other, steps=40, memo=memo)
    assert len(calls) == 1
    warm_start(same_net(), steps=41, memo=memo)
    assert len(calls) == 5


def test_warm_start_works_without_gradients_around_it() -> None:
    model = nn.Sequential(BinaryLinear(8, 6, method="lns")).eval()
    with torch.no_grad():
        before = sign_agreement(model)["0"]
        assert warm_start(model, steps=200, lr=1e-2)["0"] > before
    assert not model.training


def test_warm_start_of_a_model_without_lns(float_net: Net) -> None:
    model = unflip.binarize(float_net(), "dorefa", quiet=True)
    with pytest.raises(ValueError, match="no LNS layer: binarize it with method='lns' first"):
        warm_start(model)
    with pytest.raises(ValueError, match="no LNS layer"):
        sign_agreement(model)


def test_warm_start_after_agreement_changes_nothing(lns_net: Net) -> None:
    model = lns_net(mapping="residual")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert set(warm_start(model).values()) == {1.0}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_warm_start_of_a_half_precision_model_is_fitted_in_float32() -> None:
    model = unflip.binarize(
        nn.Sequential(nn.Conv2d(16, 32, 3)).half(), "lns", keep_first_and_last=False, quiet=True
    )
    [share] = warm_start(model).values()
    assert share > 0.999
    assert all(p.dtype == torch.float16 and p.isfinite().all() for p in model.parameters())


def test_warm_start_that_falls_short_says_so() -> None:
    model = unflip.binarize(
        nn.Sequential(nn.Conv2d(16, 32, 3)), "lns", keep_first_and_last=False, quiet=True
    )
    with pytest.warns(
        UserWarning,
        match=r"after at most 1 steps of warm start .* too few labels: 0 \d.*warm_steps",
    ):
        warm_start(model, steps=1)


def untaught_warnings(model: nn.Module, times: int = 2) -> int:
    """How often training says that a mapping has not learned its signs, over several losses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            unflip.auxiliary_loss(model)
    return sum("has not learned the signs" in str(w.message) for w in caught)


def test_training_without_a_warm_start_is_said_once(lns_net: Net) -> None:
    model = lns_net()
    layers = len(list(binary_layers(model)))
    assert untaught_warnings(copy.deepcopy(model).eval()) == 0
    with torch.no_grad():
        assert untaught_warnings(model) == 0
    assert untaught_warnings(copy.deepcopy(model)) == layers, "once per layer"
    assert untaught_warnings(lns_net(mapping="residual")) == 0
    trained = lns_net()
    trained.load_state_dict(model.state_dict())
    assert untaught_warnings(trained) == 0


@pytest.mark.filterwarnings("ignore:after at most 1 steps")
@pytest.mark.parametrize("labels", ["following", "frozen"])
def test_a_warm_start_is_of_the_weights_at_hand(labels: str, float_net: Net, lns_net: Net) -> None:
    model = lns_net(labels=labels)
    warm_start(model, steps=1)
    assert untaught_warnings(copy.deepcopy(model)) == 0
    unflip.load_twin(model, float_net().state_dict())
    assert untaught_warnings(copy.deepcopy(model)) > 0, "other weights have other signs"
    warm_start(model, steps=1)
    assert untaught_warnings(model) == 0


def test_a_compiled_step_does_not_know_of_the_warning(lns_net: Net) -> None:
    model = lns_net()
    compiled = torch.compile(
        lambda: unflip.auxiliary_loss(model), fullgraph=True, backend="aot_eager"
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lns: a mapping network")
        compiled()


def test_a_state_filled_in_place_counts_as_taught(lns_net: Net) -> None:
    model = lns_net()
    state_restored(model)
    assert untaught_warnings(model) == 0


def test_a_long_warm_start_says_how_far_it_is() -> None:
    for every, expected in (
        (1e9, []),
        (0.0, ["warm start: finished layer 1 (layer1.0.conv1); its signs agree on 50.0000%"]),
    ):
        said: list[str] = []
        warm_start_module.WarmStartLog(said.append, every)("layer1.0.conv1", 0.5, "steps")
        assert said == expected


def taught(monkeypatch: pytest.MonkeyPatch, shares: list[float], **limits: Any) -> tuple[int, str]:
    """The steps that one layer is taught, and what ends it, if every check finds the next of these shares."""
    found = iter(shares)
    monkeypatch.setattr(warm_start_module._Lessons, "share", lambda _: next(found))
    ends: list[str] = []
    steps: list[float] = []
    monkeypatch.setattr(warm_start_module._Lessons, "step", lambda _, lr: steps.append(lr))
    model = nn.Sequential(BinaryLinear(8, 6, method="lns"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warm_start(model, progress=lambda name, share, ended: ends.append(ended), **limits)
    assert steps == pytest.approx([1e-3 * (1 - i / limits["steps"]) for i in range(len(steps))]), (
        "the rate falls to 0 over all steps"
    )
    return len(steps), ends[0]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"agreement": 0.8, "patience": None}, (40, "agreement")),
        ({"agreement": 0.95, "patience": 60}, (140, "patience")),  # best at 80, checked every 20
        ({"agreement": 0.95, "patience": 50}, (140, "patience")),
        ({"agreement": None, "patience": 40}, (120, "patience")),
        ({"agreement": None, "patience": None}, (150, "steps")),
        ({"agreement": 0.85, "patience": 20}, (60, "agreement")),
    ],
    ids=str,
)
def test_what_ends_a_warm_start(
    limits: dict[str, Any], expected: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = [0.5, 0.6, 0.8, 0.85, 0.9, 0.9, 0.9, 0.89, 0.9]
    assert taught(monkeypatch, shares, steps=150, **limits) == expected


def test_the_summary_of_a_warm_start_counts_what_ended_it() -> None:
    log = warm_start_module.WarmStartLog(lambda _: None)
    for share, ended in ((0.9996, "agreement"), (0.99, "patience"), (1.0, "agreement")):
        log("layer", share, ended)  # type: ignore[arg-type]
    assert log.summary() == (
        "warm start: signs agree on 99.0000% or more in each of 3 layers; "
        "of these, 2 reached warm_agreement, 1 stopped improving"
    )


@pytest.mark.filterwarnings("ignore:after at most 5 steps")
def test_a_mapping_that_is_not_taught_again_ended_as_the_first(same_net: Net) -> None:
    memo: dict[str, Any] = {}
    logs = [warm_start_module.WarmStartLog(lambda _: None) for _ in range(2)]
    for log in logs:
        warm_start(same_net(), steps=5, progress=log, memo=memo)
    assert logs[0].ended == logs[1].ended == {"steps": 4}


def test_patience_alone_goes_on_after_all_signs_agree() -> None:
    model = nn.Sequential(BinaryLinear(8, 6, method="lns"))
    warm_start(model, steps=300, lr=1e-2)
    [(_, weight, binarizer)] = mapped_layers(model)

    def loss() -> float:
        q_hat, labels = binarizer.predict(weight), binarizer.noisy_labels(weight)
        return binarizer.supervision(q_hat, labels).mean().item()

    before = loss()
    assert warm_start(model, steps=300, lr=1e-2, agreement=None, patience=100) == {"0": 1.0}
    assert loss() < before / 2


class _OtherLayout(torch.autograd.Function):
    """The weights, and a gradient whose strides are those of channels_last, as some kernels return it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.contiguous(memory_format=torch.channels_last)


def test_gradients_have_the_layout_of_the_parameters(lns_net: Net) -> None:
    """Adam's fused step on a GPU refuses others."""
    _, latent, binarizer = mapped_layers(lns_net())[0]
    kernels = [p for p in binarizer.mapping.parameters() if p.dim() == 4]

    def predict(weight: torch.Tensor) -> torch.Tensor:
        return binarizer.mapping(weight) + sum(_OtherLayout.apply(p).sum() for p in kernels)

    weight = latent.detach()
    labels = binarizer.noisy_labels(weight)
    warm_start_module._Lessons(weight, labels, binarizer, predict, lr=0.001).step(0.001)
    for kernel in kernels:
        assert kernel.grad is not None
        assert kernel.grad.stride() == kernel.stride()
