"""BBG: balanced weights and their gradient, and the gates on a residual network's shortcuts."""

import pytest
import torch
from torch import nn

import unflip
from unflip import models
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods import Carry
from unflip.methods.bbg import CenteredSign, Gate
from unflip.models.resnet import Block, Style


def test_weights_are_centred_then_signed_with_one_scale() -> None:
    weight = torch.tensor([[1.0, 2.0, 6.0], [-4.0, -4.0, -1.0]])
    #  means 3 and −3: [[-2, -1, 3], [-1, -1, 2]], mean of sizes 10 / 6
    code = CenteredSign().code(weight)
    assert code.signs.tolist() == [[[-1, -1, 1], [-1, -1, 1]]]
    torch.testing.assert_close(code.scales, torch.tensor([[[10 / 6]]]))
    assert torch.equal(CenteredSign()(weight), code.dense())


def test_a_filter_has_about_as_many_of_each_sign() -> None:
    weight = torch.randn(8, 16, 3, 3) + 5
    shares = (CenteredSign().code(weight).signs[0] > 0).float().mean((1, 2, 3))
    assert ((shares - 0.5).abs() < 0.15).all()


def test_gradient_loses_its_mean_over_the_filter() -> None:
    weight = torch.randn(3, 2, 2, 2, requires_grad=True)
    upstream = torch.randn(3, 2, 2, 2)
    CenteredSign()(weight).backward(upstream)
    assert weight.grad is not None
    expected = upstream - upstream.mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(weight.grad, expected)


def test_a_filter_of_one_weight_is_not_centred_to_nothing() -> None:
    weight = torch.tensor([[[[-2.0]]], [[[1.0]]]])
    assert CenteredSign()(weight).flatten().tolist() == [-1.5, 1.5]
    layer = BinaryConv2d(3, 3, 1, groups=3, method="bbg")
    assert torch.equal(layer.code().signs[0], torch.where(layer.weight >= 0, 1.0, -1.0))


def test_inputs_are_binarynets() -> None:
    layer = BinaryLinear(4, 1, method="bbg")
    x = torch.tensor([-0.0, -0.3, 1.5, -1.0], requires_grad=True)
    out = layer.input_binarizer(x)
    assert out.tolist() == [1, -1, 1, -1]
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 0, 1]


def test_a_gate_scales_each_channel_of_the_shortcut() -> None:
    block = Block(3, 3, 1, Style("conv"), nn.Identity()).eval()
    net = nn.Sequential(nn.Conv2d(3, 3, 1), block, nn.Flatten(), nn.Linear(48, 2))
    unflip.binarize(net, "bbg", quiet=True)
    gates = [m for m in block.modules() if isinstance(m, Gate)]
    assert [block.carry1, block.carry2] == gates
    for norm in (block.bn1, block.bn2):
        nn.init.zeros_(norm.weight)
        nn.init.zeros_(norm.bias)
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(block(x), x), "gates start at 1"
    first, second = torch.tensor([2.0, 0.5, -1.0]), torch.tensor([1.0, 3.0, 0.25])
    with torch.no_grad():
        for gate, values in zip(gates, (first, second), strict=True):
            gate.adapted["gate"].copy_(values.view(3, 1, 1))
    torch.testing.assert_close(block(x), x * (first * second).view(3, 1, 1))
    upstream = torch.randn(2, 3, 4, 4)
    block(x).backward(upstream)
    found = gates[1].adapted["gate"].grad
    expected = (upstream * x * first.view(3, 1, 1)).sum((0, 2, 3))
    torch.testing.assert_close(found.flatten(), expected)


@pytest.mark.parametrize(("shortcut", "gates"), [("conv", 18), ("block", 9)])
def test_every_shortcut_in_use_has_a_gate(shortcut: str, gates: int) -> None:
    model = models.create("resnet20", "bbg", width=4, shortcut=shortcut)
    assert sum(isinstance(m, Gate) for m in model.modules()) == gates
    assert not any(isinstance(m, Carry) for m in model.modules())
    names = [n for n, _ in model.named_parameters() if n.endswith("adapted.gate")]
    assert len(names) == gates
    assert "layer1.0.carry2.adapted.gate" in names
    half = models.create("resnet20", {"name": "bbg", "gate_start": 0.5}, width=4, shortcut=shortcut)
    assert half.get_parameter(names[0]).eq(0.5).all()


def test_gates_and_the_float_twin() -> None:
    x = torch.randn(2, 3, 8, 8)
    twin = models.create("resnet20", width=4).eval()
    model = models.create("resnet20", "bbg", width=4).eval()
    unflip.load_twin(model, twin.state_dict())
    before = model(x)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Gate):
                module.adapted["gate"].uniform_(0.5, 2)
    assert not torch.equal(model(x), before)
    other = models.create("resnet20", "bbg", width=4).eval()
    unflip.load_twin(other, model.state_dict())
    assert torch.equal(other(x), model(x)), "gates go to another network of the method"
    unflip.load_twin(twin, model.state_dict())  # and are left behind here
    assert not any("gate" in name for name in twin.state_dict())
    frozen = unflip.freeze(model)
    assert torch.equal(frozen(x), model(x))
    # 9 gates: 3 each of 4, 8 and 16 channels, 32 bits a channel
    plain = models.create("resnet20", "dorefa", width=4)
    assert unflip.cost(model, x).memory_bits - unflip.cost(plain, x).memory_bits == 32 * 3 * 28
