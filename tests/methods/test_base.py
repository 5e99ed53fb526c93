"""What a new method can get wrong is refused by its name, before broadcasting makes other weights of it."""

import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d
from unflip.methods.base import BinaryWeight, InputBinarizer, Method, WeightBinarizer
from unflip.methods.pieces import ClippedSign
from unflip.ste import sign

Code = Callable[[Tensor], BinaryWeight]


class MyWeights(WeightBinarizer):
    def __init__(self, code: Code, surrogate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.made, self.soft = code, surrogate

    def code(self, weight: Tensor) -> BinaryWeight:
        return self.made(weight)

    def surrogate(self, weight: Tensor) -> Tensor:
        return self.soft(weight)


def scale(weight: Tensor) -> Tensor:
    return weight.abs().mean().view(1, 1, 1, 1, 1)


def right(weight: Tensor) -> BinaryWeight:
    return BinaryWeight(sign(weight)[None], scale(weight))


def layer(code: Code = right, surrogate: Callable[[Tensor], Tensor] = lambda w: w) -> BinaryConv2d:
    @dataclass(frozen=True)
    class Mine(Method):
        def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
            return MyWeights(code, surrogate)

        def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
            return ClippedSign()

    Mine.name = "mine"
    return BinaryConv2d(4, 4, 3, method=Mine())


def test_a_method_that_is_right() -> None:
    made, x = layer(), torch.randn(2, 4, 5, 5)
    assert torch.equal(unflip.freeze(made)(x), made(x))


WRONG: dict[str, tuple[Code, str]] = {
    "signs without a base": (
        lambda w: BinaryWeight(sign(w), scale(w)),
        r"signs has shape \(4, 4, 3, 3\) and should have \(bases, \*weight.shape\)",
    ),
    "a scale a filter, one dimension short": (
        lambda w: BinaryWeight(sign(w)[None], w.abs().mean((1, 2, 3)).view(1, 4, 1, 1)),
        r"scales has shape \(1, 4, 1, 1\) and .*\(1, 1, 1, 1, 1\) or \(1, 4, 1, 1, 1\)",
    ),
    "a scale an input channel": (
        lambda w: BinaryWeight(sign(w)[None], w.abs().mean((0, 2, 3)).view(1, 1, 4, 1, 1)),
        r"scales has shape \(1, 1, 4, 1, 1\)",
    ),
    "one scale for two bases": (
        lambda w: BinaryWeight(torch.stack([sign(w), sign(w)]), scale(w)),
        r"scales has shape \(1, 1, 1, 1, 1\) and .*\(2, 1, 1, 1, 1\)",
    ),
    "an offset a weight": (
        lambda w: BinaryWeight(sign(w)[None], scale(w), w),
        r"offset has shape \(4, 4, 3, 3\) and .*\(out or 1, 1, ...\)",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_shapes_of_the_code_are_refused(wrong: str) -> None:
    code, message = WRONG[wrong]
    made = layer(code)
    for use in (lambda: made(torch.randn(2, 4, 5, 5)), made.code, lambda: unflip.freeze(made)):
        with pytest.raises(ValueError, match=rf"^MyWeights of method 'mine': code\(\)\.{message}"):
            use()


def test_a_surrogate_of_another_shape_is_refused() -> None:
    made = layer(surrogate=lambda w: w.mean())
    with pytest.raises(ValueError, match=r"'mine': surrogate\(\) has shape \(\) .*weight\.shape"):
        made(torch.randn(2, 4, 5, 5))


def test_signs_of_zero_are_not_called_nan() -> None:
    made = layer(lambda w: BinaryWeight(torch.sign(w)[None], scale(w)))
    with torch.no_grad():
        made.weight[1, 2] = 0
    with pytest.raises(ValueError, match=r"method 'mine' gives signs that are NaN or 0.*ste\.sign"):
        unflip.freeze(made)


@pytest.mark.parametrize("value", ["fast", None, True])
def test_an_option_that_is_no_number_is_refused_by_name(value: object) -> None:
    """It went on to the first comparison, whose error named neither the option nor its value."""
    tried = []
    for name in methods.names():
        for option, hint in typing.get_type_hints(methods.config_class(name)).items():
            if hint is float:
                tried.append(name)
                with pytest.raises(ValueError, match=f"{name}: {option}={value!r} should be a"):
                    methods.get(name, **{option: value})
    assert {"bop", "lns", "reste"} <= set(tried)


def test_whole_and_numpy_numbers_are_numbers() -> None:
    assert methods.get("bop", gamma=1).options()["gamma"] == 1
    assert methods.get("bop", gamma=np.float32(0.5)).options()["gamma"] == 0.5


@dataclass(frozen=True)
class Optional(Method):
    count: int = 1
    switch: bool = False
    rate: float | None = None
    base: str | Method = "dorefa"


Optional.name = "optional"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 2.0}, "optional: count=2.0 should be a whole number"),
        ({"count": True}, "optional: count=True should be a whole number"),
        ({"switch": "yes"}, "optional: switch='yes' should be true or false"),
        ({"switch": 1}, "optional: switch=1 should be true or false"),
        ({"rate": "fast"}, "optional: rate='fast' should be a number or None"),
        ({"rate": True}, "optional: rate=True should be a number or None"),
    ],
    ids=str,
)
def test_options_are_checked_by_their_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Optional(**options)


def test_options_of_the_right_type() -> None:
    assert Optional(count=3, switch=True, rate=None, base=methods.get("bwn")).rate is None
    assert Optional(rate=1).rate == 1
