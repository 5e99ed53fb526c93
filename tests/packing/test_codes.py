"""The discrete form of inputs: every method's, at every float32 that could matter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods import InputBinarizer, InputCode, least_float, sign_code
from unflip.packing import CannotPack
from unflip.packing.codes import code_values, input_code

OPTIONS = [
    *({"name": name} for name in methods.names()),
    *({"name": "dorefa", "input_bits": bits} for bits in range(2, 9)),
    {"name": "dorefa", "inputs": "pm1"},
    {"name": "abc", "input_bases": 1},
    {"name": "abc", "input_bases": 8},
    {"name": "quantnet", "threshold": 0.0},
    {"name": "tbn", "threshold": 0.05},
    {"name": "xnor", "k_map": False},
    {"name": "lns", "base": "reactnet"},
]


def binarizer_of(options, kind=BinaryConv2d, channels=3):
    layer = (
        kind(channels, 4, 1, method=options)
        if kind is BinaryConv2d
        else kind(channels, 4, method=options)
    )
    return unflip.freeze(layer.eval())


def around(code: InputCode, channels: int) -> Tensor:
    """Thresholds with three floats on either side, zeros of both signs, and random numbers of all sizes."""
    at = code.thresholds.expand(-1, channels)
    points = [at]
    for end in (-math.inf, math.inf):
        x = at
        for _ in range(3):
            x = x.nextafter(torch.full_like(x, end))
            points.append(x)
    random = torch.randn(50, channels) * 10 ** torch.empty(50, 1).uniform_(-8, 8)
    zeros = torch.tensor([[0.0], [-0.0]]).expand(-1, channels)
    return torch.cat([*points, random, zeros])


numbers = st.one_of(
    st.floats(-3, 3, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda x: abs(x) < 1e30),
).filter(lambda x: x != 0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_the_stated_form_is_what_forward_does(options, data):
    layer = binarizer_of(options)
    binarizer = layer.input_binarizer
    for parameter in binarizer.parameters():
        values = data.draw(
            st.lists(numbers, min_size=parameter.numel(), max_size=parameter.numel())
        )
        parameter.data = torch.tensor(values, dtype=torch.float32).view(parameter.shape)
    code = input_code(layer, "layer")
    assert (code is None) == (binarizer.bits == 32)
    if code is None:
        return
    assert len(code.scales) == binarizer.bits
    x = around(code, 3)[:, :, None, None]
    with torch.no_grad():
        expected = binarizer(x).double()
    size = max(abs(s) for s in (*code.scales, code.offset))
    assert (code_values(code, x) - expected).abs().max() <= 1e-6 * size * len(code.scales)


@pytest.mark.parametrize("beta", [1.0, -0.7, 0.0, 1e-20, -3e5])
@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_quantnet_may_turn_round_or_stop(beta, threshold):
    layer = binarizer_of({"name": "quantnet", "threshold": threshold}, BinaryLinear)
    layer.input_binarizer.beta.data.fill_(beta)
    code = input_code(layer, "layer")
    assert code is not None
    x = around(code, 3)
    torch.testing.assert_close(code_values(code, x).float(), layer.input_binarizer(x))
    below, above = code.offset, code.offset + code.scales[0]
    if beta == 0:
        assert below == above == (1 if threshold == 0 else 0)
    else:
        assert (below, above) == ((0, 1) if beta > 0 else (1, 0))


def test_halves_round_to_even():
    code = methods.get("dorefa", input_bits=2).input_binarizer(nn.Linear(1, 1)).code()
    levels = [
        int(level)
        for level in (3 * code_values(code, torch.tensor([[0.5 / 3], [0.5], [2.5 / 3]]))).round()
    ]
    assert levels == [0, 2, 2]


def test_least_float_finds_the_very_float():
    shifts = torch.tensor([0.3, -7.0, 1e-8])
    found = least_float(lambda x: x + shifts >= 0.5, shifts)
    below = found.nextafter(torch.full_like(found, -math.inf))
    assert ((found + shifts) >= 0.5).all()
    assert ((below + shifts) < 0.5).all()


class Stated(InputBinarizer):
    """sign(x), with whatever code a test gives it."""

    def __init__(self, stated=None, scale=None):
        super().__init__()
        self.stated, self.scale = stated, scale

    def forward(self, x):
        return torch.where(x >= 0, 1.0, -1.0)

    def code(self):
        return self.stated

    def output_scale(self, x, layer):
        return None if self.scale is None else x.abs().mean(self.scale, keepdim=True)


@pytest.mark.parametrize(
    ("binarizer", "reason"),
    [
        (Stated(), "does not state its discrete form"),
        (
            Stated(sign_code(torch.full((1, 1), 1e-40))),
            r"at x = 0.0 of channel 0 the code gives -1, forward 1",
        ),
        (Stated(sign_code()._replace(strict=(True,))), "a discrete form that differs"),
        (
            Stated(sign_code(torch.zeros(1, 2))),
            r"thresholds of shape \(1, 2\), not \(steps, 3 or 1\)",
        ),
        (Stated(sign_code()._replace(scales=(2.0, 2.0))), "1 steps for 2 planes"),
        (Stated(sign_code()._replace(offset=math.nan)), "NaN or infinity"),
        (Stated(sign_code()._replace(k_map=True)), "states a K map, but output_scale is None"),
        (Stated(sign_code(), scale=1), r"has an output_scale, which its code does not state"),
        (
            Stated(sign_code()._replace(k_map=True), scale=(1, 2, 3)),
            "output_scale has different values",
        ),
        (
            Stated(sign_code()._replace(k_map=True), scale=3),
            r"output_scale has shape \(2, 3, 3, 1\)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_so_is_refused_by_name(binarizer, reason):
    layer = binarizer_of("dorefa")
    layer.input_binarizer = binarizer
    with pytest.raises(
        CannotPack, match=rf"layer 'net\.2': Stated of method dorefa.*{reason}.*new-method"
    ):
        input_code(layer, "net.2")


def test_float_inputs_stay_as_they_are():
    layer = binarizer_of("bwn")
    assert input_code(layer, "x") is None
    layer.input_binarizer.register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.raises(CannotPack, match="has bits = 32, but changes its input"):
        input_code(layer, "x")
