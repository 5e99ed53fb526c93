"""Single layers of every shape: as the frozen layer has it, exactly where sums are integers."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.packing import make_packed
from unflip.packing.reference import evaluate


def examples(count):
    fixtures = [HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=count, deadline=None, suppress_health_check=fixtures, derandomize=True
    )


@st.composite
def convolutions(draw):
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    kernel = [draw(st.integers(1, 4)) for _ in range(2)]
    padding = [draw(st.integers(0, 5)) for _ in range(2)]
    dilation = [draw(st.integers(1, 2)) for _ in range(2)]
    shape = [
        draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 9))
        for k, p, d in zip(kernel, padding, dilation, strict=True)
    ]
    options = {
        "stride": [draw(st.integers(1, 5)) for _ in range(2)],
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    c_in, c_out = (groups * draw(st.integers(1, 70 // groups)) for _ in range(2))
    return (c_in, c_out, kernel), options, (draw(st.integers(1, 9)), c_in, *shape)


@examples(60)
@given(case=convolutions(), method=st.sampled_from(methods.names()))
def test_convolutions(case, method, agree, lively):
    arguments, options, shape = case
    if method == "lns" and arguments[1] == 1:
        return  # its BatchNorm over filters needs two
    agree(lively(BinaryConv2d(*arguments, **options, method=method)), torch.randn(shape))


@examples(25)
@given(case=convolutions())
def test_sums_of_signs_are_exact_integers(case, agree):
    arguments, options, shape = case
    layer = BinaryConv2d(*arguments, **{**options, "bias": False}, method="binarynet")
    x = torch.randn(shape)
    packed = agree(layer, x, exactly=True)
    assert torch.equal(evaluate(packed, x), evaluate(packed, x).round())


@examples(25)
@given(
    features=st.integers(2, 300),
    outputs=st.integers(2, 40),
    batch=st.integers(1, 9),
    bias=st.booleans(),
    method=st.sampled_from(methods.names()),
)
def test_linear_layers(features, outputs, batch, bias, method, agree, lively):
    agree(
        lively(BinaryLinear(features, outputs, bias=bias, method=method)),
        torch.randn(batch, features),
    )


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("binary", [True, False])
def test_padding_by_name(padding, binary, agree):
    kind = BinaryConv2d if binary else nn.Conv2d
    agree(kind(3, 4, (4, 3), padding=padding, dilation=2), torch.randn(2, 3, 9, 8))


def test_what_is_stored():
    layer = BinaryConv2d(5, 6, 3, method={"name": "abc", "weight_bases": 3, "input_bases": 2})
    packed = make_packed(layer, torch.randn(1, 5, 4, 4))
    quantize, conv = packed.graph["ops"]
    assert (quantize["op"], conv["op"]) == ("quantize", "conv")
    assert len(packed.tensors[conv["bits"]]) == -(-3 * 6 * 5 * 9 // 8)
    assert packed.tensors[conv["scales"]].shape == (3, 1)
    assert packed.tensors[quantize["thresholds"]].shape == (2, 1)
    assert quantize["strict"] == [False, False]
    assert [step["step"] for step in conv["steps"]] == ["affine"]


def test_a_filters_offset_is_one_number(agree, lively):
    packed = agree(lively(BinaryConv2d(5, 6, 3, method="adabin")), torch.randn(2, 5, 4, 4))
    assert packed.tensors[packed.graph["ops"][1]["offset"]].shape == (6,)


def test_frozen_or_not_is_the_same_file(lively):
    model = lively(
        unflip.binarize(
            nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3)), "reactnet", quiet=True
        )
    )
    x = torch.randn(2, 2, 6, 6)
    first, second = make_packed(model, x), make_packed(unflip.freeze(model), x)
    assert first.graph == second.graph
    assert all((first.tensors[name] == second.tensors[name]).all() for name in first.tensors)
