"""BiPer: the square wave, its sine gradient, the first step with sine weights, the loss term."""

import math

import pytest
import torch
from torch import nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.biper import SineWave, SquareWave


def test_the_wave_by_hand() -> None:
    period = 2 * math.pi / 20
    weight = torch.tensor([[0.0, 0.25, 0.75, 1.25, -0.25, -0.75]]) * period
    wave = SquareWave(weight, 20.0, 0.0)
    assert wave.code(weight).signs.tolist() == [[[1, 1, -1, 1, -1, 1]]]
    assert wave(weight).tolist() == [[0.5, 0.5, -0.5, 0.5, -0.5, 0.5]]
    with torch.no_grad():
        wave.alpha.fill_(-2)
    assert wave(weight).tolist() == [[-2, -2, 2, -2, 2, -2]]


@pytest.mark.parametrize("kind", [SquareWave, SineWave])
@pytest.mark.parametrize("shape", [(5, 40), (4, 3, 3, 3), (6, 1, 1, 1)])
def test_gradients(shape: tuple[int, ...], kind: type[SquareWave]) -> None:
    weight = (0.2 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    wave = kind(weight, 13.0, 0.0)
    with torch.no_grad():
        wave.alpha.copy_(torch.randn_like(wave.alpha))
    upstream = torch.randn(shape, dtype=torch.float64)
    out = wave(weight)
    found = torch.autograd.grad(out, [weight, wave.alpha], upstream)
    w, alpha = weight.detach(), wave.alpha.detach()
    torch.testing.assert_close(found[0], upstream * alpha * 13 * torch.cos(13 * w))
    value = torch.sin(13 * w)
    if kind is SquareWave:
        value = torch.where(value >= 0, 1.0, -1.0).double()
    torch.testing.assert_close(out.detach(), alpha * value)
    torch.testing.assert_close(found[1].flatten(), (upstream * value).flatten(1).sum(1))


def test_the_loss_term() -> None:
    model = nn.Sequential(
        BinaryLinear(6, 4, method={"name": "biper", "tau": 0.5}), BinaryLinear(4, 3, method="biper")
    ).double()
    assert list(unflip.auxiliary_losses(model)) == ["0"]
    weight = model[0].weight
    loss = unflip.auxiliary_loss(model)
    # as in the authors' code
    expected = 0.5 * (0.5 - 0.5 * torch.cos(2 * 20 * weight)).mean()
    torch.testing.assert_close(loss, expected)
    (found,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(found, 0.5 * 20 * torch.sin(40 * weight.detach()) / 24)


def test_the_second_step_starts_from_the_first() -> None:
    def net(weights: str) -> nn.Module:
        layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3), nn.Conv2d(5, 2, 3))
        return unflip.binarize(layers, "biper", weights=weights, quiet=True)

    first, second = net("sine"), net("binary")
    with torch.no_grad():
        first[1].weight_binarizer.alpha.uniform_(-1, 1)  # type: ignore[index, union-attr, operator]
    unflip.load_twin(second, first.state_dict())
    state = second.state_dict()
    assert all(torch.equal(state[k], v) for k, v in first.state_dict().items())
    unflip.freeze(second)
    with pytest.raises(ValueError, match="leaves its weights float"):
        unflip.freeze(first)
    with pytest.raises(ValueError, match="with weights='sine' they are float"):
        first[1].code()  # type: ignore[index, operator]
    with pytest.raises(RuntimeError, match=r"made with method biper\(weights=sine\)"):
        second.load_state_dict(first.state_dict())


def test_one_layer_alone_takes_over_alpha() -> None:
    first, second = (BinaryLinear(4, 3, method="biper") for _ in range(2))
    with torch.no_grad():
        first.weight_binarizer.alpha.fill_(3)  # type: ignore[union-attr]
    unflip.load_twin(second, first.state_dict())
    assert (second.weight_binarizer.alpha == 3).all()


def test_family() -> None:
    assert methods.get("biper", tau=0.1).family == "biper"
    assert methods.get("biper", tau=0.1, frequency=30).family == "biper(frequency=30)"


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_signs_in_half_precision_are_those_of_the_same_weights(half: torch.dtype) -> None:
    weight = torch.randn(4, 50).to(half)
    found = SquareWave(weight, 20.0, 0.0).code(weight).signs[0]
    assert torch.equal(found.double(), torch.where(torch.sin(20 * weight.double()) >= 0, 1.0, -1.0))


def test_eval_is_frozen() -> None:
    model = nn.Sequential(BinaryConv2d(3, 8, 3, method="biper"), nn.BatchNorm2d(8))
    with torch.no_grad():
        model[0].weight_binarizer.alpha.uniform_(-1, 1)  # type: ignore[union-attr,operator]
    x = torch.randn(4, 3, 6, 6)
    model(x)
    assert torch.equal(unflip.freeze(model)(x), model.eval()(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequency": 0}, "frequency=0 should be finite and > 0"),
        ({"frequency": float("inf")}, "frequency=inf should be"),
        ({"tau": -1}, "tau=-1 should be finite and >= 0"),
        ({"weights": "float"}, "weights='float' is not one of"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"biper: {message}"):
        methods.get("biper", **options)


def test_lns_cannot_wrap_it() -> None:
    with pytest.raises(ValueError, match=r"biper.*mapping network"):
        methods.get("lns", base="biper")
