"""Networks as users write them: functional calls, shared layers, concatenation, views, in-place operations."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unflip
from unflip.packing import CannotPack, make_packed
from unflip.packing.check import _compare, _sensitivity
from unflip.packing.file import Packed
from unflip.packing.ir import affine, clamp, merged, prelu
from unflip.packing.reference import run_op


class Inner(nn.Module):
    """Called twice, with shared layers inside."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.leaky_relu(self.norm(self.conv(x)), 0.1) + x


class Hand(nn.Module):
    """Everything at once."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 5, stride=(2, 1), padding=(2, 1))
        self.body = nn.ModuleDict({"inner": Inner(6), "wide": nn.Conv2d(12, 10, (1, 3), groups=2)})
        self.gate = nn.Parameter(torch.rand(10, 1, 1) + 0.5)
        self.pool = nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)
        self.drop = nn.Dropout(0.5)
        self.act = nn.ReLU6(inplace=True)
        self.last = nn.Linear(16 * 3, 7)

    def forward(self, x):
        x = self.body["inner"](self.stem(x))
        x = self.act(self.body["inner"](x))
        left, right = x[:, :2], x[:, 2:]
        x = torch.cat([right * 2, left - 0.5, F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)], 1)
        x = self.pool(self.body["wide"](x) * self.gate)
        a, b, c = torch.split(F.pad(x, (1, 0, 0, 1, 1, 1)), [4, 4, 4], 1)
        x = torch.cat((a, b.abs(), c.clamp(min=-1), (3 - b) / 2), dim=1)
        x = (
            F.hardtanh(x[:, :, ::2, 1:])
            + x[:, :, ::2, 1:].mean((2, 3), keepdim=True) * x[:, :, ::2, 1:]
        )
        x = F.adaptive_max_pool2d(x, (1, 3))
        return F.softmax(self.last(self.drop(x.view(x.size(0), -1))), dim=1)


def test_a_hand_written_network(agree, lively):
    torch.manual_seed(3)
    model = unflip.binarize(Hand(), "reactnet", quiet=True)
    packed = agree(lively(model), torch.randn(4, 3, 12, 9))
    names = [op["name"] for op in packed.graph["ops"] if op["op"] == "conv"]
    assert names == ["stem", "body.inner.conv", "body.inner.conv", "body.wide", "last"]
    kinds = {op["op"] for op in packed.graph["ops"]}
    assert {"concat", "slice", "pad", "max_pool", "avg_pool", "softmax", "flatten", "mean"} <= kinds


def test_shared_layers_store_their_bits_once(lively):
    model = lively(unflip.binarize(Hand(), "bireal", quiet=True))
    packed = make_packed(model, torch.randn(1, 3, 12, 9))
    convs = [
        op for op in packed.graph["ops"] if op["name"] == "body.inner.conv" and op["op"] == "conv"
    ]
    assert len(convs) == 2
    assert convs[0]["bits"] == convs[1]["bits"]


CASES = {
    "adaptive mean": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    "adaptive windows": lambda x: F.adaptive_avg_pool2d(x, (2, 7)),
    "global maximum": lambda x: x.amax((-2, -1)),
    "average, rounded up": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "average, wide": lambda x: F.avg_pool2d(
        x, (2, 5), (3, 1), (1, 2), ceil_mode=True, count_include_pad=True
    ),
    "maximum, rounded up": lambda x: F.max_pool2d(x, 2, 3, ceil_mode=True),
    "maxout": lambda x: 1.5 * F.relu(x) - 0.3 * F.relu(-x),
    "maxout, negative slopes": lambda x: F.relu(x) * -0.5 + 2 * F.relu(-x),
    "one-sided": lambda x: 0.0 * F.relu(x) - 0.3 * F.relu(-x),
    "a sum with itself": lambda x: x + F.relu(x) + x,
    "alpha": lambda x: torch.add(x, F.relu(x), alpha=-0.5) + torch.sub(1, x, alpha=2),
    "square": lambda x: x**2 - x.square() * 0.5,
    "hardswish": lambda x: F.hardswish(x) + F.hardsigmoid(x),
    "gate from the image": lambda x: x * F.hardsigmoid(x.mean((2, 3), keepdim=True)),
    "one channel for all": lambda x: x * x[:, :1],
    "channels of zeros": lambda x: F.pad(torch.cat([x, x], 1), (0, 0, 0, 0, 2, 1)),
    "slices of slices": lambda x: x[:, 1:, 1:-1:2][:, ::2, :, 2:5],
    "last pixels": lambda x: x[..., -3:],
    "narrow": lambda x: x.narrow(2, 1, 3),
    "chunks": lambda x: torch.cat(x.chunk(3, 1)[::-1], 1),
    "in place": lambda x: (x * 1).relu_().add_(1).mul_(2).clamp_(max=3),
    "division": lambda x: x / 3 + (1 - x),
    "division by channels": lambda x: (
        (x - torch.arange(6.0).view(6, 1, 1)) / torch.linspace(1, 2, 6).view(1, 6, 1, 1)
    ),
    "views": lambda x: x.flatten(1).unsqueeze(-1).unsqueeze(-1).reshape(len(x), -1) * 2,
    "clamps": lambda x: x.clamp(-1, 1).clamp_min(-0.5).clamp_max(0.25),
    "clamps whose ends are exchanged": lambda x: x.clamp(0.5, -0.5) + x,
    "clamps without an end": lambda x: (
        x.clamp(0, float("inf")) + F.hardtanh(x, -float("inf"), 1) * 2
    ),
    "clamps of nothing": lambda x: x.clamp(-float("inf"), float("inf")) * 2,
    "to and back": lambda x: x.float().contiguous().detach().clone() * 2,
    "softmax of an image": lambda x: x.softmax(1),
    "log-softmax": lambda x: F.log_softmax(x.flatten(1), dim=1),
    "squeeze and excite": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "sigmoid and tanh": lambda x: torch.sigmoid(x) - 0.5 * torch.tanh(3 * x),
    "silu": lambda x: F.silu(x, inplace=True) + F.mish(x),
    "gelu": lambda x: F.gelu(x) + 0.1 * F.gelu(x * 2, approximate="tanh"),
    "elu": lambda x: F.elu(x, 0.7) + F.selu(x) + F.celu(x, 1.7),
    "group norm": lambda x: F.group_norm(
        x, 3, torch.linspace(0.5, 1, 6), torch.linspace(-1, 1, 6), 1e-3
    ),
    "instance norm": lambda x: F.relu(F.instance_norm(x, weight=torch.linspace(1, 2, 6))),
    "instance norm, running": lambda x: F.instance_norm(
        x, torch.linspace(-1, 1, 6), torch.linspace(1, 2, 6), use_input_stats=False
    ),
    "layer norm of an image": lambda x: F.layer_norm(x, [6, 6, 7]),
    "layer norm of a vector": lambda x: F.layer_norm(
        x.mean((2, 3)), [6], torch.linspace(1, 2, 6), torch.linspace(-1, 1, 6)
    ),
    "nearest": lambda x: F.interpolate(x, scale_factor=(2, 3)),
    "nearest, exact": lambda x: F.interpolate(x, size=(12, 7), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear, corners": lambda x: F.interpolate(
        x, scale_factor=(2, 1.6), mode="bilinear", align_corners=True
    ),
    "bilinear, a size": lambda x: F.interpolate(x, (3, 16), mode="bilinear"),
    "bilinear, the factor of a size": lambda x: F.interpolate(
        x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True
    ),
    "bilinear, nothing": lambda x: F.interpolate(x, (6, 7), mode="bilinear").relu_() - x,
    "bilinear, a mean": lambda x: F.interpolate(
        x.mean((2, 3), keepdim=True), x.shape[2:], mode="bilinear"
    ),
    "pixel shuffle": lambda x: F.pixel_shuffle(torch.cat([x, -x], 1), 2),
    "channel shuffle": lambda x: torch.channel_shuffle(x, 3) * 2,
    "matrix": lambda x: x.flatten(1) @ torch.linspace(-1, 1, 6 * 42 * 2).view(-1, 2),
    "a list that was empty": lambda x: torch.cat([torch.cat([torch.tensor([]), x], 1), -x], 1),
    "a concatenation of one": lambda x: torch.cat([x], 1).relu_() - x,
    "constants in the shape of an image": lambda x: (
        torch.cat([x + torch.linspace(-1, 1, 6).view(1, 6, 1, 1).expand_as(x), x * 0], 1)
        + torch.cat([torch.full_like(x, 0.5), x.new_ones(x.shape)], 1)
    ),
    "zeros in the shape of an image": lambda x: torch.cat(
        [torch.zeros_like(x), x.expand_as(x), x.new_zeros(len(x), 2, *x.shape[2:])], 1
    ),
    "nothing": lambda x: F.dropout(x, 0.5, training=False) * 1 + 0,
}


class Case(nn.Module):
    """A convolution in front, so that there are steps to fuse into."""

    def __init__(self, function):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 1)
        self.function = function

    def forward(self, x):
        return self.function(self.conv(x))


@pytest.mark.parametrize("name", CASES)
def test_operations(name, agree):
    agree(Case(CASES[name]), torch.randn(3, 2, 6, 7))


def test_zeros_in_a_concatenation(agree):
    class Padded(nn.Module):
        def forward(self, x):
            zeros = torch.zeros(x.shape[0], 2, 4, 5)
            return torch.cat([zeros, x, x * 2, zeros], 1)

    packed = agree(Padded(), torch.randn(2, 3, 4, 5))
    assert [op["op"] for op in packed.graph["ops"]] == ["map", "concat", "pad"]


def test_a_convolution_does_the_padding_before_it(agree):
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.wide = nn.Conv2d(2, 3, 3, 2, padding=1), nn.Conv2d(5, 3, 3)

        def forward(self, x):
            two = F.pad(x, (0, 1, 2, 3))
            return self.conv(two).mean((2, 3)) + self.wide(F.pad(x, (1, 1, 1, 1, 1, 2))).mean(
                (2, 3)
            )

    packed = agree(Padded(), torch.randn(2, 2, 6, 7))
    paddings = [op["padding"] for op in packed.graph["ops"] if op["op"] == "conv"]
    assert sorted(paddings) == [[0, 0, 0, 0], [3, 1, 4, 2]]
    assert [op["before"] for op in packed.graph["ops"] if op["op"] == "pad"] == [[1, 1, 1]]


def test_in_place_changes_what_others_see(agree):
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 2
            z = F.dropout(y, training=False)
            y.relu_()
            return z + y

    agree(InPlace(), torch.randn(2, 3, 4, 5))


def test_a_clone_is_not_what_it_was_cloned_from(agree):
    class Clone(nn.Module):
        def forward(self, x):
            y = x.clone()
            y.relu_()
            return x - 2 * y

    packed = agree(Clone(), torch.randn(2, 3, 4, 5))
    assert [len(op["steps"]) for op in packed.graph["ops"]] == [3]


def test_maxout_is_one_prelu(lively):
    packed = make_packed(Case(CASES["maxout"]), torch.randn(1, 2, 6, 7))
    [conv] = packed.graph["ops"]
    assert [step["step"] for step in conv["steps"]] == ["affine", "prelu", "affine"]


def test_steps_are_merged():
    one, half = np.ones(1), np.array([0.5, 0.25])
    steps = [
        affine(half, None),
        affine(None, one),
        affine(2 * one, one),
        clamp(0, None),
        clamp(None, 6),
    ]
    found = merged([*steps, affine(one, 0 * one), prelu(half)])
    assert [step["step"] for step in found] == ["affine", "clamp", "prelu"]
    assert found[0]["scale"].tolist() == [1, 0.5]
    assert found[0]["shift"].tolist() == [3]
    assert (found[1]["low"], found[1]["high"]) == (0, 6)
    apart = merged([affine(1e30 * one, None), affine(1e30 * one, None)])
    assert len(apart) == 2


@pytest.mark.parametrize(
    ("first", "second"), [((0, None), (None, -1)), ((2, 3), (0, 1)), ((None, 1), (2, None))]
)
def test_two_clamps_are_one(first, second):
    [step] = merged([clamp(*first), clamp(*second)])
    for x in np.linspace(-4, 4, 33):
        expected = x
        for low, high in (first, second):
            expected = expected if low is None else max(expected, low)
            expected = expected if high is None else min(expected, high)
        found = x if step["low"] is None else max(x, step["low"])
        assert (found if step["high"] is None else min(found, step["high"])) == expected


def test_in_place_keeps_the_shapes_of_other_names(agree):
    class Shapes(nn.Module):
        def forward(self, x):
            y = x.mean((2, 3), keepdim=True)
            y.flatten(1).mul_(2)
            return x * y

    agree(Shapes(), torch.randn(2, 3, 4, 5))


class Reads(nn.Module):
    """A forward pass that looks at its binary layer."""

    def __init__(self, read):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)
        self.read = read

    def forward(self, x):
        return self.head(self.read(self.conv, self.stem(x)).mean((2, 3)))


READS = {
    "settings": lambda conv, x: conv(x) + x if conv.out_channels == x.shape[1] else conv(x),
    "type of the weight": lambda conv, x: conv(x.to(conv.weight.dtype)),
    "shape of the weight": lambda conv, x: conv(x) * conv.weight.shape[0],
    "stride and padding": lambda conv, x: conv(x) if conv.stride + conv.padding == (1,) * 4 else x,
    "bias": lambda conv, x: conv(x) + conv.bias.view(1, -1, 1, 1),
    "scales": lambda conv, x: conv(x) * conv.weight.abs().mean(),
    "class": lambda conv, x: F.relu(conv(x)) if isinstance(conv, nn.Conv2d) else conv(x),
}


@pytest.mark.parametrize("read", READS)
def test_a_forward_pass_may_read_its_binary_layers(read, agree):
    frozen = unflip.freeze(unflip.binarize(Reads(READS[read]), "dorefa", quiet=True))
    agree(frozen, torch.randn(5, 3, 8, 8))


class Listed(nn.Module):
    """A plain list refers to layers that are registered elsewhere."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(8, 4)
        self.order = [self.stem, self.conv, self.conv]
        self.again = self.conv

    def forward(self, x):
        for layer in [*self.order, self.again]:
            x = layer(x)
        return self.head(x.mean((2, 3)))


def test_a_layer_may_also_be_in_a_plain_list(agree):
    frozen = unflip.freeze(unflip.binarize(Listed(), "dorefa", quiet=True))
    agree(frozen, torch.randn(5, 3, 8, 8))


def smaller(conv):
    conv.weight, conv.padding = nn.Parameter(conv.weight[:, :, 1:, 1:].detach().clone()), (1, 0)


def fewer(conv):
    conv.weight = nn.Parameter(conv.weight[:5].detach().clone())
    conv.bias = nn.Parameter(conv.bias[:5].detach().clone())


CHANGES = {
    "padding and dilation": lambda conv: vars(conv).update(padding=(2, 3), dilation=(2, 3)),
    "padding": lambda conv: vars(conv).update(padding=(0, 0)),
    "dilation of padding by name": lambda conv: vars(conv).update(padding="same", dilation=(2, 2)),
    "kernel": smaller,
    "filters": fewer,
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_were_changed_after_they_were_made(change, agree):
    """The weight and the attributes that forward reads decide, not what torch keeps of the arguments."""
    conv = nn.Conv2d(8, 8, 3, padding=1)
    CHANGES[change](conv)
    head = nn.Linear(len(conv.weight), 4)
    layers = [nn.Conv2d(3, 8, 3), conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head]
    model = unflip.binarize(nn.Sequential(*layers), "dorefa", quiet=True)
    agree(unflip.freeze(model), torch.randn(5, 3, 12, 12))


def test_inputs_that_were_pruned(agree):
    conv = nn.Conv2d(8, 8, 3)
    conv.weight = nn.Parameter(conv.weight[:, :6].detach().clone())
    model = nn.Sequential(nn.Conv2d(3, 6, 3), conv, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    unflip.binarize(model, "dorefa", quiet=True)
    agree(unflip.freeze(model), torch.randn(5, 3, 12, 12))


def test_a_binary_layer_that_is_not_called_is_named():
    past = Reads(lambda conv, x: F.conv2d(x, conv.weight, conv.bias, padding=1))
    model = unflip.binarize(past, "dorefa", quiet=True)
    with pytest.warns(
        UserWarning, match=r"does not call: conv; the packed network does not contain"
    ):
        make_packed(model, torch.randn(2, 3, 8, 8))


def test_layers_that_are_called_are_not_warned_of(recwarn):
    called = unflip.binarize(Reads(lambda conv, x: conv(conv(x))), "dorefa", quiet=True)
    make_packed(called, torch.randn(2, 3, 8, 8))
    unflip.cost(called, torch.randn(2, 3, 8, 8))
    assert not [w for w in recwarn if "does not call" in str(w.message)]


def test_values_that_cancel_out():
    """The mean of normalized values is 0, up to rounding. The error is compared with the inputs of the mean."""
    for seed in range(6):
        torch.manual_seed(seed)
        layers = [nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        make_packed(nn.Sequential(*layers, nn.Linear(8, 2)), torch.randn(2, 3, 9, 9))
        make_packed(
            nn.Sequential(*layers[:2], nn.AvgPool2d(7), nn.Flatten()), torch.randn(2, 3, 9, 9)
        )


def test_differences_are_compared_with_an_ops_inputs():
    op, packed = {"op": "mean", "name": "m", "inputs": [0]}, Packed({}, {})
    values = [F.instance_norm(torch.randn(2, 8, 30, 30))]
    exact = run_op(op, packed.tensors, values)
    allowed = partial(_sensitivity, op, packed, values)
    _compare("mean", exact + 1e-7, exact, allowed)
    with pytest.raises(CannotPack, match="differs from the model at mean"):
        _compare("mean", exact + 1e-5, exact, allowed)
