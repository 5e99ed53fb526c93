"""ReActNet: RSign and RPReLU against their formulas, and what becomes of them beside the float twin."""

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import models
from unflip.layers import BinaryConv2d, BinaryLayer, BinaryLinear, binary_layers
from unflip.methods.pieces import ClippedFilterMeanSign
from unflip.methods.reactnet import RPReLU, RSign


def rsign(layer: nn.Module) -> RSign:
    assert isinstance(layer, BinaryLayer)
    assert isinstance(layer.input_binarizer, RSign)
    return layer.input_binarizer


def test_rsign_shifts_each_channel_before_the_sign() -> None:
    layer = BinaryConv2d(2, 1, 1, method="reactnet")
    binarizer = rsign(layer)
    assert binarizer.shift.shape == (2, 1, 1)
    assert (binarizer.shift == 0).all()
    with torch.no_grad():
        binarizer.shift.copy_(torch.tensor([0.5, -0.25]).view(2, 1, 1))
    x = torch.tensor([[-0.6, -0.5, 0.0], [0.2, 0.25, 3.0]]).view(1, 2, 1, 3).requires_grad_()
    out = binarizer(x)
    assert out.flatten().tolist() == [-1, 1, 1, -1, 1, 1]
    upstream = torch.tensor([[1.0, 2, 3], [4, 5, 6]]).view_as(x)
    out.backward(upstream)
    shifted = torch.tensor([[-0.1, 0.0, 0.5], [-0.05, 0.0, 2.75]])
    expected = upstream * (2 - 2 * shifted.abs()).clamp(min=0).view_as(x)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)
    assert binarizer.shift.grad is not None
    torch.testing.assert_close(binarizer.shift.grad, expected.sum((0, 2, 3)).view(2, 1, 1))


def test_a_clipped_gradient_and_weights_that_cannot_stay_beyond_one() -> None:
    method = {"name": "reactnet", "gradient": "clipped", "weights": "dorefa"}
    layer = BinaryConv2d(2, 3, 1, method=method)
    binarizer = rsign(layer)
    with torch.no_grad():
        binarizer.shift.copy_(torch.tensor([0.5, -0.25]).view(2, 1, 1))
        layer.weight.copy_(torch.tensor([3.0, -0.5, 0.1, -2.0, 1.0, -1.0]).view(3, 2, 1, 1))
    x = torch.tensor([[-0.6, 0.5, 0.6], [0.2, -0.75, 3.0]]).view(1, 2, 1, 3).requires_grad_()
    out = binarizer(x)
    assert torch.equal(binarizer.shifted(x) >= 0, out > 0)
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [1, 1, 0, 1, 1, 0], "1[|x + b| ≤ 1]"
    assert binarizer.shift.grad is not None
    assert binarizer.shift.grad.flatten().tolist() == [2, 2]
    assert (binarizer.fused_as, rsign(BinaryConv2d(2, 1, 1, method="reactnet")).fused_as) == (
        "pm1",
        None,
    )
    weight = layer.binary_weight()
    torch.testing.assert_close(weight, layer.weight.sign() * 7.6 / 6)
    weight.sum().backward()
    assert layer.weight.grad is not None
    assert (layer.weight.grad == 1).all()
    with pytest.raises(ValueError, match="gradient='clip'"):
        BinaryConv2d(2, 3, 1, method={"name": "reactnet", "gradient": "clip"})


def test_rsign_of_a_linear_layer_and_of_an_image_alone() -> None:
    linear = rsign(BinaryLinear(3, 2, method="reactnet", dtype=torch.float64))
    assert linear.shift.shape == (3,)
    assert linear.shift.dtype == torch.float64
    with torch.no_grad():
        linear.shift.copy_(torch.tensor([1.0, 0.0, -1.0]))
    assert linear(torch.tensor([[[-0.5, -0.5, 0.5]]])).tolist() == [[[1, -1, -1]]]
    conv = rsign(BinaryConv2d(4, 8, 3, groups=2, method="reactnet"))
    x = torch.randn(4, 5, 5)
    with torch.no_grad():
        conv.shift.uniform_(-1, 1)
    assert torch.equal(conv(x), conv(x[None])[0])


def test_rprelu_by_hand() -> None:
    prelu = RPReLU(nn.PReLU(2, init=0.5))
    with torch.no_grad():
        prelu.adapted.before.copy_(torch.tensor([1.0, -1.0]))
        prelu.adapted.after.copy_(torch.tensor([0.25, 10.0]))
    x = torch.tensor([[-3.0, 3.0], [0.0, 0.0]])
    #  x + γ = [[-2, 2], [1, -1]]; PReLU: [[-1, 2], [1, -0.5]]; + ζ
    assert prelu(x).tolist() == [[-0.75, 12.0], [1.25, 9.5]]
    image = torch.randn(3, 2, 4, 5)
    expected = torch.stack([prelu(image[:, :, i, j]) for i in range(4) for j in range(5)], 2)
    torch.testing.assert_close(prelu(image).flatten(2), expected)


def test_rprelu_gradients() -> None:
    prelu = RPReLU(nn.PReLU(3))
    with torch.no_grad():
        for parameter in prelu.parameters():
            parameter.uniform_(-1, 1)
    x = torch.randn(4, 3, 2, 2, requires_grad=True)
    upstream = torch.randn(4, 3, 2, 2)
    prelu(x).backward(upstream)

    def channel(values: Tensor) -> Tensor:
        return values.sum((0, 2, 3))

    shifted = x.detach() + prelu.adapted.before.detach().view(3, 1, 1)
    slope = torch.where(shifted > 0, 1.0, prelu.weight.detach().view(3, 1, 1))
    torch.testing.assert_close(x.grad, upstream * slope)
    torch.testing.assert_close(prelu.adapted.before.grad, channel(upstream * slope))
    torch.testing.assert_close(prelu.adapted.after.grad, channel(upstream))
    torch.testing.assert_close(prelu.weight.grad, channel(upstream * shifted.clamp(max=0)))


def test_one_slope_for_all_channels_has_one_shift() -> None:
    prelu = RPReLU(nn.PReLU())
    assert prelu.adapted.before.shape == (1,)
    x = torch.randn(2, 5, 3, 3)
    assert torch.equal(prelu(x), nn.PReLU()(x))


def test_every_prelu_is_replaced_and_keeps_its_slopes() -> None:
    shared = nn.PReLU(4)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), shared, nn.Conv2d(4, 4, 3), nn.PReLU(4), shared, nn.Conv2d(4, 2, 3)
    )
    slopes = [m.weight for m in net if isinstance(m, nn.PReLU)]
    model = unflip.binarize(net.eval(), "reactnet", quiet=True)
    found = [m for m in model if isinstance(m, RPReLU)]
    assert [type(m) for m in model].count(RPReLU) == 3
    assert all(a.weight is b for a, b in zip(found, slopes, strict=True))
    assert model[1] is model[4]
    assert not found[0].training
    assert type(model[2].weight_binarizer) is ClippedFilterMeanSign


@pytest.mark.parametrize("to", ["reactnet", "lns"])
def test_shifts_go_with_the_weights_to_another_network_of_the_method(to: str) -> None:
    def net(method: object) -> nn.Module:
        return models.create("resnet20", method, width=4, shortcut="conv")  # type: ignore[arg-type]

    source = net("reactnet")
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    state = source.state_dict()
    target = net({"name": "lns", "base": "reactnet"} if to == "lns" else to)
    unflip.load_twin(target, state)
    for name, parameter in source.named_parameters():
        assert torch.equal(target.get_parameter(name), parameter), name
    assert {"layer1.0.prelu1.adapted.before", "layer1.0.conv1.input_binarizer.shift"} <= set(state)

    # The float twin has neither; going through it leaves the shifts where they were.
    twin = net("float")
    unflip.load_twin(twin, state)
    assert torch.equal(
        twin.get_parameter("layer1.0.prelu1.weight"), state["layer1.0.prelu1.weight"]
    )
    again = net("reactnet")
    unflip.load_twin(again, twin.state_dict())
    for _, layer in binary_layers(again):
        assert (rsign(layer).shift == 0).all()


def test_with_shifts_of_zero_it_is_bireal() -> None:
    torch.manual_seed(3)
    react = models.create("resnet20", "reactnet", width=4).eval()
    bireal = models.create("resnet20", "bireal", width=4).eval()
    unflip.load_twin(bireal, react.state_dict())
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(react(x), bireal(x))


def first_step() -> nn.Module:
    torch.manual_seed(0)
    options = {"width": 4, "order": "conv-bn-prelu", "shortcut": "conv", "in_channels": 1}
    return models.create("resnet20", {"name": "reactnet", "weights": "float"}, **options)


def test_the_first_step_has_binary_inputs_and_float_weights() -> None:
    model = first_step()
    layer = next(layer for _, layer in binary_layers(model))
    with torch.no_grad():
        rsign(layer).shift.fill_(0.25)
        x = torch.randn(3, 4, 5, 5)
        expected = nn.functional.conv2d(torch.where(x >= -0.25, 1.0, -1.0), layer.weight, padding=1)
        assert torch.equal(layer(x), expected)
    assert layer.binary_weight() is layer.weight
    assert unflip.signs(model) == {}
    assert not any(one.binary for one in unflip.summary(model))
    bits = {
        one.name: (one.weight_bits, one.input_bits)
        for one in unflip.cost(model, torch.zeros(1, 1, 8, 8)).layers
    }
    assert bits["layer1.0.conv1"] == (32, 1)
    with pytest.raises(ValueError, match=r"weights are float, so they have no signs"):
        layer.code()


def test_the_second_step_starts_from_the_first() -> None:
    first = first_step()
    with torch.no_grad():
        for name, parameter in first.named_parameters():
            if "shift" in name or "adapted" in name:
                parameter.normal_()
    second = models.create(
        "resnet20", "reactnet", width=4, order="conv-bn-prelu", shortcut="conv", in_channels=1
    )
    unflip.load_twin(second, first.state_dict())
    for name, parameter in first.named_parameters():
        assert torch.equal(second.get_parameter(name), parameter), name
    assert all(one.binary for one in unflip.summary(second) if one.reason != "float")


def test_a_first_step_is_not_frozen() -> None:
    with pytest.raises(
        ValueError, match=r"layer 'layer1.0.conv1' cannot be frozen: .*Train the next"
    ):
        unflip.freeze(first_step())
    with pytest.raises(ValueError, match=r"weights='float' leaves no signs to correct"):
        unflip.methods.get("lns", base={"name": "reactnet", "weights": "float"})
