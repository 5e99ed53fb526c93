"""BinaryConv2d and BinaryLinear as torch layers: arguments, state dicts, autocast, module functions."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unflip
from unflip.layers import (
    BinaryConv2d,
    BinaryLayer,
    BinaryLinear,
    binary_layers,
    inside_binarizer,
)


def net(method: Any = "dorefa", **options: Any) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(96, 5), nn.Linear(5, 2)
    )
    return unflip.binarize(model, method, quiet=True, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2, "groups": 2},
        {"kernel_size": (3, 1), "padding": "same", "bias": False},
        {"kernel_size": 5, "padding": 2, "padding_mode": "circular"},
        {"kernel_size": 3, "dtype": torch.float64},
    ],
    ids=str,
)
def test_takes_the_arguments_of_torchs_convolution(options: dict[str, Any]) -> None:
    layer = BinaryConv2d(4, 8, method="bwn", **options)
    twin = nn.Conv2d(4, 8, **options)
    assert isinstance(layer, nn.Conv2d)
    assert layer.state_dict().keys() == twin.state_dict().keys()
    twin.load_state_dict(layer.state_dict())
    w = twin.weight.data
    twin.weight.data = w.abs().mean((1, 2, 3), keepdim=True) * torch.where(w >= 0, 1.0, -1.0)
    x = torch.randn(2, 4, 9, 9, dtype=w.dtype)
    torch.testing.assert_close(layer(x), twin(x))


def test_repr_keeps_torchs_part() -> None:
    layer = BinaryConv2d(4, 8, 3, stride=2, method={"name": "dorefa", "inputs": "pm1"})
    assert "4, 8, kernel_size=(3, 3), stride=(2, 2), method=dorefa(inputs=pm1)" in repr(layer)
    assert "in_features=3, out_features=2, bias=True, method=xnor" in repr(
        BinaryLinear(3, 2, method="xnor")
    )


def test_linear_takes_any_number_of_dimensions() -> None:
    layer = BinaryLinear(6, 3, method="binarynet")
    x = torch.randn(2, 4, 5, 6)
    assert torch.equal(layer(x).view(-1, 3), layer(x.view(-1, 6)))
    assert layer(x[0, 0, 0]).shape == (3,)


def test_the_default_method_is_dorefa() -> None:
    assert BinaryLinear(3, 2).method == unflip.methods.get("dorefa")
    with pytest.raises(ValueError, match=r"unknown method 'bnn'. .*Known: .*binarynet"):
        BinaryLinear(3, 2, method="bnn")


def test_set_method_changes_the_layer_and_keeps_its_weights() -> None:
    layer = BinaryLinear(6, 3, method="dorefa").eval()
    weight = layer.weight
    layer.set_method("lns")
    assert layer.weight is weight
    assert not layer.weight_binarizer.training
    assert any(k.startswith("weight_binarizer.mapping") for k in layer.state_dict())
    layer.set_method("xnor")
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_bias_is_added_once_and_after_the_scale() -> None:
    for method in unflip.methods.names():
        layer = BinaryConv2d(4, 6, 3, method=method)
        x = torch.randn(2, 4, 5, 5)
        out = layer(x)
        bias = layer.bias.detach().clone()
        with torch.no_grad():
            layer.bias.zero_()
        torch.testing.assert_close(out, layer(x) + bias[:, None, None])


def test_inside_binarizer() -> None:
    assert inside_binarizer("layer1.0.conv.weight_binarizer.mapping.conv1.weight")
    assert inside_binarizer("input_binarizer.step")
    assert not inside_binarizer("my_weight_binarizer_2.weight")
    assert not inside_binarizer("layer1.weight")


# --- autocast -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [2048, 2049, 5001])  # float16 holds integers up to 2048
def test_half_precision_sums_are_exact(inputs: int) -> None:
    layer = BinaryLinear(inputs, 4, bias=False, method="binarynet")
    x = torch.randn(8, inputs)
    x[0], layer.weight.data[0] = 1, 1  # the largest sum there is
    exact = layer(x)
    assert exact[0, 0] == inputs
    with torch.autocast("cpu", dtype=torch.float16):
        half = layer(x)
    assert torch.equal(half.float(), exact)
    assert half.dtype == (torch.float16 if inputs <= 2048 else torch.float32)


def test_half_precision_gradients_are_those_of_full_precision() -> None:
    layer = BinaryConv2d(4, 6, 3, method={"name": "dorefa", "inputs": "pm1"})
    x = torch.randn(2, 4, 6, 6)
    grads = []
    for half in (False, True):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            out = layer(leaf)
        out.float().square().sum().backward()
        assert leaf.grad is not None
        grads.append([leaf.grad.clone(), *(p.grad.clone() for p in layer.parameters())])
    for full, half_grad in zip(*grads, strict=True):
        assert half_grad.dtype == torch.float32
        torch.testing.assert_close(half_grad, full, rtol=1e-2, atol=1e-2 * full.abs().max().item())


# --- state dicts of other methods -----------------------------------------------------------------------


def test_a_state_dict_of_another_method_is_refused_by_name() -> None:
    cases: list[tuple[Any, Any, str]] = [
        ("lns", "dorefa", r"has method dorefa, .*made with method lns\(base=dorefa\).*load_twin"),
        ("dorefa", "xnor", r"has method xnor, .*made with method dorefa\. .*load_twin"),
        ("dorefa", "lns", r"has method lns\(base=dorefa\), .*made with method dorefa\."),
        ({"name": "dorefa", "inputs": "pm1"}, "dorefa", r"made with method dorefa\(inputs=pm1\)"),
    ]
    for made, own, words in cases:
        model = net(own)
        with pytest.raises(RuntimeError, match=rf"(?s)layer '1' .*{words}"):
            model.load_state_dict(net(made).state_dict())


def test_options_that_shape_only_the_training_do_not_matter() -> None:
    net("lns", alpha=0.1, rho_plus=0.2).load_state_dict(net("lns").state_dict())
    with pytest.raises(RuntimeError, match=r"made with method lns\(base=dorefa\)"):
        net("lns", mapping="residual").load_state_dict(net("lns").state_dict())


def test_it_is_refused_without_metadata_too_where_the_keys_tell() -> None:
    """A state dict that went through safetensors has keys and tensors, nothing else."""
    with pytest.raises(RuntimeError, match=r"(?s)layer '1' .*state of another method.*mapping"):
        net("dorefa").load_state_dict(dict(net("lns").state_dict()))
    with pytest.raises(
        RuntimeError, match=r"(?s)layer '1' .*lacks what this method needs.*mapping"
    ):
        net("lns").load_state_dict(dict(net("dorefa").state_dict()))
    with pytest.raises(RuntimeError, match=r"(?s)layer '1' .*lacks .*weight_binarizer.labels"):
        net("lns", labels="frozen").load_state_dict(dict(net("lns").state_dict()))


def test_a_frozen_state_dict_is_refused() -> None:
    for method in ("dorefa", "lns"):
        model = net(method)
        with pytest.raises(
            RuntimeError, match=r"(?s)'1'.*frozen model, which has no latent weights"
        ):
            model.load_state_dict(unflip.freeze(model).state_dict())
        with pytest.raises(ValueError, match="frozen model"):
            unflip.load_twin(model, unflip.freeze(model).state_dict())


def test_plain_weights_load_where_the_method_has_no_state() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3))
    binary = nn.Sequential(nn.Conv2d(3, 4, 3), BinaryConv2d(4, 6, 3, method="xnor"))
    binary.load_state_dict(model.state_dict())
    assert torch.equal(binary[1].weight, model[1].weight)
    model.load_state_dict(binary.state_dict())


def test_a_layer_alone_names_itself_too() -> None:
    layer = BinaryLinear(3, 2, method="xnor")
    with pytest.raises(RuntimeError, match=r"has method xnor, but .*made with method dorefa"):
        layer.load_state_dict(BinaryLinear(3, 2, method="dorefa").state_dict())


# --- functions over models ------------------------------------------------------------------------------


def test_binary_layers_names_every_one() -> None:
    model = net()
    assert [name for name, _ in binary_layers(model)] == ["1", "3"]
    assert [name for name, _ in binary_layers(model[1])] == [""]
    assert list(binary_layers(nn.Linear(2, 2))) == []


def test_after_step_reaches_every_layer() -> None:
    model = net("binarynet")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3)
    unflip.after_step(model)
    values = {name: set(p.unique().tolist()) for name, p in model.named_parameters()}
    assert values["1.weight"] == values["3.weight"] == {1}
    assert all(v == {3} for name, v in values.items() if name not in ("1.weight", "3.weight"))


def test_before_step_reaches_every_layer_and_its_gradient_alone() -> None:
    model = net({"name": "ovsw", "delta": 0, "sigma": 0.5})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    unflip.before_step(model)
    for name, parameter in model.named_parameters():
        decayed = 0.5 * parameter if name in ("1.weight", "3.weight") else 0 * parameter
        torch.testing.assert_close(parameter.grad, decayed.detach())


@pytest.mark.parametrize(("epoch", "epochs"), [(-1, 4), (4, 4), (1, 1), (0, 0)])
def test_an_epoch_outside_the_schedule_is_refused(epoch: int, epochs: int) -> None:
    with pytest.raises(ValueError, match=f"epoch={epoch} should be .* epochs={epochs}$"):
        unflip.start_epoch(net("recu"), epoch, epochs)


def test_auxiliary_loss_of_a_model_without_parameters() -> None:
    assert unflip.auxiliary_loss(nn.ReLU()).item() == 0


def test_a_layer_is_a_binary_layer_and_torchs() -> None:
    for layer, kind in ((net()[1], nn.Conv2d), (net()[3], nn.Linear)):
        assert isinstance(layer, BinaryLayer)
        assert isinstance(layer, kind)


def test_float_inputs_are_used_as_they_are() -> None:
    layer = BinaryLinear(6, 3, bias=False, method="bwn")
    x = torch.randn(2, 6)
    torch.testing.assert_close(layer(x), F.linear(x, layer.code().dense()))


def test_a_layer_behind_a_relu_says_that_all_images_look_alike_there() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    unflip.binarize(model, "bireal", quiet=True)
    x = torch.randn(2, 3, 8, 8)
    with pytest.warns(UserWarning, match=r"every input of layer '2' .* binarizes to 1.* a ReLU"):
        model(x)
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        model(x)


@pytest.mark.parametrize("method", ["dorefa", "hwgq", "bwn"])
def test_methods_for_inputs_behind_a_relu_say_nothing(method: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    unflip.binarize(model, method, quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 3, 8, 8))


def test_vmap_over_networks_and_images() -> None:
    torch.manual_seed(0)
    layers = [unflip.BinaryConv2d(3, 4, 3) for _ in range(2)]
    x = torch.randn(2, 3, 8, 8)
    parameters, buffers = torch.func.stack_module_state(layers)  # type: ignore[arg-type]

    def one(p: Any, b: Any) -> torch.Tensor:
        return torch.func.functional_call(layers[0], (p, b), (x,))  # type: ignore[no-any-return]

    together = torch.func.vmap(one)(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([layer(x) for layer in layers]))
